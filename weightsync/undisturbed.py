"""Running a loader for what it would do, so that afterwards nothing about the model or the process has changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn


@contextmanager
def unmarked(model: nn.Module) -> Iterator[None]:
    """Afterwards every module holds the tensors that it held before, in the memory where they were."""
    held = []
    for module in model.modules():
        for holder in (module._parameters, module._buffers, module.__dict__):
            before = {k: v for k, v in holder.items() if v is None or isinstance(v, torch.Tensor)}
            held.append((holder, before, {k: v.detach() for k, v in before.items() if v is not None}))
    try:
        yield
    finally:
        for holder, before, memory in held:
            _put_back(holder, before, memory)


def _put_back(holder: dict, before: dict, memory: dict[str, torch.Tensor]) -> None:
    for key in [k for k, v in holder.items() if isinstance(v, torch.Tensor) and k not in before]:
        del holder[key]
    for key, value in before.items():
        if holder.get(key) is not value:
            holder[key] = value
        if value is not None and not value.is_meta and value.data_ptr() != memory[key].data_ptr():
            value.data = memory[key]


_one_at_a_time = threading.Lock()  # two that overlap would each put back what the other had put there


@contextmanager
def inline_thread_pools() -> Iterator[None]:
    """Work that this thread gives to any ThreadPoolExecutor runs at once, here: dispatch modes do not cross threads.

    One thread of a process at a time; others wait.
    """
    with _one_at_a_time, patch.object(ThreadPoolExecutor, "submit", _inline_in_this_thread()):
        yield


def _inline_in_this_thread() -> Callable[..., Future]:
    here, submit = threading.get_ident(), ThreadPoolExecutor.submit

    def run_here(pool: ThreadPoolExecutor, function: Callable, /, *args: Any, **kwargs: Any) -> Future:
        if threading.get_ident() != here:
            return submit(pool, function, *args, **kwargs)
        future: Future = Future()
        future.set_running_or_notify_cancel()
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as e:  # belongs to whoever asks for the result, as in a real pool
            future.set_exception(e)
        return future

    return run_here

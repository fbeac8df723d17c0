"""How memory of one process becomes readable in another: one module a way, all with the functions of ``Transport``.

Nothing here imports CUDA; ``get`` imports a transport when it is asked for. Runs in training workers, engines and the
actor.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, cast, runtime_checkable

import torch

from weightsync.errors import ConfigError
from weightsync.spec import Segment

_MODULES = {"shm": "weightsync.transports.shm", "cuda_ipc": "weightsync.transports.cuda_ipc"}


@runtime_checkable
class Memory(Protocol):
    """A piece of shared memory as a tensor: ``tensor`` is torch.uint8 of one dim, ``segment`` names it to others.

    ``close`` frees (the owner's) or unmaps (a consumer's); tensors that view it must not be used after. Idempotent.
    """

    tensor: torch.Tensor
    segment: Segment

    def close(self) -> None: ...


class Puller(Protocol):
    """A fixed set of copies. ``num_bytes`` are bytes written by a run.

    ``goes_on``: whether ``start`` returns before they are done.
    """

    num_bytes: int
    goes_on: bool

    def start(self, *, alone: bool = True) -> Callable[[], float]:
        """Begin, after all else on their GPU if ``alone``, else after what this thread has queued there.

        What is returned waits for the end; seconds from the begin. What this thread queues on the GPU after that comes
        after the copies.
        """
        ...

    def run(self, *, alone: bool = True) -> float:
        """Do the copies, all of them done on return; seconds that it took."""
        ...


class Transport(Protocol):
    """The functions of a transport's module. They raise TransferError, which says what could not be shared and why."""

    NAME: str

    def allocate(self, nbytes: int, device: str = "") -> Memory:
        """New memory (``nbytes`` > 0) of this process, on the GPU with UUID ``device`` ("": the current one)."""
        ...

    def export(self, tensor: torch.Tensor) -> tuple[Segment, int]:
        """The segment that holds ``tensor``'s own storage, and the byte offset of its first element there."""
        ...

    def open_segment(self, segment: Segment) -> Memory:
        """Map another process's segment."""
        ...

    def make_puller(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Puller:
        """Copies from (target view, source view) pairs of equal shapes; targets must not overlap."""
        ...


def get(name: str) -> Transport:
    """The transport of that name, imported on first use. Raises ConfigError that lists those there are."""
    if name not in _MODULES:
        raise ConfigError(f"unknown transport {name!r}; there are {', '.join(_MODULES)}")
    return cast(Transport, importlib.import_module(_MODULES[name]))


def make_puller(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Puller:
    """A Puller by the transport that copies on the targets' device (all on one)."""
    on_gpu = any(target.is_cuda for target, _ in pairs)
    return get("cuda_ipc" if on_gpu else "shm").make_puller(pairs)


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager:
    """Makes a tensor's GPU this thread's current one, so that what is mapped meanwhile can be copied to it."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()

"""SGLang's own weight-update calls as a sender without sglang makes them: what our routes are compared with.

Runs in the training ranks, all of them at once: each gathers whole tensors, each makes the payload of the engine rank
on its GPU, the first of those beside an engine calls it. Nothing is kept from one push to the next, as in the
frameworks that use these calls.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from benchmarks.rank_wire import StockRequest, Took

Named = tuple[str, torch.Tensor]
FLATTENED = "flattened_bucket"
TIMEOUT_S = 120.0
DEVICE_ARGUMENT = 6  # of rebuild_cuda_tensor: the device index, which the engine also takes as a UUID


class Share(NamedTuple):
    """The training ranks that serve one engine: its number, their group, how many they are, the rank that calls."""

    engine: int
    tp_size: int
    group: Any
    ranks: int
    first: int


class Engine:
    """The engine at ``url`` over one HTTP connection. ``sessions``: updates go between begin and end (0.5.21 on)."""

    def __init__(self, url: str) -> None:
        self.url = url
        parts = urllib.parse.urlsplit(url)
        self._where = (parts.hostname, parts.port)
        self._connection: http.client.HTTPConnection | None = None
        info = self.call("GET", "/server_info")
        self.tp_size = int(info.get("tp_size") or 1)
        self.sessions = tuple(int(n) for n in info["version"].split(".")[:3]) >= (0, 5, 21)

    def call(self, method: str, path: str, body: dict | None = None) -> dict:
        """A call that must succeed; raises RuntimeError with the engine's own words."""
        content = None if body is None else json.dumps(body)
        status, text = self._send(method, path, content)
        answer = json.loads(text) if text.startswith("{") else {}
        if status != 200 or answer.get("success") is False:
            raise RuntimeError(f"{method} {path}: HTTP {status}: {answer.get('message') or text[:300]}")
        return answer

    def _send(self, method: str, path: str, content: str | None) -> tuple[int, str]:
        for attempt in (1, 2):
            if self._connection is None:
                self._connection = http.client.HTTPConnection(*self._where, timeout=TIMEOUT_S)
            try:
                self._connection.request(method, path, content, {"Content-Type": "application/json"})
                reply = self._connection.getresponse()
                return reply.status, reply.read().decode(errors="replace")
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                self.close()  # the server closes a connection that stood idle
                if attempt == 2:
                    raise
        raise AssertionError("returned or raised above")

    def pause(self) -> None:
        """Pause and flush, as frameworks do before they update."""
        self.call("POST", "/pause_generation", {"mode": "abort"})
        self.call("POST", "/flush_cache")

    def begin(self) -> None:
        if self.sessions:
            self.call("POST", "/begin_weight_update", {"selector": "target"})

    def end(self) -> None:
        if self.sessions:
            self.call("POST", "/end_weight_update", {})

    def resume(self) -> None:
        self.call("POST", "/continue_generation", {})

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


# ----------------------------------------------------------------------------------------------------- payloads


def chunks(tensors: Iterable[Named], limit_bytes: int) -> Iterator[list[Named]]:
    """Tensors in order, in lists of at most ``limit_bytes`` (0: one a list, -1: all in one); what is larger alone."""
    chunk: list[Named] = []
    total = 0
    for name, tensor in tensors:
        if chunk and limit_bytes >= 0 and total + tensor.nbytes > limit_bytes:
            yield chunk
            chunk, total = [], 0
        chunk.append((name, tensor))
        total += tensor.nbytes
    if chunk:
        yield chunk


def flatten(chunk: list[Named]) -> dict[str, Any]:
    """``chunk`` in one new uint8 buffer, with what the engine needs to take it apart."""
    flat = [tensor.detach().reshape(-1).view(torch.uint8) for _, tensor in chunk]
    metadata, at = [], 0
    for (name, tensor), part in zip(chunk, flat, strict=True):
        size = part.numel()
        where = {"start_idx": at, "end_idx": at + size, "numel": size}
        metadata.append(SimpleNamespace(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, **where))
        at += size
    return {"flattened_tensor": torch.cat(flat), "metadata": metadata}


def serialize(content: object) -> str:
    """``content`` as SGLang reads it. CUDA tensors go as handles with their GPU's UUID, host tensors as shared files.

    A host tensor's own storage moves into shared memory by this: pass one that may. To be opened exactly once.
    """
    torch.multiprocessing.set_sharing_strategy("file_system")
    file = io.BytesIO()
    _Pickler(file).dump(content)
    return base64.b64encode(file.getvalue()).decode()


class _Pickler(ForkingPickler):
    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, torch.Tensor) and obj.is_cuda:
            rebuild, arguments = reductions.reduce_tensor(obj)
            uuid = str(torch.cuda.get_device_properties(obj.device).uuid)
            return rebuild, (*arguments[:DEVICE_ARGUMENT], uuid, *arguments[DEVICE_ARGUMENT + 1 :])
        return NotImplemented


# ----------------------------------------------------------------------------------------------------- a push


def share(engines: int, tp_size: int) -> Share:
    """This rank's, where the ranks are shared out in order among ``engines`` of ``tp_size`` each. A collective."""
    ranks = dist.get_world_size() // engines
    assert ranks * engines == dist.get_world_size(), f"ranks cannot be shared out among {engines} engines"
    number = dist.get_rank() // ranks
    groups = [dist.new_group(list(range(i * ranks, (i + 1) * ranks))) for i in range(engines if engines > 1 else 0)]
    return Share(number, tp_size, groups[number] if groups else None, ranks, number * ranks)


def push(engine: Engine | None, tensors: Iterable[Named], request: StockRequest, own: Share) -> Took:
    """One push by tensor calls. A collective; ``engine`` is given on its calling rank, others return zeros."""
    started = time.perf_counter()
    if engine:
        engine.pause()
    dist.barrier()
    paused = time.perf_counter()
    if engine:
        engine.begin()
    for chunk in chunks(tensors, request.limit_bytes):
        content, load_format = _content(chunk, request.flattened)
        payloads = _payloads(content, own)
        if engine:
            engine.call("POST", "/update_weights_from_tensor", _body(payloads, load_format))
        dist.barrier()  # every rank keeps its tensors until the engine has taken them
    if not engine:
        return Took()
    engine.end()
    updated = time.perf_counter()
    engine.resume()
    return Took(time.perf_counter() - started, updated - paused)


def _content(chunk: list[Named], flattened: bool) -> tuple[object, str | None]:
    if flattened:
        return flatten(chunk), FLATTENED
    detached = [(name, tensor.detach()) for name, tensor in chunk]
    return [(name, t if t.is_cuda else t.clone()) for name, t in detached], None


def _payloads(content: object, own: Share) -> list[str]:
    """One payload a TP rank of the engine, on the rank that calls it; each rank beside it makes its part of them."""
    number = dist.get_rank() - own.first
    count = own.tp_size // own.ranks if own.tp_size >= own.ranks else int(number < own.tp_size)
    assert own.tp_size % own.ranks == 0 or own.tp_size < own.ranks, f"{own.ranks} ranks, {own.tp_size} of the engine"
    _settle(content)
    made = [serialize(content) for _ in range(count)]
    if own.ranks == 1:
        return made
    gathered: list[Any] | None = [None] * own.ranks if number == 0 else None
    dist.gather_object(made, gathered, dst=own.first, group=own.group)
    return [payload for part in gathered or [] for payload in part]


def _settle(content: object) -> None:
    """Wait until what the handles point to is written."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _body(payloads: list[str], load_format: str | None) -> dict[str, Any]:
    return {"serialized_named_tensors": payloads, "load_format": load_format, "flush_cache": False}


def repeat[T](
    run: Callable[[], T], n: int, budget_s: float, *, agree: Callable[[bool], bool] = lambda more: more
) -> list[T]:
    """``run``'s results: one that does not count, then up to ``n`` while ``budget_s`` lasts, at least one.

    ``agree`` makes one answer of those of all ranks, so that none goes on alone.
    """
    started = time.monotonic()
    run()
    found = [run()]
    while agree(len(found) < n and time.monotonic() - started < budget_s):
        found.append(run())
    return found


def agree(more: bool) -> bool:
    """Rank 0's answer, on every rank."""
    answer = [more]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]

"""A process that owns GPU memory and does what the tests tell it over a pipe. Started with multiprocessing's spawn."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch

from weightsync.errors import WeightSyncError
from weightsync.fingerprint import fingerprint
from weightsync.spec import Segment
from weightsync.transports import cuda_ipc

WAIT_S = 120
LIFE_S = 300


class Owner:
    """The commands. Tensors have names; what is exported crosses as (segment as msgpack, byte offset)."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.arenas: dict[str, cuda_ipc.Memory] = {}

    def make(self, name: str, shape: tuple[int, ...], dtype: str, device: int = 0) -> None:
        self.tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=f"cuda:{device}")
        self.refill(name, 0)

    def refill(self, name: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.tensors[name].normal_()
        torch.cuda.synchronize(self.tensors[name].device)

    def arena(self, name: str, nbytes: int, device: str = "") -> bytes:
        self.arenas[name] = cuda_ipc.allocate(nbytes, device)
        self.tensors[name] = self.arenas[name].tensor
        self.tensors[name].random_()
        torch.cuda.synchronize()
        return msgspec.msgpack.encode(self.arenas[name].segment)

    def export(self, name: str) -> tuple[bytes, int]:
        segment, offset = cuda_ipc.export(self.tensors[name])
        return msgspec.msgpack.encode(segment), offset

    def fingerprint(self, name: str) -> int:
        tensor = self.tensors[name]
        return fingerprint(tensor, (0,) * tensor.dim())

    def drop(self, name: str) -> None:
        del self.tensors[name]
        if name in self.arenas:
            self.arenas.pop(name).close()
        torch.cuda.empty_cache()

    def die(self) -> None:
        os._exit(3)


def _serve(connection: Connection, kind: Callable[[], object]) -> None:
    faulthandler.dump_traceback_later(LIFE_S, exit=True)
    owner = kind()
    while (command := connection.recv()) is not None:
        name, arguments, options = command
        try:
            connection.send(getattr(owner, name)(*arguments, **options))
        except WeightSyncError as e:
            connection.send(e)
        except Exception:
            connection.send(AssertionError(traceback.format_exc()))
    getattr(owner, "close", lambda: None)()


class Remote:
    """The test's end of the pipe: ``call`` returns what the method returned, or raises what it raised."""

    def __init__(self, connection: Connection, pid: int = 0) -> None:
        self._connection = connection
        self.pid = pid

    def send(self, name: str, *arguments: object, **options: object) -> None:
        self._connection.send((name, arguments, options))

    def call(self, name: str, *arguments: object, **options: object) -> Any:
        self.send(name, *arguments, **options)
        return self.answer()

    def answer(self) -> Any:
        assert self._connection.poll(WAIT_S), "no answer"
        answer = self._connection.recv()
        if isinstance(answer, WeightSyncError | AssertionError):
            raise answer
        return answer

    def segment_of(self, name: str) -> tuple[Segment, int]:
        encoded, offset = self.call("export", name)
        return msgspec.msgpack.decode(encoded, type=Segment), offset


@contextlib.contextmanager
def started(kind: Callable[[], object] = Owner, /, **environment: str) -> Iterator[Remote]:
    """An owner process (or what ``kind`` makes), ``environment`` added to its own; ended, by force if need be."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, kind), daemon=True)
    before = dict(os.environ)
    os.environ.update(environment)  # torch reads some of it while it is loaded
    try:
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    theirs.close()
    try:
        yield Remote(mine, process.pid or 0)
    finally:
        with contextlib.suppress(OSError):
            mine.send(None)
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join(10)

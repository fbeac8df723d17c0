"""Many GPU copies as a few launches: pairs of views become tables once, and every run executes the tables.

Contiguous pieces are copied by one kernel over a table of chunks, slices and transposed boxes by one over a table of
tiles; ``cuda_tables`` makes both. Source and target dtype may differ among float32, bfloat16 and float16: the copy then
rounds as ``Tensor.to`` does on the GPU. What comes from host memory, where kernels may not read, torch copies. Runs in
engines and, for arenas and relays, in training workers and the actor.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence

import torch

from weightsync.transports import cuda_driver
from weightsync.transports.cuda_tables import (
    Boxes,
    Pair,
    Piece,
    chunk_elements,
    chunks_of,
    split,
    tiles_of,
    within_allocations,
)

_STREAMS = 4
_DRIVER_BYTES = 8 << 20  # a driver copy costs about 5 us, in which the memory moves that much
_PROGRAMS_PER_SM = 32
_CHUNK_STEP_BYTES, _CHUNK_WARPS = 16 << 10, 8  # of the wider dtype, moved at a time by so many warps
_TRANSPOSE, _WIDE, _NARROW, _TILE_WARPS = (128, 128), (32, 256), (128, 64), 8  # rows and columns of a tile


def make_puller(pairs: Sequence[Pair], *, method: str = "auto") -> Puller:
    """A Puller for (target view, source view) pairs of equal shapes, targets on one GPU; targets must not overlap.

    ``method`` says what moves contiguous pieces: one ``kernel``, the driver's copies over several ``streams`` or in one
    ``batch`` call; ``auto``, the fastest, gives pieces of 8 MiB and more to streams and the others to the kernel.
    Raises TransferError on a cast that copying cannot do.
    """
    return Puller(pairs, method)


class Puller:
    """A recorded set of copies. ``num_bytes`` are bytes written; ``num_launches`` kernels or driver calls a run."""

    def __init__(self, pairs: Sequence[Pair], method: str = "auto") -> None:
        pairs = [pair for pair in pairs if pair[0].numel()]
        self._kept = [tensor.untyped_storage() for pair in pairs for tensor in pair]  # alive: tables point to them
        self.num_bytes = sum(target.numel() * target.itemsize for target, _ in pairs)
        self.num_copies = len(pairs)
        self._steps: list[_Chunks | _Tiles | _DriverCopies | _FromHost] = []
        if not pairs:
            return
        devices = {target.device for target, _ in pairs}
        assert len(devices) == 1, f"targets on several devices: {devices}"
        self.device = devices.pop()
        from_host = [pair for pair in pairs if pair[1].device.type != self.device.type]
        pieces, boxes = split([pair for pair in pairs if pair[1].device.type == self.device.type])
        least = {"auto": _DRIVER_BYTES, "kernel": math.inf, "streams": 0, "batch": 0}[method]
        large = [p for p in pieces if p.read == p.write and p.length >= least]
        small = [p for p in pieces if p.read != p.write or p.length < least]
        with cuda_driver.on(self.device):
            if large:  # first: they run while the kernels are launched
                self._steps.append(_DriverCopies(large, self.device, batched=method == "batch"))
            if from_host:
                self._steps.append(_FromHost(from_host))
            self._steps += [_Chunks(key, table, self.device) for key, table in chunks_of(small).items()]
            self._steps += [_Tiles(group, self.device) for group in boxes]

    @property
    def num_launches(self) -> int:
        return sum(step.num_launches for step in self._steps)

    goes_on = True

    def start(self, *, alone: bool = True) -> Callable[[], float]:
        """Launch the copies. What is returned waits until the GPU has made them: seconds from the first launch.

        Waits first for all work of this process on the target's GPU; if not ``alone``, only the copies wait, for what
        the current stream has. The sources' owners must have synchronised. That stream goes on after the copies.
        """
        if not self._kept:
            return lambda: 0.0
        with cuda_driver.on(self.device):
            if alone:
                torch.cuda.synchronize(self.device)
            begun, stream, done = time.perf_counter(), torch.cuda.current_stream(self.device), torch.cuda.Event()
            driven = [step for step in self._steps if isinstance(step, _DriverCopies)]
            for copies in driven:
                copies.fork(stream)
            for step in self._steps:
                step()
            for copies in driven:
                copies.join(stream)
            done.record(stream)

        def finish() -> float:
            with torch.cuda.device(self.device):
                done.synchronize()
            return time.perf_counter() - begun

        return finish

    def run(self, *, alone: bool = True) -> float:
        """Do the copies; seconds from the first launch until the GPU has finished them. As ``start``, and wait."""
        return self.start(alone=alone)()


class _FromHost:
    """Copies from host memory, pinned or not."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._pairs = [(target.detach(), source.detach()) for target, source in pairs]
        self.num_launches = len(pairs)

    def __call__(self) -> None:
        for target, source in self._pairs:
            target.copy_(source, non_blocking=True)


class _DriverCopies:
    """Contiguous pieces by the driver's copies: one batched call, or one call a piece over several streams."""

    def __init__(self, pieces: list[Piece], device: torch.device, *, batched: bool) -> None:
        pieces = [part for piece in pieces for part in within_allocations(piece, cuda_driver.allocation_of)]
        self._batched = batched and cuda_driver.has_batch()
        self._targets, self._sources = [p.target for p in pieces], [p.source for p in pieces]
        self._sizes = [p.length for p in pieces]
        self._streams = _streams(device)[: 1 if self._batched else _STREAMS]
        self.num_launches = 1 if self._batched else len(pieces)

    def __call__(self) -> None:
        if self._batched:
            cuda_driver.copy_batch(self._targets, self._sources, self._sizes, self._streams[0].cuda_stream)
            return
        handles = [stream.cuda_stream for stream in self._streams]
        for i, copy in enumerate(zip(self._targets, self._sources, self._sizes, strict=True)):
            cuda_driver.copy(*copy, handles[i % len(handles)])

    def fork(self, stream: torch.cuda.Stream) -> None:
        """Have them go on after what ``stream`` has."""
        for own in self._streams:
            own.wait_stream(stream)

    def join(self, stream: torch.cuda.Stream) -> None:
        """Have ``stream`` go on after them."""
        for own in self._streams:
            stream.wait_stream(own)


class _Chunks:
    """One launch over a table of chunks."""

    num_launches = 1

    def __init__(self, key: tuple[torch.dtype, torch.dtype, int], table: torch.Tensor, device: torch.device) -> None:
        read, write, vector = key
        self._table, self._count = table.to(device), len(table)
        length = chunk_elements(read, write, vector)
        block = min(length, _CHUNK_STEP_BYTES // max(read.itemsize, write.itemsize)) if vector > 1 else length
        self._constants = {
            "READ": _triton_type(read),
            "WRITE": _triton_type(write),
            "VECTOR": vector,
            "BLOCK": block,
            "STEPS": length // block,
            "num_warps": _CHUNK_WARPS,
        }
        self._grid = (min(self._count, _programs(device)),)
        self._launch(0)  # compiles now, not in the first push

    def _launch(self, count: int) -> None:
        from weightsync.transports import cuda_kernels

        cuda_kernels.copy_chunks[self._grid](self._table, count, **self._constants)

    def __call__(self) -> None:
        self._launch(self._count)


class _Tiles:
    """One launch over the tiles of boxes of one class."""

    num_launches = 1

    def __init__(self, boxes: Boxes, device: torch.device) -> None:
        wide = int(boxes.rows[:, 3].max()) > _NARROW[1]
        rows, cols = _TRANSPOSE if boxes.source_unit == 0 else _WIDE if wide else _NARROW
        tiles = tiles_of(boxes.rows[:, 2], boxes.rows[:, 3], rows, cols)
        self._tiles, self._boxes, self._count = tiles.to(device), boxes.rows.to(device), len(tiles)
        self._constants = {
            "READ": _triton_type(boxes.read),
            "WRITE": _triton_type(boxes.write),
            "SOURCE_UNIT": boxes.source_unit,
            "TARGET_UNIT": boxes.target_unit,
            "VECTOR": boxes.vector,
            "ROWS": rows,
            "COLS": cols,
            "num_warps": _TILE_WARPS,
        }
        self._grid = (min(self._count, _programs(device)),)
        self._launch(0)

    def _launch(self, count: int) -> None:
        from weightsync.transports import cuda_kernels

        cuda_kernels.copy_tiles[self._grid](self._tiles, self._boxes, count, **self._constants)

    def __call__(self) -> None:
        self._launch(self._count)


@functools.lru_cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    """The same for all copies: torch hands out 32 a device again and again, and one of them may be an NCCL group's,
    behind whose broadcast a copy would then wait.
    """
    return [torch.cuda.Stream(device) for _ in range(_STREAMS)]


def _programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count * _PROGRAMS_PER_SM


def _triton_type(dtype: torch.dtype) -> object:
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))

"""Where a publisher's tensors lie for others to read: in place, or copied into an arena. Runs in training workers.

An arena is one shared segment for all of a rank's tensors that cannot be read where they are: host memory, memory that
has no handle, or another dtype than the engines want. Tensors lie in it one after the other, dense and aligned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch

from weightsync import transports
from weightsync.boxes import dense_strides
from weightsync.errors import ConfigError, TransferError
from weightsync.spec import Segment, Shard
from weightsync.trainers import Held
from weightsync.transports import Memory, Puller

ALIGNMENT = 256  # bytes; what wide GPU reads and the largest element need


class Slot(NamedTuple):
    """Where a tensor lies in an arena: ``number`` is that of the tensor, ``byte_offset`` from the arena's start."""

    number: int
    size: tuple[int, ...]
    dtype: torch.dtype
    byte_offset: int


class Layout(NamedTuple):
    """An arena before it has memory. Two equal layouts can use the same memory."""

    transport: str
    device: str
    slots: tuple[Slot, ...]
    nbytes: int


class Arena:
    """Memory laid out. ``views`` by tensor index; ``close`` frees it, consumers must have let go of it before."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.memory: Memory = transports.get(layout.transport).allocate(layout.nbytes, layout.device)
        self.views = {slot.number: _view(self.memory.tensor, slot) for slot in layout.slots}

    def close(self) -> None:
        self.views = {}
        self.memory.close()


def lay_out(transport: str, device: str, wanted: Sequence[tuple[int, tuple[int, ...], torch.dtype]]) -> Layout:
    """Place (tensor index, size, dtype) one after the other. Empty tensors take no room, but have no slot either."""
    slots, end = [], 0
    for index, size, dtype in wanted:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        slots.append(Slot(index, size, dtype, start))
        end = start + prod(size) * dtype.itemsize
    return Layout(transport, device, tuple(slots), end)


def _view(memory: torch.Tensor, slot: Slot) -> torch.Tensor:
    nbytes = prod(slot.size) * slot.dtype.itemsize
    return memory[slot.byte_offset : slot.byte_offset + nbytes].view(slot.dtype).view(slot.size)


class Outlet:
    """What a rank has exported: for each tensor that it read, the memory that others see and the shard that says where.

    ``views`` has None for a tensor of which this rank holds nothing. ``notes`` say why an arena was needed.
    """

    def __init__(
        self, held: Sequence[Held], *, transport: str, device: str, dtypes: Mapping[str, str], in_place: bool,
        arena: Arena | None, limit_bytes: int = 0,
    ) -> None:  # fmt: skip
        """``device`` is the GPU's UUID for an arena of ``transport``; ``arena`` an earlier one, used again if it fits.

        Raises TransferError if there is no room, or none within ``limit_bytes`` (0: no limit), and ConfigError on a
        dtype that torch does not have.
        """
        self._reasons: dict[str, list[str]] = {}
        self.segments: list[Segment] = []
        wanted = [dtype_of(dtypes.get(h.name, h.dtype)) for h in held]
        self._in_place = self._export(held, wanted, transport) if in_place else {}
        if not in_place:
            self._reasons["in place was not asked for"] = [h.name for h in held if h.tensor.numel()]
        copied = [
            (i, tuple(h.tensor.shape), dtype)
            for i, (h, dtype) in enumerate(zip(held, wanted, strict=True))
            if h.tensor.numel() and i not in self._in_place
        ]
        self.arena = _reused(arena, _within(limit_bytes, lay_out(transport, device, copied), self.notes))
        if self.arena is not None:
            self.segments.append(self.arena.memory.segment)
        slots = {slot.number: slot for slot in self.arena.layout.slots} if self.arena is not None else {}
        self.views = [self._view_of(i, h) for i, h in enumerate(held)]
        self.shards = [self._shard(i, h, wanted[i], slots.get(i)) for i, h in enumerate(held)]
        self._puller: Puller | None = None
        self._pulled: list[tuple] = []

    @property
    def arena_bytes(self) -> int:
        return self.arena.layout.nbytes if self.arena is not None else 0

    @property
    def notes(self) -> list[str]:
        return [
            f"{len(names)} tensors through an arena: {why} ({', '.join(names[:3])}{', ...' if names[3:] else ''})"
            for why, names in self._reasons.items()
            if names
        ]

    def fill(self, held: Sequence[Held]) -> None:
        """Copy what goes through the arena, casting where dtypes differ; done on return. Waits for no stream."""
        if self.arena is None:
            return
        pairs = []
        for index, view in self.arena.views.items():
            compute = held[index].compute
            if compute is None:
                pairs.append((view, held[index].tensor))
                continue
            view.copy_(compute(held[index].tensor))
            if view.is_cuda:
                torch.cuda.current_stream(view.device).synchronize()
        where = [_place(source) for _, source in pairs]
        if self._puller is None or where != self._pulled:
            self._puller, self._pulled = transports.make_puller(pairs), where
        self._puller.run()

    def moved(self, held: Sequence[Held]) -> list[str]:
        """Names of tensors exported in place that are no longer where they were exported."""
        return [held[i].name for i, (_, _, place) in self._in_place.items() if _place(held[i].tensor) != place]

    # ----------------------------------------------------------------------------------------------- building

    def _export(self, held: Sequence[Held], wanted: list[torch.dtype], transport: str) -> dict[int, tuple]:
        """By tensor index its segment's number, byte offset and place, of all that can be read where they are."""
        done: dict[int, tuple] = {}
        for i, h in enumerate(held):
            if not h.tensor.numel():
                continue
            if h.compute is not None:
                self._reasons.setdefault("computed from the trainer's", []).append(h.name)
                continue
            if h.tensor.dtype != wanted[i]:
                self._reasons.setdefault(f"{h.dtype} is published as {_name(wanted[i])}", []).append(h.name)
                continue
            try:
                segment, byte_offset = transports.get(transport).export(h.tensor)
            except TransferError as e:
                self._reasons.setdefault(e.message, []).append(h.name)
                continue
            if segment not in self.segments:
                self.segments.append(segment)
            done[i] = (self.segments.index(segment), byte_offset, _place(h.tensor))
        return done

    def _view_of(self, index: int, held: Held) -> torch.Tensor | None:
        if index in self._in_place:
            return held.tensor
        return self.arena.views.get(index) if self.arena is not None else None

    def _shard(self, index: int, held: Held, dtype: torch.dtype, slot: Slot | None) -> Shard:
        segment, byte_offset, strides = -1, 0, dense_strides(tuple(held.tensor.shape))
        if index in self._in_place:
            segment, byte_offset, _ = self._in_place[index]
            strides = held.tensor.stride()
        elif slot is not None:
            segment, byte_offset = len(self.segments) - 1, slot.byte_offset
        return Shard(
            held.name, held.shape, _name(dtype), held.box, tuple(strides), segment, byte_offset, held.is_buffer
        )


def _within(limit_bytes: int, layout: Layout, notes: list[str]) -> Layout:
    if limit_bytes and layout.nbytes > limit_bytes:
        why = "; ".join(notes)
        raise TransferError(f"an arena of {layout.nbytes} bytes is needed, arena_bytes allows {limit_bytes} ({why})")
    return layout


def _reused(arena: Arena | None, layout: Layout) -> Arena | None:
    """``arena`` if it is laid out so; else it is closed, and a new one made if there is anything to lay out."""
    if arena is not None and arena.layout == layout:
        return arena
    if arena is not None:
        arena.close()
    return Arena(layout) if layout.slots else None


def _place(tensor: torch.Tensor) -> tuple:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def dtype_of(name: str) -> torch.dtype:
    """The dtype of that name; raises ConfigError if torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"torch {torch.__version__} has no dtype {name!r}")
    return dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Where a publisher's tensors lie for others to read: in place, or copied into an arena. Runs in training workers.

An arena is one shared segment for all of a rank's tensors that cannot be read where they are: host memory, memory that
has no handle, or another dtype than the engines want. Tensors lie in it one after the other, dense and aligned. One
that may not be large enough for all has two parts, which take turns: each round fills one while the other is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch

from weightsync import transports
from weightsync.boxes import ALIGNMENT, aligned, dense_strides
from weightsync.errors import ConfigError, TransferError
from weightsync.spec import Segment, Shard
from weightsync.trainers import Held
from weightsync.transports import Memory, Puller


class Slot(NamedTuple):
    """Where a tensor lies in an arena: ``number`` is that of the tensor, ``byte_offset`` from the arena's start."""

    number: int
    size: tuple[int, ...]
    dtype: torch.dtype
    byte_offset: int
    round: int = 0


class Layout(NamedTuple):
    """An arena before it has memory. Two equal layouts can use the same memory."""

    transport: str
    device: str
    slots: tuple[Slot, ...]
    nbytes: int
    num_parts: int = 1

    @property
    def num_rounds(self) -> int:
        return 1 + max((slot.round for slot in self.slots), default=0)


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
        start = aligned(end)
        slots.append(Slot(index, size, dtype, start))
        end = start + prod(size) * dtype.itemsize
    return Layout(transport, device, tuple(slots), end)


def in_parts(layout: Layout, limit_bytes: int) -> Layout:
    """The same tensors in at most ``limit_bytes``, in rounds: two parts take turns, or one where a tensor needs it all.

    Raises ValueError with the index of a tensor that is larger than the limit, and its bytes.
    """
    sizes = [prod(slot.size) * slot.dtype.itemsize for slot in layout.slots]
    largest = max(range(len(sizes)), key=lambda i: sizes[i])
    half = limit_bytes // 2 // ALIGNMENT * ALIGNMENT
    if sizes[largest] > limit_bytes:
        raise ValueError(layout.slots[largest].number, sizes[largest])
    num_parts = 2 if sizes[largest] <= half else 1
    part_bytes = half if num_parts == 2 else limit_bytes
    slots, number, end, used = [], 0, 0, 0
    for slot, size in zip(layout.slots, sizes, strict=True):
        start = aligned(end)
        if start + size > part_bytes:
            number, start = number + 1, 0
        end = start + size
        at = number % num_parts * part_bytes + start
        used = max(used, at + size)
        slots.append(slot._replace(byte_offset=at, round=number))
    return layout._replace(slots=tuple(slots), nbytes=used, num_parts=num_parts)


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

        Raises TransferError if there is no room, or if ``limit_bytes`` (0: no limit) is less than one tensor, and
        ConfigError on a dtype that torch does not have.
        """
        self._reasons: dict[str, list[str]] = {}
        self._bounded: list[str] = []
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
        self.arena = _reused(arena, self._within(limit_bytes, lay_out(transport, device, copied), held))
        if self.arena is not None:
            self.segments.append(self.arena.memory.segment)
        slots = {slot.number: slot for slot in self.arena.layout.slots} if self.arena is not None else {}
        self.views = [self._view_of(i, h) for i, h in enumerate(held)]
        self.shards = [self._shard(i, h, wanted[i], slots.get(i)) for i, h in enumerate(held)]
        self._pullers: dict[int, tuple[list[tuple], Puller]] = {}

    @property
    def arena_bytes(self) -> int:
        return self.arena.layout.nbytes if self.arena is not None else 0

    @property
    def num_rounds(self) -> int:
        return self.arena.layout.num_rounds if self.arena is not None else 1

    @property
    def num_parts(self) -> int:
        """How many rounds the arena has room for at a time."""
        return self.arena.layout.num_parts if self.arena is not None else 1

    @property
    def rounds(self) -> list[int]:
        """By shard, the round in which it lies in the arena (0: from the first on); empty if there is one alone."""
        if self.arena is None or self.num_rounds == 1:
            return []
        numbers = {slot.number: slot.round for slot in self.arena.layout.slots}
        return [numbers.get(i, 0) for i in range(len(self.shards))]

    @property
    def notes(self) -> list[str]:
        return [*self._why(), *self._bounded]

    def _why(self) -> list[str]:
        return [
            f"{len(names)} tensors through an arena: {why} ({', '.join(names[:3])}{', ...' if names[3:] else ''})"
            for why, names in self._reasons.items()
            if names
        ]

    def fill(self, held: Sequence[Held], number: int = 0) -> None:
        """Copy what goes through the arena in round ``number``, casting where dtypes differ; done on return.

        Waits for no stream. What lay there of an earlier round is gone.
        """
        if self.arena is None:
            return
        pairs = []
        for slot in self.arena.layout.slots:
            if slot.round != number:
                continue
            index, view = slot.number, self.arena.views[slot.number]
            compute = held[index].compute
            if compute is None:
                pairs.append((view, held[index].tensor))
                continue
            view.copy_(compute(held[index].tensor))
            if view.is_cuda:
                torch.cuda.current_stream(view.device).synchronize()
        where = [_place(source) for _, source in pairs]
        if pairs and (number not in self._pullers or where != self._pullers[number][0]):
            self._pullers[number] = where, transports.make_puller(pairs)
        if pairs:
            self._pullers[number][1].run()

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

    def _within(self, limit_bytes: int, layout: Layout, held: Sequence[Held]) -> Layout:
        """``layout``, in rounds if it is larger than ``limit_bytes``."""
        if not limit_bytes or layout.nbytes <= limit_bytes:
            return layout
        why = "; ".join(self._why())
        try:
            bounded = in_parts(layout, limit_bytes)
        except ValueError as e:
            index, least = e.args
            raise TransferError(
                f"{held[index].name} takes {least} bytes of an arena, and arena_bytes allows {limit_bytes}: it must be "
                f"{least} or more, twice that for filling to overlap reading ({why})",
                tensor=held[index].name,
            ) from None
        self._bounded = [
            f"an arena of {bounded.nbytes} bytes for {layout.nbytes} (arena_bytes: {limit_bytes}): it is filled in "
            f"{bounded.num_rounds} rounds during the move, {bounded.num_parts} of them at a time"
        ]
        return bounded

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

"""Slices that an engine rank cannot open, because their GPU is masked from it, brought to a GPU that it sees.

Production engines usually see only their own GPUs. The actor, which sees all, copies just the slices that the rank
needs into an arena on the rank's own GPU; to the receiver that arena is one more training rank. It is filled in rounds,
so that the receiver pulls one while the next is on its way. Runs in the actor.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import torch

from weightsync import transports
from weightsync.boxes import aligned, dense_strides, volume
from weightsync.rounds import num_rounds, round_of
from weightsync.spec import Copy, Export, RankPlan, Segment, Shard, View
from weightsync.transports import Memory, Puller
from weightsync.views import source_view

RELAY_RANK = -1
_NUM_CHUNKS, _LEAST_CHUNK_BYTES = 8, 64 << 20


class Relay:
    """The relayed part of one engine rank's plan. ``plan`` is the rank's whole plan with the arena as a source.

    ``segments`` and ``shards`` are what the receiver needs besides those of the training ranks. ``num_bytes`` are
    copied by all rounds together, of which there are ``num_rounds``: those of ``exports``, or else as many as make
    chunks of a size worth it. ``num_bytes_on`` says on which GPUs they lie. Raises TransferError if the actor cannot
    map a source or has no room for the arena.
    """

    def __init__(self, plan: RankPlan, exports: dict[int, Export], *, device: str, visible: Collection[str]) -> None:
        relayed = [c for c in plan.copies if _is_masked(_segment_of(c, exports), visible)]
        assert relayed, "nothing to relay"
        self._mapped: dict[tuple[str, bytes], Memory] = {}
        self._shards, self.num_bytes = _lay_out(relayed, exports)
        transport = transports.get(_segment_of(relayed[0], exports).transport)
        self._arena = transport.allocate(self.num_bytes, device)
        chunk_bytes = max(_LEAST_CHUNK_BYTES, self.num_bytes // _NUM_CHUNKS)
        if num_rounds(exports) > 1:
            self._rounds = [round_of(copy, exports) for copy in relayed]
        else:
            self._rounds = [shard.byte_offset // chunk_bytes for shard in self._shards]
        self.num_rounds = 1 + max(self._rounds)
        self.num_bytes_on: dict[str, int] = {}
        for copy, shard in zip(relayed, self._shards, strict=True):
            gpu, itemsize = _segment_of(copy, exports).device, getattr(torch, shard.dtype).itemsize
            self.num_bytes_on[gpu] = self.num_bytes_on.get(gpu, 0) + volume(copy.box) * itemsize
        with transports.on_device_of(self._arena.tensor):
            self._pullers = self._make_pullers(relayed, exports)
        self.plan = msgspec.structs.replace(plan, copies=_resourced(plan.copies, relayed))
        self.segments = {RELAY_RANK: [self._arena.segment]}
        self.shards = {RELAY_RANK: self._shards}

    def round_of(self, copy: Copy) -> int:
        """The round after which a copy of ``plan`` that reads from the arena can be made."""
        assert copy.rank == RELAY_RANK, "not a relayed copy"
        return self._rounds[copy.source.storage]

    def run(self, number: int = 0) -> float:
        """Bring the present bytes of one round's slices over; done on return. Seconds."""
        puller = self._pullers.get(number)
        return puller.run() if puller is not None else 0.0

    def close(self) -> None:
        """Unmap and free. The receiver must have let go of the arena before."""
        for memory in self._mapped.values():
            memory.close()
        self._mapped = {}
        self._arena.close()

    def _make_pullers(self, relayed: list[Copy], exports: dict[int, Export]) -> dict[int, Puller]:
        pairs: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for copy, shard, number in zip(relayed, self._shards, self._rounds, strict=True):
            index = exports[copy.rank].shards[copy.source.storage].segment
            memories = {copy.rank: {index: self._open(exports[copy.rank].segments[index])}}
            source = source_view(memories, exports[copy.rank].shards, copy)
            pairs.setdefault(number, []).append((self._view(shard, source.dtype), source))
        return {number: transports.make_puller(some) for number, some in pairs.items()}

    def _open(self, segment: Segment) -> Memory:
        key = (segment.transport, segment.handle)
        if key not in self._mapped:
            self._mapped[key] = transports.get(segment.transport).open_segment(segment)
        return self._mapped[key]

    def _view(self, shard: Shard, dtype: torch.dtype) -> torch.Tensor:
        nbytes = volume(shard.box) * dtype.itemsize
        part = self._arena.tensor[shard.byte_offset : shard.byte_offset + nbytes]
        return part.view(dtype).view(shard.box.size)


def masked(plan: RankPlan, exports: dict[int, Export], visible: Collection[str]) -> list[Copy]:
    """The copies of a rank's plan whose source lies on a GPU that the rank cannot see."""
    return [c for c in plan.copies if _is_masked(_segment_of(c, exports), visible)]


def any_masked(exports: dict[int, Export], visible: Collection[str]) -> bool:
    """Whether anything at all lies on a GPU that a rank which sees ``visible`` cannot see."""
    return any(_is_masked(segment, visible) for export in exports.values() for segment in export.segments)


def _is_masked(segment: Segment, visible: Collection[str]) -> bool:
    return bool(segment.device) and segment.device not in visible


def _segment_of(copy: Copy, exports: dict[int, Export]) -> Segment:
    export = exports[copy.rank]
    return export.segments[export.shards[copy.source.storage].segment]


def _lay_out(relayed: list[Copy], exports: dict[int, Export]) -> tuple[list[Shard], int]:
    """One dense shard a copy, one after the other, and the bytes of all."""
    shards, end = [], 0
    for copy in relayed:
        origin = exports[copy.rank].shards[copy.source.storage]
        start = aligned(end)
        strides = dense_strides(copy.box.size)
        shards.append(Shard(copy.tensor, origin.shape, origin.dtype, copy.box, strides, 0, start))
        end = start + volume(copy.box) * getattr(torch, origin.dtype).itemsize
    return shards, end


def _resourced(copies: list[Copy], relayed: list[Copy]) -> list[Copy]:
    """``copies`` with those relayed read from the arena, each from the shard of its own."""
    number = {id(copy): i for i, copy in enumerate(relayed)}
    return [
        msgspec.structs.replace(c, rank=RELAY_RANK, source=View(number[id(c)], 0, dense_strides(c.box.size)))
        if id(c) in number
        else c
        for c in copies
    ]

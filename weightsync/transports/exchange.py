"""Slices from several senders to one engine's ranks: each rank is sent what it needs and nothing else.

Both ends work out the same *chunks* from the same plan, so no header travels: the copies of one sender and one engine
rank, in the plan's order, packed one after the other. Chunk ``n`` of all pairs makes round ``n``, one grouped exchange;
two arenas alternate, so that one is packed or unpacked while the other travels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from weightsync import transports
from weightsync.boxes import volume
from weightsync.deadline import Deadline
from weightsync.spec import Copy, Shard
from weightsync.transports import Puller
from weightsync.transports.rendezvous import Group

_ALIGN = 16


class Chunk(NamedTuple):
    """What one message carries: copies, contiguous, and the byte at which each begins. ``nbytes`` is its length."""

    parts: tuple[tuple[Copy, int], ...]
    nbytes: int


def streams(
    copies: Sequence[Copy], shards: Mapping[int, Sequence[Shard]], senders: Mapping[int, int], limit_bytes: int
) -> dict[int, list[Chunk]]:
    """By sender, the chunks that one engine rank gets from it. ``senders``: by trainer rank, who sends for it.

    No chunk is over ``limit_bytes``, but a copy that is larger travels alone.
    """
    assert limit_bytes > 0, f"chunks of {limit_bytes} bytes"
    packing: dict[int, list[tuple[Copy, int]]] = {sender: [] for sender in senders.values()}
    ends = dict.fromkeys(packing, 0)
    made: dict[int, list[Chunk]] = {sender: [] for sender in packing}
    for copy in copies:
        sender, nbytes = senders[copy.rank], volume(copy.box) * _dtype(copy, shards).itemsize
        start = -(-ends[sender] // _ALIGN) * _ALIGN
        if packing[sender] and start + nbytes > limit_bytes:
            made[sender].append(Chunk(tuple(packing[sender]), ends[sender]))
            packing[sender], start = [], 0
        packing[sender].append((copy, start))
        ends[sender] = start + nbytes
    for sender, parts in packing.items():
        if parts:
            made[sender].append(Chunk(tuple(parts), ends[sender]))
    return made


class _Flow:
    """The chunks to or from one peer, their two arenas, and the puller that packs or unpacks each."""

    def __init__(
        self,
        chunks: list[Chunk],
        shards: Mapping[int, Sequence[Shard]],
        device: torch.device,
        pair: Callable[[Copy, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        largest = max((c.nbytes for c in chunks), default=0)
        arenas = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in chunks[:2]]
        self.messages = [arenas[n % 2][: c.nbytes] for n, c in enumerate(chunks)]
        self.pullers: list[Puller] = []
        for message, chunk in zip(self.messages, chunks):
            packed = [(copy, _packed(message, copy, start, _dtype(copy, shards))) for copy, start in chunk.parts]
            self.pullers.append(transports.make_puller([pair(copy, view) for copy, view in packed]))


class Outgoing:
    """One sender's end. ``chunks``: by the group rank it goes to; ``view`` gives the trainer's memory of a copy."""

    def __init__(
        self,
        chunks: Mapping[int, list[Chunk]],
        shards: Mapping[int, Sequence[Shard]],
        view: Callable[[Copy], torch.Tensor],
        device: torch.device,
    ) -> None:
        self._flows = {
            peer: _Flow(parts, shards, device, lambda copy, packed: (packed, view(copy)))
            for peer, parts in chunks.items()
        }
        self.num_bytes = sum(c.nbytes for parts in chunks.values() for c in parts)

    def run(self, group: Group, deadline: Deadline) -> int:
        """Pack and send all, done on return; the bytes sent. Raises TransferError, TransferTimeout."""
        under_way: list[list[Any]] = []
        for number in range(_rounds(self._flows)):
            if number >= 2:
                group.finish(under_way[number - 2], deadline)  # its arena is filled again now
            sends = []
            for peer, flow in self._flows.items():
                if number < len(flow.messages):
                    flow.pullers[number].run()
                    sends.append((peer, flow.messages[number]))
            under_way.append(group.start(sends, []))
        for works in under_way[-2:]:
            group.finish(works, deadline)
        return self.num_bytes


class Incoming:
    """An engine rank's end. ``chunks``: by the group rank they come from; ``view`` gives the memory of a copy."""

    def __init__(
        self,
        chunks: Mapping[int, list[Chunk]],
        shards: Mapping[int, Sequence[Shard]],
        view: Callable[[Copy], torch.Tensor],
        device: torch.device,
    ) -> None:
        self._flows = {
            peer: _Flow(parts, shards, device, lambda copy, packed: (view(copy), packed))
            for peer, parts in chunks.items()
        }

    def run(self, group: Group, deadline: Deadline) -> None:
        """Receive and unpack all, done on return. Raises TransferError, TransferTimeout."""
        rounds = _rounds(self._flows)
        coming = self._receive(group, 0) if rounds else []
        for number in range(rounds):
            group.finish(coming, deadline)
            coming = self._receive(group, number + 1) if number + 1 < rounds else []
            for flow in self._flows.values():
                if number < len(flow.pullers):
                    flow.pullers[number].run()

    def _receive(self, group: Group, number: int) -> list[Any]:
        receives = [(p, flow.messages[number]) for p, flow in self._flows.items() if number < len(flow.messages)]
        return group.start([], receives)


def _rounds(flows: Mapping[int, _Flow]) -> int:
    return max((len(flow.messages) for flow in flows.values()), default=0)


def _dtype(copy: Copy, shards: Mapping[int, Sequence[Shard]]) -> torch.dtype:
    return getattr(torch, shards[copy.rank][copy.source.storage].dtype)


def _packed(message: torch.Tensor, copy: Copy, start: int, dtype: torch.dtype) -> torch.Tensor:
    nbytes = volume(copy.box) * dtype.itemsize
    return message[start : start + nbytes].view(dtype).view(copy.box.size)

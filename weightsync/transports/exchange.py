"""Slices between members of a group: each is sent what it needs and nothing else.

Both ends work out the same *chunks* from the same plan, so no header travels: the copies of one sender and one
receiver, in the plan's order, packed one after the other. Chunk ``n`` of all pairs makes round ``n``, one grouped
exchange; two arenas alternate, so that one is packed or unpacked while the other travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from weightsync import transports
from weightsync.boxes import volume
from weightsync.deadline import Deadline
from weightsync.sharing import part_of
from weightsync.spec import Copy, Shard
from weightsync.transports import Puller

Transfers = Sequence[tuple[int, torch.Tensor]]

_ALIGN = 16


class GroupLike(Protocol):
    """What slices travel over. See ``rendezvous.Group``."""

    def start(self, sends: Transfers, receives: Transfers) -> list[Any]: ...

    def finish(self, works: list[Any], deadline: Deadline) -> None: ...

    def abort(self) -> None: ...


class Chunk(NamedTuple):
    """What one message carries: copies, contiguous, and the byte at which each begins. ``nbytes`` is its length."""

    parts: tuple[tuple[Copy, int], ...]
    nbytes: int


def streams(
    copies: Sequence[Copy], shards: Mapping[int, Sequence[Shard]], senders: Mapping[int, int], limit_bytes: int
) -> dict[int, list[Chunk]]:
    """By sender, the chunks that one engine rank gets from it. ``senders``: by trainer rank, who sends for it.

    No chunk is over ``limit_bytes``: a copy that is larger is cut, down to a single element.
    """
    assert limit_bytes > 0, f"chunks of {limit_bytes} bytes"
    packing: dict[int, list[tuple[Copy, int]]] = {sender: [] for sender in senders.values()}
    ends = dict.fromkeys(packing, 0)
    made: dict[int, list[Chunk]] = {sender: [] for sender in packing}
    for copy in (part for whole in copies for part in _cut(whole, limit_bytes, _dtype(whole, shards).itemsize)):
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


def _cut(copy: Copy, limit_bytes: int, itemsize: int) -> Iterator[Copy]:
    """``copy`` in pieces of at most ``limit_bytes``, cut along its first dim that can be."""
    size = copy.box.size
    dim = next((d for d, n in enumerate(size) if n > 1), None)
    nbytes = volume(copy.box) * itemsize
    if nbytes <= limit_bytes or dim is None:
        yield copy
        return
    step = max(1, limit_bytes // (nbytes // size[dim]))
    for start in range(0, size[dim], step):
        count = min(step, size[dim] - start)
        yield from _cut(part_of(copy, dim, start, count), limit_bytes, itemsize)


def chunked(copies: Sequence[Copy], shards: Mapping[int, Sequence[Shard]], limit_bytes: int) -> list[Chunk]:
    """The chunks of ``copies`` that all travel between the same two members."""
    return streams(copies, shards, dict.fromkeys({copy.rank for copy in copies}, 0), limit_bytes).get(0, [])


class Buffers:
    """Two arenas a peer, shared by all that is sent to or received from it one part after the other."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._arenas: dict[int, list[torch.Tensor]] = {}

    def reserve(self, parts: Sequence[Mapping[int, list[Chunk]]]) -> None:
        """Make room for all of ``parts`` before any of them is laid out."""
        for peer in {peer for part in parts for peer in part}:
            chunks = [part.get(peer, []) for part in parts]
            largest = max((c.nbytes for part in chunks for c in part), default=0)
            count = min(2, max(len(part) for part in chunks))
            self._arenas[peer] = [torch.empty(largest, dtype=torch.uint8, device=self.device) for _ in range(count)]

    @property
    def nbytes(self) -> int:
        return sum(arena.numel() for arenas in self._arenas.values() for arena in arenas)

    def messages(self, peer: int, chunks: list[Chunk]) -> list[torch.Tensor]:
        """For each chunk, the memory that it travels from or to."""
        arenas = self._arenas.get(peer, [])
        return [arenas[n % 2][: c.nbytes] for n, c in enumerate(chunks)]


class _Flow:
    """The chunks to or from one peer, their two arenas, and the puller that packs or unpacks each."""

    def __init__(
        self,
        chunks: list[Chunk],
        messages: list[torch.Tensor],
        shards: Mapping[int, Sequence[Shard]],
        pair: Callable[[Copy, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self.messages = messages
        self.pullers: list[Puller] = []
        for message, chunk in zip(self.messages, chunks):
            packed = [(copy, _packed(message, copy, start, _dtype(copy, shards))) for copy, start in chunk.parts]
            self.pullers.append(transports.make_puller([pair(copy, view) for copy, view in packed]))


class Outgoing:
    """One end that sends. ``chunks``: by the group rank it goes to; ``view`` gives the memory that a copy reads."""

    def __init__(
        self,
        chunks: Mapping[int, list[Chunk]],
        shards: Mapping[int, Sequence[Shard]],
        view: Callable[[Copy], torch.Tensor],
        buffers: Buffers,
    ) -> None:
        self.flows = {
            peer: _Flow(parts, buffers.messages(peer, parts), shards, lambda copy, packed: (packed, view(copy)))
            for peer, parts in chunks.items()
        }
        self.num_bytes = sum(c.nbytes for parts in chunks.values() for c in parts)

    def run(self, group: GroupLike, deadline: Deadline) -> int:
        """Pack and send all, done on return; the bytes sent. Raises TransferError, TransferTimeout."""
        under_way: list[list[Any]] = []
        for number in range(_rounds(self.flows)):
            if number >= 2:
                group.finish(under_way[number - 2], deadline)  # its arena is filled again now
            under_way.append(group.start(self.packed(number), []))
        for works in under_way[-2:]:
            group.finish(works, deadline)
        return self.num_bytes

    def packed(self, number: int) -> list[tuple[int, torch.Tensor]]:
        """Pack chunk ``number`` of every peer; what goes where."""
        sends = []
        for peer, flow in self.flows.items():
            if number < len(flow.messages):
                flow.pullers[number].run(alone=False)  # beside what travels
                sends.append((peer, flow.messages[number]))
        return sends


class Incoming:
    """One end that receives. ``chunks``: by the group rank they come from; ``view`` gives the memory of a copy."""

    def __init__(
        self,
        chunks: Mapping[int, list[Chunk]],
        shards: Mapping[int, Sequence[Shard]],
        view: Callable[[Copy], torch.Tensor],
        buffers: Buffers,
    ) -> None:
        self.flows = {
            peer: _Flow(parts, buffers.messages(peer, parts), shards, lambda copy, packed: (view(copy), packed))
            for peer, parts in chunks.items()
        }
        self.num_bytes = sum(c.nbytes for parts in chunks.values() for c in parts)

    def run(self, group: GroupLike, deadline: Deadline) -> int:
        """Receive and unpack all, done on return; the bytes received. Raises TransferError, TransferTimeout."""
        rounds = _rounds(self.flows)
        coming = [group.start([], self.expected(number)) for number in range(min(2, rounds))]
        for number in range(rounds):  # the next is on its way already, with no pause between the two
            group.finish(coming[number], deadline)
            self.unpack(number)
            if number + 2 < rounds:  # into the arena that was unpacked just now
                coming.append(group.start([], self.expected(number + 2)))
        return self.num_bytes

    def expected(self, number: int) -> list[tuple[int, torch.Tensor]]:
        """Where chunk ``number`` of every peer is to lie."""
        return [(p, flow.messages[number]) for p, flow in self.flows.items() if number < len(flow.messages)]

    def unpack(self, number: int) -> None:
        """Bring chunk ``number`` of every peer where it belongs."""
        for flow in self.flows.values():
            if number < len(flow.pullers):
                flow.pullers[number].run(alone=False)  # beside what travels


def swap(group: GroupLike, out: Outgoing, into: Incoming, deadline: Deadline) -> None:
    """Send and receive at once, round by round, so that two that send to each other do not wait for each other."""
    for number in range(max(_rounds(out.flows), _rounds(into.flows))):
        group.finish(group.start(out.packed(number), into.expected(number)), deadline)
        into.unpack(number)


def _rounds(flows: Mapping[int, _Flow]) -> int:
    return max((len(flow.messages) for flow in flows.values()), default=0)


def _dtype(copy: Copy, shards: Mapping[int, Sequence[Shard]]) -> torch.dtype:
    return getattr(torch, shards[copy.rank][copy.source.storage].dtype)


def _packed(message: torch.Tensor, copy: Copy, start: int, dtype: torch.dtype) -> torch.Tensor:
    nbytes = volume(copy.box) * dtype.itemsize
    return message[start : start + nbytes].view(dtype).view(copy.box.size)

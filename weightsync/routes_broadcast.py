"""Whole tensors to stock engines over process groups: the bucket route's buckets, broadcast. Runs in the actor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from weightsync import transports
from weightsync.boxes import volume, whole
from weightsync.config import BUCKET_BYTES, Config
from weightsync.deadline import Deadline
from weightsync.engines import Tensors
from weightsync.fanout import Fanout
from weightsync.fleet import EngineLink
from weightsync.gathering import GatherGroup, gathered, to_gather
from weightsync.groups_broadcast import BroadcastGroup, Sending, step_of
from weightsync.nodes import Nodes, Place
from weightsync.plan import Plan
from weightsync.routes import Outcome
from weightsync.routes_bucket import IN_TURNS, BucketRoute
from weightsync.spec import Copy, Export, TensorSpec
from weightsync.transports import Memory, bucket
from weightsync.transports.bucket_cuda import CudaArena
from weightsync.transports.nccl_wire import Broadcast, Fill, Part
from weightsync.turns import Turn
from weightsync.workers import Workers

GATHER_SHARE = 8
"""Parts from other nodes pass through buffers of an eighth of a bucket, two at either end. Buckets are a ninth smaller
where the trainer is on several nodes, so that all fits into two of ``bucket_bytes``.
"""

BROADCAST_BYTES = 1 << 30
"""Of a bucket between GPUs: with half as many bytes, what an engine does beside receiving takes longer than that.

Of the first one at most, in any case: until the sender has begun with all of it the engine has nothing to do.
"""

PART_BYTES = 64 << 20
"""Tensors from this size on are broadcast each by itself: of a flattened bucket an engine makes two copies more, but
every message takes both sides some time.
"""
UNDER_WAY = 4
"""Buckets that a sender which fills its arena has begun with and the engine does not have yet."""
PLAIN = ("float32", "bfloat16", "float16")
"""What every torch gives to NCCL."""


class BroadcastRoute(BucketRoute):
    """Whole tensors to stock engines: broadcast, instead of mapped, out of one arena with two ends."""

    _engines_map_arenas = False  # its sender reads them, and is ended

    def __init__(
        self,
        fanout: Fanout,
        config: Config,
        workers: Workers,
        select: Callable[[str], bool],
        groups_fanout: Fanout,
        nodes: Nodes,
        *,
        is_all: bool = True,
    ) -> None:
        """``is_all``: whether engines get nothing but what goes this way."""
        super().__init__(fanout, config, workers.rules, select)
        self._workers = workers
        self._nodes = nodes
        self._is_all = is_all
        self._places: dict[int, Place] = {}
        self._groups_fanout = groups_fanout
        self._groups: dict[str, BroadcastGroup] = {}
        self._begun: dict[str, tuple[Turn, Future[int]]] = {}
        self._gather: GatherGroup | None = None

    def prepare(self, links: list[EngineLink], plan: Plan, exports: dict[int, Export], deadline: Deadline) -> None:
        if not links:
            self.close_groups()
            return
        self._end_gathering()
        self._places = self._nodes.places(self._workers.hosts(), self._workers.devices())
        super().prepare(links, plan, exports, deadline)
        device = self._device()
        kept = {}
        for link in links:
            old = self._groups.pop(link.url, None)
            if old is not None and old.info is not link.info:
                old.give_up()
                old = None
            kept[link.url] = old or BroadcastGroup(link, self._groups_fanout, self._nodes, device)
        for group in self._groups.values():
            group.close()
        self._groups = kept
        self._prepare_gathering(links[0], exports, deadline)
        only = len(links) == 1 and self._gather is None
        for group in kept.values():
            if self._buckets:
                group.prepare(self._fill_by_sender(exports if only else {}), len(self._buckets), deadline)
            else:
                group.unmap(deadline)

    def begin(self, link: EngineLink, deadline: Deadline) -> None:
        """While its engine pauses: have the sender begin with the first bucket, if it is the one that fills."""
        group = self._groups.get(link.url)
        if group is not None and group.works and group.fills and link.state == "serving":
            barrier = group.barrier()
            self._begun[link.url] = barrier, super()._send(link, 0, deadline)

    def end_push(self) -> None:
        """Call off what was begun and not moved. Idempotent."""
        for url in list(self._begun):
            self._call_off(url)

    def move(self, links: list[EngineLink], step: int, deadline: Deadline) -> list[Outcome]:
        """Make the groups that are missing, all at once; then the buckets, to those whose group works."""
        if not self._arenas:
            return super().move(links, step, deadline)
        opened = self._fanout.each(lambda link: self._open(link, deadline), links)
        ready = [link for link, outcome in zip(links, opened, strict=True) if outcome is None]
        moved = dict(zip([link.url for link in ready], super().move(ready, step, deadline), strict=True))
        return [moved.get(link.url, outcome) for link, outcome in zip(links, opened, strict=True)]

    def let_go(self, deadline: Deadline) -> None:
        """The groups stay; their senders map nothing, and a trainer on other nodes is gathered from by a new group."""
        for group in self._groups.values():
            group.unmap(deadline)
        self._end_gathering()
        self.close()

    def close_groups(self) -> None:
        """Leave every group, and give arena and mappings back. Idempotent."""
        for group in self._groups.values():
            group.close()
        self._groups = {}
        self._end_gathering()
        self.close()

    def _prepare_gathering(self, like: EngineLink, exports: dict[int, Export], deadline: Deadline) -> None:
        """The group that brings what lies on other nodes, if a bucket has any of it."""
        read = {copy.rank for copies in self._planned for _, copy in copies}
        remote = sorted({self._places[rank] for rank in read if not self._is_here(rank)})
        if remote:
            places = [Place("", self._device()), *remote]
            self._gather = GatherGroup(self._groups_fanout, self._nodes, places, like=like)
            chunk_bytes = max(1, self._bucket_bytes // (GATHER_SHARE * len(remote)))
            wanted = self._into_arena(exports)
            arena = self._memory.segment
            self._gather.install(*to_gather(wanted, self._places, remote, exports, arena, chunk_bytes))
            self._gather.started(deadline)

    def _end_gathering(self) -> None:
        if self._gather is not None:
            self._gather.give_up()
        self._gather = None

    def _is_here(self, rank: int) -> bool:
        return not self._places[rank].host

    def _device(self) -> str:
        """The GPU on which buckets are assembled: that of the first training rank here; "" for host memory."""
        return next((self._places[rank].device for rank in sorted(self._places) if self._is_here(rank)), "")

    def _fill_by_sender(self, exports: dict[int, Export]) -> Fill:
        """For the sender of an only engine: GPUs run kernels of one process side by side, those of two in turns.

        Without ``exports`` the actor fills, and a sender is told the arena alone.
        """
        here = {rank: export for rank, export in exports.items() if self._is_here(rank)}
        return Fill(
            segments={rank: export.segments for rank, export in here.items()},
            shards={rank: export.shards for rank, export in here.items()},
            arena=self._memory.segment,
            buckets=self._into_arena(exports) if exports else [],
        )

    def _into_arena(self, exports: dict[int, Export]) -> list[list[Copy]]:
        """By bucket, the copies that fill it, aimed at the arena."""
        return [gathered(b, copies, exports) for b, copies in zip(self._buckets, self._planned, strict=True)]

    def _fill(self, number: int, deadline: Deadline) -> None:
        if self._sender_fills:
            return
        gathering = None
        if self._gather is not None:
            gather = self._gather
            gathering = self._fanout.submit(lambda: gather.fill(number, step_of(deadline)))
        try:
            super()._fill(number, deadline)
        finally:
            if gathering is not None:
                gathering.result()

    def _open(self, link: EngineLink, deadline: Deadline) -> None:
        group = self._groups[link.url]
        if link.state != "serving":
            group.give_up()  # the engine may have been restarted, or still hold the group that failed
        if group.works:
            return
        self._call_off(link.url)
        group.started(deadline)
        group.ready(self._memory.segment, step_of(deadline))

    def _pack(self, tensors: list[TensorSpec]) -> list[bucket.Bucket]:
        if not tensors:
            return []
        first, *_ = bucket.without_gaps(tensors, min(self._bucket_bytes, BROADCAST_BYTES), _goes_by_itself)
        there = {entry.tensor.name for entry in first.entries}
        rest = [tensor for tensor in tensors if tensor.name not in there]
        return [first, *bucket.without_gaps(rest, self._bucket_bytes, _goes_by_itself)]

    @property
    def _most_under_way(self) -> int:
        """An engine is asked for them in turn; see ``groups_broadcast``."""
        return UNDER_WAY if self._sender_fills else IN_TURNS

    @property
    def _sender_fills(self) -> bool:
        return bool(self._groups) and all(group.fills for group in self._groups.values())

    @property
    def _bucket_bytes(self) -> int:
        nbytes = self._config.bucket_bytes or (BROADCAST_BYTES if self._device() else BUCKET_BYTES)
        alone = all(self._is_here(rank) for rank in self._places)
        return nbytes if alone else max(1, nbytes * GATHER_SHARE // (GATHER_SHARE + 1))

    def _new_arenas(self) -> Sequence[Memory]:
        if not self._buckets:
            return []
        self._buckets, nbytes = bucket.at_both_ends(self._buckets, self._bucket_bytes)
        transport = transports.get("cuda_ipc" if self._device() else "shm")
        return [transport.allocate(max(nbytes, 1), self._device())]

    def _arena(self, number: int) -> Any:
        return self._memory.tensor[self._buckets[number].start :]

    @property
    def _memory(self) -> Memory:
        (memory,) = self._arenas
        assert not isinstance(memory, bucket.Arena | CudaArena), "this route makes its own"
        return memory

    def _most_while_filling(self, number: int) -> int:
        if self._sender_fills:  # and waits itself
            return UNDER_WAY - 1
        return IN_TURNS - 1 if self._is_beside(number) else 0

    def _is_beside(self, number: int) -> bool:
        """Whether that bucket has no byte of the arena where the one before has one."""
        return number == 0 or not self._buckets[number].overlaps(self._buckets[number - 1])

    def _sender(self, link: EngineLink, number: int, deadline: Deadline) -> Callable[[], int]:
        planned = self._buckets[number]
        specs = [entry.tensor for entry in planned.entries]
        tensors = Tensors([s.name for s in specs], [s.dtype for s in specs], [s.shape for s in specs])
        what, parts = f"bucket {number + 1} of {len(self._buckets)}", parts_of(planned)
        group, progress, is_end = self._groups[link.url], link.progress, self._is_all and planned is self._buckets[-1]
        turn, fills = group.turn(what), number if group.fills else None
        segment, nbytes, start = self._memory.segment, planned.nbytes, planned.start
        request = Broadcast("", segment, nbytes, deadline.remaining_s(), parts=parts, fills=fills, start=start)
        sending = Sending(
            request,
            lambda name: link.client.update_from_distributed(
                tensors, name, step_of(deadline), flattened=not parts, what=what
            ),
            is_beside=self._is_beside(number),
            granted=progress.answered if is_end else lambda: None,
            filled=progress.landed if is_end and group.fills else None,
        )

        def send() -> int:
            group.send(turn, sending, deadline)
            return planned.nbytes

        return send

    def _send(self, link: EngineLink, number: int, deadline: Deadline) -> Future[int]:
        barrier, begun = self._begun.pop(link.url, (None, None)) if number == 0 else (None, None)
        if barrier is None or begun is None:
            return super()._send(link, number, deadline)
        barrier.granted.set()
        return begun

    def _call_off(self, url: str) -> None:
        barrier, begun = self._begun.pop(url, (None, None))
        if barrier is not None and begun is not None and url in self._groups:
            self._groups[url].call_off(barrier)
            begun.exception()


def parts_of(planned: bucket.Bucket) -> list[Part]:
    """A bucket's tensors as messages of their own, if each goes by itself; else none: the bucket goes as one."""
    if not all(_goes_by_itself(entry.tensor) for entry in planned.entries):
        return []
    return [Part(e.start, e.end, e.tensor.dtype) for e in planned.entries]


def _goes_by_itself(tensor: TensorSpec) -> bool:
    return tensor.dtype in PLAIN and volume(whole(tensor.shape)) * bucket.dtype_of(tensor.dtype).itemsize >= PART_BYTES

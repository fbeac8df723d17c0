"""Route ``nccl``: to engines on another node, or without peer access, over process groups. Runs in the actor.

A stock engine gets flattened buckets by broadcast, an engine with our receiver just the slices that its ranks need.
Each engine has a group of its own; see ``transports.nccl`` for who sits in which NCCL world.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from types import MappingProxyType

from weightsync import transports
from weightsync.config import BUCKET_BYTES, Config
from weightsync.deadline import Deadline
from weightsync.engines import Tensors
from weightsync.errors import ConfigError
from weightsync.fanout import Fanout
from weightsync.fleet import EngineLink
from weightsync.gathering import GatherGroup, gathered, to_gather
from weightsync.groups_broadcast import BroadcastGroup
from weightsync.groups_exchange import ExchangeGroup
from weightsync.nodes import Nodes, Place
from weightsync.plan import Plan
from weightsync.routes import Outcome
from weightsync.routes_bucket import BucketRoute
from weightsync.spec import Export, Segment, TensorSpec
from weightsync.transports import Memory, bucket
from weightsync.transports.bucket_cuda import CudaArena
from weightsync.transports.nccl import check_same_nccl, nccl_version
from weightsync.transports.sender import Nursery
from weightsync.workers import Workers

GATHER_SHARE = 8
"""Of a bucket: what its parts from other nodes may take on the way, twice, at both ends."""

BROADCAST_BYTES = 1 << 30
"""Of a bucket between GPUs: with half as many bytes, what an engine does beside receiving takes longer than that."""

MIN_STALL_S = 5.0
STALL_SHARE = 0.25
"""Of the push's time: what one bucket may take before its engine counts as stalled, so that the others still finish."""


class NcclRoute:
    """Both kinds of engines. What a receiver's trace could not follow goes ahead, by broadcast, as in other routes."""

    def __init__(self, fanout: Fanout, config: Config, workers: Workers) -> None:
        self._fanout = fanout
        self._config = config
        self._workers = workers
        self._groups_fanout = Fanout("groups", workers=256)
        self._nursery = Nursery()
        self._nodes = Nodes(self._nursery, config)
        self._exchanges: dict[str, ExchangeGroup] = {}
        self._whole = self._broadcast_of(lambda name: True)
        self._rest: BroadcastRoute | None = None

    def prepare(self, links: list[EngineLink], plan: Plan, exports: dict[int, Export], deadline: Deadline) -> None:
        """Compare versions, start the senders, give the receivers their plans. Opens no group: the first push does."""
        self._nodes.connect(deadline)
        places = self._nodes.places(self._workers.hosts(), self._workers.devices())
        for link in links:
            check_fits(link, self._workers.devices(), self._nodes.nccl_versions())
        stock = [link for link in links if not link.has_receiver]
        self._whole.prepare(stock, plan, exports, deadline)
        self._prepare_rest([link for link in links if link.has_opaque], plan, exports, deadline)
        kept = {}
        for link in links:
            if link.has_receiver:
                old = self._exchanges.pop(link.url, None)
                if old is not None and old.info is not link.info:
                    old.close()
                    old = None
                kept[link.url] = old or ExchangeGroup(link, self._config, self._groups_fanout, self._nodes, places)
        for group in self._exchanges.values():
            group.close()
        self._exchanges = kept
        self._fanout.all(lambda group: group.install(plan, exports, deadline), list(kept.values()))
        for group in kept.values():
            group.started(deadline)

    def move(self, links: list[EngineLink], step: int, deadline: Deadline) -> list[Outcome]:
        """Broadcast to the stock engines and exchange with the others, at the same time."""
        stock = [link for link in links if not link.has_receiver]
        push_id = secrets.token_hex(8)
        broadcasting = self._fanout.submit(lambda: self._whole.move(stock, step, deadline)) if stock else None
        with_receiver = [link for link in links if link.has_receiver]
        failed = self._move_rest([link for link in with_receiver if link.has_opaque], step, deadline)

        def exchange(link: EngineLink) -> Outcome:
            if failed.get(link.url) is None:
                self._exchanges[link.url].move(push_id, step, deadline)
            return failed.get(link.url)

        outcomes = dict(zip([li.url for li in with_receiver], self._fanout.each(exchange, with_receiver), strict=True))
        if broadcasting is not None:
            outcomes |= dict(zip([li.url for li in stock], broadcasting.result(), strict=True))
        return [outcomes[link.url] for link in links]

    def close(self) -> None:
        """Leave every group and end every sender. Idempotent."""
        for group in self._exchanges.values():
            group.close()
        self._exchanges = {}
        self._whole.close_groups()
        if self._rest is not None:
            self._rest.close_groups()
        self._nodes.close()
        self._groups_fanout.close()

    def _broadcast_of(self, select: Callable[[str], bool]) -> BroadcastRoute:
        return BroadcastRoute(self._fanout, self._config, self._workers, select, self._groups_fanout, self._nodes)

    def _prepare_rest(
        self, opaque: list[EngineLink], plan: Plan, exports: dict[int, Export], deadline: Deadline
    ) -> None:
        if self._rest is not None:
            self._rest.close_groups()
        self._rest = None
        if opaque:
            traced = {need.tensor for link in opaque for layout in link.layouts for need in layout.needs}
            self._rest = self._broadcast_of(lambda name: name not in traced)
            self._rest.prepare(opaque, plan, exports, deadline)

    def _move_rest(self, opaque: list[EngineLink], step: int, deadline: Deadline) -> dict[str, Outcome]:
        if not opaque or self._rest is None:
            return {}
        outcomes = self._rest.move(opaque, step, deadline)
        return dict(zip([link.url for link in opaque], outcomes, strict=True))


class BroadcastRoute(BucketRoute):
    """Whole tensors to stock engines: the bucket route's two arenas, broadcast instead of mapped."""

    _engines_map_arenas = False  # its sender reads them, and is ended
    _sends_ahead = True  # in turn: the engine is asked for a bucket when it has received the one before

    def __init__(
        self,
        fanout: Fanout,
        config: Config,
        workers: Workers,
        select: Callable[[str], bool],
        groups_fanout: Fanout,
        nodes: Nodes,
    ) -> None:
        super().__init__(fanout, config, workers.rules, select)
        self._workers = workers
        self._nodes = nodes
        self._places: dict[int, Place] = {}
        self._groups_fanout = groups_fanout
        self._groups: dict[str, BroadcastGroup] = {}
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
        for group in kept.values():
            group.started(deadline)
        self._prepare_gathering(links[0], exports, deadline)

    def move(self, links: list[EngineLink], step: int, deadline: Deadline) -> list[Outcome]:
        """Make the groups that are missing, all at once; then the buckets, to those whose group works."""
        if not self._arenas:
            return [None for _ in links]
        opened = self._fanout.each(lambda link: self._open(link, deadline), links)
        ready = [link for link, outcome in zip(links, opened, strict=True) if outcome is None]
        moved = dict(zip([link.url for link in ready], super().move(ready, step, deadline), strict=True))
        return [moved.get(link.url, outcome) for link, outcome in zip(links, opened, strict=True)]

    def close_groups(self) -> None:
        """Leave every group, and give arenas and mappings back. Idempotent."""
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
            arenas = [_segment(arena) for arena in self._arenas]
            chunk_bytes = max(1, self._bucket_bytes // (GATHER_SHARE * len(remote)))
            wanted = [gathered(b, copies, exports) for b, copies in zip(self._buckets, self._planned, strict=True)]
            self._gather.install(*to_gather(wanted, self._places, remote, exports, arenas, chunk_bytes))
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

    def _fill(self, number: int, deadline: Deadline) -> None:
        gathering = None
        if self._gather is not None:
            gather = self._gather
            gathering = self._fanout.submit(lambda: gather.fill(number, _within(deadline)))
        super()._fill(number, deadline)
        if gathering is not None:
            gathering.result()

    def _open(self, link: EngineLink, deadline: Deadline) -> None:
        group = self._groups[link.url]
        if link.state != "serving":
            group.give_up()  # the engine may have been restarted, or still hold the group that failed
        group.started(deadline)
        group.ready(_segment(self._arenas[0]), _within(deadline))

    def _pack(self, tensors: list[TensorSpec]) -> list[bucket.Bucket]:
        return bucket.without_gaps(tensors, self._bucket_bytes)

    @property
    def _bucket_bytes(self) -> int:
        return self._config.bucket_bytes or (BROADCAST_BYTES if self._device() else BUCKET_BYTES)

    def _new_arena(self, nbytes: int, exports: dict[int, Export]) -> Memory:
        device = self._device()
        return transports.get("cuda_ipc" if device else "shm").allocate(max(nbytes, 1), device)

    def _sender(self, link: EngineLink, number: int, deadline: Deadline) -> Callable[[], int]:
        planned = self._buckets[number]
        specs = [entry.tensor for entry in planned.entries]
        tensors = Tensors([s.name for s in specs], [s.dtype for s in specs], [s.shape for s in specs])
        group = self._groups[link.url]
        turn = group.turn()

        def send() -> int:
            link.progress.applied = True  # before the call: one that times out may still be loaded
            what = f"bucket {number + 1} of {len(self._buckets)}"
            segment = _segment(self._arenas[number % 2])
            with group.in_turn(turn, deadline, what):
                group.send(turn, segment, planned.nbytes, tensors, _within(deadline), what)
            return planned.nbytes

        return send


def check_fits(link: EngineLink, devices: dict[int, str], elsewhere: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raise ConfigError if this engine cannot be in a group with us: another NCCL, or a GPU that a sender is on.

    ``elsewhere``: by host of a node actor, its NCCL.
    """
    assert link.info is not None, "connect first"
    if link.info.device == "cpu":
        return
    for layout in link.layouts:
        if layout.device and layout.device in devices.values():
            raise ConfigError(
                f"route nccl: TP rank {layout.rank} runs on a GPU of the trainer ({layout.device}), and NCCL takes one "
                "member a GPU; use route direct or bucket",
                engine=link.url,
            )
    said = next((v for layout in link.layouts if (v := layout.versions.get("nccl"))), link.info.nccl)
    check_same_nccl(said, nccl_version(), url=link.url)
    for host, version in elsewhere.items():
        check_same_nccl(said, version, url=link.url, whose=f"the node actor of {host}")


def _segment(arena: bucket.Arena | CudaArena | Memory) -> Segment:
    assert not isinstance(arena, bucket.Arena | CudaArena), "this route makes its own"
    return arena.segment


def _within(deadline: Deadline) -> Deadline:
    allowed_s = max(MIN_STALL_S, deadline.timeout_s * STALL_SHARE)
    return Deadline(min(allowed_s, deadline.remaining_s()), f"{deadline.what}, a step of it")

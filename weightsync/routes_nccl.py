"""Route ``nccl``: to engines on another node, or without peer access, over process groups. Runs in the actor.

A stock engine gets flattened buckets by broadcast, an engine with our receiver just the slices that its ranks need.
Each engine has a group of its own; see ``transports.nccl`` for who sits in which NCCL world.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from weightsync import transports
from weightsync.config import Config
from weightsync.deadline import Deadline
from weightsync.engines import Tensors
from weightsync.errors import ConfigError
from weightsync.fanout import Fanout
from weightsync.fleet import EngineLink
from weightsync.groups import BroadcastGroup, ExchangeGroup
from weightsync.plan import Plan
from weightsync.routes import Outcome
from weightsync.routes_bucket import BucketRoute
from weightsync.spec import Export, Rule, Segment, TensorSpec
from weightsync.transports import Memory, bucket
from weightsync.transports.bucket_cuda import CudaArena
from weightsync.transports.nccl import check_same_nccl, nccl_version
from weightsync.transports.sender import Nursery
from weightsync.workers import Workers

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
        self._exchanges: dict[str, ExchangeGroup] = {}
        self._whole = self._broadcast_of(lambda name: True)
        self._rest: BroadcastRoute | None = None

    def prepare(self, links: list[EngineLink], plan: Plan, exports: dict[int, Export], deadline: Deadline) -> None:
        """Compare versions, start the senders, give the receivers their plans. Opens no group: the first push does."""
        for link in links:
            check_fits(link, self._workers.devices())
        stock = [link for link in links if not link.has_receiver]
        self._whole.prepare(stock, plan, exports, deadline)
        self._prepare_rest([link for link in links if link.has_opaque], plan, exports, deadline)
        devices = self._workers.devices()
        kept = {}
        for link in links:
            if link.has_receiver:
                old = self._exchanges.pop(link.url, None)
                if old is not None and old.info is not link.info:
                    old.close()
                    old = None
                kept[link.url] = old or ExchangeGroup(link, self._config, self._groups_fanout, self._nursery, devices)
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
        self._nursery.close()
        self._groups_fanout.close()

    def _broadcast_of(self, select: Callable[[str], bool]) -> BroadcastRoute:
        return BroadcastRoute(
            self._fanout, self._config, self._workers.rules, select, self._groups_fanout, self._nursery
        )

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

    def __init__(
        self,
        fanout: Fanout,
        config: Config,
        rules: list[Rule],
        select: Callable[[str], bool],
        groups_fanout: Fanout,
        nursery: Nursery,
    ) -> None:
        super().__init__(fanout, config, rules, select)
        self._nursery = nursery
        self._groups_fanout = groups_fanout
        self._groups: dict[str, BroadcastGroup] = {}

    def prepare(self, links: list[EngineLink], plan: Plan, exports: dict[int, Export], deadline: Deadline) -> None:
        if not links:
            self.close_groups()
            return
        super().prepare(links, plan, exports, deadline)
        device = _device_of(exports)
        kept = {}
        for link in links:
            old = self._groups.pop(link.url, None)
            if old is not None and old.info is not link.info:
                old.give_up()
                old = None
            kept[link.url] = old or BroadcastGroup(link, self._config, self._groups_fanout, self._nursery, device)
        for group in self._groups.values():
            group.close()
        self._groups = kept
        for group in kept.values():
            group.started(deadline)

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
        self.close()

    def _open(self, link: EngineLink, deadline: Deadline) -> None:
        group = self._groups[link.url]
        if link.state != "serving":
            group.give_up()  # the engine may have been restarted, or still hold the group that failed
        group.started(deadline)
        group.ready(_segment(self._arenas[0]), _within(deadline))

    def _pack(self, tensors: list[TensorSpec]) -> list[bucket.Bucket]:
        return bucket.without_gaps(tensors, self._config.bucket_bytes)

    def _new_arena(self, nbytes: int, exports: dict[int, Export]) -> Memory:
        device = _device_of(exports)
        return transports.get("cuda_ipc" if device else "shm").allocate(max(nbytes, 1), device)

    def _sender(self, link: EngineLink, number: int, deadline: Deadline) -> Callable[[], None]:
        planned = self._buckets[number]
        specs = [entry.tensor for entry in planned.entries]
        tensors = Tensors([s.name for s in specs], [s.dtype for s in specs], [s.shape for s in specs])

        def send() -> None:
            link.progress.applied = True  # before the call: one that times out may still be loaded
            what = f"bucket {number + 1} of {len(self._buckets)}"
            segment = _segment(self._arenas[number % 2])
            self._groups[link.url].send(segment, planned.nbytes, tensors, _within(deadline), what)
            link.progress.num_bytes += planned.nbytes

        return send


def check_fits(link: EngineLink, devices: dict[int, str]) -> None:
    """Raise ConfigError if this engine cannot be in a group with us: another NCCL, or a GPU that a sender is on."""
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


def _device_of(exports: dict[int, Export]) -> str:
    """The GPU on which buckets are assembled: that of the first trainer rank with memory on one; "" for host memory."""
    return next((s.device for _, e in sorted(exports.items()) for s in e.segments if s.device), "")


def _segment(arena: bucket.Arena | CudaArena | Memory) -> Segment:
    assert not isinstance(arena, bucket.Arena | CudaArena), "this route makes its own"
    return arena.segment


def _within(deadline: Deadline) -> Deadline:
    allowed_s = max(MIN_STALL_S, deadline.timeout_s * STALL_SHARE)
    return Deadline(min(allowed_s, deadline.remaining_s()), f"{deadline.what}, a step of it")

"""Route ``nccl``: to engines on another node, or without peer access, over process groups. Runs in the actor.

A stock engine gets flattened buckets by broadcast, an engine with our receiver just the slices that its ranks need.
Each engine has a group of its own; see ``transports.nccl`` for who sits in which NCCL world.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from weightsync.config import Config
from weightsync.deadline import Deadline
from weightsync.errors import ConfigError
from weightsync.fanout import Fanout, ended
from weightsync.fleet import EngineLink
from weightsync.groups_exchange import ExchangeGroup
from weightsync.nodes import Nodes
from weightsync.plan import Plan
from weightsync.routes import Outcome
from weightsync.routes_broadcast import BroadcastRoute
from weightsync.spec import Export
from weightsync.transports.nccl_versions import check_same_nccl, nccl_version
from weightsync.transports.sender import Nursery
from weightsync.workers import Workers

UNKNOWN = "{url}: which NCCL SGLang {version} has is not known, {ours} is assumed; the engine's `nccl` may say it"


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

    def begin(self, link: EngineLink, deadline: Deadline) -> None:
        """Have the sender of a stock engine begin."""
        if not link.has_receiver:
            self._whole.begin(link, deadline)

    def end_push(self) -> None:
        self._whole.end_push()

    def move(self, links: list[EngineLink], step: int, deadline: Deadline) -> list[Outcome]:
        """Broadcast to the stock engines and exchange with the others, at the same time."""
        stock = [link for link in links if not link.has_receiver]
        broadcasting = [self._fanout.submit(lambda: self._whole.move(stock, step, deadline))] if stock else []
        with_receiver = [link for link in links if link.has_receiver]
        try:
            exchanged = self._exchange(with_receiver, step, deadline)
        finally:
            ended(broadcasting)  # what goes on would reach engines that were let go
        outcomes = dict(zip([li.url for li in with_receiver], exchanged, strict=True))
        for future in broadcasting:
            outcomes |= dict(zip([li.url for li in stock], future.result(), strict=True))
        return [outcomes[link.url] for link in links]

    def _exchange(self, links: list[EngineLink], step: int, deadline: Deadline) -> list[Outcome]:
        failed = self._move_rest([link for link in links if link.has_opaque], step, deadline)

        def exchange(link: EngineLink) -> Outcome:
            if failed.get(link.url) is None:
                self._exchanges[link.url].move(step, deadline)
            return failed.get(link.url)

        return self._fanout.each(exchange, links)

    def let_go(self, deadline: Deadline) -> None:
        """The groups stay; their senders map nothing."""
        self._groups_fanout.all(lambda group: group.unmap(deadline), list(self._exchanges.values()))
        self._whole.let_go(deadline)
        if self._rest is not None:
            self._rest.let_go(deadline)

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

    def _broadcast_of(self, select: Callable[[str], bool], *, is_all: bool = True) -> BroadcastRoute:
        common = self._fanout, self._config, self._workers
        return BroadcastRoute(*common, select, self._groups_fanout, self._nodes, is_all=is_all)

    def _prepare_rest(
        self, opaque: list[EngineLink], plan: Plan, exports: dict[int, Export], deadline: Deadline
    ) -> None:
        if self._rest is not None:
            self._rest.close_groups()
        self._rest = None
        if opaque:
            traced = {need.tensor for link in opaque for layout in link.layouts for need in layout.needs}
            self._rest = self._broadcast_of(lambda name: name not in traced, is_all=False)
            self._rest.prepare(opaque, plan, exports, deadline)

    def _move_rest(self, opaque: list[EngineLink], step: int, deadline: Deadline) -> dict[str, Outcome]:
        if not opaque or self._rest is None:
            return {}
        outcomes = self._rest.move(opaque, step, deadline)
        return dict(zip([link.url for link in opaque], outcomes, strict=True))


def check_fits(link: EngineLink, devices: dict[int, str], elsewhere: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raise ConfigError if this engine cannot be in a group with us: another NCCL, or a GPU that a sender is on.

    ``elsewhere``: by host of a node actor, its NCCL. A note says so if the engine's is not known.
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
    ours, theirs = nccl_version(), link.info.nccl
    if not theirs and (note := UNKNOWN.format(url=link.url, version=link.info.version, ours=ours)) not in link.notes:
        link.notes.append(note)
    check_same_nccl(theirs or ours, ours, url=link.url)
    for host, version in elsewhere.items():
        check_same_nccl(theirs or ours, version, url=link.url, whose=f"the node actor of {host}")

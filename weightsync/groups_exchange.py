"""The process group of an engine with our receiver: slices from every GPU of the trainer. Runs in the actor."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import msgspec

from weightsync import receiver_wire as wire
from weightsync.boxes import volume
from weightsync.config import BUCKET_BYTES, Config
from weightsync.deadline import Deadline
from weightsync.fanout import Fanout
from weightsync.fit import dtype_bytes
from weightsync.fleet import EngineLink
from weightsync.groups import CLOSE_S, CTAS, NAME, EngineGroup, join_request, quietly, together
from weightsync.nodes import Nodes, Place
from weightsync.plan import Plan
from weightsync.sharing import Pass, Shared, share
from weightsync.spec import Export, RankPlan, Shard
from weightsync.transports.nccl_wire import Greet, Load, Send
from weightsync.transports.node import SenderLike


class ExchangeGroup(EngineGroup):
    """The group of an engine with our receiver: a sender for each GPU of the trainer, and every TP rank.

    ``places``: by training rank, where it is read. ``sent_bytes``: what the senders sent at the last push.
    """

    _ctas = CTAS

    def __init__(
        self, link: EngineLink, config: Config, fanout: Fanout, nodes: Nodes, places: Mapping[int, Place]
    ) -> None:
        every = sorted(set(places.values()))
        super().__init__(link, fanout, nodes, every)
        self._sender_of = {rank: every.index(place) for rank, place in places.items()}
        self._bucket_bytes = config.bucket_bytes or BUCKET_BYTES
        self._chunk_bytes = 0
        self._loads: list[Load] = []
        self._loaded_into: list[SenderLike] = []
        self.shared = Shared({}, {})
        self.sent_bytes = 0

    def install(self, plan: Plan, exports: dict[int, Export], deadline: Deadline) -> None:
        """Give the receivers what they unpack by, and keep what the senders pack by."""
        plan_id = secrets.token_hex(8)
        layouts = self.link.layouts
        rank_plans = {layout.rank: plan.rank_plan(self.link.url, layout.rank) for layout in layouts}
        shards = {rank: export.shards for rank, export in exports.items()}
        self.shared = share(
            {rank: p.copies for rank, p in rank_plans.items()},
            {layout.rank: layout.host for layout in layouts},
            lambda copy: volume(copy.box) * dtype_bytes(shards[copy.rank][copy.source.storage].dtype),
        )
        self._chunk_bytes = max(1, self._bucket_bytes // self._most_peers())
        installs = [self._install(plan_id, rank_plans[layout.rank], shards) for layout in layouts]
        self.link.install(plan_id, installs, deadline)
        self._loads = [self._load(sender, exports) for sender in range(len(self._places))]
        self._loaded_into = []

    def move(self, step: int, deadline: Deadline) -> None:
        """Send every rank its slices; returns when all are unpacked. Makes the group first if there is none."""
        self._ready(deadline)
        request = Send(deadline.remaining_s())

        def send(sender: SenderLike) -> int:
            return sender.call("send", request, deadline=deadline, returns=int)

        def act() -> None:
            self.sent_bytes = sum(self._fanout.all(send, self._senders))

        together(lambda: self.link.pull(step, deadline), act, self.give_up)

    def close(self) -> None:
        """Have the receivers leave, and end the senders."""
        if self._joined:
            deadline = Deadline(CLOSE_S, "leaving the group")
            quietly(lambda: self.link.receivers.call("leave", None, deadline))
        self.give_up()

    def _most_peers(self) -> int:
        """Of any end. It has two chunks for each, and so no more than two buckets."""
        ends = [self.info.tp_size]
        for passes in self.shared.passes.values():
            sent, received = {p for one in passes for p in one.sends}, {p for one in passes for p in one.receives}
            ends.append(len(self._places) + len(sent) + len(received))
        return max(ends)

    def _install(self, plan_id: str, plan: RankPlan, shards: dict[int, list[Shard]]) -> wire.Install:
        first = len(self._places)
        passes = [
            Pass(
                sends={first + rank: copies for rank, copies in one.sends.items()},
                receives={first + rank: copies for rank, copies in one.receives.items()},
            )
            for one in self.shared.passes[plan.rank]
        ]
        return wire.Install(
            plan_id=plan_id,
            segments={},
            shards=shards,
            plan=msgspec.structs.replace(plan, copies=self.shared.direct[plan.rank]),
            exchange=wire.Exchange(senders=self._sender_of, chunk_bytes=self._chunk_bytes, passes=passes),
        )

    def _load(self, sender: int, exports: dict[int, Export]) -> Load:
        ranks = [rank for rank, number in self._sender_of.items() if number == sender]
        copies = {
            len(self._places) + rank: [c for c in direct if self._sender_of[c.rank] == sender]
            for rank, direct in self.shared.direct.items()
        }
        return Load(
            segments={r: exports[r].segments for r in ranks},
            shards={r: exports[r].shards for r in ranks},
            parts=[copies],
            chunk_bytes=self._chunk_bytes,
        )

    def _ready(self, deadline: Deadline) -> None:
        self.started(deadline)
        if self._loaded_into != self._senders:
            jobs = list(zip(self._senders, self._loads, strict=True))
            self._fanout.all(lambda job: job[0].call("load", job[1], deadline=deadline), jobs)
            self._loaded_into = list(self._senders)
        if self._joined:
            return
        spec = self._spec(NAME.format(secrets.token_hex(4)), self._listen(deadline))
        senders, ranks = spec.rank_offset, range(spec.rank_offset, spec.world_size)
        requests = [join_request(spec, rank, deadline, greeted_by=senders, ctas=CTAS) for rank in ranks]
        greet = Greet(list(ranks), deadline.remaining_s())

        def act() -> None:
            self._join_senders(spec, deadline)
            self._fanout.all(lambda s: s.call("greet", greet, deadline=deadline), self._senders)

        together(lambda: self.link.receivers.call("join", requests, deadline), act, self.give_up)
        self._joined = True

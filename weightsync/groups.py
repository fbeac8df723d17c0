"""The process group of one engine, as the actor sees it: made when it is needed, given up when anything goes wrong.

An engine that refuses, dies or stalls ends the senders of its own group and of no other; the next push makes a new
group. Nothing is applied to an engine before its group has carried a first, tiny message.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from weightsync import receiver as wire
from weightsync.addresses import bind_host, reachable_host
from weightsync.config import Config
from weightsync.deadline import Deadline
from weightsync.engines import GroupSpec, Tensors
from weightsync.errors import EngineLost, EngineRejected, WeightSyncError
from weightsync.fanout import Fanout
from weightsync.fleet import EngineLink
from weightsync.plan import Plan
from weightsync.spec import Export, RankPlan, Segment
from weightsync.transports.nccl import PROBE_BYTES, Broadcast, Greet, Join, Listen, Load, Send
from weightsync.transports.sender import Nursery, SenderProcess

NAME = "weightsync-{}"
PROBE = Tensors(names=["weightsync.probe"], dtypes=["uint8"], shapes=[(1,)])
_NAMES_TRIED = 8
_CLOSE_S = 5.0


def meeting_host(bind: str, engine_url: str) -> str:
    """Where the rendezvous is served: an address of this machine that the engine can reach.

    A loopback address serves an engine at a loopback address only; for others this machine's own is taken.
    """
    peer = urlsplit(engine_url).hostname or ""
    loopback = bind_host(bind) in ("127.0.0.1", "::1")
    return reachable_host("" if loopback else bind, peer_host=peer)


def together(ask: Callable[[], object], act: Callable[[], object], give_up: Callable[[], None]) -> None:
    """``ask`` the engine from a thread while ``act`` does the senders' part; the first to fail ends the other.

    Raises the failure that came first, with the engine's words if it had any; EngineLost before all others.
    """
    failures: list[tuple[str, WeightSyncError]] = []

    def run(side: str, function: Callable[[], object]) -> None:
        try:
            function()
        except WeightSyncError as e:
            failures.append((side, e))
            give_up()

    asking = threading.Thread(target=run, args=("engine", ask), name="weightsync-ask", daemon=True)
    asking.start()
    run("sender", act)
    asking.join()
    if not failures:
        return
    lost = [e for side, e in failures if isinstance(e, EngineLost)]
    side, first = failures[0]
    if not lost and side == "sender" and len(failures) > 1:
        first.message = f"{first.message}; then the engine: {failures[1][1].message}"
    raise lost[0] if lost else first


class _Group:
    """What both kinds share: sender processes, one a device of ``devices``, replaced after they were killed."""

    def __init__(
        self, link: EngineLink, config: Config, fanout: Fanout, nursery: Nursery, devices: Sequence[str]
    ) -> None:
        assert link.info is not None, "connect first"
        self.link = link
        self.info = link.info
        self._fanout = fanout
        self._backend = "gloo" if link.info.device == "cpu" else "nccl"
        self._host = meeting_host(config.bind_host, link.url)
        self._nursery = nursery
        self._devices = list(devices)
        self._senders: list[SenderProcess] = []
        self._joined = False

    def give_up(self) -> None:
        """End the senders, and with them whatever they wait for."""
        self._joined = False
        for sender in self._senders:
            sender.kill()

    def started(self, deadline: Deadline) -> bool:
        """Start the senders if there are none or some were killed; False if all were there."""
        if self._senders and all(s.alive for s in self._senders):
            return False
        self.give_up()
        self._senders = [self._nursery.start(device, self.info.nccl_variables, deadline) for device in self._devices]
        return True

    def _spec(self, name: str, port: int) -> GroupSpec:
        senders = len(self._devices)
        return GroupSpec(name, self._host, port, senders, senders + self.info.tp_size, self._backend)

    def _join_senders(self, spec: GroupSpec, deadline: Deadline) -> None:
        def join(rank: int) -> None:
            request = _join(spec, rank, deadline)
            self._senders[rank].call("join", request, deadline=deadline)

        self._fanout.all(join, range(len(self._senders)))

    def _listen(self, deadline: Deadline) -> int:
        request = Listen(self._host, deadline.remaining_s())
        return self._senders[0].call("listen", request, deadline=deadline, returns=int)


class BroadcastGroup(_Group):
    """A stock engine's group: one sender, which broadcasts. ``device``: the GPU of the arenas ("": host memory)."""

    def __init__(self, link: EngineLink, config: Config, fanout: Fanout, nursery: Nursery, device: str) -> None:
        super().__init__(link, config, fanout, nursery, [device])
        self._name = ""

    def ready(self, probe: Segment, deadline: Deadline) -> None:
        """Make the group if there is none, and send the first byte of ``probe`` through it."""
        for number in range(_NAMES_TRIED):
            self.started(deadline)
            if self._joined:
                return
            try:
                self._make(NAME.format(number), deadline)
            except EngineRejected as e:
                if "already been created" not in e.message:
                    raise
                continue  # a dead run's group that the engine could not take down
            self._send(probe, PROBE_BYTES, PROBE, deadline, "the first message of the group")
            self._joined = True

    def send(self, segment: Segment, nbytes: int, tensors: Tensors, deadline: Deadline, what: str) -> None:
        """Broadcast one bucket; returns when the engine has loaded it."""
        assert self._joined, "ready first"
        self._send(segment, nbytes, tensors, deadline, what)

    def close(self) -> None:
        """Have the engine leave, and end the sender."""
        if self._joined:
            deadline = Deadline(_CLOSE_S, "leaving the group")
            _quietly(lambda: self.link.client.destroy_weights_update_group(self._name, deadline))
        self.give_up()

    def _make(self, name: str, deadline: Deadline) -> None:
        client = self.link.client
        _quietly(lambda: client.destroy_weights_update_group(name, deadline), EngineRejected)  # of a run that is gone
        port = self._listen(deadline)
        spec = self._spec(name, port)
        self._name = name
        try:
            together(
                lambda: client.init_weights_update_group(spec, deadline),
                lambda: self._join_senders(spec, deadline),
                self.give_up,
            )
        except WeightSyncError as e:
            e.message = f"joining group {name} at {self._host}:{port}: {e.message}"
            raise

    def _send(self, segment: Segment, nbytes: int, tensors: Tensors, deadline: Deadline, what: str) -> None:
        request = Broadcast(segment, nbytes, deadline.remaining_s())
        client = self.link.client

        def ask() -> None:
            try:
                client.update_weights_from_distributed(tensors, self._name, deadline, what=what)
            except EngineRejected as e:
                if tensors is not PROBE or PROBE.names[0] not in e.message:  # a loader that takes no unknown names
                    raise

        together(ask, lambda: self._senders[0].call("broadcast", request, deadline=deadline), self.give_up)


class ExchangeGroup(_Group):
    """The group of an engine with our receiver: a sender for each GPU of the trainer, and every TP rank."""

    def __init__(
        self, link: EngineLink, config: Config, fanout: Fanout, nursery: Nursery, devices: dict[int, str]
    ) -> None:
        places = sorted(set(devices.values()))
        super().__init__(link, config, fanout, nursery, places)
        self._sender_of = {rank: places.index(device) for rank, device in devices.items()}
        self._chunk_bytes = max(1, config.bucket_bytes // self.info.tp_size)
        self._loads: list[Load] = []
        self._loaded_into: list[SenderProcess] = []

    def install(self, plan: Plan, exports: dict[int, Export], deadline: Deadline) -> None:
        """Give the receivers what they unpack by, and keep what the senders pack by."""
        plan_id = secrets.token_hex(8)
        rank_plans = [plan.rank_plan(self.link.url, layout.rank) for layout in self.link.layouts]
        shards = {rank: export.shards for rank, export in exports.items()}
        exchange = wire.Exchange(senders=self._sender_of, chunk_bytes=self._chunk_bytes)
        installs = [
            wire.Install(plan_id=plan_id, segments={}, shards=shards, plan=p, exchange=exchange) for p in rank_plans
        ]
        self.link.install(plan_id, installs, deadline)
        self._loads = [self._load(sender, rank_plans, exports) for sender in range(len(self._devices))]
        self._loaded_into = []

    def move(self, push_id: str, step: int, deadline: Deadline) -> None:
        """Send every rank its slices; returns when all are unpacked. Makes the group first if there is none."""
        self._ready(deadline)
        request = Send(deadline.remaining_s())
        together(
            lambda: self.link.pull(push_id, step, deadline),
            lambda: self._fanout.all(lambda s: s.call("send", request, deadline=deadline), self._senders),
            self.give_up,
        )

    def close(self) -> None:
        """Have the receivers leave, and end the senders."""
        if self._joined:
            deadline = Deadline(_CLOSE_S, "leaving the group")
            _quietly(lambda: self.link.call_receivers("leave", None, deadline))
        self.give_up()

    def _load(self, sender: int, rank_plans: list[RankPlan], exports: dict[int, Export]) -> Load:
        ranks = [rank for rank, number in self._sender_of.items() if number == sender]
        return Load(
            segments={r: exports[r].segments for r in ranks},
            shards={r: exports[r].shards for r in ranks},
            copies={
                len(self._devices) + p.rank: [c for c in p.copies if self._sender_of[c.rank] == sender]
                for p in rank_plans
            },
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
        requests = [_join(spec, rank, deadline, greeted_by=senders) for rank in ranks]
        greet = Greet(list(ranks), deadline.remaining_s())

        def act() -> None:
            self._join_senders(spec, deadline)
            self._fanout.all(lambda s: s.call("greet", greet, deadline=deadline), self._senders)

        together(lambda: self.link.call_receivers("join", requests, deadline), act, self.give_up)
        self._joined = True


def _join(spec: GroupSpec, rank: int, deadline: Deadline, greeted_by: int = 0) -> Join:
    return Join(
        name=spec.group_name,
        host=spec.master_address,
        port=spec.master_port,
        rank=rank,
        world_size=spec.world_size,
        backend=spec.backend,
        timeout_s=deadline.remaining_s(),
        greeted_by=greeted_by,
    )


def _quietly(function: Callable[[], object], kind: type[WeightSyncError] = WeightSyncError) -> None:
    with contextlib.suppress(kind):
        function()

"""The weight-sync actor's core: connects a trainer to its engines, and pushes."""

from __future__ import annotations

import threading
import time
from functools import partial

import msgspec

from weightsync.config import Config, EngineConfig, check_peers
from weightsync.deadline import Deadline
from weightsync.errors import ConfigError, StaleVersion, TransferError, WeightSyncError
from weightsync.fanout import Fanout
from weightsync.fleet import EngineLink, lost
from weightsync.groundwork import Groundwork, SourcesMoved
from weightsync.inbox import Doorbell, Inbox
from weightsync.plan import PlanSummary, offered
from weightsync.push import EnginesGone, Push
from weightsync.readiness import Readiness
from weightsync.reports import PushRequest, Status, SyncReport
from weightsync.rpc import Server
from weightsync.spec import TensorSpec
from weightsync.workers import Workers

MAX_REMAPS = 3
CLOSE_S = 5.0


def _meet(config: Config, trainer: str, deadline: Deadline) -> Workers:
    if config.source == "mapped":
        return Workers(config.publishers, trainer=trainer, deadline=deadline)
    from weightsync.mirror import MirroredWorkers

    return MirroredWorkers(config.publishers, trainer=trainer, deadline=deadline, config=config)


class Session:
    """One trainer connected to its engines. Every public method may be called remotely; pushes exclude each other.

    ``trainer`` names the shard reader that the publishers must have been made with.
    """

    def __init__(self, config: Config, *, trainer: str) -> None:
        check_peers(config)
        deadline = Deadline(config.connect_timeout_s, "connecting (connect_timeout_s)")
        self._config = config
        self._lock = threading.RLock()
        self._workers = _meet(config, trainer, deadline)
        self._readiness = Readiness(self._workers.descriptions.values())
        self._fanout = Fanout("engines")
        self._inbox = Inbox()
        workers = 4 + len(config.publishers)  # who withdraw all at once, and may wait
        doorbell = Doorbell(self._inbox, self._let_go, self._readiness.on_marked)
        self._server = Server(doorbell, host=config.bind_host, workers=workers)
        self._groundwork = Groundwork(config, self._workers, self._fanout, reply=self._server.address)
        self._links: list[EngineLink] = []
        self._step: int | None = None
        try:
            self._links = [EngineLink(e, config) for e in config.engines]
            self._fanout.all(lambda link: self._connect(link, deadline), self._links)
            self._groundwork.lay(self._links, deadline)
        except BaseException:
            self.close()
            raise

    # ---------------------------------------------------------------------------------------------- public verbs

    def plan(self) -> PlanSummary:
        """What every push moves, by which route, and what is not covered."""
        summary, routes = self._groundwork.plan.summary(), {link.url: link.route for link in self._links}
        return msgspec.structs.replace(
            summary,
            route="+".join(sorted(set(routes.values()))),
            traffic=[
                msgspec.structs.replace(row, route=routes[row.engine])
                for row in summary.traffic
                if row.engine in routes  # the plan may still have one that is gone
            ],
            notes=[*summary.notes, *(note for link in self._links for note in link.notes), *self._groundwork.notes()],
        )

    def push(self, request: PushRequest) -> SyncReport:
        """Bring ``request.step`` into every engine. See ``weightsync.push`` for what a failure leaves behind."""
        timeout_s = self._config.timeout_s if request.timeout_s is None else request.timeout_s
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s must be positive, got {timeout_s}")
        deadline = Deadline(timeout_s, f"push of step {request.step}, timeout_s")
        with self._lock:
            self._check_step(request)
            self._reconnect([link for link in self._links if link.state == "lost"], deadline)
            report = self._run(request.step, deadline)
            self._step = request.step
            return report

    def status(self) -> Status:
        """The state of every engine as of the last push; asks nobody."""
        return Status(
            pair=self._config.pair,
            step=self._step,
            engines=[link.report() for link in self._links],
            publishers=[f"rank {r}: {d.host} pid {d.pid}" for r, d in self._workers.descriptions.items()],
        )

    def add_engine(self, engine: EngineConfig) -> PlanSummary:
        """Take one more engine in. It is paused at once and serves from the next push on, never what it booted with."""
        deadline = Deadline(self._config.connect_timeout_s, f"adding engine {engine.url}")
        with self._lock:
            link = EngineLink(engine, self._config)
            if any(link.url == other.url for other in self._links):
                raise ConfigError(f"engine {link.url} is already in this session")
            try:
                self._connect(link, deadline, hold=True)
                self._links.append(link)
                self._groundwork.lay(self._links, deadline)
            except BaseException:
                self._links = [other for other in self._links if other is not link]
                link.close()
                raise
            return self.plan()

    def remove_engine(self, url: str) -> None:
        """Let an engine go; it keeps the weights and the state that it has."""
        with self._lock:
            link = next((li for li in self._links if li.url == url.rstrip("/")), None)
            if link is None:
                raise ConfigError(f"engine {url} is not in this session; there are {[li.url for li in self._links]}")
            self._links.remove(link)
            try:
                if self._links:
                    deadline = Deadline(self._config.connect_timeout_s, f"removing engine {url}")
                    self._groundwork.lay(self._links, deadline)
            finally:
                link.close()

    def close(self) -> None:
        """Unmap everything and close every connection. Engines keep their weights and state. Idempotent.

        A push that is under way is let finish, but not for long.
        """
        alone = self._lock.acquire(timeout=CLOSE_S)
        try:
            self._close()
        finally:
            if alone:
                self._lock.release()

    def _close(self) -> None:
        self._groundwork.close()  # first: some routes tell the engines
        for link in self._links:
            link.close()
        self._workers.close()
        self._server.close()
        self._fanout.close()
        self._links = []

    # ------------------------------------------------------------------------------------------------ connecting

    def _connect(self, link: EngineLink, deadline: Deadline, *, hold: bool = False) -> None:
        """Meet an engine; with ``hold`` it is paused first and stays so until a push has reached it."""
        link.connect(deadline)
        if hold:
            link.client.pause("abort" if self._config.pause == "none" else self._config.pause, deadline)
            link.held = True
        if link.info is not None and link.info.has_receiver:
            link.attach(self._inbox, self._server.address, list(self._offered().values()), deadline)
        self._check_same_node(link)

    def _let_go(self, timeout_s: float) -> None:
        self._groundwork.let_go(timeout_s)

    def _offered(self) -> dict[str, TensorSpec]:
        descriptions = [self._workers.descriptions[r] for r in self._workers.ranks]
        return offered(descriptions, self._config.rename, self._config.leave_out)

    def _check_same_node(self, link: EngineLink) -> None:
        hosts = {*self._workers.hosts().values(), *(layout.host for layout in link.layouts)}
        if len(hosts) > 1 and link.route != "nccl":  # which knows where it has senders
            raise ConfigError(
                f"route {link.route} needs trainer and engine on one node, but they are on {sorted(hosts)}",
                engine=link.url,
            )

    # --------------------------------------------------------------------------------------------------- pushing

    def _check_step(self, request: PushRequest) -> None:
        if request.force or self._step is None or request.step > self._step:
            return
        behind = [li.url for li in self._links if li.state != "serving" or li.version != str(self._step)]
        if request.step == self._step and behind:
            return  # the same step again, to heal those
        raise StaleVersion(
            f"step {request.step} is not newer than step {self._step}, which the engines hold; "
            "push a newer step, or this one with force=True"
        )

    def _run(self, step: int, deadline: Deadline) -> SyncReport:
        """Push; when trainer memory has moved, map it anew first. A rank that moves it again and again is an error."""
        started, remaps = time.perf_counter(), list[str]()
        while len(remaps) < MAX_REMAPS:
            try:
                report = self._new_push(step, deadline).run()
                return _with_remaps(report, remaps, time.perf_counter() - started) if remaps else report
            except EnginesGone as found:
                self._reconnect(found.links, deadline)
            except SourcesMoved:
                remaps.append(self._groundwork.lay(self._links, deadline))
        raise TransferError(
            f"training memory moved during each of {MAX_REMAPS} attempts to map it for step {step}: call step_done "
            "only when the weights stay where they are until push returns",
            safe_to_retry=True,
        )

    def _new_push(self, step: int, deadline: Deadline) -> Push:
        return Push(
            step,
            config=self._config,
            workers=self._workers,
            links=[link for link in self._links if link.state != "lost"],
            routes=self._groundwork.routes,
            plan=self._groundwork.plan,
            generations=self._groundwork.generations(),
            fanout=self._fanout,
            deadline=deadline,
            alone=partial(self._groundwork.kept, deadline),
            may_pause_early=lambda link: self._groundwork.is_mapped() and self._readiness.is_ready_beside(link, step),
        )

    def _reconnect(self, gone: list[EngineLink], deadline: Deadline) -> None:
        """Attach engines anew that were lost or restarted since the last push, paused, before anything moves."""
        if not gone:
            return
        outcomes = self._fanout.each(lambda link: self._revive(link, deadline), gone)
        failures = [
            lost(link, outcome)
            for link, outcome in zip(gone, outcomes, strict=True)
            if isinstance(outcome, WeightSyncError)
        ]
        if failures and (self._config.on_engine_failure == "raise" or len(failures) == len(self._links)):
            failures[0].report = [msgspec.to_builtins(link.report()) for link in self._links]
            raise failures[0]
        if len(failures) < len(gone):
            self._groundwork.lay(self._links, deadline)

    def _revive(self, link: EngineLink, deadline: Deadline) -> None:
        self._connect(link, deadline, hold=True)
        link.state, link.error = "fenced", "restarted or not reachable since the last push; waits for a full push"


def _with_remaps(report: SyncReport, remaps: list[str], total_s: float) -> SyncReport:
    """The report of a push that mapped memory anew first, as one that says so."""
    remap_s = total_s - report.seconds["total"]
    seconds = {"remap": remap_s, **report.seconds, "total": total_s}
    return msgspec.structs.replace(report, seconds=seconds, notes=[*report.notes, *remaps])

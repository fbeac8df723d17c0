"""The engines as the actor sees them: one link an engine, holding its HTTP client, its receivers and its state."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from weightsync import receiver as wire
from weightsync.config import Config, EngineConfig
from weightsync.deadline import Deadline
from weightsync.engines import Engine, EngineInfo
from weightsync.engines.sglang import SglangEngine
from weightsync.errors import ConfigError, EngineLost, PlanError, WeightSyncError
from weightsync.fanout import Fanout
from weightsync.rounds import Ask, Release
from weightsync.rpc import Client
from weightsync.spec import EngineReport, Layout, TensorSpec

logger = logging.getLogger(__name__)

PING_S = 2.0


class Inbox:
    """Where receivers announce themselves. ``Doorbell`` is what they call; ``wait`` is for the actor's own threads."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._announced: dict[str, dict[int, wire.Announcement]] = {}

    def put(self, announcement: wire.Announcement) -> None:
        with self._arrived:
            self._announced.setdefault(announcement.session, {})[announcement.tp_rank] = announcement
            self._arrived.notify_all()

    def wait(self, session: str, count: int, deadline: Deadline) -> list[wire.Announcement]:
        """The ``count`` announcements of a session, by TP rank; TransferTimeout says which ranks are missing."""
        with self._arrived:
            complete = self._arrived.wait_for(
                lambda: len(self._announced.get(session, {})) >= count, timeout=deadline.remaining_s()
            )
            announced = self._announced.pop(session, {})
        if not complete:
            missing = [r for r in range(count) if r not in announced]
            raise deadline.error(f"the receivers of TP rank(s) {missing} did not announce themselves")
        return [announced[r] for r in range(count)]


class Doorbell:
    """The methods that receivers call at the actor's own rpc server."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def announce(self, announcement: wire.Announcement) -> None:
        """A receiver was attached, or says why it could not be."""
        self._inbox.put(announcement)

    def unknown(self, announcement: wire.Announcement) -> None:
        """A receiver was sent a pull of a session that it does not know: its process is not the one attached."""
        logger.warning("boot %s does not know session %s", announcement.boot_id, announcement.session)


@dataclass
class Progress:
    """How far one push has come with one engine."""

    paused: bool = False
    began: bool = False
    applied: bool = False
    committed: bool = False
    verified: bool = False
    num_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    fingerprints: list[list[int]] = field(default_factory=list)
    landed: Callable[[], None] = field(default=lambda: None)
    """Called, perhaps twice, when every rank says that its bytes are there, before the engine itself has answered."""


class EngineLink:
    """One engine. ``state``: serving, fenced or lost; ``held``: paused by us, must not serve before a full push."""

    def __init__(self, engine: EngineConfig, config: Config) -> None:
        self.url = engine.url.rstrip("/")
        self._config = config
        self.client: Engine = SglangEngine(
            self.url, api_key=engine.api_key, admin_api_key=engine.admin_api_key, config=config
        )
        self.info: EngineInfo | None = None
        self.route = ""
        self.layouts: list[Layout] = []
        self.state, self.version, self.error = "serving", "", ""
        self.held = False
        self.had_requests = False  # in flight at the last pause, so that it took a second
        self.notes: list[str] = []
        self.progress = Progress()
        self._receivers: list[Client] = []
        self._waiting = Fanout("results")
        self._boot_ids: list[str] = []
        self._is_sure = False  # that nothing happened since its receivers last answered as they should
        self._session = ""
        self._plan_id = ""

    # ---------------------------------------------------------------------------------------------- connecting

    def connect(self, deadline: Deadline) -> None:
        """Ask the engine what it is; refuses by name what is not supported. Nothing in it changes."""
        self.info = self.client.connect(deadline)
        self.version = self.info.weight_version
        self.route, note = self._choose_route()
        self.notes = [f"{self.url}: {note}"]

    def attach(self, inbox: Inbox, reply: str, tensors: list[TensorSpec], deadline: Deadline) -> None:
        """Have every TP rank trace its needs and open its own channel to us."""
        assert self.info is not None, "connect first"
        self.detach()
        self._session = secrets.token_hex(8)
        payloads = [
            wire.payload(wire.Attach(reply=reply, session=self._session, tp_rank=r, tensors=tensors))
            for r in range(self.info.tp_size)
        ]
        self.client.begin(deadline)
        try:
            self.client.update(payloads, wire.LOADER, deadline)
        finally:
            self.client.end(deadline)
        announced = inbox.wait(self._session, self.info.tp_size, deadline)
        for a in announced:
            if a.error:
                raise PlanError(f"its needs could not be traced: {a.error}", engine=self.url, rank=a.tp_rank)
        self._boot_ids = [a.boot_id for a in announced]
        self._receivers = [
            Client(a.address, what=f"receiver of {self.url} TP rank {a.tp_rank}", lost=EngineLost) for a in announced
        ]
        self.layouts = [r.call("needs", deadline=deadline, returns=Layout) for r in self._receivers]

    def install(self, plan_id: str, installs: list[wire.Install], deadline: Deadline) -> None:
        """Give every TP rank its part of the plan; it maps the trainer's memory."""
        verified = self._config.verify == "fingerprint"
        for receiver, install in zip(self._receivers, installs, strict=True):
            receiver.call("install", msgspec.structs.replace(install, verified=verified), deadline=deadline)
        self._plan_id = plan_id

    def call_receivers(self, method: str, arguments: list | None, deadline: Deadline) -> None:
        """Call a method of every TP rank's receiver, all at once: each may wait for the others."""
        calls = list(zip(self._receivers, arguments or [None] * len(self._receivers), strict=True))
        fanout = Fanout("receivers", workers=max(1, len(calls)))
        try:
            fanout.all(lambda call: call[0].call(method, call[1], deadline=deadline), calls)
        finally:
            fanout.close()

    def is_attached(self) -> bool:
        """True while it is the process that was attached. A stock engine is known by its weight version only.

        As long as nothing failed, connections that stand tell enough: an answer would wait for the engine's event loop,
        which takes 2 ms as a rule and 50 now and then.
        """
        if self._receivers and self._is_sure and all(receiver.is_connected() for receiver in self._receivers):
            return True
        self._is_sure = self._answers()
        return self._is_sure

    def _answers(self) -> bool:
        deadline = Deadline(PING_S, f"asking the receivers of {self.url}")
        try:
            if not self._receivers:
                return self.state == "fenced" or self.client.weight_version(deadline) == self.version
            statuses = [r.call("status", deadline=deadline, returns=wire.Status) for r in self._receivers]
        except WeightSyncError:
            return False
        return [s.boot_id for s in statuses] == self._boot_ids and all(s.session == self._session for s in statuses)

    def detach(self) -> None:
        """Let the receivers unmap the trainer's memory; best effort, since the engine may be gone."""
        for receiver in self._receivers:
            with contextlib.suppress(WeightSyncError):
                receiver.call("detach", deadline=Deadline(PING_S, f"detaching from {self.url}"))
            receiver.close()
        self._receivers, self.layouts, self._boot_ids = [], [], []

    def close(self) -> None:
        self.detach()
        self.client.close()
        self._waiting.close()

    # ------------------------------------------------------------------------------------------------- pushing

    @property
    def has_receiver(self) -> bool:
        return bool(self._receivers)

    @property
    def tp_size(self) -> int:
        assert self.info is not None, "connect first"
        return self.info.tp_size

    @property
    def fully_verifiable(self) -> bool:
        """False if some parameter could not be traced, so that no fingerprint speaks for it."""
        return self.has_receiver and not self.has_opaque

    @property
    def has_opaque(self) -> bool:
        return any(layout.opaque for layout in self.layouts)

    @property
    def ends_by_itself(self) -> bool:
        """Whether what has landed is final: an engine with sessions finalises in ``end``."""
        return self.info is not None and self.info.generation == "plain"

    def start_push(self, landed: Callable[[], None] = lambda: None) -> None:
        self.progress = Progress(landed=landed)

    def pull(self, push_id: str, step: int, deadline: Deadline) -> None:
        """Have every TP rank pull its slices. Sets ``progress.applied`` to what the receivers themselves say."""
        command = wire.Pull(
            session=self._session,
            push_id=push_id,
            plan_id=self._plan_id,
            step=step,
            full=self.held or self.state != "serving",
            timeout_s=deadline.remaining_s(),
            verify=self._config.verify == "fingerprint" and self.ends_by_itself,
        )
        before, self.progress.applied = self.progress.applied, True
        try:
            results = self._run(command, deadline)
        except WeightSyncError:
            self.progress.applied = before or not self._revoke(push_id)
            raise
        self.progress.applied = before or any(r.applied for r in results)
        self._check(results)
        self.progress.num_bytes = sum(r.num_bytes for r in results)
        self.progress.seconds = {"pull": max(r.seconds for r in results)}

    def fingerprints(self, deadline: Deadline) -> list[list[int]]:
        """By TP rank, one fingerprint a need, of the engine's live memory: as the pull found it, or asked for now."""
        if not self.progress.fingerprints and self.ends_by_itself:
            nothing = wire.Pull(
                session=self._session,
                push_id=secrets.token_hex(8),
                plan_id=self._plan_id,
                step=-1,
                timeout_s=deadline.remaining_s(),
                verify=True,
            )  # after a route that did the copying itself; in the event loop no thread has to wait for it
            self._check(self._run(nothing, deadline))
        if self.progress.fingerprints:
            return self.progress.fingerprints
        was_sure, self._is_sure = self._is_sure, False
        read = [r.call("verify", deadline=deadline, returns=list[int]) for r in self._receivers]
        self._is_sure = was_sure
        return read

    def _run(self, command: wire.Pull, deadline: Deadline) -> list[wire.PullResult]:
        """Give every rank the command; what became of it, by rank. Tells ``progress.landed`` once all are done."""
        self._is_sure = False
        ends = [self._waiting.submit(lambda r=r: self._result(r, command.push_id, deadline)) for r in self._receivers]

        def look(_: Future) -> None:
            if all(end.done() and not end.exception() and end.result().ok for end in ends):
                self.progress.landed()

        for end in ends:
            end.add_done_callback(look)
        self.client.update([wire.payload(command)] * len(self._receivers), wire.LOADER, deadline)
        return [
            early if early.ended else self._result(receiver, command.push_id, deadline)
            for receiver, early in zip(self._receivers, [end.result() for end in ends], strict=True)
        ]

    def _check(self, results: list[wire.PullResult]) -> None:
        for rank, result in enumerate(results):
            if not result.ok:
                raise wire.pull_error(result, engine=self.url, rank=rank)
        self._is_sure = True
        found = [r.fingerprints for r in results if r.fingerprints is not None]
        self.progress.fingerprints = found if len(found) == len(results) else []

    def release(self, release: Release, deadline: Deadline) -> None:
        """Tell every rank that a round of its pull may begin."""
        for receiver in self._receivers:
            receiver.call("release", release, deadline=deadline)

    def passed(self, ask: Ask, deadline: Deadline) -> bool:
        """Whether every rank has passed a round of its pull; waits a little. TransferError if a pull has ended."""
        answers = [r.call("passed", ask, deadline=deadline, returns=bool) for r in self._receivers]
        return all(answers)

    def contexts(self, deadline: Deadline) -> list[str]:
        """What its ranks' processes have made on GPUs other than their own, in words."""
        by_rank = [r.call("contexts", deadline=deadline, returns=list[str]) for r in self._receivers]
        return [f"{self.url}: TP rank {rank}: {text}" for rank, found in enumerate(by_rank) for text in found]

    def report(self) -> EngineReport:
        return EngineReport(
            url=self.url,
            state=self.state,
            weight_version=self.version,
            verified=self.progress.verified,
            num_bytes=self.progress.num_bytes,
            seconds=self.progress.seconds,
            error=self.error,
        )

    def _result(self, receiver: Client, push_id: str, deadline: Deadline) -> wire.PullResult:
        """How a pull went. Asked before it begins, so that the answer is on its way when the engine's own is."""
        return receiver.call("result", wire.ResultRequest(push_id=push_id), deadline=deadline, returns=wire.PullResult)

    def _revoke(self, push_id: str) -> bool:
        """True if every receiver confirms that this pull never began there, and now never will."""
        try:
            deadline = Deadline(PING_S, f"revoking a pull at {self.url}")
            revoked = [
                r.call("revoke", wire.ResultRequest(push_id=push_id), deadline=deadline, returns=bool)
                for r in self._receivers
            ]
        except WeightSyncError:
            return False
        return all(revoked)

    def _choose_route(self) -> tuple[str, str]:
        assert self.info is not None
        pulls = {"cpu": "shm"}.get(self.info.device, "direct")
        wanted, has = self._config.route, self.info.has_receiver
        start_so = f"start it with --custom-weight-loader {wire.LOADER}"
        if self._config.verify == "fingerprint" and not has:
            raise ConfigError(
                f"verify: fingerprint reads the engine's memory back, and this engine has no receiver: {start_so}, "
                "or set verify: none (reports then say verified=False)",
                engine=self.url,
            )
        if wanted == "auto":
            return (
                (pulls, f"route {pulls}: the engine has our receiver")
                if has
                else (
                    "bucket",
                    "route bucket: a stock engine without our receiver",
                )
            )
        if wanted in ("shm", "direct") and not has:
            raise ConfigError(f"route {wanted} needs our receiver in the engine: {start_so}", engine=self.url)
        if wanted in ("shm", "direct") and wanted != pulls:
            unfit = f"route {wanted} does not fit an engine on {self.info.device}: use {pulls}"
            raise ConfigError(unfit, engine=self.url)
        return wanted, f"route {wanted}: as configured"


def lost(link: EngineLink, error: WeightSyncError) -> EngineLost:
    """``error`` of a reconnection, as the state of its engine."""
    link.state, link.error = "lost", str(error)
    return EngineLost(f"the engine could not be reached again: {error.message}", engine=link.url, safe_to_retry=True)

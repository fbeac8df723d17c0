"""The engines as the actor sees them: one link an engine, holding its HTTP client, its receivers and its state."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from weightsync import receiver_wire as wire
from weightsync.config import Config, EngineConfig
from weightsync.deadline import Deadline
from weightsync.engines import Call, Engine, EngineInfo
from weightsync.engines.sglang import SglangEngine
from weightsync.errors import ConfigError, EngineLost, WeightSyncError
from weightsync.inbox import Inbox
from weightsync.receivers import PING_S, Receivers
from weightsync.reports import EngineReport
from weightsync.spec import Layout, TensorSpec


@dataclass
class Progress:
    """How far one push has come with one engine."""

    paused: bool = False
    began: bool = False
    applied: bool = False
    pulled: bool = False
    committed: bool = False
    verified: bool = False
    num_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    fingerprints: list[list[int]] = field(default_factory=list)
    push_id: str = ""
    landed: Callable[[], None] = field(default=lambda: None)
    """Called, perhaps twice, when nothing reads the trainer's memory for this engine any more."""
    sent: Callable[[], None] = field(default=lambda: None)
    """Called when the call is on its way that has the ranks pull beside the engine's event loop."""
    answered: Callable[[], None] = field(default=lambda: None)
    """Called when the engine has answered that they do, or that it takes part in the last broadcast."""


class EngineLink:
    """One engine. ``state``: serving, fenced or lost; ``held``: paused by us, must not serve before a full push."""

    def __init__(self, engine: EngineConfig, config: Config) -> None:
        self.url = engine.url.rstrip("/")
        self._engine = engine
        self._config = config
        self.client: Engine = SglangEngine(
            self.url, api_key=engine.api_key, admin_api_key=engine.admin_api_key, config=config
        )
        self.info: EngineInfo | None = None
        self.route = ""
        self.receivers = Receivers(self.client)
        self.state, self.version, self.error = "serving", "", ""
        self.held = False
        self.had_requests = False  # in flight at the last pause, so that it took a second
        self.notes: list[str] = []
        self.progress = Progress()
        self._ahead: dict[str, Call] = {}
        self._lock = threading.Lock()  # what is ahead: a pause that ends late may come with what is of no use any more

    # ---------------------------------------------------------------------------------------------- connecting

    def connect(self, deadline: Deadline) -> None:
        """Ask the engine what it is; refuses by name what is not supported. Nothing in it changes."""
        self.info = self.client.connect(deadline).corrected({}, self._engine)
        self.version = self.info.weight_version
        self.route, note = self._choose_route()
        self.notes = [f"{self.url}: {note}"]

    def attach(self, inbox: Inbox, reply: str, tensors: list[TensorSpec], deadline: Deadline) -> None:
        """Have every TP rank trace its needs and open its own channel to us."""
        self.receivers.attach(inbox, reply, tensors, self.tp_size, deadline)
        assert self.info is not None, "connect first"
        self.info = self.info.corrected(self.layouts[0].versions if self.layouts else {}, self._engine)

    def install(self, plan_id: str, installs: list[wire.Install], deadline: Deadline) -> None:
        """Give every TP rank its part of the plan; it maps the trainer's memory."""
        self.receivers.install(plan_id, installs, verified=self._verifies, deadline=deadline)

    def is_attached(self) -> bool:
        """True while it is the process that was attached. A stock engine is known by its weight version only."""
        if self.has_receiver:
            return self.receivers.are_attached()
        try:
            deadline = Deadline(PING_S, f"asking {self.url} for its version")
            return self.state == "fenced" or self.client.weight_version(deadline) == self.version
        except WeightSyncError:
            return False

    def close(self) -> None:
        self.receivers.close()
        self.client.close()

    # ------------------------------------------------------------------------------------------------- pushing

    @property
    def has_receiver(self) -> bool:
        return len(self.receivers) > 0

    @property
    def layouts(self) -> list[Layout]:
        """By TP rank, what it needs; empty without our receiver."""
        return self.receivers.layouts

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

    @property
    def pulls(self) -> bool:
        """Whether its ranks pull, rather than being handed whole tensors."""
        return self.has_receiver and self.route != "bucket"

    @property
    def pulls_beside(self) -> bool:
        """Whether its ranks pull beside its event loop, which then answers other calls meanwhile."""
        paused = self.held or self._config.pause != "none"
        return paused and self.pulls and self.receivers.go_on

    def start_push(
        self,
        push_id: str = "",
        *,
        landed: Callable[[], None] = lambda: None,
        sent: Callable[[], None] = lambda: None,
        answered: Callable[[], None] = lambda: None,
    ) -> None:
        self.end_push()
        self.progress = Progress(push_id=push_id, landed=landed, sent=sent, answered=answered)

    def prepare_pull(self, push_id: str, step: int, deadline: Deadline) -> None:
        """Write the call that has every rank pull, but for its last byte, if that push is under way. Idempotent."""
        with self._lock:
            if push_id != self.progress.push_id or "pull" in self._ahead:
                return
            self._ahead["pull"] = self.receivers.prepare_pull(
                push_id,
                step,
                deadline,
                full=self.held or self.state != "serving",
                verify=self._verifies and self.ends_by_itself,
                beside=self.pulls_beside,
            )

    def pull(self, step: int, deadline: Deadline) -> None:
        """Have every TP rank pull its slices. Sets ``progress.applied`` to what the receivers themselves say."""
        self.prepare_pull(self.progress.push_id, step, deadline)
        before, self.progress.applied = self.progress.applied, True
        try:
            results = self._pull(self._ahead["pull"], deadline)
        except WeightSyncError:
            self.progress.applied = before or not self.receivers.revoke(self.progress.push_id)
            raise
        self.progress.applied = before or any(r.applied for r in results)
        self._keep_fingerprints(results)
        self.progress.pulled = True
        self.progress.num_bytes = sum(r.num_bytes for r in results)
        self.progress.seconds = {"pull": max(r.seconds for r in results)}

    def _pull(self, call: Call, deadline: Deadline) -> list[wire.PullResult]:
        now = self.progress
        if not self.pulls_beside:
            return self.receivers.pull(now.push_id, call, deadline, landed=now.landed)
        return self.receivers.pull_beside(
            now.push_id, call, deadline, sent=now.sent, answered=now.answered, landed=now.landed
        )

    def prepare_to_serve(self, version: str, deadline: Deadline) -> None:
        """Write the calls that end the push, but for their last bytes."""
        with self._lock:
            self._ahead["stamp"] = self.client.stamp_ahead(version, deadline)
            self._ahead["resume"] = self.client.resume_ahead(deadline)

    def stamp(self, version: str, deadline: Deadline) -> None:
        """Set the engine's weight version; the link's follows."""
        self._make("stamp", partial(self.client.stamp, version), deadline)
        self.version = version

    def resume(self, deadline: Deadline) -> None:
        """Have the engine generate again."""
        self._make("resume", self.client.resume, deadline)

    def _make(self, name: str, otherwise: Callable[[Deadline], None], deadline: Deadline) -> None:
        """The call of that name that was written ahead, if one was."""
        call = self._ahead.get(name)
        (otherwise if call is None else call.make)(deadline)

    def end_push(self) -> None:
        """Take back what was written ahead and never made. Idempotent."""
        with self._lock:
            ahead, self._ahead = self._ahead, {}
            self.progress.push_id = ""
        for call in ahead.values():
            call.drop()

    def fingerprints(self, deadline: Deadline) -> list[list[int]]:
        """By TP rank, one fingerprint a need, of the engine's live memory: as the pull found it, or asked for now.

        After a route that did the copying itself the plan has nothing to copy, and running it reads back: in the event
        loop, where no thread has to wait for it. An engine with sessions takes no such call by then.
        """
        if self.ends_by_itself and not self.progress.pulled:
            push_id = secrets.token_hex(8)
            update = self.receivers.prepare_pull(push_id, -1, deadline, verify=True)
            try:
                self._keep_fingerprints(self.receivers.pull(push_id, update, deadline))
            finally:
                update.drop()
        return self.progress.fingerprints or self.receivers.verify(deadline)

    def _keep_fingerprints(self, results: list[wire.PullResult]) -> None:
        for rank, result in enumerate(results):
            if not result.ok:
                raise wire.pull_error(result, engine=self.url, rank=rank)
        found = [r.fingerprints for r in results if r.fingerprints is not None]
        self.progress.fingerprints = found if len(found) == len(results) else []

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

    @property
    def _verifies(self) -> bool:
        return self._config.verify == "fingerprint"

    def _choose_route(self) -> tuple[str, str]:
        assert self.info is not None
        pulls = {"cpu": "shm"}.get(self.info.device, "direct")
        wanted, has = self._config.route, self.info.has_receiver
        start_so = f"start it with --custom-weight-loader {wire.LOADER}"
        if self._verifies and not has:
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

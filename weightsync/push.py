"""One push: publish, pause, begin, move, verify, commit, continue. Runs in the weight-sync actor.

The version is stamped once an engine, at commit, after every rank of every engine has been verified. What happens to
an engine when something fails depends on one fact only: whether anything was applied to it.

    nothing applied    it goes back to work with its old version
    anything applied   it is fenced: it stays paused until a later push has healed it in full
    committed          it holds the new version, verified, and goes back to work
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import msgspec

from weightsync.config import Config
from weightsync.deadline import Deadline
from weightsync.errors import TransferError, WeightSyncError
from weightsync.fanout import Fanout
from weightsync.fleet import EngineLink
from weightsync.flushing import Flushing
from weightsync.groundwork import SourcesMoved
from weightsync.pausing import Pausing
from weightsync.plan import Plan
from weightsync.record import Record
from weightsync.reports import SyncReport
from weightsync.routes import Route
from weightsync.settling import Settling
from weightsync.verifying import Verification
from weightsync.workers import Workers

PHASES = ("publish", "pause", "begin", "move", "verify", "commit", "continue")


class EnginesGone(Exception):
    """``links`` are no longer the processes that were attached. Nothing moved, nobody stays paused."""

    def __init__(self, links: list[EngineLink]) -> None:
        super().__init__(", ".join(link.url for link in links))
        self.links = links


class Push:
    """The transaction that brings one step's weights into ``links``. Made anew for every push, run once."""

    def __init__(
        self,
        step: int,
        *,
        config: Config,
        workers: Workers,
        links: list[EngineLink],
        routes: dict[str, Route],
        plan: Plan,
        generations: dict[int, int],
        fanout: Fanout,
        deadline: Deadline,
        alone: Callable[[], AbstractContextManager] = nullcontext,
        may_pause_early: Callable[[EngineLink], bool] = lambda link: False,
    ) -> None:
        """``alone``: entered when all is published, so that nobody unmaps it meanwhile. May raise SourcesMoved.
        ``may_pause_early``: whether an engine may be paused while the trainer publishes; see ``pausing``.
        """
        self.step = step
        self._alone = alone
        self._config = config
        self._workers = workers
        self._links = list(links)
        self._involved = list(links)
        self._routes = routes
        self._plan = plan
        self._fanout = fanout
        self._deadline = deadline
        self._record = Record(step, deadline)
        self._generations = generations
        self._flushing = Flushing(config=config, fanout=fanout, deadline=deadline)
        self._push_id = secrets.token_hex(8)
        self._pausing = self._make_pausing(may_pause_early)
        self._settling = Settling(deadline.timeout_s, config=config, pausing=self._pausing)
        self._regions = {r: plan.regions(r) if self._verifies else [] for r in workers.ranks}
        self._verification = self._make_verification()

    @property
    def _verifies(self) -> bool:
        return self._config.verify == "fingerprint"

    def _make_pausing(self, may_be_beside: Callable[[EngineLink], bool]) -> Pausing:
        return Pausing(
            self.step,
            self._push_id,
            config=self._config,
            fanout=self._fanout,
            deadline=self._deadline,
            flushing=self._flushing,
            begin=lambda link: self._routes[link.route].begin(link, self._deadline),
            may_be_beside=may_be_beside,
        )

    def _make_verification(self) -> Verification:
        return Verification(
            self.step,
            workers=self._workers,
            plan=self._plan,
            regions=self._regions,
            reads_back=self._verifies,
            fanout=self._fanout,
            deadline=self._deadline,
        )

    def run(self) -> SyncReport:
        """The main path. Raises a WeightSyncError whose ``report`` says what state each engine is in.

        After SourcesMoved and EnginesGone nothing has moved, and nobody stays paused.
        """
        started = time.perf_counter()
        for link in self._links:
            link.start_push(
                self._push_id,
                landed=partial(self._on_landed, link),
                sent=partial(self._flushing.behind, link),
                answered=partial(link.prepare_to_serve, str(self.step), self._deadline),
            )
        try:
            self._publish_and_transfer()
        except (SourcesMoved, EnginesGone):
            raise
        except WeightSyncError as error:
            self._abandon(error)
            raise
        except Exception as e:  # a fault of ours must not leave an engine paused that could serve
            fault = TransferError(f"{type(e).__name__}: {e}")
            self._abandon(fault)
            raise fault from e
        except BaseException as e:  # nor a user's interrupt
            self._abandon(TransferError(f"interrupted: {type(e).__name__}"))
            raise
        finally:
            for link in self._involved:
                link.end_push()
        self._record.seconds["total"] = time.perf_counter() - started
        num_tensors = self._plan.summary().num_tensors
        return self._record.report(self._involved, self._links, num_tensors=num_tensors, notes=self._pausing.notes)

    # ------------------------------------------------------------------------------------------------- phases

    def _publish_and_transfer(self) -> None:
        try:
            with self._record.timed("publish"):
                self._pausing.before_publish(self._links)
                self._publish()
            with self._alone():
                try:
                    self._transfer()
                finally:
                    for route in self._routes.values():
                        route.end_push()
        except SourcesMoved:
            self._undo_pauses([])
            raise
        except EnginesGone as found:
            self._undo_pauses(found.links)
            raise

    def _transfer(self) -> None:
        with self._record.timed("pause"):
            self._settle_failures(self._links, self._pausing.outcomes(self._links))
        with self._record.timed("begin"):
            self._each(self._begin)
        with self._record.timed("move"):
            self._move()
        with self._record.timed("verify"):
            self._verify()
        with self._record.timed("commit"):
            self._each(self._commit)
        with self._record.timed("continue"):
            self._continue()

    def _publish(self) -> None:
        attached = self._fanout.submit(lambda: self._fanout.each(lambda link: link.is_attached(), self._links))
        try:
            published = self._workers.publish(self.step, self._regions, self._deadline)
        finally:
            answers = attached.result()
        self._record.trainer_seconds["publish"] = max(p.seconds for p in published.values())
        gone = [link for link, answer in zip(self._links, answers, strict=True) if answer is not True]
        if gone:
            raise EnginesGone(gone)
        moved = [rank for rank, p in published.items() if p.generation != self._generations[rank]]
        if moved:
            raise SourcesMoved(f"training ranks {moved} moved their memory")

    def _begin(self, link: EngineLink) -> None:
        link.progress.began = True
        if note := link.client.begin(self._deadline):
            self._record.notes.append(note)

    def _move(self) -> None:
        for link in self._links:
            if not link.pulls_beside:
                self._flushing.beside(link)
        for name, route in self._routes.items():
            links = [link for link in self._links if link.route == name]
            if links:
                self._settle_failures(links, route.move(links, self.step, self._deadline))
        self._each(self._end)

    def _on_landed(self, link: EngineLink) -> None:
        self._verification.on_landed(link, self._links)

    def _end(self, link: EngineLink) -> None:
        link.client.end(self._deadline)
        link.progress.began = False

    def _verify(self) -> None:
        outcomes = self._verification.outcomes(self._links)
        self._record.trainer_seconds["verify"] = self._verification.trainer_seconds
        self._settle_failures(self._links, outcomes)
        self._settle_failures(self._links, self._flushing.outcomes(self._links))

    def _commit(self, link: EngineLink) -> None:
        link.stamp(str(self.step), self._deadline)
        link.progress.committed = True
        link.state, link.error = "serving", ""

    def _continue(self) -> None:
        """Resume and confirm, all at once. No call waits for another: there may be more engines than threads."""
        links = list(self._links)
        confirming = self._fanout.submit(lambda: self._fanout.each(self._confirm, links))
        resumed = self._fanout.each(self._resume, links)
        confirmed = confirming.result()
        self._settle_failures(links, [r or c for r, c in zip(resumed, confirmed, strict=True)])

    def _resume(self, link: EngineLink) -> None:
        if self._config.pause != "none" or link.held:
            link.resume(self._deadline)
        link.held = False

    def _confirm(self, link: EngineLink) -> None:
        link.client.confirm(str(self.step), self._deadline)

    # ----------------------------------------------------------------------------------------------- failures

    def _each(self, function: Callable[[EngineLink], None]) -> None:
        self._settle_failures(self._links, self._fanout.each(function, self._links))

    def _settle_failures(self, links: list[EngineLink], outcomes: list) -> None:
        failed = [(li, o) for li, o in zip(links, outcomes, strict=True) if isinstance(o, WeightSyncError)]
        if not failed:
            return
        for link, error in failed:
            error.engine, error.phase = error.engine or link.url, error.phase or self._record.phase
            link.error = str(error)
        if self._config.on_engine_failure == "raise" or len(failed) == len(self._links):
            raise failed[0][1]
        self._fanout.each(self._settling.settle, [link for link, _ in failed])
        gone = {id(link) for link, _ in failed}
        self._links = [link for link in self._links if id(link) not in gone]

    def _undo_pauses(self, gone: list[EngineLink]) -> None:
        """Engines that are ``gone`` are asked to go on too, in case that they are there; they need not answer."""
        links = [link for link in self._links if link not in gone]
        outcomes = self._fanout.each(lambda link: self._pausing.undo(link, self._settling.within_s), [*links, *gone])
        self._settle_failures(links, outcomes[: len(links)])

    def _abandon(self, error: WeightSyncError) -> None:
        error.phase = error.phase or self._record.phase
        self._fanout.each(self._settling.settle, self._links)
        error.report = [msgspec.to_builtins(link.report()) for link in self._involved]

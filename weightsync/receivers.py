"""The receivers of one engine as the actor calls them: one a TP rank, each in that rank's process.

Commands that touch weights go through the engine's own update call, which brings them into its event loop; everything
else goes to a receiver's own server.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import msgspec

from weightsync import receiver_wire as wire
from weightsync.deadline import Deadline
from weightsync.engines import Call, Engine
from weightsync.errors import EngineLost, PlanError, WeightSyncError
from weightsync.fanout import Fanout
from weightsync.inbox import Inbox
from weightsync.landing import Landing
from weightsync.rounds import Ask, Release
from weightsync.rpc import Client
from weightsync.spec import Layout, TensorSpec

PING_S = 2.0


class Receivers:
    """Empty until ``attach``. ``layouts``: by TP rank, what it needs."""

    def __init__(self, client: Engine) -> None:
        self._client = client
        self._url = client.url
        self.layouts: list[Layout] = []
        self._ranks: list[Client] = []
        self._waiting = Fanout("results")
        self._boot_ids: list[str] = []
        self._is_sure = False  # that nothing happened since they last answered as they should
        self._session = ""
        self._plan_id = ""
        self._landing = Landing([])

    def __len__(self) -> int:
        return len(self._ranks)

    def attach(self, inbox: Inbox, reply: str, tensors: list[TensorSpec], tp_size: int, deadline: Deadline) -> None:
        """Have every TP rank trace its needs and open its own channel to us."""
        self.detach()
        self._session = secrets.token_hex(8)
        payloads = [
            wire.payload(wire.Attach(reply=reply, session=self._session, tp_rank=r, tensors=tensors))
            for r in range(tp_size)
        ]
        self._client.begin(deadline)
        try:
            self._client.update(payloads, wire.LOADER, deadline)
        finally:
            self._client.end(deadline)
        announced = inbox.wait(self._session, tp_size, deadline)
        for a in announced:
            if a.error:
                raise PlanError(f"its needs could not be traced: {a.error}", engine=self._url, rank=a.tp_rank)
        self._boot_ids = [a.boot_id for a in announced]
        self._ranks = [
            Client(a.address, what=f"receiver of {self._url} TP rank {a.tp_rank}", lost=EngineLost) for a in announced
        ]
        self.layouts = [r.call("needs", deadline=deadline, returns=Layout) for r in self._ranks]

    def detach(self) -> None:
        """Let them unmap the trainer's memory; best effort, since the engine may be gone."""
        for rank in self._ranks:
            with contextlib.suppress(WeightSyncError):
                rank.call("detach", deadline=Deadline(PING_S, f"detaching from {self._url}"))
            rank.close()
        self._land_by(Landing([]))
        self._ranks, self.layouts, self._boot_ids, self._is_sure = [], [], [], False

    def close(self) -> None:
        self.detach()
        self._waiting.close()

    def install(self, plan_id: str, installs: list[wire.Install], *, verified: bool, deadline: Deadline) -> None:
        """Give every TP rank its part of the plan; it maps the trainer's memory."""
        answers = [
            rank.call(
                "install",
                msgspec.structs.replace(install, verified=verified),
                deadline=deadline,
                returns=wire.Installed,
            )
            for rank, install in zip(self._ranks, installs, strict=True)
        ]
        self._plan_id = plan_id
        self._land_by(Landing(answers))

    @property
    def go_on(self) -> bool:
        """Whether pulls of the installed plan can go on beside the event loop of a paused engine."""
        return bool(self._landing)

    def are_attached(self) -> bool:
        """True while they are in the processes that were attached.

        As long as nothing failed, connections that stand tell enough: an answer would wait for the engine's event loop,
        which takes 2 ms as a rule and up to 157 as measured.
        """
        if not (self._is_sure and all(rank.is_connected() for rank in self._ranks)):
            self._is_sure = self._answer_as_they_should()
        return self._is_sure

    def let_go(self, deadline: Deadline) -> None:
        """Have every TP rank unmap the trainer's memory; ``install`` comes before the next pull."""
        self._plan_id = ""
        self.call("let_go", None, deadline)

    # ------------------------------------------------------------------------------- through the event loop

    def prepare_pull(
        self,
        push_id: str,
        step: int,
        deadline: Deadline,
        *,
        full: bool = False,
        verify: bool = False,
        beside: bool = False,
    ) -> Call:
        """What ``pull`` makes of the engine: to run the installed plan in every rank, as ``wire.Pull`` says."""
        command = wire.Pull(
            session=self._session,
            push_id=push_id,
            plan_id=self._plan_id,
            step=step,
            full=full,
            timeout_s=deadline.remaining_s(),
            verify=verify,
            beside=beside,
        )
        return self._client.update_ahead([wire.payload(command)] * len(self._ranks), wire.LOADER, deadline)

    def pull(
        self, push_id: str, update: Call, deadline: Deadline, *, landed: Callable[[], None] = lambda: None
    ) -> list[wire.PullResult]:
        """Have every rank pull as was prepared, inside the engine's event loop; how it went, by rank.

        ``landed`` is called, perhaps twice, when every rank has pulled, before the engine itself has answered. Raises
        what the engine's call raises; whether the pull began is then for ``revoke`` to find out.
        """
        self._is_sure = False
        ends = [self._waiting.submit(partial(self._result, r, push_id, deadline)) for r in self._ranks]

        def look(_: Future) -> None:
            if all(end.done() and not end.exception() and end.result().ok for end in ends):
                landed()

        for end in ends:
            end.add_done_callback(look)
        update.make(deadline)
        results = [
            early if early.ended else self._ended(rank, push_id, deadline)
            for rank, early in zip(self._ranks, [end.result() for end in ends], strict=True)
        ]
        self._is_sure = all(result.ok for result in results)
        return results

    def pull_beside(
        self,
        push_id: str,
        update: Call,
        deadline: Deadline,
        *,
        sent: Callable[[], None],
        answered: Callable[[], None],
        landed: Callable[[], None],
    ) -> list[wire.PullResult]:
        """As ``pull``, but beside the event loop: the engine answers that it has begun, boards say when it has landed.

        ``sent`` is called when the engine's call is on its way, ``answered`` when it has answered.
        """
        self._is_sure = False
        update.make(deadline, sent=sent)
        answered()
        results = self._landing.results(push_id, lambda rank: self._ended(self._ranks[rank], push_id, deadline))
        self._is_sure = all(result.ok for result in results)
        if self._is_sure:
            landed()
        return results

    def revoke(self, push_id: str) -> bool:
        """True if every rank confirms that this pull never began there, and now never will."""
        try:
            deadline = Deadline(PING_S, f"revoking a pull at {self._url}")
            request = wire.ResultRequest(push_id=push_id)
            revoked = [r.call("revoke", request, deadline=deadline, returns=bool) for r in self._ranks]
        except WeightSyncError:
            return False
        return all(revoked)

    # -------------------------------------------------------------------------------------- at their servers

    def verify(self, deadline: Deadline) -> list[list[int]]:
        """By rank, one fingerprint a need, of the engine's live memory."""
        was_sure, self._is_sure = self._is_sure, False
        read = [r.call("verify", deadline=deadline, returns=list[int]) for r in self._ranks]
        self._is_sure = was_sure
        return read

    def call(self, method: str, arguments: list | None, deadline: Deadline) -> None:
        """Call a method of every rank's receiver, all at once: each may wait for the others."""
        calls = list(zip(self._ranks, arguments or [None] * len(self._ranks), strict=True))
        fanout = Fanout("receivers", workers=max(1, len(calls)))
        try:
            fanout.all(lambda call: call[0].call(method, call[1], deadline=deadline), calls)
        finally:
            fanout.close()

    def release(self, release: Release, deadline: Deadline) -> None:
        """Tell every rank that a round of its pull may begin."""
        for rank in self._ranks:
            rank.call("release", release, deadline=deadline)

    def passed(self, ask: Ask, deadline: Deadline) -> bool:
        """Whether every rank has passed a round of its pull; waits a little. TransferError if a pull has ended."""
        answers = [r.call("passed", ask, deadline=deadline, returns=bool) for r in self._ranks]
        return all(answers)

    def contexts(self, deadline: Deadline) -> list[str]:
        """What their processes have made on GPUs other than their own, in words."""
        by_rank = [r.call("contexts", deadline=deadline, returns=list[str]) for r in self._ranks]
        return [f"{self._url}: TP rank {rank}: {text}" for rank, found in enumerate(by_rank) for text in found]

    def _answer_as_they_should(self) -> bool:
        deadline = Deadline(PING_S, f"asking the receivers of {self._url}")
        try:
            statuses = [r.call("status", deadline=deadline, returns=wire.Status) for r in self._ranks]
        except WeightSyncError:
            return False
        return [s.boot_id for s in statuses] == self._boot_ids and all(s.session == self._session for s in statuses)

    def _land_by(self, landing: Landing) -> None:
        self._landing.close()
        self._landing = landing

    def _ended(self, rank: Client, push_id: str, deadline: Deadline) -> wire.PullResult:
        """How a pull that the engine has taken went, when it has ended."""
        while (found := self._result(rank, push_id, deadline)).kind == "not_ended":
            deadline.check("waiting for a pull to end", engine=self._url, phase="move")
        return found

    def _result(self, rank: Client, push_id: str, deadline: Deadline) -> wire.PullResult:
        """How a pull went. Asked before it begins, so that the answer is on its way when the engine's own is."""
        return rank.call("result", wire.ResultRequest(push_id=push_id), deadline=deadline, returns=wire.PullResult)

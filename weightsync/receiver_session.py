"""One attached session of a receiver: its needs, its installed plan, and the calls that its server answers.

Runs in the engine. ``_pull`` runs in SGLang's event loop, all public methods in threads of the rpc server; one lock
keeps plans, pulls and reads apart.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext, suppress

import msgspec
import torch
from torch import nn

from weightsync import collector, devices
from weightsync import receiver_wire as wire
from weightsync.errors import PlanError, TransferError, VerifyMismatch
from weightsync.exchanging import ExchangedPlan, Membership
from weightsync.fingerprint import Fingerprinter
from weightsync.layouts import constants_of, layout_of
from weightsync.live import LiveWeights, bits
from weightsync.pull_log import PullLog
from weightsync.pulling import InstalledPlan, MappedSegments, SlotViews
from weightsync.rounds import Ask, Gate, Release
from weightsync.rpc import Server
from weightsync.spec import Layout
from weightsync.trace import finalise, has_hook, trace
from weightsync.transports.nccl_wire import Join

_RETIRED_S = 2.0
"""How long a session that was ended still answers. Then its connections close, and its actor knows without asking."""


class _Refusal(Exception):
    """A pull that ends with a named ``kind``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class ReceiverSession:
    """The state of one session on one model object. Public methods are what the actor may call."""

    def __init__(self, model: nn.Module, command: wire.Attach, *, host: str, before: ReceiverSession | None) -> None:
        self.session = command.session
        self._model = model
        self._live = LiveWeights(model)
        with collector.paused():
            traced = trace(model, self._live, command.tensors)
        self._derived = traced.derived
        constants = constants_of(self._live, traced)
        self._known = before._live if before is not None else None
        self._live.keep(constants, known=self._known)
        self._unfed = [s.name for s in self._live.slots if s.name not in {*traced.written, *traced.opaque, *constants}]
        self._device = next((s.tensor().device for s in self._live.slots), torch.device("cpu"))
        self._layout = layout_of(self._live, traced, rank=command.tp_rank, device=self._device)
        self._plan: InstalledPlan | ExchangedPlan | None = None
        self._fingerprinter: Fingerprinter | None = None
        self._keeps_unfed = False
        self._membership = Membership(self._device)
        self._mapped = MappedSegments()
        self._lock = threading.RLock()
        self._log = PullLog()
        self._gate = Gate()
        self._server = Server(self, host=host)
        self._address = self._server.address

    # ------------------------------------------------------------------------------- called by the actor

    def needs(self) -> Layout:
        """What this rank needs, as traced when it was attached."""
        return self._layout

    def install(self, install: wire.Install) -> None:
        """Make a plan ready to run; maps the trainer's memory. On PlanError or TransferError the old plan stays."""
        plan = install.plan if install.pulls else msgspec.structs.replace(install.plan, copies=[])
        with self._lock, self._on_device(), torch.no_grad(), collector.paused():
            made: InstalledPlan | ExchangedPlan
            if install.exchange is not None:
                made = ExchangedPlan(install, live=self._live, membership=self._membership)
            else:
                made = InstalledPlan(
                    install.plan_id,
                    plan,
                    install.segments,
                    install.shards,
                    live=self._live,
                    mapped=self._mapped,
                    rounds=install.rounds,
                    gate=self._gate,
                )
            if not self._keeps_unfed:  # a plan that leaves parameters unwritten was allowed to: they are constants too
                self._live.keep(self._unfed, known=self._known)
                self._keeps_unfed = True
            self._plan, self._fingerprinter = made, None
            self._mapped.close_all_but(made.segments)
        if install.verified and self._device.type == "cuda":
            self._prepare_to_verify()

    def let_go(self) -> None:
        """Unmap the trainer's memory, which is about to be given back. Nothing can be pulled until the next plan."""
        with self._lock, self._on_device():
            self._plan = self._fingerprinter = None
            self._mapped.close_all_but([])

    def result(self, request: wire.ResultRequest) -> wire.PullResult:
        """How a pull went; waits up to ``timeout_s`` for it to end. ``started`` is false if it never came here."""
        return self._log.result(request)

    def revoke(self, request: wire.ResultRequest) -> bool:
        """True if that pull has not begun, and now never will."""
        return self._log.revoke(request.push_id)

    def release(self, release: Release) -> None:
        """A round of a pull may begin, or none will any more."""
        self._gate.release(release)

    def passed(self, ask: Ask) -> bool:
        """Whether a round of a pull is over; waits a little. Raises TransferError if the pull ended before."""
        return self._gate.passed(ask)

    def verify(self) -> list[int]:
        """One fingerprint a need of the installed plan, of the model's live memory.

        Raises VerifyMismatch naming ``constant:NAME`` if a tensor that no push writes has changed.
        """
        with self._lock, self._on_device(), torch.inference_mode():
            needs, constants = self._checks().start(), self._live.start_constants()
            if changed := constants():
                raise VerifyMismatch(
                    f"{changed}, which no push writes, is not what it was; a full push restores it",
                    tensor=f"constant:{changed}",
                    rank=self._layout.rank,
                )
            return needs()

    def poison(self) -> None:
        """Set every bit of every parameter, buffer and derived tensor (NaN for floats): what a full push must undo.

        A diagnostic that proves coverage. The engine must be paused, and is unusable until a full push.
        """
        with self._lock, self._on_device(), torch.inference_mode():
            self._live.poison()
            self._synchronise()

    def join(self, request: Join) -> None:
        """Become a member of a process group, in place of any before; returns when its senders have been heard."""
        with self._on_device():
            self._membership.join(request)

    def leave(self) -> None:
        """Give the process group up."""
        self._membership.leave()

    def status(self) -> wire.Status:
        """Who this is, and whether it must be attached again."""
        return wire.Status(
            boot_id=wire.BOOT_ID,
            session=self.session,
            plan_id=self._plan.plan_id if self._plan else "",
            pid=os.getpid(),
            num_segments=self._mapped.count,
        )

    def contexts(self) -> list[str]:
        """The contexts that this process has on GPUs other than its own, in words."""
        return devices.contexts_elsewhere(self._layout.device) if self._device.type == "cuda" else []

    def detach(self) -> None:
        """Unmap the trainer's memory and end the session. The engine keeps its weights."""
        self._retire()

    # ------------------------------------------------------------------------------- in SGLang's event loop

    def _pull(self, command: wire.Pull) -> None:
        """Run the installed plan once and keep the result. Never raises."""
        if not self._log.begin(command.push_id):
            return
        applied, kind, error, seconds, num_bytes = False, "", "", 0.0, 0
        fingerprints: list[int] | None = None
        self._gate.begin(command.push_id)
        try:
            with self._lock, self._on_device():
                plan = self._checked(command)
                self._synchronise()
                applied = True
                if command.full:
                    with torch.inference_mode():
                        self._live.restore()
                seconds, num_bytes = plan.run(command.timeout_s), plan.num_bytes
                self._finalise()
                if command.verify:
                    with suppress(VerifyMismatch):  # whoever asks ``verify`` then hears of it
                        fingerprints = self.verify()
        except _Refusal as e:
            kind, error = e.kind, str(e)
        except Exception as e:  # whatever it is, it must reach the actor and not SGLang
            kind, error = "failed", f"{type(e).__name__}: {e}"
        self._gate.end(error)
        if kind:
            self._membership.leave()  # so that senders and other ranks do not wait for this one
        self._log.end(
            wire.PullResult(
                push_id=command.push_id,
                started=True,
                applied=applied,
                ok=not kind,
                kind=kind,
                error=error,
                step=command.step,
                num_bytes=num_bytes,
                seconds=seconds,
                fingerprints=fingerprints,
            )
        )

    def _checked(self, command: wire.Pull) -> InstalledPlan | ExchangedPlan:
        if self._plan is None or self._plan.plan_id != command.plan_id:
            raise _Refusal("unknown_plan", f"plan {command.plan_id} is not installed here")
        if isinstance(self._plan, ExchangedPlan):
            self._membership.group()
        moved = self._live.moved()
        if moved:
            self._void()
            raise _Refusal("layout_moved", f"the engine moved a tensor since it was attached: {moved}")
        return self._plan

    def _finalise(self) -> None:
        """Recompute derived tensors, and check that every element of them was: they are poisoned first."""
        if self._derived:
            with torch.inference_mode():
                self._live.poison(self._derived)
        if not self._derived and not has_hook(self._model):
            return
        with self._live.writable():
            finalise(self._model)
        self._synchronise()
        for name in self._derived:
            own = bits(self._live[name])
            if bool((own == (255 if own.dtype == torch.uint8 else -1)).any()):
                raise _Refusal("derived_stale", f"{name} was not recomputed from the new weights")
        moved = self._live.moved()
        if moved:
            self._void()
            raise _Refusal("layout_moved", f"finalising the new weights moved a tensor: {moved}")

    # ------------------------------------------------------------------------------- both

    def _installed(self) -> InstalledPlan | ExchangedPlan:
        if self._plan is None:
            raise PlanError("no plan is installed in this receiver")
        return self._plan

    def _checks(self) -> Fingerprinter:
        """What the installed plan is verified by: the live memory of each need. Made once for as long as that stays."""
        plan = self._installed()
        if moved := self._live.moved():
            self._void()
            raise TransferError(f"the engine moved a tensor since it was attached: {moved}")
        if self._fingerprinter is None:
            views = SlotViews(self._live)
            pairs = [(views(need.view, need.box.size), need) for need in plan.needs]
            self._fingerprinter = Fingerprinter([(view, need.box.offset, view.dtype) for view, need in pairs])
        return self._fingerprinter

    def _prepare_to_verify(self) -> None:
        """Compile the kernels and make the tables now: at the first push that would take seconds of its pause."""
        with self._lock, self._on_device(), torch.inference_mode(), collector.paused():
            self._checks().run()
            self._live.changed_constant()

    def _void(self) -> None:
        """The layout no longer holds: the actor must attach again, and sees that by the empty session."""
        self.session = ""

    def _retire(self) -> None:
        """End the session; the server says so for a while to whoever still asks."""
        self._membership.leave()  # before the lock: a pull may wait in the group, or for a round
        self._gate.end("the session was ended")
        with self._lock:
            self._void()
            self._plan = self._fingerprinter = None
            self._mapped.close_all_but([])
        timer = threading.Timer(_RETIRED_S, self._server.close)
        timer.daemon = True
        timer.start()

    def _on_device(self) -> AbstractContextManager:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

"""What one engine rank serves from, and the plan by which pushes change it. Runs in the engine.

No locks: ``receiver_session`` keeps plans, pulls and reads apart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import msgspec
import torch
from torch import nn

from weightsync import collector
from weightsync import receiver_wire as wire
from weightsync.board import Board
from weightsync.errors import PlanError, TransferError, VerifyMismatch
from weightsync.exchanging import ExchangedPlan, Membership
from weightsync.fingerprint import Fingerprinter
from weightsync.layouts import constants_of, layout_of
from weightsync.live import LiveWeights, bits
from weightsync.pulling import InstalledPlan, MappedSegments, SlotViews
from weightsync.rounds import Gate
from weightsync.trace import finalise, has_hook, trace

logger = logging.getLogger(__name__)


class Refusal(Exception):
    """A pull that ends with a named ``kind``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Served:
    """The tensors of one model object, traced for the trainer of ``command``. ``before``: what it was known as.

    ``layout`` is what was traced; ``valid`` is false once a tensor lies elsewhere: it must be traced anew.
    """

    def __init__(self, model: nn.Module, command: wire.Attach, *, before: Served | None) -> None:
        self._model = model
        self._live = LiveWeights(model)
        with collector.paused():
            traced = trace(model, self._live, command.tensors)
        self._derived = traced.derived
        constants = constants_of(self._live, traced)
        self._known = before._live if before is not None else None
        self._live.keep(constants, known=self._known)
        self._unfed = [s.name for s in self._live.slots if s.name not in {*traced.written, *traced.opaque, *constants}]
        self._keeps_unfed = False
        self.device = next((s.tensor().device for s in self._live.slots), torch.device("cpu"))
        self.layout = layout_of(self._live, traced, rank=command.tp_rank, device=self.device)
        self.valid = True
        self._plan: InstalledPlan | ExchangedPlan | None = None
        self._fingerprinter: Fingerprinter | None = None
        self._mapped = MappedSegments()
        self._board: Board | None = None

    def on_device(self) -> AbstractContextManager:
        """Makes the rank's GPU, if it has one, this thread's current one."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def synchronise(self) -> None:
        """Wait for all that this process has queued on its GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # ------------------------------------------------------------------------------------------------ the plan

    def install(self, install: wire.Install, gate: Gate, membership: Membership) -> wire.Installed:
        """Make a plan ready to run; maps the trainer's memory. On PlanError or TransferError the old plan stays."""
        plan = install.plan if install.pulls else msgspec.structs.replace(install.plan, copies=[])
        with self.on_device(), torch.no_grad(), collector.paused():
            made: InstalledPlan | ExchangedPlan
            if install.exchange is not None:
                made = ExchangedPlan(install, live=self._live, membership=membership)
            else:
                made = InstalledPlan(
                    install.plan_id,
                    plan,
                    install.segments,
                    install.shards,
                    live=self._live,
                    mapped=self._mapped,
                    rounds=install.rounds,
                    gate=gate,
                )
            if not self._keeps_unfed:  # a plan that leaves parameters unwritten was allowed to: they are constants too
                self._live.keep(self._unfed, known=self._known)
                self._keeps_unfed = True
            self._plan, self._fingerprinter = made, None
            self._mapped.close_all_but(made.segments)
        if install.verified and self.device.type == "cuda":
            self._prepare_to_verify()
        return self._hang_up(install.verified)

    def let_go(self) -> None:
        """Unmap the trainer's memory. Nothing can be pulled until the next plan."""
        with self.on_device():
            self._plan = self._fingerprinter = None
            self._mapped.close_all_but([])
            self._take_down()

    @property
    def plan_id(self) -> str:
        """Of the installed plan; "" if there is none."""
        return self._plan.plan_id if self._plan else ""

    @property
    def num_segments(self) -> int:
        """How many pieces of the trainer's memory are mapped."""
        return self._mapped.count

    def _hang_up(self, verified: bool) -> wire.Installed:
        """The board of the installed plan, if its pulls can go on: nothing waits for others, or is computed from it."""
        assert self._plan is not None, "install first"
        self._take_down()
        if not self._plan.goes_on or self._finalises:
            return wire.Installed()
        order, kept = list[int](), list[int]()
        if verified and self.device.type == "cuda" and not self._live.has_constants_elsewhere():
            constants = self._live.constants_on_gpu()
            order, kept = self._checks().order, [constants.kept[i] for i in constants.check.order]
        try:
            self._board = Board(len(order) + len(kept), self.device)
        except TransferError as e:
            logger.warning("weightsync: pulls keep the event loop: %s", e)
            return wire.Installed()
        return wire.Installed(goes_on=True, board=self._board.segment, order=order, constants=kept)

    def _take_down(self) -> None:
        if self._board is not None:
            self._board.close()
        self._board = None

    def let_go_on(self, command: wire.Pull, num_bytes: int, launched_ns: int) -> Callable[[], None] | None:
        """Have the GPU say when what the current stream holds is over, if there is where to say it.

        What is returned waits until it has.
        """
        board, plan = self._board, self._plan
        if board is None or plan is None or (command.verify and not board.num_words):
            return None
        if command.verify:
            needs, constants = self._made_checks(plan), self._live.constants_on_gpu()
            needs.write(board.prints[: len(needs.order)])
            constants.check.write(board.prints[len(needs.order) :])
        landed = board.land(command.push_id)
        board.accept(command.push_id, num_bytes=num_bytes, launched_ns=launched_ns, printed=command.verify)
        return landed

    def planned(self, plan_id: str) -> InstalledPlan | ExchangedPlan:
        """That plan, if it can be run now; raises Refusal or TransferError."""
        if self._plan is None or self._plan.plan_id != plan_id:
            raise Refusal("unknown_plan", f"plan {plan_id} is not installed here")
        self._plan.check()
        if moved := self._moved():
            raise Refusal("layout_moved", f"the engine moved a tensor since it was attached: {moved}")
        return self._plan

    def _moved(self) -> str:
        """Which tensor lies elsewhere than it was traced, and how; "" if none does."""
        moved = self._live.moved()
        self.valid = self.valid and not moved
        return moved

    # --------------------------------------------------------------------------------------------- the memory

    def restore(self) -> None:
        """Write back what no push writes."""
        with torch.inference_mode():
            self._live.restore()

    def finalise(self) -> None:
        """Recompute derived tensors, and check that every element of them was: they are poisoned first."""
        if not self._finalises:
            return
        if self._derived:
            with torch.inference_mode():
                self._live.poison(self._derived)
        with self._live.writable():
            finalise(self._model)
        self.synchronise()
        for name in self._derived:
            own = bits(self._live[name])
            if bool((own == (255 if own.dtype == torch.uint8 else -1)).any()):
                raise Refusal("derived_stale", f"{name} was not recomputed from the new weights")
        if moved := self._moved():
            raise Refusal("layout_moved", f"finalising the new weights moved a tensor: {moved}")

    def start_reading(self) -> Callable[[], list[int]]:
        """Begin to fingerprint the needs of the installed plan. What is returned waits for that: one number a need.

        It raises VerifyMismatch naming ``constant:NAME`` if a tensor that no push writes has changed.
        """
        with self.on_device(), torch.inference_mode():
            needs, constants = self._checks().start(), self._live.start_constants()

        def finish() -> list[int]:
            with self.on_device(), torch.inference_mode():
                if changed := constants():
                    raise VerifyMismatch(
                        f"{changed}, which no push writes, is not what it was; a full push restores it",
                        tensor=f"constant:{changed}",
                        rank=self.layout.rank,
                    )
                return needs()

        return finish

    def poison(self) -> None:
        """Set every bit of every tensor."""
        with self.on_device(), torch.inference_mode():
            self._live.poison()
            self.synchronise()

    @property
    def _finalises(self) -> bool:
        return bool(self._derived) or has_hook(self._model)

    def _checks(self) -> Fingerprinter:
        """What the installed plan is verified by: the live memory of each need, if that is where it was."""
        if self._plan is None:
            raise PlanError("no plan is installed in this receiver")
        if moved := self._moved():
            raise TransferError(f"the engine moved a tensor since it was attached: {moved}")
        return self._made_checks(self._plan)

    def _made_checks(self, plan: InstalledPlan | ExchangedPlan) -> Fingerprinter:
        """Made once for as long as that stays."""
        if self._fingerprinter is None:
            views = SlotViews(self._live)
            pairs = [(views(need.view, need.box.size), need) for need in plan.needs]
            self._fingerprinter = Fingerprinter([(view, need.box.offset, view.dtype) for view, need in pairs])
        return self._fingerprinter

    def _prepare_to_verify(self) -> None:
        """Compile the kernels and make the tables now: at the first push that would take seconds of its pause."""
        with self.on_device(), torch.inference_mode(), collector.paused():
            self._checks().run()
            self._live.changed_constant()

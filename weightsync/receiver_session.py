"""One attached session of a receiver: its needs, its installed plan, and the calls that its server answers.

Runs in the engine. ``_pull`` runs in SGLang's event loop, all public methods in threads of the rpc server; one lock
keeps plans, pulls and reads apart.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from weightsync import devices
from weightsync import receiver_wire as wire
from weightsync.exchanging import Membership
from weightsync.gil import be_punctual
from weightsync.one_pull import OnePull
from weightsync.pull_log import PullLog
from weightsync.rounds import Ask, Gate, Release
from weightsync.rpc import Server
from weightsync.served import Served
from weightsync.spec import Layout
from weightsync.transports.nccl_wire import Join

_RETIRED_S = 2.0
"""How long a session that was ended still answers. Then its connections close, and its actor knows without asking."""


class ReceiverSession:
    """The state of one session on one model object. Public methods are what the actor may call."""

    def __init__(self, model: nn.Module, command: wire.Attach, *, host: str, before: ReceiverSession | None) -> None:
        self._session = command.session
        self._served: Served = Served(model, command, before=before._served if before is not None else None)
        self._membership = Membership(self._served.device)
        self._lock = threading.RLock()
        self._going: OnePull | None = None  # goes on beside the event loop; whoever has the lock ends it first
        self._log = PullLog()
        self._gate = Gate()
        self._server = Server(self, host=host, prepare=be_punctual)
        self._address = self._server.address

    @property
    def session(self) -> str:
        """Its name; "" once it has ended or its layout no longer holds: the actor must attach again."""
        return self._session if self._served.valid else ""

    # ------------------------------------------------------------------------------- called by the actor

    def needs(self) -> Layout:
        """What this rank needs, as traced when it was attached."""
        return self._served.layout

    def install(self, install: wire.Install) -> wire.Installed:
        """Make a plan ready to run; maps the trainer's memory. On PlanError or TransferError the old plan stays."""
        with self._alone():
            return self._served.install(install, self._gate, self._membership)

    def let_go(self) -> None:
        """Unmap the trainer's memory, which is about to be given back. Nothing can be pulled until the next plan."""
        with self._alone():
            self._served.let_go()

    def result(self, request: wire.ResultRequest) -> wire.PullResult:
        """How a pull went; waits up to ``timeout_s`` for it to end. ``started`` is false if it never came here."""
        found = self._log.result(request)
        if found.kind != "not_ended" or self._going is None:
            return found
        with self._alone():  # it ends here
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
        with self._alone():
            return self._served.start_reading()()

    def poison(self) -> None:
        """Set every bit of every parameter, buffer and derived tensor (NaN for floats): what a full push must undo.

        A diagnostic that proves coverage. The engine must be paused, and is unusable until a full push.
        """
        with self._alone():
            self._served.poison()

    def join(self, request: Join) -> None:
        """Become a member of a process group, in place of any before; returns when its senders have been heard."""
        with self._served.on_device():
            self._membership.join(request)

    def leave(self) -> None:
        """Give the process group up."""
        self._membership.leave()

    def status(self) -> wire.Status:
        """Who this is, and whether it must be attached again."""
        return wire.Status(
            boot_id=wire.BOOT_ID,
            session=self.session,
            plan_id=self._served.plan_id,
            pid=os.getpid(),
            num_segments=self._served.num_segments,
        )

    def contexts(self) -> list[str]:
        """The contexts that this process has on GPUs other than its own, in words."""
        return devices.contexts_elsewhere(self._served.layout.device) if self._served.device.type == "cuda" else []

    def detach(self) -> None:
        """Unmap the trainer's memory and end the session. The engine keeps its weights."""
        self._retire()

    # ------------------------------------------------------------------------------- in SGLang's event loop

    def _pull(self, command: wire.Pull) -> None:
        """Run the installed plan once and keep the result. Never raises.

        A pull that goes on by itself is left to the GPU, so that the event loop can answer meanwhile.
        """
        if not self._log.begin(command.push_id):
            return
        self._gate.begin(command.push_id)
        with self._alone():
            pull = OnePull(self._served, command)
            pull.start()
            if pull.goes_on:
                self._going = pull
                self._log.leave(command.push_id)
            else:
                self._end(pull)

    # ------------------------------------------------------------------------------- both

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else changes, pulls or reads meanwhile, and no pull goes on."""
        with self._lock:
            going, self._going = self._going, None
            if going is not None:
                self._end(going)
            yield

    def _end(self, pull: OnePull) -> None:
        pull.finish()
        result = pull.result()
        self._gate.end(result.error)
        if pull.failed:
            self._membership.leave()  # so that senders and other ranks do not wait for this one
        self._log.end(result)

    def _retire(self) -> None:
        """End the session; the server says so for a while to whoever still asks."""
        self._membership.leave()  # before the lock: a pull may wait in the group, or for a round
        self._gate.end("the session was ended")
        with self._alone():
            self._session = ""
            self._served.let_go()
        timer = threading.Timer(_RETIRED_S, self._server.close)
        timer.daemon = True
        timer.start()

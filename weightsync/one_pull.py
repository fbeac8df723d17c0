"""One run of an installed plan, as a receiver's session makes it. Runs in the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from weightsync import receiver_wire as wire
from weightsync.errors import VerifyMismatch
from weightsync.served import Refusal, Served


class OnePull:
    """One run of the installed plan, in two parts that never raise; ``result`` says how it went.

    ``goes_on``: whether it does so by itself after ``start``, and says on the board when it has landed. ``finish`` may
    then be called at any time, from any thread.
    """

    def __init__(self, served: Served, command: wire.Pull) -> None:
        self._served, self._command = served, command
        self._applied, self._kind, self._error, self._seconds, self._num_bytes = False, "", "", 0.0, 0
        self._fingerprints: list[int] | None = None
        self._copied: Callable[[], float]
        self._landed: Callable[[], None] | None = None

    @property
    def goes_on(self) -> bool:
        return self._landed is not None

    def start(self) -> None:
        """In SGLang's event loop, where nothing else uses the weights."""
        served, command = self._served, self._command
        with self._caught():
            plan = served.planned(command.plan_id)
            served.synchronise()
            self._applied = True
            if command.full:
                served.restore()
            launched_ns = time.monotonic_ns()
            self._copied, self._num_bytes = plan.start(command.timeout_s), plan.num_bytes
            if command.beside:
                self._landed = served.let_go_on(command, self._num_bytes, launched_ns)

    def finish(self) -> None:
        """Wait for its end, finalise, and read back, as far as that was asked for."""
        if self.failed:
            with suppress(Exception):
                self._served.synchronise()  # some of it may have begun
            return
        with self._caught():
            self._seconds = self._copied()
            if self._landed is not None:
                self._landed()
                return
            self._served.finalise()
            if self._command.verify:
                with suppress(VerifyMismatch):  # whoever asks ``verify`` then hears of it
                    self._fingerprints = self._served.start_reading()()

    @property
    def failed(self) -> bool:
        return bool(self._kind)

    def result(self) -> wire.PullResult:
        return wire.PullResult(
            push_id=self._command.push_id,
            started=True,
            applied=self._applied,
            ok=not self.failed,
            kind=self._kind,
            error=self._error,
            step=self._command.step,
            num_bytes=self._num_bytes,
            seconds=self._seconds,
            fingerprints=self._fingerprints,
        )

    @contextmanager
    def _caught(self) -> Iterator[None]:
        """Whatever it is, it must reach the actor and not SGLang."""
        try:
            with self._served.on_device():
                yield
        except Refusal as e:
            self._kind, self._error = e.kind, str(e)
        except Exception as e:
            self._kind, self._error = "failed", f"{type(e).__name__}: {e}"

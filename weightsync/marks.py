"""The training thread's word that its weights are those of a step, and the wait for it. Runs in training workers."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from weightsync.deadline import Deadline
from weightsync.errors import TransferError, TransferTimeout
from weightsync.trainers import Seen
from weightsync.watch import Watch


class Mark(NamedTuple):
    """The weights are those of ``step``, once ``event`` (CUDA) has happened.

    ``seen`` are the tensors themselves, kept until that step has been pushed: in this time they have to stay what they
    are. ``reading`` is the reader's number at that moment.
    """

    step: int
    watch: Watch
    event: Any
    seen: Seen | None
    reading: int


class Marks:
    """The last mark of one rank. ``wait_for`` is called from other threads than ``put``."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._changed = threading.Condition()
        self._last: Mark | None = None
        self._closed = False

    @property
    def step(self) -> int | None:
        last = self._last
        return None if last is None else last.step

    def put(self, mark: Mark) -> None:
        with self._changed:
            self._last = mark
            self._changed.notify_all()

    def forget_tensors(self) -> None:
        """Keep no tensor alive any more."""
        with self._changed:
            if self._last is not None:
                self._last = self._last._replace(seen=None)

    def close(self) -> None:
        """End every wait. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def check_open(self) -> None:
        if self._closed:
            raise self._error("its publisher was closed")

    def wait_for(self, step: int, deadline: Deadline) -> Mark:
        """The mark of ``step``. Raises TransferError if a later one is there, TransferTimeout if it does not come."""
        with self._changed:
            while True:
                self.check_open()
                mark = self._last
                if mark is not None and mark.step == step:
                    return mark
                if mark is not None and mark.step > step:
                    raise self._error(f"it is at step {mark.step} already, step {step} was asked for")
                if deadline.passed():
                    at = f"at step {mark.step}" if mark is not None else "not marked (step_done) at any step"
                    why = f"it is {at}, and did not reach step {step} within {deadline.timeout_s:g} s"
                    raise TransferTimeout(f"training rank {self._rank}: {why}", rank=self._rank, safe_to_retry=True)
                self._changed.wait(deadline.remaining_s())

    def _error(self, why: str) -> TransferError:
        return TransferError(f"training rank {self._rank}: {why}", rank=self._rank)

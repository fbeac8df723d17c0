"""Deadlines: one object handed down a call chain, so that nested waits share one budget."""

from __future__ import annotations

import time
from typing import Any

from weightsync.errors import TransferTimeout


class Deadline:
    """A point in time on the monotonic clock. ``what`` names the operation in the error that ``check`` raises."""

    __slots__ = ("_at", "timeout_s", "what")

    def __init__(self, timeout_s: float, what: str) -> None:
        self.timeout_s = timeout_s
        self.what = what
        self._at = time.monotonic() + timeout_s

    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._at - time.monotonic())

    def passed(self) -> bool:
        return time.monotonic() >= self._at

    def check(self, doing: str, **where: Any) -> None:
        """Raise TransferTimeout, naming ``doing``, if the time is up."""
        if self.passed():
            raise self.error(doing, **where)

    def error(self, doing: str, **where: Any) -> TransferTimeout:
        """The error for this deadline; ``where`` are WeightSyncError's keyword arguments."""
        return TransferTimeout(f"{doing}: no answer within {self.timeout_s:g} s ({self.what})", **where)

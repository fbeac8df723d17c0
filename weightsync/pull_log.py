"""Which pulls a receiver has begun, refused and ended. Runs in the engine; safe between threads."""

from __future__ import annotations

import threading
from collections import OrderedDict

from weightsync.receiver_wire import PullResult, ResultRequest

_MAX_RESULTS = 64


class PullLog:
    """A pull begins at most once, by its push id; once revoked it never begins."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._begun: set[str] = set()
        self._revoked: set[str] = set()
        self._left = ""
        self._results: OrderedDict[str, PullResult] = OrderedDict()

    def begin(self, push_id: str) -> bool:
        """False if that pull has begun before, or was revoked."""
        with self._changed:
            if push_id in self._begun or push_id in self._revoked:
                return False
            self._begun.add(push_id)
            return True

    def revoke(self, push_id: str) -> bool:
        """True if that pull has not begun, and now never will."""
        with self._changed:
            if push_id not in self._begun:
                self._revoked.add(push_id)
                self._changed.notify_all()
            return push_id not in self._begun

    def leave(self, push_id: str) -> None:
        """It goes on by itself, and nobody ends it here before he is asked to: ``result`` need not wait."""
        with self._changed:
            self._left = push_id
            self._changed.notify_all()

    def end(self, result: PullResult) -> None:
        """Keep a result; the oldest are forgotten."""
        with self._changed:
            self._results[result.push_id] = result
            while len(self._results) > _MAX_RESULTS:
                self._results.popitem(last=False)
            self._changed.notify_all()

    def _is_settled(self, push_id: str) -> bool:
        return push_id in self._results or push_id in self._revoked or push_id == self._left

    def result(self, request: ResultRequest) -> PullResult:
        """How a pull went; waits up to ``timeout_s`` for its end. One that never came here has ``started`` false."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_settled(request.push_id), request.timeout_s)
            known = self._results.get(request.push_id)
            begun = request.push_id in self._begun
        if known is not None:
            return known
        return PullResult(
            push_id=request.push_id,
            started=begun,
            applied=begun,
            kind="not_ended" if begun else "not_started",
            error="the pull has not ended" if begun else "the pull did not reach this session of the receiver",
        )

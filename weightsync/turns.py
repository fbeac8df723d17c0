"""The order in which buckets go to one engine, and the first failure, after which none do. Runs in the actor."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from weightsync.deadline import Deadline
from weightsync.errors import TransferError


class Turn:
    """A bucket's place in the order. ``what`` names it, ``group`` is the one by which it goes, as ``same`` did before.

    ``begun``: the sender has begun with it, ``asked``: the engine was asked for it, ``granted``: it takes part,
    ``over``: it has the bytes, and those before. All are set, too, when something failed. ``was_asked``: the engine,
    indeed. ``number``: what the sender calls its broadcast; ``is_finished``: it was told to finish that.
    """

    def __init__(self, what: str = "", group: str = "", before: Turn | None = None, same: Turn | None = None) -> None:
        self.what, self.group = what, group
        self.before, self.same = before, same
        self.after: Turn | None = None
        self.begun, self.asked, self.granted, self.over = (threading.Event() for _ in range(4))
        self.was_asked, self.is_finished, self.number = False, False, -1

    def end(self) -> None:
        """Nobody waits for it any more, nor does it keep those before it."""
        for event in (self.begun, self.asked, self.granted, self.over):
            event.set()
        self.before = self.same = None

    def later(self) -> list[Turn]:
        """Those behind it, in order."""
        found, turn = [], self.after
        while turn is not None:
            found.append(turn)
            turn = turn.after
        return found

    def await_(self, reached: threading.Event, deadline: Deadline) -> None:
        """Wait until another one has come so far, or failed. Raises TransferTimeout."""
        if not reached.wait(deadline.remaining_s()):
            raise deadline.error(f"{self.what}: its turn did not come")


class Turns:
    """Of one engine, whose groups are taken in turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Turn | None = None
        self._last_but_one: Turn | None = None
        self._count = 0
        self.failure: BaseException | None = None

    def next(self, what: str, groups: Sequence[str]) -> Turn:
        """The place behind all others, by one of ``groups``: one or two, or none after a failure."""
        self._count += 1
        same = self._last_but_one if len(groups) > 1 else self._last
        turn = Turn(what, groups[self._count % len(groups)] if groups else "", self._last, same)
        if self._last is not None:
            self._last.after = turn
        self._last, self._last_but_one = turn, self._last
        return turn

    def barrier(self) -> Turn:
        """A place past which the engine is asked for nothing before it is ``granted``; whatever was before is over."""
        turn = Turn()
        for event in (turn.begun, turn.asked, turn.over):
            event.set()
        self._last = self._last_but_one = turn
        return turn

    def ask(self, turn: Turn) -> None:
        """The engine is asked for this one now, unless ``check`` raises."""
        with self._lock:
            self.check(turn)
            turn.was_asked = True

    def check(self, turn: Turn) -> None:
        """Raise TransferError if any one has failed."""
        if self.failure is not None:
            raise TransferError(f"{turn.what} was given up, since another one failed: {self.failure}")

    def fail(self, error: BaseException) -> bool:
        """Nothing more is asked for. True for the first failure."""
        with self._lock:
            first, self.failure = self.failure is None, self.failure or error
        return first

    def stop(self, within_s: float) -> bool:
        """Nothing more is asked for. True if what was is over, or is so in time."""
        self.fail(TransferError("the session was closed"))
        return self._last is None or self._last.over.wait(within_s)

    def reset(self) -> None:
        """Begin anew; all are over."""
        self.failure = self._last = self._last_but_one = None


def nobody() -> Turn:
    """Who nobody has to wait for."""
    turn = Turn()
    turn.end()
    return turn

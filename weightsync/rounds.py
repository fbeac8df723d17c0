"""Moving in rounds: what lies in a part of memory that is filled again during the move is pulled before that happens.

Two things make rounds: an arena smaller than what goes through it, filled part by part by the publishers, and a relay,
whose copies arrive chunk by chunk. A receiver starts one pull; before each of its rounds it waits until the actor has
*released* that round, and says when it has *passed* it. Both ends of that wire are here; no torch.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from weightsync.deadline import Deadline
from weightsync.errors import TransferError, WeightSyncError
from weightsync.spec import Copy, Export, Struct

POLL_S = 1.0
"""How long a receiver waits, at most, before it says that a round is not passed yet."""


class Release(Struct):
    """Round ``number`` of a pull may begin, and those before it; ``stop`` says why none will any more."""

    push_id: str
    number: int
    stop: str = ""


class Ask(Struct):
    """Has that pull passed round ``number``?"""

    push_id: str
    number: int


class Gate:
    """Where one receiver's pull and its actor meet. Releases may come before the pull has begun."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._push_id = ""
        self._past: deque[str] = deque(maxlen=16)  # pulls of before: a release of theirs may still be on its way
        self._released = self._passed = -1
        self._stop = ""
        self._ended = False

    def begin(self, push_id: str) -> None:
        """In the pull: it begins."""
        with self._changed:
            self._turn_to(push_id)

    def end(self, why: str = "the pull has ended") -> None:
        """In the pull, or when its session ends: nothing more is passed or waited for."""
        with self._changed:
            self._ended, self._stop = True, self._stop or why
            self._changed.notify_all()

    def run(self, number: int, pull: Callable[[], float], timeout_s: float) -> float:
        """In the pull: ``pull`` once round ``number`` is released. TransferError if it is stopped or too late."""
        with self._changed:
            released = self._changed.wait_for(lambda: self._released >= number or self._stop, timeout_s)
            if self._stop:
                raise TransferError(f"stopped before round {number}: {self._stop}")
            if not released:
                raise TransferError(f"round {number} was not released within {timeout_s:g} s")
        seconds = pull()
        with self._changed:
            self._passed = number
            self._changed.notify_all()
        return seconds

    def release(self, release: Release) -> None:
        """From the actor."""
        with self._changed:
            if not self._turn_to(release.push_id):
                return
            self._released = max(self._released, release.number)
            self._stop = self._stop or release.stop
            self._changed.notify_all()

    def passed(self, ask: Ask) -> bool:
        """From the actor. Waits up to POLL_S; raises TransferError if the pull has ended before that round."""
        with self._changed:
            if not self._turn_to(ask.push_id):
                raise TransferError("that pull is over, and another one has come")
            self._changed.wait_for(lambda: self._passed >= ask.number or self._ended, POLL_S)
            if self._ended and self._passed < ask.number:
                raise TransferError(f"the pull has ended before round {ask.number}: {self._stop}")
            return self._passed >= ask.number

    def _turn_to(self, push_id: str) -> bool:
        if push_id in self._past:
            return False
        if push_id != self._push_id:
            self._past.append(self._push_id)
            self._push_id, self._released, self._passed, self._stop, self._ended = push_id, -1, -1, "", False
        return True


# ------------------------------------------------------------------------------------------------------ in the actor


class Engine(Protocol):
    """What the actor needs of an engine: of all its ranks together."""

    def release(self, release: Release, deadline: Deadline) -> None: ...

    def passed(self, ask: Ask, deadline: Deadline) -> bool: ...


def num_rounds(exports: Mapping[int, Export]) -> int:
    """In how many rounds the publishers fill their arenas; 1: at once, before the move."""
    return 1 + max((number for export in exports.values() for number in export.rounds), default=0)


def round_of(copy: Copy, exports: Mapping[int, Export]) -> int:
    """The round in which what a copy reads lies readable."""
    rounds = exports[copy.rank].rounds
    return rounds[copy.source.storage] if rounds else 0


def in_rounds(
    copies: Iterable[Copy], number_of: Callable[[Copy], int], num_rounds: int
) -> tuple[list[Copy], list[int]]:
    """``copies`` by round, each round in their order, and how many each of ``num_rounds`` has."""
    numbered = [(number_of(copy), copy) for copy in copies]
    counts = [0] * num_rounds
    for number, _ in numbered:
        counts[number] += 1
    return [copy for _, copy in sorted(numbered, key=lambda pair: pair[0])], counts


class Conductor:
    """Leads one push through its rounds: has the arenas filled, the relays run, and the receivers let on.

    ``relay`` runs one engine's relays of a round, ``fill`` has the publishers fill one. An engine that fails is left
    behind (``leave``); a failure of ours ends every pull, and ``failure`` holds it.
    """

    def __init__(
        self,
        push_id: str,
        engines: Mapping[str, Engine],
        *,
        num_rounds: int,
        num_parts: int,
        fill: Callable[[int], None],
        relay: Callable[[str, int], None],
        deadline: Deadline,
    ) -> None:
        self._push_id, self._engines, self._deadline = push_id, dict(engines), deadline
        self._num_rounds, self._num_parts = num_rounds, num_parts
        self._fill, self._relay = fill, relay
        self.failure: WeightSyncError | None = None

    def run(self) -> None:
        """All rounds, or until no engine is left. Never raises a WeightSyncError."""
        try:
            for number in range(self._num_rounds):
                if number >= self._num_parts:
                    self._wait_for(number - self._num_parts)
                    self._fill(number)
                for url in list(self._engines):
                    self._relay(url, number)
                self._release(Release(self._push_id, number))
        except WeightSyncError as e:
            self.failure = e
            self._release(Release(self._push_id, -1, stop=str(e)))

    def leave(self, url: str) -> None:
        """That engine's pull is over, well or not."""
        self._engines.pop(url, None)

    def _wait_for(self, number: int) -> None:
        """Until every engine has passed that round; one whose pull has ended is left behind."""
        for url, engine in list(self._engines.items()):
            while url in self._engines:
                self._deadline.check(f"waiting for {url} to pull round {number}", engine=url)
                try:
                    if engine.passed(Ask(self._push_id, number), self._deadline):
                        break
                except WeightSyncError:
                    self.leave(url)  # its own pull says why

    def _release(self, release: Release) -> None:
        for url, engine in list(self._engines.items()):
            try:
                engine.release(release, self._deadline)
            except WeightSyncError:
                self.leave(url)

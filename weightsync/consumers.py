"""Who has a training rank's memory mapped, and is told what becomes of it. Both ends of that wire.

A mapping keeps memory: what a trainer frees while an engine has it mapped stays taken. So a publisher that withdraws
calls every actor that it exported to, and returns when those have had it unmapped everywhere. What it marks it tells
them too, without waiting, so that they need not ask before they pause an engine.
"""

from __future__ import annotations

import logging
import threading

from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.rpc import Client
from weightsync.spec import Struct

logger = logging.getLogger(__name__)


class Withdrawn(Struct):
    """A training rank is about to give back what it exported. Answered when nobody has it mapped any more."""

    rank: int
    timeout_s: float


class Marked(Struct):
    """A training rank's weights are those of ``step``, once its GPU has done what was queued."""

    rank: int
    step: int


class Consumers:
    """The publisher's end: the actors that it exported to, by the address of their servers."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._actors: dict[str, Client] = {}

    def add(self, address: str) -> None:
        """An actor is about to map what is exported; "": it will not."""
        if address:
            what = f"the weight-sync actor at {address.split('#')[0]}"
            with self._lock:
                self._actors[address] = self._actors.get(address) or Client(address, what=what, was_there=True)

    def marked(self, step: int) -> None:
        """Tell all of them that ``step`` is marked. Waits for nobody."""
        with self._lock:
            for client in self._actors.values():
                client.tell("marked", Marked(self._rank, step))

    def withdrawn(self, timeout_s: float) -> None:
        """Have all of them unmap it. One that does not answer in time, or is gone, is logged and forgotten."""
        deadline = Deadline(timeout_s, "withdrawing")
        grace = Deadline(timeout_s + 1.0, "withdrawing")  # so that an actor's own, better error arrives
        for client in self._forget():
            try:
                client.call("withdrawn", Withdrawn(self._rank, deadline.remaining_s()), deadline=grace)
            except WeightSyncError as e:
                logger.warning("weightsync: rank %d withdraws memory that may still be mapped: %s", self._rank, e)
            finally:
                client.close()

    def close(self) -> None:
        """Forget all of them. Idempotent."""
        for client in self._forget():
            client.close()

    def _forget(self) -> list[Client]:
        with self._lock:
            actors, self._actors = list(self._actors.values()), {}
        return actors

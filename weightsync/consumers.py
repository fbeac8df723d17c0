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
        self._addresses: set[str] = set()
        self._lines: dict[str, Client] = {}

    def add(self, address: str) -> None:
        """An actor is about to map what is exported; "": it will not."""
        if address:
            with self._lock:
                self._addresses.add(address)
                if address not in self._lines:
                    self._lines[address] = _client(address)

    def marked(self, step: int) -> None:
        """Tell all of them that ``step`` is marked. Waits for nobody; who is gone is not told again."""
        with self._lock:
            for address, line in list(self._lines.items()):
                if not line.tell("marked", Marked(self._rank, step)):
                    self._lines.pop(address).close()

    def withdrawn(self, timeout_s: float) -> None:
        """Have all of them unmap it. One that does not answer in time, or is gone, is logged and forgotten."""
        with self._lock:
            told, self._addresses = self._addresses, set()
        deadline = Deadline(timeout_s, "withdrawing")
        grace = Deadline(timeout_s + 1.0, "withdrawing")  # so that an actor's own, better error arrives
        for address in told:
            client = _client(address)
            try:
                client.call("withdrawn", Withdrawn(self._rank, deadline.remaining_s()), deadline=grace)
            except WeightSyncError as e:
                logger.warning("weightsync: rank %d withdraws memory that may still be mapped: %s", self._rank, e)
            finally:
                client.close()

    def close(self) -> None:
        """Forget all of them. Idempotent."""
        with self._lock:
            lines, self._lines, self._addresses = list(self._lines.values()), {}, set()
        for line in lines:
            line.close()


def _client(address: str) -> Client:
    return Client(address, what=f"the weight-sync actor at {address.split('#')[0]}", was_there=True)

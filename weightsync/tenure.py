"""Whose turn it is with the trainer's mapped memory: whoever maps, reads or unmaps it does so alone. In the actor."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from weightsync.deadline import Deadline


class Tenure:
    """A lock with deadlines."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    @contextmanager
    def alone(self, deadline: Deadline, what: str) -> Iterator[None]:
        """Raises TransferTimeout, which says ``what`` took so long."""
        if not self._lock.acquire(timeout=deadline.remaining_s()):
            raise deadline.error(what)
        try:
            yield
        finally:
            self._lock.release()

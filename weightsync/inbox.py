"""Where receivers announce themselves to the actor that attached them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from weightsync.consumers import Marked, Withdrawn
from weightsync.deadline import Deadline
from weightsync.receiver_wire import Announcement

logger = logging.getLogger(__name__)


class Inbox:
    """Where receivers announce themselves. ``Doorbell`` is what they call; ``wait`` is for the actor's own threads."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._announced: dict[str, dict[int, Announcement]] = {}

    def put(self, announcement: Announcement) -> None:
        with self._arrived:
            self._announced.setdefault(announcement.session, {})[announcement.tp_rank] = announcement
            self._arrived.notify_all()

    def wait(self, session: str, count: int, deadline: Deadline) -> list[Announcement]:
        """The ``count`` announcements of a session, by TP rank; TransferTimeout says which ranks are missing."""
        with self._arrived:
            complete = self._arrived.wait_for(
                lambda: len(self._announced.get(session, {})) >= count, timeout=deadline.remaining_s()
            )
            announced = self._announced.pop(session, {})
        if not complete:
            missing = [r for r in range(count) if r not in announced]
            raise deadline.error(f"the receivers of TP rank(s) {missing} did not announce themselves")
        return [announced[r] for r in range(count)]


class Doorbell:
    """The methods that receivers and publishers call at the actor's own rpc server.

    ``let_go`` has the trainer's memory unmapped everywhere, within so many seconds; ``on_marked`` is told of marks.
    """

    def __init__(self, inbox: Inbox, let_go: Callable[[float], None], on_marked: Callable[[Marked], None]) -> None:
        self._inbox = inbox
        self._let_go = let_go
        self._on_marked = on_marked

    def announce(self, announcement: Announcement) -> None:
        """A receiver was attached, or says why it could not be."""
        self._inbox.put(announcement)

    def withdrawn(self, request: Withdrawn) -> None:
        """A training rank is about to give its memory back. Raises TransferTimeout while a push is under way."""
        self._let_go(request.timeout_s)

    def marked(self, marked: Marked) -> None:
        """A training rank has marked a step."""
        self._on_marked(marked)

    def unknown(self, announcement: Announcement) -> None:
        """A receiver was sent a pull of a session that it does not know: its process is not the one attached."""
        logger.warning("boot %s does not know session %s", announcement.boot_id, announcement.session)

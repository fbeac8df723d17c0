"""Where receivers announce themselves to the actor that attached them."""

from __future__ import annotations

import logging
import threading

from weightsync.deadline import Deadline
from weightsync.receiver import Announcement

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
    """The methods that receivers call at the actor's own rpc server."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def announce(self, announcement: Announcement) -> None:
        """A receiver was attached, or says why it could not be."""
        self._inbox.put(announcement)

    def unknown(self, announcement: Announcement) -> None:
        """A receiver was sent a pull of a session that it does not know: its process is not the one attached."""
        logger.warning("boot %s does not know session %s", announcement.boot_id, announcement.session)

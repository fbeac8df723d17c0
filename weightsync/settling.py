"""What becomes of an engine when a push fails. Runs in the weight-sync actor; see ``push``."""

from __future__ import annotations

from contextlib import suppress

from weightsync.config import Config
from weightsync.deadline import Deadline
from weightsync.errors import EngineLost, EngineRejected, WeightSyncError
from weightsync.fleet import EngineLink
from weightsync.pausing import Pausing

CLEANUP_S = 5.0
"""What it may take, and no more than a quarter of the push's time."""


class Settling:
    """Of one push, whose time is ``timeout_s``."""

    def __init__(self, timeout_s: float, *, config: Config, pausing: Pausing) -> None:
        self.within_s = min(CLEANUP_S, timeout_s / 4)
        self._config = config
        self._pausing = pausing

    def settle(self, link: EngineLink) -> None:
        """Bring one engine to the state that its progress allows, in bounded time, whatever it answers."""
        deadline = Deadline(self.within_s, "cleaning up after a failed push")
        if link.progress.applied and not link.progress.committed:
            link.state, link.held = "fenced", True
            if self._config.pause == "none":  # nothing was paused: a fenced engine must not serve
                with suppress(WeightSyncError):
                    link.client.pause("abort", deadline)
            return
        try:
            self._pausing.settle(link, self.within_s)
            if link.progress.began:
                with suppress(EngineRejected):  # it had not begun; one that was left open is closed by the next begin
                    link.client.end(deadline)
            if link.progress.paused and (link.progress.committed or not link.held):
                link.client.resume(deadline)
                link.held = False
        except EngineLost as e:
            link.state, link.error = "lost", link.error or str(e)
        except WeightSyncError as e:
            link.state, link.held, link.error = "fenced", True, link.error or str(e)

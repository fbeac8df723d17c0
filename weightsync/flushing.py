"""When an engine's KV cache is flushed in a push. Runs in the weight-sync actor.

After an abort that had nothing to end, a flush is as good as granted, and any time before the commit is right for it:
it goes beside the move: behind the call that begins a pull which then goes on by itself, else before the calls that
keep the engine's event loop. Where requests may still be about, it comes right after the pause, so that one that is
refused finds the engine as it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from weightsync.config import Config
from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.fanout import Fanout
from weightsync.fleet import EngineLink

BEHIND_S = 1e-3
"""A flush takes a shorter way through the engine's server than an update that was sent before it."""


class Flushing:
    """The flushes of one push."""

    def __init__(self, *, config: Config, fanout: Fanout, deadline: Deadline) -> None:
        self._config = config
        self._fanout = fanout
        self._deadline = deadline
        self._later: set[str] = set()
        self._begun: dict[str, Future[WeightSyncError | None]] = {}

    def after_pause(self, link: EngineLink) -> None:
        """Flush now, if it cannot be beside. Raises what the engine's call raises."""
        if self._config.pause == "abort" and not link.had_requests:
            self._later.add(link.url)
        elif self._config.pause != "in_place":
            self._flush(link)

    def beside(self, link: EngineLink) -> None:
        """Begin now, if it was left for later and not done before."""
        self._begin(self._flush, link)

    def behind(self, link: EngineLink) -> None:
        """As ``beside``, but so that a call which is on its way already comes to the engine's event loop first."""
        self._begin(self._flush_behind, link)

    def outcomes(self, links: Sequence[EngineLink]) -> list[WeightSyncError | None]:
        """Wait for the flushes of ``links`` that are beside, and for no other engine's; an outcome a link."""
        for link in links:
            self.beside(link)
        return [self._begun[link.url].result() if link.url in self._begun else None for link in links]

    def _begin(self, flush: Callable[[EngineLink], None], link: EngineLink) -> None:
        if link.url in self._later and link.url not in self._begun:
            self._begun[link.url] = self._fanout.begin(flush, link)

    def _flush_behind(self, link: EngineLink) -> None:
        time.sleep(BEHIND_S)
        self._flush(link)

    def _flush(self, link: EngineLink) -> None:
        link.client.flush(self._deadline, wait=self._config.on_flush_refused == "wait")

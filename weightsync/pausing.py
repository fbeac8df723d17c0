"""When an engine is paused in a push. Runs in the weight-sync actor.

As a rule when all is published: an engine that generates loses no time to a trainer that is late. One that shares its
GPU with a training rank has nothing to lose while that rank publishes a step that it has marked already, so its pause
goes beside; but not where the last one had requests to end, which a publish that fails would have ended for nothing.
What the engine will be asked for next is written while it pauses, all but its last byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from weightsync.config import Config
from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.fanout import Fanout
from weightsync.fleet import EngineLink
from weightsync.flushing import Flushing

SLOW_PAUSE_S = 0.5


class Pausing:
    """The pauses of one push. ``may_be_beside``: whether this engine may be paused beside ``publish``.

    ``begin`` is called while an engine pauses that had no requests last time, if all is published.
    """

    def __init__(
        self,
        step: int,
        push_id: str,
        *,
        config: Config,
        fanout: Fanout,
        deadline: Deadline,
        flushing: Flushing,
        begin: Callable[[EngineLink], None],
        may_be_beside: Callable[[EngineLink], bool],
    ) -> None:
        self._step, self._push_id = step, push_id
        self._config = config
        self._fanout = fanout
        self._deadline = deadline
        self._flushing = flushing
        self._begin = begin
        self._may_be_beside = may_be_beside
        self._begun: dict[str, Future[WeightSyncError | None]] = {}
        self.notes: list[str] = []

    def before_publish(self, links: Sequence[EngineLink]) -> None:
        """Begin now, where it may be beside."""
        for link in links:
            if self._config.pause != "none" and not link.had_requests and self._may_be_beside(link):
                self._begun[link.url] = self._fanout.begin(partial(self._pause, beside=True), link)

    def outcomes(self, links: Sequence[EngineLink]) -> list[WeightSyncError | None]:
        """Pause all of ``links`` that are not paused yet, and flush those that are flushed then; an outcome a link."""
        return self._fanout.each(self._paused, links)

    def settle(self, link: EngineLink, within_s: float) -> None:
        """Wait for a pause that was begun: what undoes it must not overtake it. TransferTimeout if it does not end."""
        if link.url in self._begun:
            try:
                self._begun[link.url].result(within_s)
            except TimeoutError:
                what = "pausing this engine while the trainer published"
                raise Deadline(within_s, "cleaning up").error(what, engine=link.url, phase="pause") from None

    def undo(self, link: EngineLink, within_s: float) -> None:
        """Let an engine that was paused beside work again: nothing is to be moved now."""
        self.settle(link, within_s)
        if link.progress.paused and not link.held:
            link.client.resume(Deadline(within_s, "letting an engine go on"))
        link.progress.paused = False

    def _paused(self, link: EngineLink) -> None:
        if link.url not in self._begun:
            self._pause(link)
        elif (error := self._begun[link.url].result()) is not None:  # it began before any that is waited for here
            raise error
        self._flushing.after_pause(link)

    def _pause(self, link: EngineLink, beside: bool = False) -> None:
        link.progress.paused = self._config.pause != "none" or link.held  # before the call: it may still take effect
        drained = self._drain(link)
        started = time.perf_counter()
        if self._config.pause != "none":
            link.client.pause(self._config.pause, self._deadline, sent=partial(self._prepare, link, beside))
        elif link.held:  # it must not serve, and is pulled into beside its event loop
            link.client.pause("abort", self._deadline)
        if link.progress.push_id == self._push_id:  # and not so late that another push is under way
            link.had_requests = drained or time.perf_counter() - started > SLOW_PAUSE_S
        if self._config.pause == "in_place":
            self.notes.append(f"{link.url}: pause in_place keeps the KV cache of the old weights")

    def _prepare(self, link: EngineLink, beside: bool) -> None:
        """While the engine pauses: what it will be asked for next, or what others can begin with."""
        if link.pulls:
            link.prepare_pull(self._push_id, self._step, self._deadline)
        elif not beside and not link.had_requests:
            self._begin(link)

    def _drain(self, link: EngineLink) -> bool:
        """End requests in flight, where the last pause had to wait for some: SGLang looks once a second only."""
        if self._config.pause != "abort" or not link.had_requests:
            return False
        num_requests = link.client.num_requests(self._deadline)
        if num_requests:
            link.client.drain(num_requests, self._deadline)
        return bool(num_requests)

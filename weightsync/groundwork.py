"""What pushes stand on: the trainer's memory as it is exported, a plan over it, routes that have it mapped.

Laid anew when engines come or go and when the trainer's memory has moved; let go of when a rank is about to give that
memory back. Runs in the weight-sync actor.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from weightsync import collector
from weightsync.config import Config
from weightsync.deadline import Deadline
from weightsync.fanout import Fanout
from weightsync.fleet import EngineLink
from weightsync.plan import Plan, build_plan, needed_dtypes
from weightsync.route_kinds import make_route
from weightsync.routes import Route, refuse_rounds
from weightsync.spec import Export, Layout
from weightsync.tenure import Tenure
from weightsync.workers import Workers


class SourcesMoved(Exception):
    """What a rank had exported is void: withdrawn, offloaded and back, a new allocation."""


class Groundwork:
    """Of one trainer. ``lay`` comes first. ``reply``: where ranks reach this actor before they give memory back."""

    def __init__(self, config: Config, workers: Workers, fanout: Fanout, *, reply: str) -> None:
        self.routes: dict[str, Route] = {}
        self.plan: Plan
        self._config = config
        self._workers = workers
        self._fanout = fanout
        self._reply = reply
        self._tenure = Tenure()
        self._exports: dict[int, Export] = {}

    @collector.paused()
    def lay(self, links: list[EngineLink], deadline: Deadline) -> str:
        """Export what ``links`` need, plan, and prepare every route. Moves nothing. Says what took how long.

        After a failure nothing is mapped: what is, is partly old and partly new.
        """
        with self._tenure.alone(deadline, "the trainer's memory is being unmapped"):
            times = [time.perf_counter()]
            try:
                for step in (self._export, self._make_plan, self._prepare):
                    step(links, deadline)
                    times.append(time.perf_counter())
            except BaseException:
                self._void()
                raise
        took = [f"{b - a:.3f} s to {what}" for what, a, b in zip(("export", "plan", "map"), times, times[1:])]
        return f"mapped anew: {', '.join(took)}"

    def let_go(self, timeout_s: float) -> None:
        """Have the trainer's memory unmapped everywhere: a rank is about to give it back. The next push maps anew."""
        deadline = Deadline(timeout_s, "letting go of the trainer's memory")
        with self._tenure.alone(deadline, "a push is under way"):
            self._void()
            self._fanout.all(lambda route: route.let_go(deadline), list(self.routes.values()))

    def is_mapped(self) -> bool:
        """Whether a push can stand on it as it is, as far as this actor knows."""
        return bool(self._exports) and all(export.generation >= 0 for export in self._exports.values())

    @contextmanager
    def kept(self, deadline: Deadline) -> Iterator[None]:
        """Nobody unmaps anything meanwhile. SourcesMoved if somebody did before."""
        with self._tenure.alone(deadline, "the trainer's memory is being unmapped"):
            if not self.is_mapped():
                raise SourcesMoved("it was withdrawn")
            yield

    def generations(self) -> dict[int, int]:
        """By rank, which of its exports this is."""
        return {rank: export.generation for rank, export in self._exports.items()}

    def notes(self) -> list[str]:
        """Of the exports."""
        return [f"training rank {rank}: {note}" for rank, e in self._exports.items() for note in e.notes]

    def close(self) -> None:
        """Unmap everything. Idempotent."""
        for route in self.routes.values():
            route.close()
        self.routes = {}

    def _void(self) -> None:
        """Have the next push map everything anew."""
        self._exports = {r: msgspec.structs.replace(e, generation=-1) for r, e in self._exports.items()}

    def _export(self, links: list[EngineLink], deadline: Deadline) -> None:
        workers, config = self._workers, self._config
        own = {shard.tensor: shard.dtype for d in workers.descriptions.values() for shard in d.shards}
        dtypes = own | needed_dtypes(_layouts(links), workers.rules, config.rename)
        transport = "cuda_ipc" if any(workers.devices().values()) else "shm"
        self._exports = workers.export(dtypes, transport, deadline, arena_bytes=config.arena_bytes, reply=self._reply)

    def _make_plan(self, links: list[EngineLink], deadline: Deadline) -> None:
        workers, config = self._workers, self._config
        self.plan = build_plan(
            {r: e.shards for r, e in self._exports.items()},
            workers.rules,
            _layouts(links),
            config=config,
            source_devices=workers.devices(),
            source_hosts=workers.hosts(),
        )
        if config.verify == "fingerprint":
            self.plan.prepare_to_verify()

    def _prepare(self, links: list[EngineLink], deadline: Deadline) -> None:
        refuse_rounds(links, self._exports)
        for name in dict.fromkeys(link.route for link in links):
            if name not in self.routes:
                self.routes[name] = make_route(name, self._fanout, self._config, self._workers)
            there = [link for link in links if link.route == name and link.state != "lost"]
            self.routes[name].prepare(there, self.plan, self._exports, deadline)


def _layouts(links: list[EngineLink]) -> dict[str, list[Layout]]:
    """By engine, what the ranks of those with a receiver need."""
    return {link.url: link.layouts for link in links if link.layouts}

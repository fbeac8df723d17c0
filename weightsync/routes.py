"""How bytes get from trainer memory into engines: every route executes the same plan. Runs in the weight-sync actor."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Protocol

from weightsync import receiver as wire
from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.fanout import Fanout
from weightsync.fleet import EngineLink
from weightsync.plan import Plan
from weightsync.spec import Export

Outcome = WeightSyncError | None


class Route(Protocol):
    """One way to move. ``prepare`` is called whenever plan or trainer memory changed, ``move`` at every push."""

    def prepare(self, links: list[EngineLink], plan: Plan, exports: dict[int, Export], deadline: Deadline) -> None: ...

    def move(self, links: list[EngineLink], step: int, deadline: Deadline) -> list[Outcome]:
        """Move one step into every link; an outcome a link. Sets ``progress.applied`` as soon as bytes may land."""

    def close(self) -> None: ...


class PullRoute:
    """``shm`` and ``direct``: the receiver inside each engine rank pulls its slices from mapped trainer memory.

    What a trace could not follow (opaque parameters) goes first, by ``rest``: the bucket route, limited to tensors that
    no need names.
    """

    def __init__(self, fanout: Fanout, rest: Callable[[Callable[[str], bool]], Route]) -> None:
        self._fanout = fanout
        self._make_rest = rest
        self._rest: Route | None = None

    def prepare(self, links: list[EngineLink], plan: Plan, exports: dict[int, Export], deadline: Deadline) -> None:
        self.close()
        install_plan(self._fanout, links, plan, exports, deadline, pulls=True)
        opaque = [link for link in links if link.has_opaque]
        if opaque:
            traced = {need.tensor for link in opaque for layout in link.layouts for need in layout.needs}
            self._rest = self._make_rest(lambda name: name not in traced)
            self._rest.prepare(opaque, plan, exports, deadline)

    def move(self, links: list[EngineLink], step: int, deadline: Deadline) -> list[Outcome]:
        push_id = secrets.token_hex(8)
        opaque = [link for link in links if link.has_opaque]
        failed: dict[str, Outcome] = {}
        if opaque:
            assert self._rest is not None, "prepare is called whenever the engines change"
            outcomes = self._rest.move(opaque, step, deadline)
            failed = {link.url: error for link, error in zip(opaque, outcomes, strict=True) if error is not None}

        def pull(link: EngineLink) -> Outcome:
            if link.url not in failed:
                link.pull(push_id, step, deadline)
            return failed.get(link.url)

        return self._fanout.each(pull, links)

    def close(self) -> None:
        if self._rest is not None:
            self._rest.close()
        self._rest = None


def install_plan(
    fanout: Fanout,
    links: list[EngineLink],
    plan: Plan,
    exports: dict[int, Export],
    deadline: Deadline,
    *,
    pulls: bool,
) -> None:
    """Give every receiver of ``links`` its part of the plan; with ``pulls`` false only what it is verified by."""
    plan_id = secrets.token_hex(8)

    def install(link: EngineLink) -> None:
        if not link.has_receiver:
            return
        rank_plans = [plan.rank_plan(link.url, layout.rank) for layout in link.layouts]
        installs = [
            wire.Install(
                plan_id=plan_id,
                segments={r: e.segments for r, e in exports.items()} if pulls else {},
                shards={r: e.shards for r, e in exports.items()} if pulls else {},
                plan=p,
                pulls=pulls,
            )
            for p in rank_plans
        ]
        link.install(plan_id, installs, deadline)

    fanout.all(install, links)

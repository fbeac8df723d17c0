"""How bytes get from trainer memory into engines: every route executes the same plan. Runs in the weight-sync actor."""

from __future__ import annotations

import secrets
from typing import Protocol

from weightsync import receiver as wire
from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.fanout import Fanout
from weightsync.fleet import EngineLink
from weightsync.plan import Plan
from weightsync.spec import Export


class Route(Protocol):
    """One way to move. ``prepare`` is called whenever the plan or the trainer's memory changed, ``move`` at every push."""

    def prepare(self, links: list[EngineLink], plan: Plan, exports: dict[int, Export], deadline: Deadline) -> None: ...

    def move(self, links: list[EngineLink], step: int, deadline: Deadline) -> list[WeightSyncError | None]:
        """Move one step into every link; an outcome a link. Sets ``link.progress.applied`` as soon as bytes may land."""

    def close(self) -> None: ...


class PullRoute:
    """``shm`` and ``direct``: the receiver inside each engine rank pulls its slices from mapped trainer memory."""

    def __init__(self, fanout: Fanout) -> None:
        self._fanout = fanout

    def prepare(self, links: list[EngineLink], plan: Plan, exports: dict[int, Export], deadline: Deadline) -> None:
        install_plan(self._fanout, links, plan, exports, deadline, pulls=True)

    def move(self, links: list[EngineLink], step: int, deadline: Deadline) -> list[WeightSyncError | None]:
        push_id = secrets.token_hex(8)
        return self._fanout.each(lambda link: link.pull(push_id, step, deadline), links)

    def close(self) -> None:
        return


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

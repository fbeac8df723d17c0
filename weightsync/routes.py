"""How bytes get from trainer memory into engines: every route executes the same plan. Runs in the weight-sync actor."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from weightsync import receiver as wire
from weightsync.deadline import Deadline
from weightsync.devices import contexts_elsewhere
from weightsync.errors import WeightSyncError
from weightsync.fanout import Fanout
from weightsync.fleet import EngineLink
from weightsync.plan import Plan
from weightsync.relay import Relay, masked
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
        self._relays: dict[tuple[str, int], Relay] = {}

    def prepare(self, links: list[EngineLink], plan: Plan, exports: dict[int, Export], deadline: Deadline) -> None:
        if self._rest is not None:
            self._rest.close()
        opaque = [link for link in links if link.has_opaque]
        if opaque:  # first: it installs, for verification alone, what the pull's own plan then replaces
            traced = {need.tensor for link in opaque for layout in link.layouts for need in layout.needs}
            self._rest = self._make_rest(lambda name: name not in traced)
            self._rest.prepare(opaque, plan, exports, deadline)
        before, self._relays = self._relays, _relays(links, plan, exports)
        install_plan(self._fanout, links, plan, exports, deadline, pulls=True, relays=self._relays)
        _close(before)  # only now has no receiver an arena of theirs mapped
        self._fanout.all(lambda link: _note_contexts(link, self._relays, deadline), links)

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
                self._run_relays(link)
                link.pull(push_id, step, deadline)
            return failed.get(link.url)

        return self._fanout.each(pull, links)

    def _run_relays(self, link: EngineLink) -> None:
        relays = [relay for (url, _), relay in self._relays.items() if url == link.url]
        if relays:
            link.progress.seconds["relay"] = max(self._fanout.all(lambda relay: relay.run(), relays))

    def close(self) -> None:
        if self._rest is not None:
            self._rest.close()
        self._rest = None
        _close(self._relays)
        self._relays = {}


def _relays(links: list[EngineLink], plan: Plan, exports: dict[int, Export]) -> dict[tuple[str, int], Relay]:
    """By engine and rank, the relays that masked GPUs make necessary; each engine's note says how much and why."""
    relays: dict[tuple[str, int], Relay] = {}
    for link in links:
        for layout in link.layouts:
            rank_plan = plan.rank_plan(link.url, layout.rank)
            if layout.device and masked(rank_plan, exports, layout.visible):
                relay = Relay(rank_plan, exports, device=layout.device, visible=layout.visible)
                relays[link.url, layout.rank] = relay
                note = (
                    f"{link.url}: rank {layout.rank} sees only {', '.join(layout.visible)}: {relay.num_bytes} bytes "
                    "are relayed through an arena on its GPU"
                )
                link.notes += [note] if note not in link.notes else []
    return relays


_CONTEXT = ": a context "


def _note_contexts(link: EngineLink, relays: dict[tuple[str, int], Relay], deadline: Deadline) -> None:
    """Say in the engine's notes which contexts reading peers' memory has made, each some hundred MB of a GPU."""
    found = link.contexts(deadline)
    if any(url == link.url for url, _ in relays):
        found += [f"the actor, which relays: {text}" for text in contexts_elsewhere("")]
    link.notes = [note for note in link.notes if _CONTEXT not in note] + found


def _close(relays: dict[tuple[str, int], Relay]) -> None:
    for relay in relays.values():
        relay.close()


def install_plan(
    fanout: Fanout,
    links: list[EngineLink],
    plan: Plan,
    exports: dict[int, Export],
    deadline: Deadline,
    *,
    pulls: bool,
    relays: Mapping[tuple[str, int], Relay] = MappingProxyType({}),
) -> None:
    """Give every receiver of ``links`` its part of the plan; with ``pulls`` false only what it is verified by."""
    plan_id = secrets.token_hex(8)
    segments = {r: e.segments for r, e in exports.items()} if pulls else {}
    shards = {r: e.shards for r, e in exports.items()} if pulls else {}

    def install(link: EngineLink) -> None:
        if not link.has_receiver:
            return
        installs = []
        for layout in link.layouts:
            relay = relays.get((link.url, layout.rank))
            installs.append(
                wire.Install(
                    plan_id=plan_id,
                    segments=segments | relay.segments if relay else segments,
                    shards=shards | relay.shards if relay else shards,
                    plan=relay.plan if relay else plan.rank_plan(link.url, layout.rank),
                    pulls=pulls,
                )
            )
        link.install(plan_id, installs, deadline)

    fanout.all(install, links)

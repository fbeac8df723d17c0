"""How bytes get from trainer memory into engines: every route executes the same plan. Runs in the weight-sync actor."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Protocol

import msgspec

from weightsync import receiver_wire as wire
from weightsync.deadline import Deadline
from weightsync.devices import contexts_elsewhere
from weightsync.errors import ConfigError, WeightSyncError
from weightsync.fanout import Fanout
from weightsync.fleet import EngineLink
from weightsync.plan import Plan
from weightsync.relay import RELAY_RANK, Relay, any_masked, masked
from weightsync.rounds import Conductor, in_rounds, num_rounds, round_of
from weightsync.spec import Copy, Export, RankPlan
from weightsync.workers import Workers

Outcome = WeightSyncError | None


class Route(Protocol):
    """One way to move. ``prepare`` is called whenever plan or trainer memory changed, ``move`` at every push."""

    def prepare(self, links: list[EngineLink], plan: Plan, exports: dict[int, Export], deadline: Deadline) -> None: ...

    def begin(self, link: EngineLink, deadline: Deadline) -> None:
        """While an engine pauses, all being published: begin with what needs no engine."""

    def end_push(self) -> None:
        """Call off what was begun and not moved. Idempotent."""

    def move(self, links: list[EngineLink], step: int, deadline: Deadline) -> list[Outcome]:
        """Move one step into every link; an outcome a link. Sets ``progress.applied`` as soon as bytes may land."""

    def let_go(self, deadline: Deadline) -> None:
        """Have nobody map the trainer's memory any more; ``prepare`` comes before the next move. Idempotent.

        Raises what went wrong with an engine, when all others have let go.
        """

    def close(self) -> None: ...


class PullRoute:
    """``shm`` and ``direct``: the receiver inside each engine rank pulls its slices from mapped trainer memory.

    What a trace could not follow (opaque parameters) goes first, by ``rest``: the bucket route, limited to tensors that
    no need names.
    """

    def __init__(self, fanout: Fanout, rest: Callable[[Callable[[str], bool]], Route], workers: Workers) -> None:
        self._fanout = fanout
        self._workers = workers
        self._make_rest = rest
        self._rest: Route | None = None
        self._relays: dict[tuple[str, int], Relay] = {}
        self._num_rounds: dict[str, int] = {}
        self._num_parts = 1
        self._relayed_s: dict[str, float] = {}
        self._links: list[EngineLink] = []

    def prepare(self, links: list[EngineLink], plan: Plan, exports: dict[int, Export], deadline: Deadline) -> None:
        self._links = links
        if self._rest is not None:
            self._rest.close()
        opaque = [link for link in links if link.has_opaque]
        if opaque:  # first: it installs, for verification alone, what the pull's own plan then replaces
            traced = {need.tensor for link in opaque for layout in link.layouts for need in layout.needs}
            self._rest = self._make_rest(lambda name: name not in traced)
            self._rest.prepare(opaque, plan, exports, deadline)
        before, self._relays = self._relays, _relays(links, plan, exports)
        self._num_rounds = {link.url: _num_rounds(link.url, exports, self._relays) for link in links}
        at_once = max(self._num_rounds.values(), default=0)
        self._num_parts = min((e.num_parts for e in exports.values() if e.rounds), default=at_once)
        install_plan(
            self._fanout, links, plan, exports, deadline, pulls=True, relays=self._relays, num_rounds=self._num_rounds
        )
        _close(before)  # only now has no receiver an arena of theirs mapped
        relayed = {url for url, _ in self._relays}
        self._fanout.all(lambda link: note_contexts(link, link.url in relayed, deadline), links)

    def begin(self, link: EngineLink, deadline: Deadline) -> None:
        """Nothing: receivers pull."""

    def end_push(self) -> None:
        """Nothing."""

    def move(self, links: list[EngineLink], step: int, deadline: Deadline) -> list[Outcome]:
        opaque = [link for link in links if link.has_opaque]
        failed: dict[str, Outcome] = {}
        if opaque:
            assert self._rest is not None, "prepare is called whenever the engines change"
            outcomes = self._rest.move(opaque, step, deadline)
            failed = {link.url: error for link, error in zip(opaque, outcomes, strict=True) if error is not None}

        pulled = [link for link in links if link.url not in failed]
        led = [link for link in pulled if self._num_rounds[link.url]]
        conductor = self._conductor(step, led, deadline)
        conducting = self._fanout.submit(conductor.run) if led else None

        def pull(link: EngineLink) -> None:
            try:
                link.pull(step, deadline)
            finally:
                conductor.leave(link.url)

        found = failed | dict(zip([li.url for li in pulled], self._fanout.each(pull, pulled), strict=True))
        if conducting is not None:
            conducting.result()
        for link in led:
            if found[link.url] is not None and conductor.failure is not None:
                found[link.url] = conductor.failure  # why its pull was stopped
            if link.url in self._relayed_s:
                link.progress.seconds["relay"] = self._relayed_s[link.url]
        return [found[link.url] for link in links]

    def _conductor(self, step: int, links: list[EngineLink], deadline: Deadline) -> Conductor:
        return Conductor(
            next((link.progress.push_id for link in links), ""),
            {link.url: link.receivers for link in links},
            num_rounds=max((self._num_rounds[link.url] for link in links), default=0),
            num_parts=self._num_parts,
            fill=lambda number: self._workers.fill(step, number, deadline),
            relay=self._run_relays,
            deadline=deadline,
        )

    def _run_relays(self, url: str, number: int) -> None:
        relays = [relay for (engine, _), relay in self._relays.items() if engine == url]
        if relays:
            took = max(self._fanout.all(lambda relay: relay.run(number), relays))
            self._relayed_s[url] = took + (self._relayed_s.get(url, 0.0) if number else 0.0)

    def let_go(self, deadline: Deadline) -> None:
        try:
            self._fanout.all(lambda link: link.receivers.let_go(deadline), self._links)
            self._links = []
        finally:
            self.close()

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
            if not layout.device or not any_masked(exports, layout.visible):
                continue  # nor are its copies listed, of which there may be thousands
            rank_plan = plan.rank_plan(link.url, layout.rank)
            if masked(rank_plan, exports, layout.visible):
                relay = Relay(rank_plan, exports, device=layout.device, visible=layout.visible)
                relays[link.url, layout.rank] = relay
                lie = " and ".join(f"{count} bytes on {gpu}" for gpu, count in relay.num_bytes_on.items())
                note = (
                    f"{link.url}: rank {layout.rank} sees only {', '.join(layout.visible)}: {lie} are relayed through "
                    f"an arena on its GPU, in {relay.num_rounds} rounds"
                )
                link.notes += [note] if note not in link.notes else []
    return relays


def refuse_rounds(links: list[EngineLink], exports: dict[int, Export]) -> None:
    """Raise ConfigError if an arena is filled in rounds and an engine's route reads all of it at any time."""
    needed = {rank: export.notes for rank, export in exports.items() if any(export.rounds)}
    for link in links:
        if needed and (link.route not in ("direct", "shm") or link.has_opaque):
            rank, notes = next(iter(needed.items()))
            what = "buckets of opaque parameters" if link.has_opaque else f"route {link.route}"
            raise ConfigError(
                f"{what} cannot be read from an arena that is filled in rounds, as that of training rank {rank} is: "
                f"set arena_bytes to 0, or to what it needs ({notes[-1]})",
                engine=link.url,
            )


def _num_rounds(url: str, exports: dict[int, Export], relays: dict[tuple[str, int], Relay]) -> int:
    """In how many rounds an engine's ranks pull; 0: at once, as nothing is filled or relayed during the move."""
    filled = num_rounds(exports)
    relayed = max((relay.num_rounds for (engine, _), relay in relays.items() if engine == url), default=0)
    return max(filled if filled > 1 else 0, relayed)


_CONTEXT = ": a context "


def note_contexts(link: EngineLink, by_actor: bool, deadline: Deadline) -> None:
    """Say in the engine's notes which contexts reading peers' memory has made, each some hundred MB of a GPU.

    ``by_actor``: say also which ones the actor has, which copies for this engine.
    """
    found = link.receivers.contexts(deadline)
    if by_actor:
        found += [f"the actor, which copies: {text}" for text in contexts_elsewhere("")]
    link.notes = [note for note in link.notes if _CONTEXT not in note] + found


def _round_of(relay: Relay | None, exports: dict[int, Export], copy: Copy) -> int:
    """In which round what a copy reads is there."""
    return relay.round_of(copy) if relay is not None and copy.rank == RELAY_RANK else round_of(copy, exports)


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
    num_rounds: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Give every receiver of ``links`` its part of the plan; with ``pulls`` false only what it is verified by.

    ``num_rounds``: by engine, in how many it pulls; 0 or missing: at once.
    """
    plan_id = secrets.token_hex(8)
    segments = {r: e.segments for r, e in exports.items()} if pulls else {}
    shards = {r: e.shards for r, e in exports.items()} if pulls else {}

    def install(link: EngineLink) -> None:
        if not link.has_receiver:
            return
        installs = []
        for layout in link.layouts:
            relay = relays.get((link.url, layout.rank))
            own, counts = _by_round(
                relay.plan if relay else plan.rank_plan(link.url, layout.rank),
                num_rounds.get(link.url, 0),
                partial(_round_of, relay, exports),
            )
            installs.append(
                wire.Install(
                    plan_id=plan_id,
                    segments=segments | relay.segments if relay else segments,
                    shards=shards | relay.shards if relay else shards,
                    plan=own,
                    pulls=pulls,
                    rounds=counts,
                )
            )
        link.install(plan_id, installs, deadline)

    fanout.all(install, links)


def _by_round(plan: RankPlan, count: int, number_of: Callable[[Copy], int]) -> tuple[RankPlan, list[int]]:
    """A rank's plan with its copies by round, and how many each round has; as it is if there are no rounds."""
    if not count:
        return plan, []
    copies, counts = in_rounds(plan.copies, number_of, count)
    return msgspec.structs.replace(plan, copies=copies), counts

"""The planner: shards through rules, intersected with needs, gives the copies of a push. Runs in the actor, on a CPU.

Everything up to the templates is done once, with coverage proved; copies of an engine rank are listed when asked for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from itertools import chain
from math import prod

from msgspec.structs import replace

from weightsync import collector
from weightsync.config import Config
from weightsync.explain import PlanSummary
from weightsync.fit import Reader, check_boxes, check_dtypes, check_fit, dtype_bytes
from weightsync.sources import (
    Sources,
    SourceTensor,
    distinct_rules,
    map_sources,
    needed_dtypes,
    offered,
    renamed,
)
from weightsync.spec import Copy, Layout, Need, RankPlan, Rule, Shard, SourceRegion, View
from weightsync.tally import PlannedTensor, count_traffic, unread_notes
from weightsync.templates import Part, Template, Wanted, build_template

__all__ = ["Plan", "PlanSummary", "build_plan", "distinct_rules", "needed_dtypes", "offered", "renamed"]


class Plan:
    """All copies of a push, proved to cover every engine parameter. Made by ``build_plan``.

    ``dtypes``: by trainer tensor, what it must be published in. Engine ranks are addressed by engine name and rank.
    """

    def __init__(
        self, tensors: dict[str, PlannedTensor], readers: list[Reader], dtypes: dict[str, str], summary: PlanSummary
    ) -> None:
        self.dtypes = dtypes
        self._tensors = tensors
        self._readers = readers
        self._numbers = {(r.engine, r.layout.rank): i for i, r in enumerate(readers)}
        self._summary = summary
        self._first_region: dict[str, dict[int, int]] = {}
        self._regions_of: dict[tuple[str, int], list[list[tuple[int, int]]]] = {}
        self._regions: dict[int, list[SourceRegion]] = {}

    def rank_plan(self, engine: str, rank: int) -> RankPlan:
        """What one engine rank does at a push. Copies are in the order of its needs; KeyError for an unknown rank."""
        number = self._numbers[engine, rank]
        layout = self._readers[number].layout
        copies = []
        for need, tensor, parts in self._parts_of(number):
            holders, view = tensor.source.holders, need.view
            for part in parts:
                source = View(holders[part.holder].shard, part.offset, part.strides)
                target = View(view.storage, view.offset + part.target_offset, view.strides)
                copies.append(Copy(need.tensor, part.box, part.rank, source, target))
        return RankPlan(engine, rank, copies, layout.needs, layout.fills)

    def regions(self, trainer_rank: int) -> list[SourceRegion]:
        """The boxes that a trainer rank fingerprints: each once, however many engine ranks read it."""
        if trainer_rank in self._regions:
            return self._regions[trainer_rank]
        regions = self._regions[trainer_rank] = []
        for tensor in self._tensors.values():
            holders = tensor.source.holders
            for part in tensor.template.regions.get(trainer_rank, ()):
                regions.append(SourceRegion(part.box, View(holders[part.holder].shard, part.offset, part.strides)))
        return regions

    def prepare_to_verify(self) -> None:
        """Work out now which regions every engine rank's needs are made of: else an engine that is paused waits."""
        for engine, rank in self._numbers:
            self._regions_of_rank(engine, rank)

    def expected(self, engine: str, rank: int, fps: dict[int, list[int]]) -> list[int]:
        """The fingerprint that each need of an engine rank must have, in the order of its needs.

        ``fps``: by trainer rank, one fingerprint for each of its ``regions``.
        """
        return [sum(fps[r][i] for r, i in regions) % 2**64 for regions in self._regions_of_rank(engine, rank)]

    def summary(self, route: str = "") -> PlanSummary:
        """The plan without its copies; ``route`` names the one chosen where the configuration said ``auto``."""
        if not route or route == self._summary.route:
            return self._summary
        rows = [replace(row, route=route) for row in self._summary.traffic]
        return replace(self._summary, route=route, traffic=rows)

    def _parts_of(self, number: int) -> Iterator[tuple[Need, PlannedTensor, list[Part]]]:
        """``(need, its tensor, its parts)`` for each need of a reader, in order."""
        iterators = {}
        for need in self._readers[number].layout.needs:
            tensor = self._tensors[need.tensor]
            if need.tensor not in iterators:
                iterators[need.tensor] = iter(tensor.template.parts[number])
            yield need, tensor, next(iterators[need.tensor])

    def _regions_of_rank(self, engine: str, rank: int) -> list[list[tuple[int, int]]]:
        """For each of its needs the regions that it is made of: trainer rank, and position in its ``regions``."""
        if (engine, rank) not in self._regions_of:
            self._first_region = self._first_region or self._number_regions()
            first = self._first_region
            self._regions_of[engine, rank] = [
                [(part.rank, first[need.tensor][part.rank] + part.region) for part in parts]
                for need, _, parts in self._parts_of(self._numbers[engine, rank])
            ]
        return self._regions_of[engine, rank]

    def _number_regions(self) -> dict[str, dict[int, int]]:
        used: Counter[int] = Counter()
        first = {}
        for name, tensor in self._tensors.items():
            regions = tensor.template.regions
            first[name] = {rank: used[rank] for rank in regions}
            used.update({rank: len(parts) for rank, parts in regions.items()})
        return first


def build_plan(
    exports: dict[int, list[Shard]],
    rules: list[Rule],
    layouts: dict[str, list[Layout]],
    *,
    config: Config,
    source_devices: dict[int, str],
    source_hosts: dict[int, str] | None = None,
    without: Collection[str] = (),
) -> Plan:
    """Plan a push and prove that it covers every engine parameter.

    ``exports``: by trainer rank, its shards; if no memory is exported yet, casts that the engine needs are only noted.
    ``layouts``: by engine, its ranks. ``source_devices`` and ``source_hosts``: by trainer rank, the GPU's UUID ("" for
    host memory) and the host; of several replicas the nearest is read, and equally near ones take turns.
    ``without``: names of Hugging Face tensors that are left out beside those of ``config.leave_out``.

    Raises PlanError naming tensors without a home and parameters without a source, or the shape or dtype that differs.
    """
    with collector.paused():
        return _build(exports, rules, layouts, config, source_devices, source_hosts or {}, without)


def _build(
    exports: dict[int, list[Shard]],
    rules: list[Rule],
    layouts: dict[str, list[Layout]],
    config: Config,
    source_devices: dict[int, str],
    source_hosts: dict[int, str],
    without: Collection[str],
) -> Plan:
    readers = [Reader(engine, layout) for engine, ranks in layouts.items() for layout in ranks]
    dtypes = needed_dtypes(layouts, rules, config.rename)
    sources = map_sources(exports, rules, config.rename, config.leave_out, without)
    tiers = [_tiers(reader.layout, sorted(exports), source_devices, source_hosts) for reader in readers]
    tensors = _plan_tensors(sources, readers, dtypes, tiers)
    unread_buffers = check_fit(sources, {n: t.template for n, t in tensors.items()}, readers, config.constants)
    exported = any(shard.segment >= 0 for shard in chain.from_iterable(exports.values()))
    casts = check_dtypes((t.source for t in tensors.values()), dtypes, exported)
    traffic = count_traffic(tensors, readers, tiers, config.route)
    devices = [*(source_devices.get(row.trainer_rank) for row in traffic), *(r.layout.device for r in readers)]
    summary = PlanSummary(
        route=config.route,
        num_tensors=len(tensors),
        num_bytes=sum(row.num_bytes for row in traffic),
        model_bytes=sum(prod(t.source.spec.shape) * t.itemsize for t in tensors.values()),
        traffic=traffic,
        host_memory=not all(devices),
        left_out=sources.left_out,
        constants=list(dict.fromkeys(name for r in readers for name in r.layout.constants)),
        derived=list(dict.fromkeys(name for r in readers for name in r.layout.derived)),
        opaque={name: reason for r in readers for name, reason in r.layout.opaque.items()},
        ignored=unread_buffers,
        notes=casts + unread_notes(tensors, readers),
    )
    return Plan(tensors, readers, dtypes, summary)


def _plan_tensors(
    sources: Sources, readers: list[Reader], dtypes: dict[str, str], tiers: list[dict[int, int]]
) -> dict[str, PlannedTensor]:
    templates: dict[tuple, Template] = {}
    load: Counter[int] = Counter()
    tensors = {}
    for name, wanted in _wanted(readers).items():
        source = sources.tensors.get(name)
        if source is None:
            continue  # check_fit names it
        itemsize = dtype_bytes(dtypes[source.inputs[0]])
        start = _least_loaded(source, load, itemsize)
        key = (id(source.layout), start, tuple(wanted))
        if key not in templates:
            needs = [Wanted(*w) for w in wanted]
            check_boxes(source, needs, readers)
            templates[key] = build_template(source.layout, needs, tiers, start)
        tensors[name] = PlannedTensor(source, templates[key], itemsize)
    return tensors


def _wanted(readers: list[Reader]) -> dict[str, list[tuple]]:
    """All needs by tensor, as the fields of Wanted: plain tuples, for there may be millions."""
    wanted: dict[str, list[tuple]] = defaultdict(list)
    for number, reader in enumerate(readers):
        for need in reader.layout.needs:
            wanted[need.tensor].append((number, need.box, need.view.strides))
    return wanted


def _least_loaded(source: SourceTensor, load: Counter[int], itemsize: int) -> int:
    """The turn to begin with among the replicas of a tensor: that of the rank with the fewest bytes so far."""
    ranks = source.layout.replicas
    if len(ranks) < 2:
        return 0
    start = min(range(len(ranks)), key=lambda i: load[ranks[i]])
    load[ranks[start]] += prod(source.spec.shape) * itemsize
    return start


def _tiers(layout: Layout, ranks: list[int], devices: dict[int, str], hosts: dict[int, str]) -> dict[int, int]:
    """How far each trainer rank is from an engine rank: 0 the same GPU, 1 the same host, 2 elsewhere."""
    tiers = {}
    for rank in ranks:
        same_host = bool(layout.host) and hosts.get(rank) == layout.host
        tiers[rank] = 0 if layout.device and devices.get(rank) == layout.device else 1 if same_host else 2
    return tiers

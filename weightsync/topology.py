"""What a push would cost on a cluster that is not there: bytes on every link, the busiest link, the expected time.

A model of links, not of software: each byte of a flow loads the links on its way, all flows run at once, and the most
loaded link decides. Three ways are compared:

    slices      every engine rank gets the slices it needs from the trainer GPUs that hold them (our receivers)
    broadcast   whole tensors from one trainer GPU, which reads the others', to one group an engine (stock engines)
    full gather whole tensors gathered on every trainer GPU first, then broadcast by rank 0 to one group of all engines

Where all GPUs of a node take part in a ring, its hops to other nodes use all NICs of the node, as NCCL lays them.
Weights are taken as evenly sharded by rows over the trainer (FSDP, in ``replicas`` groups), and over an engine's ranks
half by rows and half by columns, but for ``replicated_share``, which every rank needs whole. No torch here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import yaml

from weightsync.errors import ConfigError
from weightsync.explain import size

WAYS = ("slices", "broadcast", "full gather")
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of what the file holds."""


class Cluster(_Struct):
    """Nodes and links; speeds in GB/s (1e9 bytes), one direction: of one GPU's NVLink, and of one NIC."""

    gpus_per_node: int = 8
    nvlink_gb_s: float = 390.0
    nics_per_node: int = 8
    nic_gb_s: float = 50.0
    gpu_memory_gb: float = 141.0


class Model(_Struct):
    """``num_bytes`` as published; ``tp``: over how many GPUs an engine lays it, but for its ``replicated_share``."""

    name: str
    num_bytes: int
    tp: int
    replicated_share: float = 0.0005


MODELS = (
    Model("8B", 16_400_000_000, 1),
    Model("70B", 141_100_000_000, 8),
    Model("671B", 1_342_000_000_000, 16),
)


class Topology(_Struct):
    """A made-up cluster. ``gpus``: totals to look at; ``trainer_share`` of them train, the rest, on other nodes where
    nodes can be told apart, serve. ``replicas``: groups that hold all weights each (HSDP).
    """

    cluster: Cluster = Cluster()
    models: tuple[Model, ...] = MODELS
    gpus: tuple[int, ...] = SIZES
    trainer_share: float = 0.5
    replicas: int = 1


class Flow(NamedTuple):
    """Bytes from one GPU to another, by number; trainer GPUs come first. ``wide``: over all NICs of both nodes."""

    source: int
    target: int
    num_bytes: float
    wide: bool = False


class Cost(NamedTuple):
    """One way on one cluster. ``links``: bytes by link, the most first; ``seconds``: what ``busiest`` needs for its
    ``num_bytes``, longer than any other.
    """

    way: str
    links: list[tuple[str, float]]
    busiest: str
    num_bytes: float
    seconds: float


class Case(NamedTuple):
    """One model on ``trainers`` and ``engines`` GPUs."""

    model: Model
    trainers: int
    engines: int
    replicas: int


def load_topology(path: str | Path) -> Topology:
    """A Topology from a YAML file; raises ConfigError naming what is wrong in it."""
    try:
        raw = yaml.safe_load(Path(path).read_text()) or {}
        topology = msgspec.convert(raw, Topology)
    except (OSError, yaml.YAMLError, msgspec.ValidationError) as e:
        raise ConfigError(f"topology {path}: {e}") from None
    _check(topology, str(path))
    return topology


def _check(topology: Topology, where: str) -> None:
    positive = {f"cluster.{k}": v for k, v in msgspec.structs.asdict(topology.cluster).items()}
    positive |= {"replicas": topology.replicas}
    positive |= {f"models.{m.name}.{k}": getattr(m, k) for m in topology.models for k in ("num_bytes", "tp")}
    positive |= {f"gpus[{i}]": n for i, n in enumerate(topology.gpus)}
    for name, value in positive.items():
        if value <= 0:
            raise ConfigError(f"topology {where}: {name} must be positive, got {value}")
    if not 0 < topology.trainer_share < 1:
        raise ConfigError(f"topology {where}: trainer_share must be between 0 and 1, got {topology.trainer_share}")


def split(topology: Topology, model: Model, gpus: int) -> Case | str:
    """The case of ``gpus`` GPUs in all, or why the model does not run on them."""
    trainers = max(1, round(gpus * topology.trainer_share))
    engines = (gpus - trainers) // model.tp * model.tp
    if not engines:
        return f"an engine needs {model.tp} GPUs, {gpus - trainers} are left"
    if model.num_bytes / model.tp > 0.8 * topology.cluster.gpu_memory_gb * 1e9:
        return f"{size(model.num_bytes // model.tp)} a GPU does not fit"
    if trainers % topology.replicas:
        return f"{trainers} trainer GPUs are not {topology.replicas} replicas"
    return Case(model, trainers, engines, topology.replicas)


def cost(cluster: Cluster, case: Case, way: str) -> Cost:
    """What every link carries when the weights go ``way``, and how long the busiest needs."""
    loads: defaultdict[str, float] = defaultdict(float)
    for flow in _flows(case, way):
        _load(loads, cluster, case, flow)
    if not loads:
        return Cost(way, [], "", 0.0, 0.0)
    busiest = max(loads, key=lambda link: loads[link] / _speed(cluster, link))
    most_first = sorted(loads.items(), key=lambda item: -item[1])
    return Cost(way, most_first, busiest, loads[busiest], loads[busiest] / _speed(cluster, busiest))


def _flows(case: Case, way: str) -> Iterator[Flow]:
    if way == "slices":
        yield from _slices(case)
    elif way == "broadcast":
        yield from _assemble(case)
        yield from _broadcast(case)
    else:
        yield from _gather(case)
        yield from _chain(case, 0, range(case.engines))


def _slices(case: Case) -> Iterator[Flow]:
    """Row slices come from the trainer GPUs that hold those rows, column slices from all, equally."""
    model, tp = case.model, case.model.tp
    group = case.trainers // case.replicas
    cut = model.num_bytes * (1 - model.replicated_share) / tp
    whole = model.num_bytes * model.replicated_share
    for number in range(case.engines):
        engine, rank = divmod(number, tp)
        first = engine % case.replicas * group
        for holder in range(group):
            low, high = max(holder / group, rank / tp), min((holder + 1) / group, (rank + 1) / tp)
            rows = max(0.0, high - low) * tp
            num_bytes = cut * (0.5 * rows + 0.5 / group) + whole / group
            yield Flow(first + holder, case.trainers + number, num_bytes)


def _assemble(case: Case) -> Iterator[Flow]:
    """The actor's GPU, the trainer's first, reads what the others of one replica hold."""
    group = case.trainers // case.replicas
    for holder in range(1, group):
        yield Flow(holder, 0, case.model.num_bytes / group)


def _gather(case: Case) -> Iterator[Flow]:
    """A ring in each replica: every GPU passes on all but its own part."""
    group = case.trainers // case.replicas
    for number in range(case.trainers if group > 1 else 0):
        first = number // group * group
        following = first + (number - first + 1) % group
        yield Flow(number, following, case.model.num_bytes * (group - 1) / group, wide=True)


def _broadcast(case: Case) -> Iterator[Flow]:
    """One group an engine, and the first trainer GPU in each."""
    for first in range(0, case.engines, case.model.tp):
        yield from _chain(case, 0, range(first, first + case.model.tp))


def _chain(case: Case, source: int, engines: range) -> Iterator[Flow]:
    """A broadcast: every GPU passes all on to the next. The first hop leaves by the NIC of its one GPU."""
    for number in engines:
        target = case.trainers + number
        yield Flow(source, target, float(case.model.num_bytes), wide=source >= case.trainers)
        source = target


def _load(loads: defaultdict[str, float], cluster: Cluster, case: Case, flow: Flow) -> None:
    here, there = (_node(cluster, case, gpu) for gpu in (flow.source, flow.target))
    if here == there:
        loads[f"NVLink out of {_name(case, flow.source)}"] += flow.num_bytes
        loads[f"NVLink into {_name(case, flow.target)}"] += flow.num_bytes
    else:
        for way, gpu in (("out of", flow.source), ("into", flow.target)):
            nics = _nics(cluster, case, gpu, flow.wide)
            for nic in nics:
                loads[f"NIC {way} {nic}"] += flow.num_bytes / len(nics)


def _place(cluster: Cluster, case: Case, gpu: int) -> int:
    """The GPU's place in the cluster: engines begin on a node of their own, unless all fits on one."""
    if case.trainers + case.engines <= cluster.gpus_per_node or gpu < case.trainers:
        return gpu
    nodes = -(-case.trainers // cluster.gpus_per_node)
    return nodes * cluster.gpus_per_node + gpu - case.trainers


def _node(cluster: Cluster, case: Case, gpu: int) -> int:
    return _place(cluster, case, gpu) // cluster.gpus_per_node


def _nics(cluster: Cluster, case: Case, gpu: int, wide: bool) -> list[str]:
    """GPUs of a node share its NICs by turns."""
    node, local = divmod(_place(cluster, case, gpu), cluster.gpus_per_node)
    used = range(cluster.nics_per_node) if wide else [local % cluster.nics_per_node]
    return [f"node {node} NIC {nic}" for nic in used]


def _name(case: Case, gpu: int) -> str:
    return f"trainer GPU {gpu}" if gpu < case.trainers else f"engine GPU {gpu - case.trainers}"


def _speed(cluster: Cluster, link: str) -> float:
    return (cluster.nvlink_gb_s if link.startswith("NVLink") else cluster.nic_gb_s) * 1e9


def explain(topology: Topology, *, links: int = 3) -> str:
    """The report as plain text: a row for each model, number of GPUs and way, with its ``links`` most loaded links."""
    c = topology.cluster
    lines = [
        f"{c.gpus_per_node} GPUs a node, NVLink {c.nvlink_gb_s:g} GB/s a GPU and direction, "
        f"{c.nics_per_node} NICs a node of {c.nic_gb_s:g} GB/s; expected time: busiest link, nothing else",
        f"{'model':>6} {'GPUs':>5} {'train+serve':>11} {'way':<12} {'time':>11} {'to gather':>9}  most loaded links",
    ]
    for model in topology.models:
        for gpus in topology.gpus:
            case = split(topology, model, gpus)
            if isinstance(case, str):
                lines.append(f"{model.name:>6} {gpus:>5} {'-':>11} {case}")
            else:
                lines += _rows(c, case, gpus, links)
    return "\n".join(lines) + "\n"


def _rows(cluster: Cluster, case: Case, gpus: int, links: int) -> Iterable[str]:
    costs = [cost(cluster, case, way) for way in WAYS]
    gather_s = costs[-1].seconds
    for one in costs:
        head = f"{case.model.name:>6} {gpus:>5} {f'{case.trainers}+{case.engines}':>11} {one.way:<12}"
        loaded = sorted(one.links, key=lambda item: -item[1] / _speed(cluster, item[0]))
        shown = ", ".join(f"{link} {size(round(num_bytes))}" for link, num_bytes in loaded[:links])
        ratio = f"{one.seconds / gather_s:.3f}" if gather_s else "-"
        yield f"{head} {one.seconds * 1e3:>8.1f} ms {ratio:>9}  {shown}"

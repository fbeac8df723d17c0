"""A trainer and engines in numpy, for the planner: every shard and parameter is a flat array of random 16-bit words.

``execute`` does what a puller does, and ``fingerprint`` is a position-weighted sum written apart from the product's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from math import prod

import numpy as np

from weightsync.config import Config
from weightsync.plan import Plan, build_plan
from weightsync.spec import Box, Fill, Layout, Need, Param, Rule, Shard, View

DTYPE = "bfloat16"


def dense(size: tuple[int, ...], order: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Strides of a dense block of ``size`` whose dims lie in ``order``, outermost first."""
    strides, step = [0] * len(size), 1
    for d in reversed(order if order is not None else range(len(size))):
        strides[d] = step
        step *= max(size[d], 1)
    return tuple(strides)


def view_of(flat: np.ndarray, offset: int, size: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    if prod(size) == 0:
        return np.zeros(size, flat.dtype)
    last = offset + sum(s * (n - 1) for s, n in zip(strides, size))
    assert 0 <= offset <= last < len(flat), "a view leaves its storage"
    return np.lib.stride_tricks.as_strided(flat[offset:], size, [s * flat.itemsize for s in strides])


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.size))


def whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def identity(name: str, shape: tuple[int, ...], target: str = "") -> Rule:
    box = whole(shape)
    return Rule(name, box, target or name, box.size, box.offset, tuple(range(len(shape))))


def fingerprint(values: np.ndarray, origin: tuple[int, ...]) -> int:
    total = 0
    for position in product(*map(range, values.shape)):
        weight = 1
        for d, i in enumerate(position):
            weight *= ((origin[d] + i + 1) * 0x9E3779B1 + (d + 1) * 0x85EBCA6B) % 2**32 | 1
        total += int(values[position]) * weight
    return total % 2**64


@dataclass
class FakeTrainer:
    """Ranks with shards and the arrays behind them; ``held[name]`` counts how many ranks hold each element."""

    ranks: int
    shards: dict[int, list[Shard]] = field(default_factory=dict)
    storages: dict[int, list[np.ndarray]] = field(default_factory=dict)
    rules: list[Rule] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shards = {rank: [] for rank in range(self.ranks)}
        self.storages = {rank: [] for rank in range(self.ranks)}

    def hold(self, rank: int, name: str, full: np.ndarray, box: Box, strides: tuple[int, ...] | None = None) -> None:
        strides = dense(box.size) if strides is None else strides
        flat = np.zeros(1 + sum(s * (n - 1) for s, n in zip(strides, box.size)) if prod(box.size) else 0, full.dtype)
        if prod(box.size):
            view_of(flat, 0, box.size, strides)[...] = full[slices(box)]
        self.shards[rank].append(Shard(name, full.shape, DTYPE, box, strides, segment=0))
        self.storages[rank].append(flat)


@dataclass
class FakeEngineRank:
    """Parameters, the needs that fill them, and what each need must hold in the end."""

    rank: int = 0
    device: str = ""
    host: str = ""
    params: list[Param] = field(default_factory=list)
    needs: list[Need] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    opaque: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)

    def param(self, name: str, shape: tuple[int, ...], kind: str = "parameter", dtype: str = DTYPE) -> int:
        self.params.append(Param(name, shape, dtype, prod(shape), kind))
        return len(self.params) - 1

    def need(self, tensor: str, box: Box, param: int, offset: int = 0, strides: tuple[int, ...] | None = None) -> None:
        self.needs.append(Need(tensor, box, View(param, offset, dense(box.size) if strides is None else strides)))

    def layout(self) -> Layout:
        return Layout(
            self.rank, "boot", self.device, self.host, self.params, self.needs, self.fills,
            self.constants, [], self.opaque, self.ignored, {},
        )  # fmt: skip


def plan_of(
    trainer: FakeTrainer,
    engines: dict[str, list[FakeEngineRank]],
    *,
    devices: dict[int, str] | None = None,
    hosts: dict[int, str] | None = None,
    **config: object,
) -> Plan:
    return build_plan(
        trainer.shards,
        trainer.rules,
        {name: [rank.layout() for rank in ranks] for name, ranks in engines.items()},
        config=Config(pair="sgl_dtensor_v2", **config),
        source_devices=devices or {},
        source_hosts=hosts,
    )


def execute(plan: Plan, trainer: FakeTrainer, engine: str, rank: FakeEngineRank) -> list[np.ndarray]:
    """The parameters of an engine rank after a push, flat. Asserts that no element is written twice."""
    memory = [np.zeros(param.numel, np.uint16) for param in rank.params]
    written = [np.zeros(param.numel, np.uint8) for param in rank.params]
    for copy in plan.rank_plan(engine, rank.rank).copies:
        source, target = copy.source, copy.target
        values = view_of(trainer.storages[copy.rank][source.storage], source.offset, copy.box.size, source.strides)
        view_of(memory[target.storage], target.offset, copy.box.size, target.strides)[...] = values
        view_of(written[target.storage], target.offset, copy.box.size, target.strides)[...] += 1
    assert all((times <= 1).all() for times in written)
    return memory


def region_fingerprints(plan: Plan, trainer: FakeTrainer) -> dict[int, list[int]]:
    """What every trainer rank answers to ``publish``."""
    result = {}
    for rank, storages in trainer.storages.items():
        regions = plan.regions(rank)
        assert len(set(regions)) == len(regions)
        result[rank] = [
            fingerprint(view_of(storages[r.view.storage], r.view.offset, r.box.size, r.view.strides), r.box.offset)
            for r in regions
        ]
    return result

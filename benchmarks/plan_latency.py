"""How long planning takes: synthetic FSDP dim-0 shards against column- and row-parallel engine ranks.

    python benchmarks/plan_latency.py [--tensors 10000] [--trainer-ranks 64] [--engine-ranks 64] [--output FILE]

Prints a table and, with --output, writes JSON rows. Making the synthetic input is not counted. ``plan_s`` is everything
up to the proved plan, over all ranks (``plan_cpu_s``: processor time of it); ``expand_s`` lists one engine rank's
copies, ``regions_s`` one trainer rank's boxes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import resource
import statistics
import time
from pathlib import Path

import msgspec

from weightsync.boxes import dense_strides
from weightsync.config import Config, EngineConfig
from weightsync.plan import build_plan
from weightsync.spec import Box, Layout, Need, Param, Rule, Shard, View

HIDDEN = 4096
KINDS = (
    ("self_attn.qkv_proj.weight", (6144, HIDDEN), 0),
    ("self_attn.o_proj.weight", (HIDDEN, HIDDEN), 1),
    ("mlp.gate_up_proj.weight", (24576, HIDDEN), 0),
    ("mlp.down_proj.weight", (HIDDEN, 12288), 1),
    ("input_layernorm.weight", (HIDDEN,), None),
)
"""Name, shape, and the dim that the engine splits (None: every rank has all of it)."""


def tensors_of(count: int) -> list[tuple[str, tuple[int, ...], int | None]]:
    kinds = len(KINDS)
    return [(f"model.layers.{i // kinds}.{KINDS[i % kinds][0]}", *KINDS[i % kinds][1:]) for i in range(count)]


def split(shape: tuple[int, ...], dim: int | None, rank: int, ranks: int) -> Box:
    """The box of one of ``ranks`` even parts along ``dim``, the last ones shorter or empty."""
    if dim is None:
        return Box((0,) * len(shape), shape)
    step = -(-shape[dim] // ranks)
    low = min(rank * step, shape[dim])
    offset, size = [0] * len(shape), list(shape)
    offset[dim], size[dim] = low, min(step, shape[dim] - low)
    return Box(tuple(offset), tuple(size))


def trainer(tensors: list, ranks: int, replicas: int) -> tuple[dict[int, list[Shard]], list[Rule]]:
    """FSDP dim-0 shards; with ``replicas`` the same shards are held by so many groups of ranks."""
    exports: dict[int, list[Shard]] = {rank: [] for rank in range(ranks)}
    rules = []
    for name, shape, _ in tensors:
        whole = Box((0,) * len(shape), shape)
        rules.append(Rule(name, whole, name, shape, whole.offset, tuple(range(len(shape)))))
        for rank in range(ranks):
            box = split(shape, 0, rank % (ranks // replicas), ranks // replicas)
            exports[rank].append(Shard(name, shape, "bfloat16", box, dense_strides(box.size), 0))
    return exports, rules


def engine(tensors: list, rank: int, ranks: int) -> Layout:
    params, needs = [], []
    for index, (name, shape, dim) in enumerate(tensors):
        box = split(shape, dim, rank, ranks)
        params.append(Param(name, box.size, "bfloat16", 0))
        needs.append(Need(name, box, View(index, 0, dense_strides(box.size))))
    return Layout(rank, "boot", f"GPU-{rank}", "host", params, needs, [], [], [], {}, [], {})


def measure(num_tensors: int, trainer_ranks: int, engine_ranks: int, replicas: int, repeats: int) -> dict:
    tensors = tensors_of(num_tensors)
    exports, rules = trainer(tensors, trainer_ranks, replicas)
    layouts = {"engine": [engine(tensors, rank, engine_ranks) for rank in range(engine_ranks)]}
    devices = {rank: f"GPU-{rank}" for rank in range(trainer_ranks)}
    config = Config(pair="sgl_dtensor_v2", engines=[EngineConfig("engine")])
    plan_s, cpu_s = [], []
    for _ in range(repeats):
        gc.collect()
        start, cpu_start = time.perf_counter(), time.process_time()
        plan = build_plan(exports, rules, layouts, config=config, source_devices=devices)
        plan_s.append(time.perf_counter() - start)
        cpu_s.append(time.process_time() - cpu_start)
    start = time.perf_counter()
    copies = len(plan.rank_plan("engine", 0).copies)
    expand_s = time.perf_counter() - start
    start = time.perf_counter()
    regions = len(plan.regions(0))
    regions_s = time.perf_counter() - start
    return {
        "name": f"plan {num_tensors} tensors, {trainer_ranks} x {engine_ranks} ranks, {replicas} replicas",
        "num_tensors": num_tensors,
        "trainer_ranks": trainer_ranks,
        "engine_ranks": engine_ranks,
        "replicas": replicas,
        "plan_s": {"min": min(plan_s), "median": statistics.median(plan_s), "max": max(plan_s), "n": repeats},
        "plan_cpu_s": statistics.median(cpu_s),
        "expand_s": expand_s,
        "copies_of_rank_0": copies,
        "regions_s": regions_s,
        "regions_of_rank_0": regions,
        "versions": {"python": platform.python_version(), "msgspec": msgspec.__version__},
        "cpu_count": os.cpu_count(),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--trainer-ranks", type=int, default=64)
    parser.add_argument("--engine-ranks", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = []
    header = ("tensors", "ranks", "replicas", "plan s", "cpu s", "expand s", "copies", "regions s")
    print("{:>8} {:>9} {:>8} {:>8} {:>7} {:>9} {:>8} {:>9}".format(*header))
    for replicas in (1, 2):
        row = measure(args.tensors, args.trainer_ranks, args.engine_ranks, replicas, args.repeats)
        rows.append(row)
        print(
            f"{row['num_tensors']:>8} {row['trainer_ranks']:>4} x {row['engine_ranks']:<2} {replicas:>8} "
            f"{row['plan_s']['median']:>8.2f} {row['plan_cpu_s']:>7.2f} {row['expand_s']:>9.2f} "
            f"{row['copies_of_rank_0']:>8} {row['regions_s']:>9.2f}",
            flush=True,
        )
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()

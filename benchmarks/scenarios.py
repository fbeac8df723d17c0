"""What ``refit_latency`` measures: one scenario, one engine start."""

from __future__ import annotations

import msgspec

from benchmarks.bench import Setting, StockCalls
from benchmarks.rows import Struct

MIB = 1 << 20
TINY_SCALE = 16_384  # a tiny run's buckets are so much smaller than a real one's
BUCKETS = ((512, "512 MiB"), (1024, "1 GiB"), (4096, "4 GiB"))

TENSOR_CALLS = (
    StockCalls("one call a tensor", 0),
    StockCalls("one call, list of handles", -1),
    *(StockCalls(f"flattened buckets of {text}", mib * MIB, flattened=True) for mib, text in BUCKETS),
)
GROUP_CALLS = tuple(
    StockCalls(f"{kind} of {text} a call", mib * MIB, flattened=kind == "NCCL, flattened bucket", distributed=True)
    for kind in ("NCCL, a broadcast a tensor,", "NCCL, flattened bucket")
    for mib, text in BUCKETS
)
DIRECT = (Setting("direct"), Setting("direct", "fingerprint"))
BUCKET = (Setting("bucket"), Setting("bucket", "fingerprint"))


class Scenario(Struct):
    """Who is where, and what is tried.

    ``trainer_gpus``: a GPU index a training rank. ``engine_gpu``: the first of the ``tp`` that the engine uses;
    ``engine_sees``: its ``CUDA_VISIBLE_DEVICES`` ("": all). ``in_flight``: requests that generate during one more
    measurement of each ``direct`` setting. ``sleeps``: the colocated cycle is measured, trainer offloaded and engine
    asleep between pushes, instead of bare pushes.
    """

    model: str
    trainer_gpus: tuple[int, ...] = (0,)
    engine_gpu: int = 0
    engine_sees: str = ""
    tp: int = 1
    trainer_dtype: str = "bfloat16"
    engine_dtype: str = "bfloat16"
    trainer_kind: str = "plain"
    stacked: bool = False
    cuda_graphs: bool = False
    in_flight: int = 0
    sleeps: bool = False
    settings: tuple[Setting, ...] = (*DIRECT, *BUCKET)
    stock: tuple[StockCalls, ...] = TENSOR_CALLS
    timeout_s: float = 400.0

    @property
    def engine_gpus(self) -> list[int]:
        """By TP rank, the GPU's index among all of the machine."""
        own = range(self.engine_gpu, self.engine_gpu + self.tp)
        seen = [int(gpu) for gpu in self.engine_sees.split(",") if gpu]
        return [seen[gpu] for gpu in own] if seen else list(own)

    @property
    def num_gpus(self) -> int:
        return len({*self.trainer_gpus, *self.engine_gpus})


QUICK_STOCK = tuple(c for c in TENSOR_CALLS if c.limit_bytes)
MOE = "Qwen3-MoE-30B-A3B/12-layers"

SCENARIOS = {
    "colocated-1gpu-8b": Scenario("Qwen3-8B", in_flight=16),
    "colocated-1gpu-1.5b": Scenario("Qwen2.5-1.5B", in_flight=16),
    "cuda-graphs": Scenario("Qwen3-8B", cuda_graphs=True, in_flight=16, settings=DIRECT, stock=QUICK_STOCK),
    "fp32-to-bf16": Scenario("Qwen3-8B", trainer_dtype="float32", stock=QUICK_STOCK),
    "moe-stacked": Scenario(MOE, stacked=True, stock=QUICK_STOCK),
    "automodel": Scenario("Qwen3-8B", trainer_kind="automodel", settings=DIRECT, stock=QUICK_STOCK),
    "sleep-cycle": Scenario("Qwen3-8B", sleeps=True, settings=DIRECT, stock=()),
    "colocated-2gpu": Scenario("Qwen3-8B", trainer_gpus=(0, 1), tp=2, stock=QUICK_STOCK),
    "disaggregated-2gpu": Scenario("Qwen3-8B", engine_gpu=1, settings=DIRECT, stock=GROUP_CALLS),
    "disaggregated-2gpu-masked": Scenario("Qwen3-8B", engine_sees="1", settings=DIRECT, stock=()),
}


def tiny(scenario: Scenario) -> Scenario:
    """The same on a CPU, small: a tiny model, the route ``shm`` in place of ``direct``, buckets to match."""

    def small(limit_bytes: int) -> int:
        return limit_bytes // TINY_SCALE if limit_bytes > 0 else limit_bytes

    settings = tuple(
        msgspec.structs.replace(s, route=s.route.replace("direct", "shm"), bucket_bytes=small(s.bucket_bytes))
        for s in scenario.settings
    )
    stock = tuple(
        msgspec.structs.replace(c, name=_small_name(c), limit_bytes=small(c.limit_bytes)) for c in scenario.stock
    )
    return msgspec.structs.replace(
        scenario,
        model="tiny-Qwen3-MoE" if scenario.stacked else "tiny-Qwen3",
        trainer_dtype="float32",
        engine_dtype="bfloat16" if scenario.trainer_dtype != scenario.engine_dtype else "float32",
        engine_sees="",
        in_flight=min(scenario.in_flight, 2),
        settings=settings,
        stock=stock,
        timeout_s=900.0,
    )


def _small_name(calls: StockCalls) -> str:
    scale = f", divided by {TINY_SCALE}" if calls.limit_bytes > 0 else ""
    return calls.name.replace("NCCL", "gloo") + scale

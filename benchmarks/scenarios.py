"""What ``refit_latency`` measures: who is where, and what is tried. Scenarios of one engine share its start."""

from __future__ import annotations

import msgspec

from benchmarks.bench import Setting, StockCalls
from benchmarks.parallel import Parallel
from benchmarks.rows import Struct

MIB = 1 << 20
TINY_SCALE = 16_384  # a tiny run's buckets are so much smaller than a real one's
TINY_RANKS = 4  # of a trainer, at most; and half as many of all engines
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
NCCL = (Setting("nccl"), Setting("nccl", "fingerprint"))
NCCL_STOCK = tuple(
    Setting("nccl", bucket_bytes=mib * MIB, as_stock=True, label=f"stock engine, buckets of {text}")
    for mib, text in BUCKETS
)


class Place(Struct):
    """Where one engine is: on ``tp`` GPUs from ``first_gpu`` on, of those in ``sees``, its CUDA_VISIBLE_DEVICES
    ("": all)."""

    first_gpu: int = 0
    tp: int = 1
    sees: str = ""

    @property
    def gpus(self) -> list[int]:
        """By TP rank, the GPU's index among all of the machine."""
        own = range(self.first_gpu, self.first_gpu + self.tp)
        seen = [int(gpu) for gpu in self.sees.split(",") if gpu]
        return [seen[gpu] for gpu in own] if seen else list(own)


class Scenario(Struct):
    """Who is where, and what is tried.

    ``trainer_gpus``: a GPU index a training rank; ``parallel`` counts for ``trainer_kind`` ``megatron``. ``engines``
    all have the same ``tp``. ``in_flight``: requests that generate on each engine during one more measurement of each
    ``direct`` setting. ``sleeps``: the colocated cycle is measured, trainer offloaded and engine asleep between pushes,
    instead of bare pushes. ``tokens``: pushes that are timed until an engine has answered with a token, too.
    ``timeout_s``: of trainer and measurements; the engine's start has its own.
    """

    model: str
    trainer_gpus: tuple[int, ...] = (0,)
    engines: tuple[Place, ...] = (Place(),)
    trainer_dtype: str = "bfloat16"
    engine_dtype: str = "bfloat16"
    trainer_kind: str = "plain"
    parallel: Parallel = Parallel()
    stacked: bool = False
    cuda_graphs: bool = False
    in_flight: int = 0
    sleeps: bool = False
    tokens: int = 0
    settings: tuple[Setting, ...] = (*DIRECT, *BUCKET)
    stock: tuple[StockCalls, ...] = TENSOR_CALLS
    timeout_s: float = 150.0

    @property
    def tp(self) -> int:
        """Of each engine."""
        return self.engines[0].tp

    @property
    def engine_gpus(self) -> list[int]:
        """The GPUs of all engines, in order."""
        return [gpu for place in self.engines for gpu in place.gpus]

    @property
    def num_gpus(self) -> int:
        return len({*self.trainer_gpus, *self.engine_gpus})

    @property
    def pair(self) -> str:
        """The actor's name in a configuration."""
        return "sgl_megatron" if self.trainer_kind == "megatron" else "sgl_dtensor_v2"

    @property
    def engine_key(self) -> tuple:
        """Scenarios for which this is equal can share their engines."""
        return self.model, self.engine_dtype, self.engines, self.cuda_graphs, self.sleeps


QUICK_STOCK = tuple(c for c in TENSOR_CALLS if c.limit_bytes)
MOE = "Qwen3-MoE-30B-A3B/12-layers"
MOE_30B = "Qwen3-30B-A3B"
LARGE = ("Qwen3-32B", MOE_30B)
LARGE_TIMEOUT_S = 250.0
TWO = (Place(tp=2),)
MEGATRON = Scenario("Qwen3-8B", trainer_kind="megatron", stock=QUICK_STOCK)


def _megatron(model: str, gpus: int, parallel: Parallel, tp: int) -> Scenario:
    places = (Place(tp=tp),)
    return msgspec.structs.replace(
        MEGATRON,
        model=model,
        trainer_gpus=tuple(range(gpus)),
        engines=places,
        parallel=parallel,
        timeout_s=LARGE_TIMEOUT_S if model in LARGE else MEGATRON.timeout_s,
    )


def _colocated(model: str, gpus: int) -> Scenario:
    """FSDP2 over all GPUs into two engines on the same ones."""
    half = gpus // 2
    places = (Place(0, half), Place(half, half))
    return Scenario(
        model,
        trainer_gpus=tuple(range(gpus)),
        engines=places,
        settings=DIRECT,
        stock=QUICK_STOCK,
        timeout_s=LARGE_TIMEOUT_S if model in LARGE else MEGATRON.timeout_s,
    )


def _disaggregated(model: str, gpus: int) -> Scenario:
    """The trainer on the first half of the GPUs, one engine on the other."""
    half = gpus // 2
    places = (Place(half, half),)
    return Scenario(
        model,
        trainer_gpus=tuple(range(half)),
        engines=places,
        settings=(*DIRECT, *NCCL),
        stock=GROUP_CALLS,
        timeout_s=LARGE_TIMEOUT_S if model in LARGE else MEGATRON.timeout_s,
    )


ONE_GPU = {
    "colocated-1gpu-8b": Scenario("Qwen3-8B", in_flight=16),
    "fp32-to-bf16": Scenario("Qwen3-8B", trainer_dtype="float32", stock=QUICK_STOCK),
    "automodel": Scenario("Qwen3-8B", trainer_kind="automodel", settings=DIRECT, stock=QUICK_STOCK),
    "megatron-1gpu-8b": MEGATRON,
    "colocated-1gpu-1.5b": Scenario("Qwen2.5-1.5B", in_flight=16),
    "cuda-graphs": Scenario("Qwen3-8B", cuda_graphs=True, in_flight=16, settings=DIRECT, stock=QUICK_STOCK),
    "moe-stacked": Scenario(MOE, stacked=True, stock=QUICK_STOCK),
    "sleep-cycle": Scenario("Qwen3-8B", sleeps=True, settings=DIRECT, stock=()),
}
TWO_GPUS = {
    "colocated-2gpu": Scenario("Qwen3-8B", trainer_gpus=(0, 1), engines=TWO, stock=QUICK_STOCK),
    "colocated-2gpu-fleet": _colocated("Qwen3-8B", 2),
    "megatron-2gpu-tp2": _megatron("Qwen3-8B", 2, Parallel(tp=2), 2),
    "megatron-2gpu-pp2": _megatron("Qwen3-8B", 2, Parallel(pp=2), 2),
    "megatron-2gpu-moe-ep2": _megatron(MOE, 2, Parallel(ep=2), 2),
    "disaggregated-2gpu": Scenario("Qwen3-8B", engines=(Place(1),), settings=(*DIRECT, *NCCL), stock=GROUP_CALLS),
    "disaggregated-2gpu-nccl": Scenario(
        "Qwen3-8B", engines=(Place(1),), settings=(*NCCL, *NCCL_STOCK), stock=GROUP_CALLS, tokens=9, timeout_s=240.0
    ),
    "disaggregated-2gpu-masked": Scenario("Qwen3-8B", engines=(Place(sees="1"),), settings=DIRECT, stock=()),
}
MORE_GPUS = {
    f"{name}-{gpus}gpu-{size}": make(model, gpus)
    for gpus in (4, 8)
    for size, model in (("8b", "Qwen3-8B"), ("32b", "Qwen3-32B"))
    for name, make in (("colocated", _colocated), ("disaggregated", _disaggregated))
} | {
    "megatron-4gpu-tp2-pp2": _megatron("Qwen3-8B", 4, Parallel(tp=2, pp=2), 4),
    "megatron-4gpu-moe-ep4": _megatron(MOE_30B, 4, Parallel(ep=4), 4),
}
SCENARIOS = ONE_GPU | TWO_GPUS | MORE_GPUS
SETS = {"one-gpu": ONE_GPU, "two-gpus": TWO_GPUS, "more-gpus": MORE_GPUS, "all": SCENARIOS}


def named(names: list[str]) -> list[str]:
    """Names of scenarios and sets of them as names of scenarios, each once."""
    return list(dict.fromkeys(name for given in names for name in SETS.get(given, [given])))


def tiny(scenario: Scenario) -> Scenario:
    """The same on a CPU, small: a tiny model, the route ``shm`` in place of ``direct``, buckets to match."""

    def small(limit_bytes: int) -> int:
        return limit_bytes // TINY_SCALE if limit_bytes > 0 else limit_bytes

    settings = tuple(
        msgspec.structs.replace(
            s, route=s.route.replace("direct", "shm"), bucket_bytes=small(s.bucket_bytes or 512 * MIB)
        )
        for s in scenario.settings
    )
    stock = tuple(
        msgspec.structs.replace(c, name=_small_name(c), limit_bytes=small(c.limit_bytes)) for c in scenario.stock
    )
    tp = max(1, min(scenario.tp, TINY_RANKS // 2 // len(scenario.engines)))
    return msgspec.structs.replace(
        scenario,
        model="tiny-Qwen3-MoE" if "MoE" in scenario.model or "A3B" in scenario.model else "tiny-Qwen3",
        trainer_gpus=scenario.trainer_gpus[:TINY_RANKS],
        engines=tuple(Place(number * tp, tp) for number in range(len(scenario.engines))),
        trainer_dtype="float32",
        engine_dtype="bfloat16" if scenario.trainer_dtype != scenario.engine_dtype else "float32",
        in_flight=min(scenario.in_flight, 2),
        settings=settings,
        stock=stock,
        timeout_s=900.0,
    )


def _small_name(calls: StockCalls) -> str:
    scale = f", divided by {TINY_SCALE}" if calls.limit_bytes > 0 else ""
    return calls.name.replace("NCCL", "gloo") + scale

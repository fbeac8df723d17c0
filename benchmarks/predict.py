"""What a scenario would move, from shapes alone: no GPU, no engine, no trainer. The planner is the real one.

Trainer shards are those of FSDP2 (even parts of dim 0) and of Megatron's axes; what engine ranks need is written down
here for the models of ``benchmarks.models``, where a push asks the engine itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks import links, models
from benchmarks.plan_latency import split
from benchmarks.scenarios import Scenario
from weightsync.boxes import dense_strides
from weightsync.config import Config
from weightsync.demo_model import DemoModel, shapes
from weightsync.explain import PEER_BYTES_PER_S, SAME_GPU_BYTES_PER_S, PlanSummary
from weightsync.plan import build_plan
from weightsync.spec import Box, Layout, Need, Param, Rule, Shard, View
from weightsync.trainers import dtensor_mapping, megatron_mapping

H200 = links.Rates(SAME_GPU_BYTES_PER_S / 2, PEER_BYTES_PER_S)
SGLANG_VOCABULARY_MULTIPLE = 64
MEGATRON_VOCABULARY_MULTIPLE = 128

_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_COLUMNS = ("o_proj", "down_proj")
_VOCABULARY = ("embed_tokens", "lm_head")

Shape = tuple[int, ...]


class Busy(NamedTuple):
    """What a push does to one GPU, in bytes: copied inside it, read from other GPUs, read by other GPUs."""

    gpu: int
    inside: int
    taken: int
    given: int

    @property
    def seconds(self) -> float:
        """The longest of what its memory and each direction of its links need on their own."""
        return max(self.inside / H200.local, self.taken / H200.peer, self.given / H200.peer)


class Prediction(NamedTuple):
    """``floor_s``: as ``Bench.floor``, with the speeds of an H200; ``busiest``: the GPU that needs longest."""

    summary: PlanSummary
    floor_s: float
    busiest: Busy


def predict(scenario: Scenario) -> Prediction:
    """Plan a scenario as it would be on GPUs."""
    shape = models.model(scenario.model)
    exports, rules = _megatron(scenario, shape) if scenario.trainer_kind == "megatron" else _fsdp(scenario, shape)
    layouts = {
        f"engine {number}": [_layout(scenario, shape, rank, place.tp, gpu) for rank, gpu in enumerate(place.gpus)]
        for number, place in enumerate(scenario.engines)
    }
    plan = build_plan(
        exports,
        rules,
        layouts,
        config=Config(pair=scenario.pair, route="direct"),
        source_devices={rank: _gpu(gpu) for rank, gpu in enumerate(scenario.trainer_gpus)},
    )
    summary = plan.summary()
    return Prediction(summary, links.loads(summary.traffic, H200)[0].seconds, _busiest(scenario, summary))


def _gpu(index: int) -> str:
    return f"GPU {index}"


def _busiest(scenario: Scenario, summary: PlanSummary) -> Busy:
    found: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    places = {f"engine {number}": place.gpus for number, place in enumerate(scenario.engines)}
    for row in summary.traffic:
        here, there = places[row.engine][row.engine_rank], scenario.trainer_gpus[row.trainer_rank]
        if row.same_device:
            found[here][0] += row.num_bytes
        else:
            found[here][1] += row.num_bytes
            found[there][2] += row.num_bytes
    return max((Busy(gpu, *counts) for gpu, counts in found.items()), key=lambda busy: busy.seconds)


# ----------------------------------------------------------------------------------------------------- engine side


def _layout(scenario: Scenario, shape: DemoModel, rank: int, tp: int, gpu: int) -> Layout:
    params, needs = [], []
    for index, (name, size) in enumerate(shapes(shape).items()):
        box = _need(name, size, shape, rank, tp)
        params.append(Param(name, box.size, scenario.engine_dtype, 0))
        needs.append(Need(name, box, View(index, 0, dense_strides(box.size))))
    return Layout(rank, "boot", _gpu(gpu), "host", params, needs, [], [], [], {}, [], {})


def _need(name: str, size: Shape, shape: DemoModel, rank: int, tp: int) -> Box:
    """The box that a TP rank of SGLang keeps: heads whole, the vocabulary padded, norms and routers on every rank."""
    module = name.split(".")[-2]
    if module in ("k_proj", "v_proj") and shape.num_kv_heads < tp:
        return split(size, 0, rank * shape.num_kv_heads // tp, shape.num_kv_heads)
    if module in _ROWS:
        return split(size, 0, rank, tp)
    if module in _COLUMNS:
        return split(size, 1, rank, tp)
    if module in _VOCABULARY:
        whole = split((_padded(size[0], SGLANG_VOCABULARY_MULTIPLE), *size[1:]), 0, rank, tp)
        rows = max(0, min(whole.size[0], size[0] - whole.offset[0]))
        return Box(whole.offset, (rows, *size[1:]))
    return split(size, None, rank, tp)


def _padded(rows: int, multiple: int) -> int:
    return -(-rows // multiple) * multiple


# ---------------------------------------------------------------------------------------------------- trainer side


def _fsdp(scenario: Scenario, shape: DemoModel) -> tuple[dict[int, list[Shard]], list[Rule]]:
    held = models.trainer_shapes(shape, stacked=scenario.stacked)
    ranks = len(scenario.trainer_gpus)
    exports = {
        rank: [_shard(scenario, name, size, split(size, 0, rank, ranks)) for name, size in held.items()]
        for rank in range(ranks)
    }
    return exports, dtensor_mapping.rules_of(held)


def _shard(scenario: Scenario, name: str, size: Shape, box: Box) -> Shard:
    """As published: in the engine's dtype."""
    return Shard(name, size, scenario.engine_dtype, box, dense_strides(box.size), 0)


class _Held(NamedTuple):
    """A Megatron tensor, whole; ``cut``: the dim that TP cuts. ``stage``: of the pipeline; ``expert``: -1 if none."""

    name: str
    size: Shape
    stage: int
    cut: int | None = None
    expert: int = -1


def _megatron(scenario: Scenario, shape: DemoModel) -> tuple[dict[int, list[Shard]], list[Rule]]:
    """Ranks are numbered as megatron-core does: tensor axis first, then experts or data, pipeline last."""
    axes, ranks = scenario.parallel, len(scenario.trainer_gpus)
    held = list(_megatron_tensors(shape, axes.tp, axes.pp))
    exports: dict[int, list[Shard]] = {}
    for rank in range(ranks):
        stage, in_stage = divmod(rank, ranks // axes.pp)
        own = [h for h in held if h.stage == stage and _has_expert(h.expert, in_stage % axes.ep, shape, axes.ep)]
        exports[rank] = [_shard(scenario, h.name, h.size, split(h.size, h.cut, rank % axes.tp, axes.tp)) for h in own]
    model = megatron_mapping.Model(
        model_type=shape.family,
        vocab_size=shape.vocab_size,
        num_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        head_dim=shape.head_dim,
        latent_attention=False,
        q_lora_rank=0,
        layers={layer: layer for layer in range(shape.num_layers)},
    )
    return exports, [rule for h in held for rule in megatron_mapping.rules_for(h.name, h.size, model)]


def _has_expert(expert: int, rank: int, shape: DemoModel, ep: int) -> bool:
    return expert < 0 or expert // (shape.num_experts // ep) == rank


def _megatron_tensors(shape: DemoModel, tp: int, pp: int) -> Iterator[_Held]:
    hidden, last = shape.hidden_size, pp - 1
    vocabulary = (_padded(shape.vocab_size, MEGATRON_VOCABULARY_MULTIPLE * tp), hidden)
    yield _Held("embedding.word_embeddings.weight", vocabulary, 0, 0)
    for layer in range(shape.num_layers):
        yield from _megatron_layer(shape, f"decoder.layers.{layer}", layer * pp // shape.num_layers)
    yield _Held("decoder.final_layernorm.weight", (hidden,), last)
    if not shape.tie_word_embeddings:
        yield _Held("output_layer.weight", vocabulary, last, 0)


def _megatron_layer(shape: DemoModel, layer: str, stage: int) -> Iterator[_Held]:
    hidden, head = shape.hidden_size, shape.head_dim
    rows = (shape.num_heads + 2 * shape.num_kv_heads) * head
    attention = f"{layer}.self_attention"
    yield _Held(f"{layer}.input_layernorm.weight", (hidden,), stage)
    yield _Held(f"{attention}.linear_qkv.weight", (rows, hidden), stage, 0)
    if shape.family == "qwen2":
        yield _Held(f"{attention}.linear_qkv.bias", (rows,), stage, 0)
    if shape.family in ("qwen3", "qwen3_moe"):
        yield _Held(f"{attention}.q_layernorm.weight", (head,), stage)
        yield _Held(f"{attention}.k_layernorm.weight", (head,), stage)
    yield _Held(f"{attention}.linear_proj.weight", (hidden, shape.num_heads * head), stage, 1)
    yield _Held(f"{layer}.pre_mlp_layernorm.weight", (hidden,), stage)
    if shape.family != "qwen3_moe":
        yield _Held(f"{layer}.mlp.linear_fc1.weight", (2, shape.intermediate_size, hidden), stage, 1)
        yield _Held(f"{layer}.mlp.linear_fc2.weight", (hidden, shape.intermediate_size), stage, 1)
        return
    inner = shape.moe_intermediate_size
    yield _Held(f"{layer}.mlp.router.weight", (shape.num_experts, hidden), stage)
    for e in range(shape.num_experts):
        expert = f"{layer}.mlp.experts.local_experts.{e}"
        yield _Held(f"{expert}.linear_fc1.weight", (2, inner, hidden), stage, None, e)
        yield _Held(f"{expert}.linear_fc2.weight", (hidden, inner), stage, None, e)


# ---------------------------------------------------------------------------------------------------------- report


def table(scenarios: dict[str, Scenario]):
    """A row a scenario, for ``rich`` to print."""
    from rich.table import Table

    assumed = f"{H200.local / 1e12:.2f} TB/s copied inside a GPU, {H200.peer / 1e9:.0f} GB/s from a peer"
    shown = Table(
        title=f"what a push moves, and its floor (assumed, measured on H200: {assumed})", title_justify="left"
    )
    for name in ("scenario", "model", "trainer", "engines"):
        shown.add_column(name)
    for name in ("GPUs", "model GB", "push GB", "copies", "floor ms", "busiest", "GB inside", "taken", "given"):
        shown.add_column(name, justify="right")
    for name, scenario in scenarios.items():
        shown.add_row(name, *_cells(scenario))
    return shown


def _cells(scenario: Scenario) -> list[str]:
    found = predict(scenario)
    axes = f" {scenario.parallel}" if str(scenario.parallel) else ""
    summary, busiest = found.summary, found.busiest
    return [
        scenario.model,
        f"{scenario.trainer_kind}{axes} on {len(scenario.trainer_gpus)}",
        f"{len(scenario.engines)} x TP {scenario.tp}",
        str(scenario.num_gpus),
        *(f"{n / 1e9:.2f}" for n in (summary.model_bytes, summary.num_bytes)),
        str(sum(row.num_copies for row in summary.traffic)),
        f"{1e3 * found.floor_s:.2f}",
        _gpu(busiest.gpu),
        *(f"{n / 1e9:.2f}" for n in busiest[1:]),
    ]

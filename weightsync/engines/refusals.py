"""What an SGLang engine may be configured to that a push cannot serve. Checked once, at connect, before anything moves.

Each rule goes only when a test shows that pushing works in spite of it. Field names are those of ``/server_info``;
a field that an older version lacks counts as off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

SESSION_SINCE = (0, 5, 21)

Info = dict[str, Any]


class Asked(NamedTuple):
    """What the configuration wants of the engine, as far as a rule depends on it."""

    version: tuple[int, int, int]
    pause: str
    same_node: bool


class Rule(NamedTuple):
    """``applies``: whether the engine is refused. ``fields`` are shown with their values, ``why`` says what to do."""

    name: str
    fields: tuple[str, ...]
    applies: Callable[[Info, Asked], bool]
    why: str


def _on(*fields: str) -> Callable[[Info, Asked], bool]:
    """True if any of the fields is set to something other than off."""
    return lambda info, asked: any(_is_on(info.get(f)) for f in fields)


def _is_on(value: Any) -> bool:
    return value not in (None, False, 0, "", "off", "none", "null") and value != [] and value != {}


def _above(field: str, limit: int) -> Callable[[Info, Asked], bool]:
    return lambda info, asked: (info.get(field) or 0) > limit


RULES: tuple[Rule, ...] = (
    Rule("pipeline parallelism", ("pp_size",), _above("pp_size", 1), "weight updates reach the first stage only"),
    Rule(
        "data-parallel replicas",
        ("dp_size",),
        lambda info, asked: (info.get("dp_size") or 1) > 1 and not info.get("enable_dp_attention"),
        "weight updates are refused there; start one engine a replica and list them all",
    ),
    Rule(
        "quantised weights",
        ("quantization", "torchao_config", "modelopt_quant", "quantize_and_serve", "rl_quant_profile"),
        _on("quantization", "torchao_config", "modelopt_quant", "quantize_and_serve", "rl_quant_profile"),
        "the trainer's weights do not fit quantised parameters; serve without quantisation",
    ),
    Rule(
        "expert placement that moves",
        ("enable_eplb", "ep_num_redundant_experts", "init_expert_location", "elastic_ep_backend"),
        lambda info, asked: (
            _on("enable_eplb", "ep_num_redundant_experts", "elastic_ep_backend")(info, asked)
            or info.get("init_expert_location", "trivial") not in (None, "trivial")
        ),
        "the plan would write experts to where they were; start without EPLB and redundant experts",
    ),
    Rule(
        "a draft model",
        ("speculative_algorithm", "speculative_draft_model_path"),
        _on("speculative_algorithm", "speculative_draft_model_path"),
        "it would keep its old weights; start without speculative decoding",
    ),
    Rule(
        "weight cache",
        ("weight_cache_mode",),
        _on("weight_cache_mode"),
        "other engines share its weights; start with --weight-cache-mode off",
    ),
    Rule(
        "an MoE backend that rewrites expert weights",
        ("moe_runner_backend", "speculative_moe_runner_backend"),
        lambda info, asked: info.get("moe_runner_backend", "auto") not in (None, "auto", "triton"),
        "start with --moe-runner-backend triton",
    ),
    Rule(
        "weights offloaded to the host",
        ("cpu_offload_gb", "offload_group_size", "enable_paged_experts", "kt_weight_path", "ple_offload_embedding"),
        lambda info, asked: (
            _on("cpu_offload_gb", "enable_paged_experts", "kt_weight_path", "ple_offload_embedding")(info, asked)
            or _above("offload_group_size", 0)(info, asked)
        ),
        "updates would write to copies that are thrown away; start without offloading",
    ),
    Rule(
        "LoRA",
        ("enable_lora", "lora_paths"),
        _on("enable_lora", "lora_paths"),
        "wrapped layers have other parameter names, which SGLang skips in silence; merge in the trainer and push that",
    ),
    Rule(
        "a KV cache that a flush does not reach",
        ("hicache_storage_backend", "enable_lmcache", "enable_flexkv"),
        _on("hicache_storage_backend", "enable_lmcache", "enable_flexkv"),
        "answers would come from the old weights' cache; start without external KV storage",
    ),
    Rule(
        "several HTTP workers",
        ("tokenizer_worker_num",),
        _above("tokenizer_worker_num", 1),
        "each keeps a weight version and a pause of its own; start with --tokenizer-worker-num 1",
    ),
    Rule(
        "several nodes",
        ("nnodes",),
        lambda info, asked: asked.same_node and (info.get("nnodes") or 1) > 1,
        "this route maps memory and works on one node only",
    ),
    Rule(
        "pause: retract",
        (),
        lambda info, asked: asked.pause == "retract" and asked.version < SESSION_SINCE,
        "before 0.5.21 the KV cache cannot be flushed after it; use pause: abort, or a newer engine",
    ),
)


def refusals(info: Info, asked: Asked) -> list[str]:
    """Every reason why the engine with this ``/server_info`` cannot be pushed to; empty if it can."""
    found = []
    for rule in RULES:
        if rule.applies(info, asked):
            shown = ", ".join(f"{f}={_short(info[f])}" for f in rule.fields if _is_on(info.get(f)))
            found.append(f"{rule.name}{f' ({shown})' if shown else ''}: {rule.why}")
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

"""Megatron-core's tensors as boxes of Hugging Face's: one list of rules a tensor. Needs neither torch nor megatron.

Tensors go by their *global* names: layer numbers and expert ids count over all ranks, and the embedding that a last
stage keeps for its output layer is called ``embedding.word_embeddings.weight`` there too. Names are those of
megatron-core 0.19 with and without Transformer Engine, of GPTModel and of HybridModel.

Shapes are the trainer's own, whole, in the layout that ``megatron_shards`` reports: a gated fc1 is ``[2, I, H]``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from weightsync.errors import ConfigError
from weightsync.spec import Box, Rule

Shape = tuple[int, ...]


class Family(NamedTuple):
    """How a ``model_type`` names its mixture of experts. ``{}`` is the expert."""

    router: str = "mlp.gate.weight"
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "qwen3_moe": Family(),
    "deepseek_v3": Family(),
    "mixtral": Family(
        router="block_sparse_moe.gate.weight",
        gate="block_sparse_moe.experts.{}.w1",
        up="block_sparse_moe.experts.{}.w3",
        down="block_sparse_moe.experts.{}.w2",
    ),
}


class Model(NamedTuple):
    """What the mapping must know of a model. ``layers`` maps a Megatron layer's number to the Hugging Face layer's.

    ``vocab_size`` is the true one, without padding. ``q_lora_rank`` is 0 where queries are not compressed.
    """

    model_type: str
    vocab_size: int
    num_heads: int
    num_query_groups: int
    head_dim: int
    latent_attention: bool
    q_lora_rank: int
    layers: dict[int, int]


_NORMS = {
    "input_layernorm": "input_layernorm",
    "self_attention.linear_qkv.layer_norm": "input_layernorm",
    "self_attention.linear_qkv_down_proj.layer_norm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1.layer_norm": "post_attention_layernorm",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
    "self_attention.linear_kv_up_proj.layer_norm": "self_attn.kv_a_layernorm",
    "self_attention.linear_q_up_proj.layer_norm": "self_attn.q_a_layernorm",
}
_SAME = {
    "self_attention.linear_proj": "self_attn.o_proj",
    "self_attention.linear_q_proj": "self_attn.q_proj",
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
    "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
    "mlp.linear_fc2": "mlp.down_proj",
    "mlp.shared_experts.linear_fc2": "mlp.shared_experts.down_proj",
}
_GATED = {
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.shared_experts.linear_fc1": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc[12])\.|(linear_fc[12])\.)weight(\d*)")
_NORM = re.compile(r"(.+?)[._](weight|bias)")


def is_norm(name: str) -> bool:
    """Whether a tensor of this name is the weight of a norm: what ``layernorm_zero_centered_gamma`` applies to."""
    return re.search(r"(layernorm|layer_norm|final_norm)[._]weight$", name) is not None


def rules_for(name: str, shape: Shape, model: Model) -> list[Rule]:
    """The rules of one tensor by its global name; empty if it has no place in a model of that family."""
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        return _vocabulary(name, shape, model)
    if name in ("decoder.final_layernorm.weight", "decoder.final_norm.weight"):
        return [_whole(name, shape, "model.norm.weight")]
    match = _LAYER.fullmatch(name)
    if match is None or int(match[1]) not in model.layers:
        return []
    prefix = f"model.layers.{model.layers[int(match[1])]}."
    for rule_maker in _RULE_MAKERS:
        rules = rule_maker(name, match[2], shape, model, prefix)
        if rules:
            return rules
    return []


def _vocabulary(name: str, shape: Shape, model: Model) -> list[Rule]:
    """The true rows only: padding goes nowhere."""
    rows, hidden = shape
    if model.vocab_size > rows:
        raise ConfigError(f"vocab_size is {model.vocab_size}, but {name} has only {rows} rows", tensor=name)
    target = "lm_head.weight" if name == "output_layer.weight" else "model.embed_tokens.weight"
    return [_rows(name, 0, (model.vocab_size, hidden), target)]


def _norm(name: str, leaf: str, shape: Shape, model: Model, prefix: str) -> list[Rule]:
    match = _NORM.fullmatch(leaf)
    target = _NORMS.get(match[1]) if match else None
    if target is None or match is None:
        return []
    if model.latent_attention and target == "self_attn.q_norm":
        target = "self_attn.q_a_layernorm"
    return [_whole(name, shape, f"{prefix}{target}.{match[2]}")]


def _same(name: str, leaf: str, shape: Shape, model: Model, prefix: str) -> list[Rule]:
    module, _, kind = leaf.rpartition(".")
    return [_whole(name, shape, f"{prefix}{_SAME[module]}.{kind}")] if module in _SAME else []


def _gated(name: str, leaf: str, shape: Shape, model: Model, prefix: str) -> list[Rule]:
    module, _, kind = leaf.rpartition(".")
    if module not in _GATED or shape[0] != 2:
        return []
    return [_half(name, half, shape, f"{prefix}{target}.{kind}") for half, target in enumerate(_GATED[module])]


def _qkv(name: str, leaf: str, shape: Shape, model: Model, prefix: str) -> list[Rule]:
    """Rows lie by query group: the group's queries, its key, its value."""
    module, _, kind = leaf.rpartition(".")
    if module != "self_attention.linear_qkv":
        return []
    head, groups = model.head_dim, model.num_query_groups
    query = model.num_heads // groups * head
    if shape[0] != groups * (query + 2 * head):
        raise ConfigError(
            f"{name} has {shape[0]} rows; {model.num_heads} heads in {groups} groups of size {head} make "
            f"{groups * (query + 2 * head)}",
            tensor=name,
        )
    rules = []
    for part, at, rows in (("q", 0, query), ("k", query, head), ("v", query + head, head)):
        target, whole = f"{prefix}self_attn.{part}_proj.{kind}", (groups * rows, *shape[1:])
        for group in range(groups):
            box = Box(_first(group * (query + 2 * head) + at, shape), (rows, *shape[1:]))
            rules.append(Rule(name, box, target, whole, _first(group * rows, shape), _dims(shape)))
    return rules


def _latent_down(name: str, leaf: str, shape: Shape, model: Model, prefix: str) -> list[Rule]:
    """The fused down projection: first the queries' rows, then those of keys and values."""
    if leaf != "self_attention.linear_qkv_down_proj.weight":
        return []
    rows, hidden = shape
    split = model.q_lora_rank
    return [
        _rows(name, 0, (split, hidden), f"{prefix}self_attn.q_a_proj.weight"),
        _rows(name, split, (rows - split, hidden), f"{prefix}self_attn.kv_a_proj_with_mqa.weight"),
    ]


def _router(name: str, leaf: str, shape: Shape, model: Model, prefix: str) -> list[Rule]:
    if leaf == "mlp.router.weight":
        return [_whole(name, shape, prefix + FAMILIES[model.model_type].router)]
    if leaf == "mlp.router.expert_bias":
        return [_whole(name, shape, f"{prefix}mlp.gate.e_score_correction_bias")]
    return []


def _experts(name: str, leaf: str, shape: Shape, model: Model, prefix: str) -> list[Rule]:
    """One expert a tensor, as modules of their own or as the numbered weights of a grouped one."""
    match = _EXPERT.fullmatch(leaf)
    if match is None or not (match[1] or match[4]):
        return []
    expert, module, family = match[1] or match[4], match[2] or match[3], FAMILIES[model.model_type]
    if module == "linear_fc2":
        return [_whole(name, shape, f"{prefix}{family.down.format(expert)}.weight")]
    if shape[0] != 2:
        return []
    halves = (family.gate.format(expert), family.up.format(expert))
    return [_half(name, half, shape, f"{prefix}{target}.weight") for half, target in enumerate(halves)]


_RULE_MAKERS: tuple[Callable[[str, str, Shape, Model, str], list[Rule]], ...] = (
    _norm,
    _same,
    _gated,
    _qkv,
    _latent_down,
    _router,
    _experts,
)


def _whole(name: str, shape: Shape, target: str) -> Rule:
    return Rule(name, Box((0,) * len(shape), shape), target, shape, (0,) * len(shape), _dims(shape))


def _rows(name: str, start: int, size: Shape, target: str) -> Rule:
    """``size[0]`` rows from ``start`` are the target, whole."""
    return Rule(name, Box(_first(start, size), size), target, size, (0,) * len(size), _dims(size))


def _half(name: str, half: int, shape: Shape, target: str) -> Rule:
    """Half 0 or 1 of dim 0, which is dropped."""
    size = shape[1:]
    box = Box(_first(half, shape), (1, *size))
    return Rule(name, box, target, size, (0,) * len(size), tuple(range(1, len(shape))))


def _first(start: int, shape: Shape) -> tuple[int, ...]:
    """The offset of a box that starts at ``start`` in dim 0 and at 0 in the others."""
    return (start, *(0,) * (len(shape) - 1))


def _dims(shape: Shape) -> tuple[int, ...]:
    return tuple(range(len(shape)))

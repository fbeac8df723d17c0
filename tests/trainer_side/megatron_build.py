"""The same model in each of the forms that megatron-core 0.19 has, holding what the oracle loaded.

Runs in envs/megatron. A form renames the oracle's state, tensor by tensor and by hand: this is how the model is made,
not what is tested.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from megatron_cases import Case, build_chunks, hf_config
from megatron_parts import Norm

State = dict[str, torch.Tensor]


def gpt(case: Case, config: Any, states: list[State], *, te_names: bool) -> list[torch.nn.Module]:
    """GPTModel chunks that hold ``states`` (none: as initialised).

    They go by Transformer Engine's names or by those of megatron-core's own modules.
    """
    config = config if te_names else plain(config)

    def provider(pre_process: bool, post_process: bool, vp_stage: int | None) -> GPTModel:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=te_names, vp_stage=vp_stage)
        return GPTModel(config, spec, **_model_options(case, pre_process, post_process), vp_stage=vp_stage)

    chunks = build_chunks(case, provider)
    for chunk, state in zip(chunks, states):
        _load(chunk, state if te_names else _local_names(chunk, state))
    return chunks


def hybrid(case: Case, config: Any, states: list[State]) -> list[torch.nn.Module]:
    """A HybridModel whose pattern is attention, feed-forward, attention, ...: twice the layers."""
    hybrid_block.TENorm = Norm
    config = copy.copy(config)
    per_stage, config.num_layers = config.num_layers // case.pp, config.num_layers * 2
    mixed = bool(config.num_moe_experts)
    pattern = "|".join(["*E" * per_stage if mixed else "*-" * per_stage] * case.pp)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    spec = ModuleSpec(module=hybrid_block.HybridStack, submodules=_hybrid_layers(block.layer_specs[-1].submodules))

    def provider(pre_process: bool, post_process: bool, vp_stage: int | None) -> HybridModel:
        options = _model_options(case, pre_process, post_process)
        spec_of_block = options.pop("max_sequence_length")
        return HybridModel(config, spec, max_sequence_length=spec_of_block, hybrid_layer_pattern=pattern, **options)

    (chunk,) = build_chunks(case, provider)
    _load(chunk, {_hybrid_name(name): tensor for name, tensor in states[0].items()})
    return [chunk]


def half(chunk: torch.nn.Module) -> torch.nn.Module:
    """Inside Float16Module. Routers keep their bias in float32, as training loops see to."""
    config = copy.copy(chunk.config)
    config.bf16 = True
    routers = [m for m in chunk.modules() if getattr(m, "expert_bias", None) is not None]
    biases = [router.expert_bias.clone() for router in routers]
    module = Float16Module(config, chunk)
    for router, bias in zip(routers, biases, strict=True):
        router._maintain_float32_expert_bias()
        router.expert_bias.copy_(bias)
    return module


def data_parallel(chunk: torch.nn.Module, *, overlap: bool = False) -> DistributedDataParallel:
    """Inside DistributedDataParallel; ``overlap``: parameters are gathered during the forward after a step."""
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=overlap, overlap_param_gather=overlap)
    return DistributedDataParallel(chunk.config, ddp, chunk)


def plain(config: Any) -> Any:
    """The configuration for megatron-core's own modules, which know neither sequence parallelism nor fused norms."""
    config = copy.copy(config)
    config.sequence_parallel, config.persist_layer_norm, config.transformer_impl = False, False, "local"
    return config


def _model_options(case: Case, pre_process: bool, post_process: bool) -> dict[str, Any]:
    hf = hf_config(case)
    rows, step = hf.vocab_size, case.padded_to or 1
    return {
        "vocab_size": -(-rows // step) * step,
        "max_sequence_length": hf.max_position_embeddings,
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": hf.tie_word_embeddings,
        "pre_process": pre_process,
        "post_process": post_process,
    }


def _hybrid_layers(layer: TransformerLayerSubmodules) -> hybrid_block.HybridStackSubmodules:
    attention = TransformerLayerSubmodules(self_attention=layer.self_attention, self_attn_bda=layer.self_attn_bda)
    dense = TransformerLayerSubmodules(mlp=layer.mlp, mlp_bda=layer.mlp_bda)
    mixed = TransformerLayerSubmodules(pre_mlp_layernorm=layer.pre_mlp_layernorm, mlp=layer.mlp, mlp_bda=layer.mlp_bda)
    return hybrid_block.HybridStackSubmodules(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=dense),
        moe_layer=ModuleSpec(module=MoETransformerLayer, submodules=mixed),
    )


def _hybrid_name(name: str) -> str:
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if match is None:
        return name.replace("final_layernorm", "final_norm")
    feeds_forward = match[2].startswith(("mlp", "pre_mlp"))
    return f"decoder.layers.{2 * int(match[1]) + feeds_forward}.{match[2]}"


def _local_names(chunk: torch.nn.Module, state: State) -> State:
    renamed = {}
    for name, tensor in state.items():
        name = name.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
        name = re.sub(r"mlp\.linear_fc1\.layer_norm_weight", "pre_mlp_layernorm.weight", name)
        name = name.replace("linear_q_up_proj.layer_norm_weight", "q_layernorm.weight")
        name = name.replace("linear_kv_up_proj.layer_norm_weight", "kv_layernorm.weight")
        name = re.sub(r"experts\.(linear_fc[12])\.weight(\d+)", r"experts.local_experts.\2.\1.weight", name)
        renamed[name] = tensor
    whole = {n: p for n, p in chunk.named_parameters() if p.shape != renamed[n].shape}
    for name, parameter in whole.items():  # megatron-core's own latent down projections are cut, not duplicated
        assert "down_proj" in name, name
        renamed[name] = renamed[name].chunk(parallel_state.get_tensor_model_parallel_world_size())[
            parallel_state.get_tensor_model_parallel_rank()
        ]
        assert renamed[name].shape == parameter.shape
    return renamed


def _load(chunk: torch.nn.Module, state: State) -> None:
    own = {k: v for k, v in chunk.state_dict().items() if "_extra_state" not in k}
    assert own.keys() == state.keys(), sorted(own.keys() ^ state.keys())
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state[name])

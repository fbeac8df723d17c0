"""The benchmark's Megatron trainer: megatron-core's GPTModel of a real model's shape. Runs in a training rank.

Only megatron-core's own modules are used: neither Transformer Engine nor other extensions have to be installed.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.parallel import Parallel
from weightsync.boxes import piece_of
from weightsync.demo_model import DemoModel, hf_config
from weightsync.spec import Box
from weightsync.trainers import megatron
from weightsync.views import box_of

VOCABULARY_ROWS_MULTIPLE = 128  # Megatron-LM's make-vocab-size-divisible-by; times tp


def build(shape: DemoModel, *, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """This rank's part of the model with random weights, on ``device``; replicas hold the same. A collective.

    No gradients and no optimizer: what takes memory is the parameters alone.
    """
    from megatron.core import parallel_state

    on_cpu = device.type == "cpu"
    if on_cpu:
        torch.cuda.current_device = lambda: torch.device("cpu")  # rotary embeddings and routers ask
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=1,
    )
    model = _model(shape, _config(shape, parallel, dtype, on_cpu), parallel)
    model.to(device=device, dtype=dtype)
    _randomise(model, shape)
    return model


def _config(shape: DemoModel, parallel: Parallel, dtype: torch.dtype, on_cpu: bool) -> Any:
    from megatron.core.transformer import TransformerConfig

    experts = {
        "num_moe_experts": shape.num_experts,
        "moe_ffn_hidden_size": shape.moe_intermediate_size,
        "moe_router_topk": shape.experts_per_token,
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": False,
        "moe_token_dispatcher_type": "allgather",
    }
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=hf_config(shape)["rms_norm_eps"],
        normalization="RMSNorm",
        activation_func=nn.functional.silu,
        gated_linear_unit=True,
        qk_layernorm=_has_qk_norm(shape),
        add_bias_linear=False,
        add_qkv_bias=shape.family == "qwen2",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=on_cpu,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        transformer_impl="local",
        **(experts if _has_experts(shape) else {}),
    )


def _model(shape: DemoModel, config: Any, parallel: Parallel) -> nn.Module:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    spec = get_gpt_layer_local_spec(
        num_experts=shape.num_experts if _has_experts(shape) else None,
        moe_grouped_gemm=False,
        qk_layernorm=_has_qk_norm(shape),
        normalization="RMSNorm",
    )
    return GPTModel(
        config,
        spec,
        vocab_size=padded_rows(shape.vocab_size, parallel.tp),
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=int(hf_config(shape)["rope_theta"]),
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
        parallel_output=False,
    )


def padded_rows(vocab_size: int, tp: int) -> int:
    """Rows of a vocabulary as Megatron keeps them."""
    step = VOCABULARY_ROWS_MULTIPLE * tp
    return -(-vocab_size // step) * step


def options_of(shape: DemoModel) -> dict[str, Any]:
    """``trainer_options`` of this model's publisher."""
    return {"hf_config": hf_config(shape)}


def _has_experts(shape: DemoModel) -> bool:
    return shape.family == "qwen3_moe"


def _has_qk_norm(shape: DemoModel) -> bool:
    return shape.family in ("qwen3", "qwen3_moe")


@torch.no_grad()
def _randomise(model: nn.Module, shape: DemoModel) -> None:
    """Seeded by name and place, so that every replica of a tensor has the same values."""
    for held in megatron.reader(model, **options_of(shape)).read():
        generator = torch.Generator(held.tensor.device)
        generator.manual_seed(zlib.crc32(f"{held.name} {held.offset}".encode()))
        held.tensor.uniform_(-0.05, 0.05, generator=generator)
        if "norm" in held.name:
            held.tensor.add_(1)


# --------------------------------------------------------------------------------- whole tensors, for stock calls


class _Piece(NamedTuple):
    """A box of a Hugging Face tensor that a rank holds; ``strides`` and ``offset`` find it in its tensor."""

    source: str
    box: Box
    strides: tuple[int, ...]
    offset: int


class WholeTensors:
    """Whole Hugging Face tensors put together from all ranks, one after the other, as converters of frameworks do.

    Each is taken from the first rank of every group of replicas, by a broadcast a rank. Made and used by all ranks.
    """

    def __init__(self, model: nn.Module, shape: DemoModel) -> None:
        self._reader = megatron.reader(model, **options_of(shape))
        own, shapes = self._own_pieces()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (own, shapes))
        self._shapes = {name: size for _, shapes in everyone for name, size in shapes.items()}
        self._pieces: dict[str, dict[int, list[_Piece]]] = {name: {} for name in self._shapes}
        for rank, (pieces, _) in enumerate(everyone):
            for name, found in pieces.items():
                taken = {p.box for others in self._pieces[name].values() for p in others}
                missing = [p for p in map(_Piece._make, found) if p.box not in taken]
                if missing:
                    self._pieces[name][rank] = missing
        for name, owners in self._pieces.items():
            found = sum(prod(piece.box.size) for pieces in owners.values() for piece in pieces)
            assert found == prod(self._shapes[name]), f"{name}: {found} elements of {self._shapes[name]} are held"

    def _own_pieces(self) -> tuple[dict[str, list[tuple]], dict[str, tuple]]:
        held = {h.name: h for h in self._reader.read()}
        own: dict[str, list[tuple]] = {}
        shapes = {}
        for rule in self._reader.rules(list(held.values())):
            tensor = held[rule.source].tensor
            piece = piece_of(rule, held[rule.source].box, tensor.stride())
            if piece is not None:
                own.setdefault(rule.target, []).append((rule.source, piece.box, piece.strides, piece.offset))
                shapes[rule.target] = rule.target_shape
        return own, shapes

    def __call__(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor whole and new, on this rank's device. A collective: all ranks iterate."""
        held = {h.name: h.tensor for h in self._reader.read()}
        device = next(iter(held.values())).device
        for name, size in self._shapes.items():
            whole = torch.empty(size, dtype=dtype, device=device)
            for rank, pieces in self._pieces[name].items():
                self._fetch(whole, rank, pieces, held)
            yield name, whole

    def _fetch(self, whole: torch.Tensor, rank: int, pieces: list[_Piece], held: dict[str, torch.Tensor]) -> None:
        targets = [box_of(whole, piece.box) for piece in pieces]
        if rank == dist.get_rank():
            for target, piece in zip(targets, pieces, strict=True):
                target.copy_(_view(held[piece.source], piece))
        if dist.get_world_size() == 1:
            return
        if whole.numel() == sum(prod(p.box.size) for p in pieces):
            dist.broadcast(whole, src=rank)
            return
        sent = torch.cat([target.reshape(-1) for target in targets])
        dist.broadcast(sent, src=rank)
        for target, part in zip(targets, sent.split([t.numel() for t in targets]), strict=True):
            target.copy_(part.view(target.shape))


def _view(tensor: torch.Tensor, piece: _Piece) -> torch.Tensor:
    return tensor.as_strided(piece.box.size, piece.strides, tensor.storage_offset() + piece.offset)

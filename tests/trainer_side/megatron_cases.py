"""The models and worlds of the Megatron tests. Every dimension of a model differs from every other.

Imports nothing of weightsync, so that the oracle can use it too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

_SHARED = {
    "vocab_size": 101,
    "hidden_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 72,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
_LATENT = {
    "vocab_size": 102,
    "moe_intermediate_size": 28,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "rope_scaling": None,
}


class Case(NamedTuple):
    """One model over four ranks. ``vpp``: chunks a pipeline rank; ``padded_to``: its vocabulary rows are a multiple."""

    model_type: str
    hf: dict[str, Any]
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int | None = None
    padded_to: int | None = 64


CASES: dict[str, Case] = {
    "llama": Case("llama", {}, tp=2, pp=2, etp=2),
    "qwen3_virtual": Case("qwen3", {}, tp=2, pp=2, etp=2, vpp=2),
    "qwen3_wide": Case("qwen3", {"intermediate_size": 72}, tp=4, etp=4),
    "qwen3_moe": Case(
        "qwen3_moe", {"num_experts": 8, "moe_intermediate_size": 28, "num_experts_per_tok": 2}, tp=2, ep=2, etp=2
    ),
    "mixtral": Case("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}, tp=2, ep=4),
    "deepseek_v3": Case("deepseek_v3", _LATENT, tp=2, pp=2, ep=2, padded_to=None),
    # Last: mbridge ties the head of every later Qwen as well.
    "qwen2_tied": Case("qwen2", {"tie_word_embeddings": True}, tp=2, pp=2, etp=2),
}
WORLD_SIZE = 4


def hf_config(case: Case):
    from transformers import AutoConfig

    return AutoConfig.for_model(case.model_type, **{**_SHARED, **case.hf})


def initialize(case: Case) -> None:
    """megatron-core's groups for a case, in place of those of the last one."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
    )


def build_chunks(case: Case, provider) -> list:
    """One model a virtual stage (one in all without), by ``provider(pre_process, post_process, vp_stage)``."""
    from megatron.core import parallel_state

    chunks = []
    for stage in range(case.vpp or 1):
        stage_or_none = stage if case.vpp else None
        at = {"ignore_virtual": not case.vpp, "vp_stage": stage_or_none}
        first, last = parallel_state.is_pipeline_first_stage(**at), parallel_state.is_pipeline_last_stage(**at)
        chunks.append(provider(first, last, stage_or_none))
    return chunks


def run_ranks(main, *arguments) -> None:
    """``main(rank, *arguments)`` on every rank, in forks that share the imports. Raises if one fails."""
    import multiprocessing
    import tempfile

    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(main, rank, folder, arguments)) for rank in range(WORLD_SIZE)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    failed = [i for i, process in enumerate(ranks) if process.exitcode]
    if failed:
        raise SystemExit(f"ranks {failed} failed")


def _rank(main, rank: int, folder: str, arguments: tuple) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE)
    main(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()

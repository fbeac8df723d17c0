"""Real SGLang model objects without a server: one process, one gloo rank, weights from a folder. Both generations.

Runs in an engine environment. Nothing of weightsync is needed to build them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn


def server_args(folder: Path):
    """SGLang's arguments for a CPU server of that model."""
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(
        model_path=str(folder),
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_overlap_schedule=True,
        skip_tokenizer_init=True,
        max_total_tokens=256,
        mem_fraction_static=0.1,
    )


def build(folder: Path) -> nn.Module:
    """The model as SGLang's own loader makes it, weights loaded. The first call starts the process's one rank."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import get_model

    args = server_args(folder)
    if _publishes():
        config = _start_published(args)
    else:
        _start_plain(args)
        config = ModelConfig.from_server_args(args)
    with torch.no_grad():
        return get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))


def _publishes() -> bool:
    """Whether this SGLang keeps its arguments in a process-wide context (0.5.21 on)."""
    from importlib.util import find_spec

    return (
        find_spec("sglang.srt.runtime_context") is not None
        and find_spec("sglang.srt.distributed.bootstrap") is not None
    )


def _start_published(args):
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
    from sglang.srt.server_args import PortArgs

    args.resolve_once()
    ranks = SpawnRanks(world_rank=spawn_world_rank(args, tp_rank=0, pp_rank=0), gpu_id=0)
    publish(args, role="scheduler", ranks=ranks)
    initialize_moe_config()
    config = ModelConfig.from_server_args(args)
    if not torch.distributed.is_initialized():
        bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=PortArgs.init_new(args).nccl_port)
    bootstrap.init_layer_runtime(model_config=config)
    return config


def _start_plain(args) -> None:
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.server_args import PortArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(args)
    initialize_moe_config(args)
    if torch.distributed.is_initialized():
        return
    port = PortArgs.init_new(args).nccl_port
    init_distributed_environment(
        backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=f"tcp://127.0.0.1:{port}"
    )
    initialize_model_parallel(tensor_model_parallel_size=1)
    from sglang.srt.configs.model_config import ModelConfig

    initialize_dp_attention(server_args=args, model_config=ModelConfig.from_server_args(args))

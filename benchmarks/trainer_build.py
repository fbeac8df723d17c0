"""The benchmark's trainer: FSDP2-sharded parameters of a real model's names and shapes. Runs in a training rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks import models
from weightsync.demo_model import DemoModel, hf_config

_INTS = {2: torch.int16, 4: torch.int32}


def build(
    shape: DemoModel, *, kind: str, stacked: bool, dtype: torch.dtype, device: torch.device, ranks: int
) -> nn.Module:
    """The model, sharded over all ``ranks`` by FSDP2 a layer at a time, with random weights, on ``device``.

    ``kind`` is ``plain`` (modules that carry the parameters, no forward) or ``automodel`` (nemo-automodel's class).
    """
    module = _automodel(shape, dtype) if kind == "automodel" else _plain(shape, stacked, dtype)
    mesh = init_device_mesh(device.type, (ranks,))
    for layer in module.model.layers.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    module.to_empty(device=device)
    _randomise(module)
    return module


def _plain(shape: DemoModel, stacked: bool, dtype: torch.dtype) -> nn.Module:
    root = nn.Module()
    for name, size in models.trainer_shapes(shape, stacked=stacked).items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, nn.Parameter(torch.empty(size, dtype=dtype, device="meta")))
    return root


def _automodel(shape: DemoModel, dtype: torch.dtype) -> nn.Module:
    from nemo_automodel.components.models.qwen3.model import Qwen3ForCausalLM
    from transformers import Qwen3Config

    config = Qwen3Config(**hf_config(shape))
    config.dtype = dtype
    with torch.device("meta"):
        return Qwen3ForCausalLM(config)


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, sharing its memory."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def locals_of(module: nn.Module) -> list[torch.Tensor]:
    """This rank's parts of all parameters, those that it has no element of left out."""
    return [part for p in module.parameters() if (part := local(p)).numel()]


@torch.no_grad()
def _randomise(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        part = local(parameter)
        part.uniform_(-0.05, 0.05)
        if "norm" in name:
            part.add_(1)


@torch.no_grad()
def change(module: nn.Module, step: int) -> None:
    """Change every element, so that each still differs after a cast to bfloat16: flips bits of its mantissa.

    By two steps of bfloat16 at least where there is a cast, since rounding to even may undo one.
    """
    mask = 1 + step % 7
    for part in locals_of(module):
        bits = part.view(_INTS[part.itemsize])
        bits.bitwise_xor_(mask if part.itemsize == 2 else mask << 17)


def full_tensors(module: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors by Hugging Face name, gathered one after the other: what a sender of stock SGLang calls needs.

    A collective over all ranks. With one rank the parameter itself is handed out, not a copy.
    """
    for name, parameter in module.named_parameters():
        whole = _whole(parameter).to(dtype)
        block, found, kind = name.rpartition(".experts.")
        if found and kind in ("gate_and_up_projs", "down_projs"):
            yield from _unstacked(f"{block}.experts", kind, whole)
        else:
            yield name, whole


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    if isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1:
        return parameter.full_tensor().detach()
    return local(parameter)


def _unstacked(prefix: str, kind: str, stacked: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for index, expert in enumerate(stacked):
        parts: dict[str, Any] = {"down_proj": expert}
        if kind == "gate_and_up_projs":
            parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2, dim=1), strict=True))
        for name, part in parts.items():
            yield f"{prefix}.{index}.{name}.weight", part.t().contiguous()

"""What a rank holds of each tensor: which box of the whole one, as a view of the parameter's own memory.

Megatron marks a tensor-parallel parameter with ``tensor_model_parallel``, ``partition_dim`` and ``partition_stride``.
A gated fc1 holds on every rank its part of the gate and then its part of the up projection, whatever its stride says
(grouped experts say 1), so it is seen as ``[2, I / tp, H]``: one box of ``[2, I, H]``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from weightsync.errors import ConfigError
from weightsync.trainers.megatron_names import NamedLocal

_FC1 = re.compile(r"linear_fc1\.(weight|bias)\d*$")


class Axis(NamedTuple):
    """A rank's place in one group of ranks."""

    rank: int
    size: int


class Place(NamedTuple):
    """Where a local tensor lies in the whole one: that one's ``shape``, the part's ``offset``; a gated one is split."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    gated: bool


def place_of(held: NamedLocal, *, tensor_axis: Axis, expert_axis: Axis, gated: bool) -> Place:
    """Place a rank's tensor. ``tensor_axis`` is its place in the tensor-parallel group, ``expert_axis`` in experts'.

    Raises ConfigError naming a tensor whose memory or partition this cannot describe.
    """
    tensor = held.tensor
    _check_plain(held.name, tensor)
    is_gated = gated and _FC1.search(held.name) is not None
    shape = [2, tensor.shape[0] // 2, *tensor.shape[1:]] if is_gated else list(tensor.shape)
    offset = [0] * len(shape)
    if not getattr(tensor, "tensor_model_parallel", False):
        return Place(tuple(shape), tuple(offset), is_gated)
    stride = getattr(tensor, "partition_stride", 1)
    if stride != 1 and not (is_gated and stride == 2):
        raise ConfigError(f"{held.name} has partition_stride {stride}; only a gated fc1 may have one", tensor=held.name)
    if is_gated and tensor.partition_dim != 0:
        raise ConfigError(f"{held.name} is gated, but cut along dim {tensor.partition_dim}", tensor=held.name)
    axis = expert_axis if ".mlp.experts." in held.name else tensor_axis
    dim = tensor.partition_dim + is_gated
    offset[dim] = axis.rank * shape[dim]
    shape[dim] *= axis.size
    return Place(tuple(shape), tuple(offset), is_gated)


def view_of(data: torch.Tensor, place: Place) -> torch.Tensor:
    """The local tensor's memory with the dims of its place."""
    return data.unflatten(0, (2, -1)) if place.gated else data


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    data = tensor.data if isinstance(tensor, torch.nn.Parameter) else tensor
    if type(data) not in (torch.Tensor, torch.nn.Parameter):
        raise ConfigError(
            f"{name} is a {type(data).__name__}: fp8 and fp4 parameters, grouped tensors and those of Megatron-FSDP "
            "are not plain memory in the trainer's dtype",
            tensor=name,
        )
    if getattr(tensor, "is_gtp_weight_remat", False):
        raise ConfigError(f"{name} is cut by generalized tensor parallelism, which is not supported", tensor=name)

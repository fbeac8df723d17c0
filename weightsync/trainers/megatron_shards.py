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


class LocalBox(NamedTuple):
    """A view of a local tensor, and where it lies in the whole one: ``shape`` of that, ``offset`` of the view's start."""

    view: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]


def local_box(
    held: NamedLocal, *, tensor_axis: Axis, expert_axis: Axis, gated: bool, data: torch.Tensor | None = None
) -> LocalBox:
    """Place a rank's tensor. ``tensor_axis`` is its place in the tensor-parallel group, ``expert_axis`` in that of experts.

    ``data``: where its elements are now, if not in its own memory.

    Raises ConfigError naming a tensor whose memory or partition this cannot describe.
    """
    tensor = held.tensor.detach() if data is None else data
    _check_plain(held.name, held.tensor)
    is_gated = gated and _FC1.search(held.name) is not None
    if is_gated:
        tensor = tensor.unflatten(0, (2, -1))
    if not getattr(held.tensor, "tensor_model_parallel", False):
        return LocalBox(tensor, tuple(tensor.shape), (0,) * tensor.ndim)
    stride = getattr(held.tensor, "partition_stride", 1)
    if stride != 1 and not (is_gated and stride == 2):
        raise ConfigError(f"{held.name} has partition_stride {stride}; only a gated fc1 may have one", tensor=held.name)
    axis = expert_axis if ".mlp.experts." in held.name else tensor_axis
    dim = held.tensor.partition_dim + is_gated
    if is_gated and held.tensor.partition_dim != 0:
        raise ConfigError(f"{held.name} is gated, but cut along dim {held.tensor.partition_dim}", tensor=held.name)
    shape, offset = list(tensor.shape), [0] * tensor.ndim
    offset[dim] = axis.rank * shape[dim]
    shape[dim] *= axis.size
    return LocalBox(tensor, tuple(shape), tuple(offset))


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

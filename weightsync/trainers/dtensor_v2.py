"""PyTorch trainers whose parameters are DTensors (FSDP2, HSDP, TP and FSDP over it) or plain replicated tensors.

What is published are the *sharded* parameters. While FSDP2 has a module gathered (after a forward pass with
``reshard_after_forward=False``, as its root has) the module shows whole plain tensors in their place; the reader then
stays with the DTensor that it saw before, which FSDP2 keeps and the optimizer updates. The model is walked anew at every
read, so a parameter that moved (``model.to``, a new allocation) is found where it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from weightsync.errors import ConfigError
from weightsync.spec import Rule
from weightsync.trainers import Held
from weightsync.trainers.dtensor_mapping import rules_of
from weightsync.trainers.dtensor_names import plain_name, refuse_what_has_no_weights_of_its_own


def reader(model_or_tensors: nn.Module | Mapping[str, torch.Tensor]) -> DTensorReader:
    """A reader of a module, or of a mapping that it looks into at every read. Call it where the model is trained.

    Gathered FSDP2 modules are sharded again once, so that the sharded parameters are seen.
    """
    return DTensorReader(model_or_tensors)


class DTensorReader:
    """See ``weightsync.trainers.Reader``. Tied parameters are read once, by the embedding's name if one has it."""

    def __init__(self, model_or_tensors: nn.Module | Mapping[str, torch.Tensor]) -> None:
        self._source = model_or_tensors
        self._sharded: dict[str, DTensor] = {}
        if isinstance(model_or_tensors, nn.Module):
            for module in model_or_tensors.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        elif not isinstance(model_or_tensors, Mapping):
            kind = type(model_or_tensors).__name__
            raise ConfigError(f"a Publisher takes an nn.Module or a mapping of names to tensors, not a {kind}")

    def settle(self) -> None:
        """Nothing: FSDP2 has gathered or resharded parameters, never half of them."""

    def read(self) -> list[Held]:
        found: dict[str, tuple[str, Held]] = {}
        by_memory: dict[tuple, str] = {}
        entries = list(_entries(self._source))
        refuse_what_has_no_weights_of_its_own(raw for raw, _, _ in entries)
        for raw, tensor, is_buffer in entries:
            held = _held(raw, self._as_sharded(raw, tensor), is_buffer)
            if held is None:
                continue
            other = by_memory.get(_memory_of(held))
            if other is not None:
                if "embed" not in held.name or "embed" in other:
                    continue
                del found[other]
            if held.name in found:
                raise ConfigError(f"{found[held.name][0]} and {raw} are both {held.name}", tensor=held.name)
            found[held.name] = (raw, held)
            by_memory[_memory_of(held)] = held.name
        return [held for _, held in found.values()]

    def rules(self, held: list[Held]) -> list[Rule]:
        return rules_of({h.name: h.shape for h in held})

    def _as_sharded(self, raw: str, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            self._sharded[raw] = tensor
        elif raw in self._sharded and self._sharded[raw].shape == tensor.shape:
            return self._sharded[raw]
        return tensor


def _entries(source: nn.Module | Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Name, tensor, whether it is a buffer. Of buffers only those that a checkpoint would hold."""
    if isinstance(source, Mapping):
        yield from ((name, tensor, False) for name, tensor in source.items())
        return
    yield from ((name, parameter, False) for name, parameter in source.named_parameters())
    passing = {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in source.named_modules()
        for name in module._non_persistent_buffers_set
    }
    yield from ((name, buffer, True) for name, buffer in source.named_buffers() if name not in passing)


def _held(raw: str, tensor: torch.Tensor, is_buffer: bool) -> Held | None:
    """None if this rank is outside the tensor's mesh and no empty box can say so (0-d)."""
    name, shape = plain_name(raw), tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Held(name, _checked(raw, tensor), shape, (0,) * len(shape), is_buffer)
    with torch.no_grad():
        local = _checked(raw, tensor.to_local())
    if tensor.device_mesh.get_coordinate() is None:
        return Held(name, local.new_empty((0,) * len(shape)), shape, (0,) * len(shape), is_buffer) if shape else None
    partial = [p for p in tensor.placements if p.is_partial()]
    if partial:
        raise ConfigError(f"{raw} is not reduced yet ({partial[0]}): its shards are sums, not parts", tensor=name)
    size, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(size) != tuple(local.shape) or not _is_one_box(tensor):
        raise ConfigError(
            f"{raw}: the part {list(local.shape)} that this rank holds by {tensor.placements} is not one box of "
            f"{list(shape)}",
            tensor=name,
        )
    return Held(name, local, shape, tuple(offset), is_buffer)


def _is_one_box(tensor: DTensor) -> bool:
    """Strided shards are one box only while the mesh axis that was cut first (TP under FSDP) is still sharded."""
    strided = {p.dim for p in tensor.placements if isinstance(p, _StridedShard)}
    coordinate = tensor.device_mesh.get_coordinate()
    for dim in strided:
        index = torch.arange(tensor.shape[dim]).view((1,) * dim + (-1,))
        for axis, placement in enumerate(tensor.placements):
            if placement.is_shard(dim) or (isinstance(placement, _StridedShard) and placement.dim == dim):
                pieces, _ = placement._split_tensor(index, tensor.device_mesh.size(axis), with_padding=False)
                index = pieces[coordinate[axis]]
        if index.numel() and int(index.max() - index.min()) + 1 != index.numel():
            return False
    return True


def _checked(raw: str, tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        raise ConfigError(f"{raw} is a {type(tensor).__name__}, not plain memory that can be read", tensor=raw)
    if tensor.device.type not in ("cpu", "cuda") or tensor.layout != torch.strided:
        raise ConfigError(f"{raw} is {tensor.layout} on {tensor.device}: there is no memory to read", tensor=raw)
    return tensor.detach()


def _memory_of(held: Held) -> tuple:
    """Equal for two names of one tensor, also where this rank holds nothing of it."""
    tensor = held.tensor
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), held.offset, held.shape, held.is_buffer

"""PyTorch trainers whose parameters are DTensors (FSDP2, HSDP, TP and FSDP over it) or plain replicated tensors.

What is published are the *sharded* parameters. While FSDP2 has a module gathered (after a forward pass with
``reshard_after_forward=False``, as its root has) the module shows whole plain tensors in their place; the reader then
stays with the DTensor that it saw before, which FSDP2 keeps and the optimizer updates. The model is walked anew at
every read, so a parameter that moved (``model.to``, a new allocation) is found where it is. Between reads nothing here
keeps memory alive that a parameter has left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from weightsync.errors import ConfigError
from weightsync.spec import Rule
from weightsync.trainers import Held, Seen
from weightsync.trainers.dtensor_mapping import rules_of
from weightsync.trainers.dtensor_names import plain_name, refuse_what_has_no_weights_of_its_own


def reader(model_or_tensors: nn.Module | Mapping[str, torch.Tensor]) -> DTensorReader:
    """A reader of a module, or of a mapping that it looks into at every read. Call it where the model is trained.

    Gathered FSDP2 modules are sharded again once, so that the sharded parameters are seen.
    """
    return DTensorReader(model_or_tensors)


class _Known(NamedTuple):
    """What was found out about a tensor: valid for the same object over the same memory.

    ``place`` names both without a reference: one would keep the memory alive, and ``Module.to`` refuses to convert
    DTensors that have weak ones.
    """

    place: tuple
    name: str
    offset: tuple[int, ...] | None
    memory: tuple


class _Entry(NamedTuple):
    """One name that a read found. ``position``: of its tensor among those that ``_walk`` gives; -1 if not among them.

    ``given`` is false for another name of a tensor, and for what this rank holds no part of.
    """

    position: int
    is_buffer: bool
    known: _Known
    given: bool


class _Reading(NamedTuple):
    """What the last read found, by names and addresses: nothing in it keeps memory alive. Those given come first."""

    traces: list
    entries: list[_Entry]
    positions: list[int]
    places: list[tuple]
    names: list[str]


class DTensorReader:
    """See ``weightsync.trainers.Reader``. Tied parameters are read once, by the embedding's name if one has it."""

    def __init__(self, model_or_tensors: nn.Module | Mapping[str, torch.Tensor]) -> None:
        self.reading = 0
        self._last: _Reading | None = None
        self._source = model_or_tensors
        self._sharded: dict[str, DTensor] = {}
        self._known: dict[str, _Known] = {}
        self._names: list[str] = []
        if isinstance(model_or_tensors, nn.Module):
            for module in model_or_tensors.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        elif not isinstance(model_or_tensors, Mapping):
            kind = type(model_or_tensors).__name__
            raise ConfigError(f"a Publisher takes an nn.Module or a mapping of names to tensors, not a {kind}")

    def settle(self) -> None:
        """Nothing: FSDP2 has gathered or resharded parameters, never half of them."""

    def swapped(self) -> list[str]:
        """None: what DTensor trainers write through raises version counters, or is an optimizer's step."""
        return []

    def read(self) -> list[Held]:
        last = self._last
        same = self._unchanged(last)
        if same is None or last is None:
            return self._read()
        return [_held(*found) for found in zip(last.entries, *same) if found[0].given]

    def glance(self) -> Seen | None:
        last = self._last
        same = self._unchanged(last)
        if same is None or last is None:
            return None
        tensors, locals_ = same
        count = len(last.names)
        return Seen(last.names, locals_[:count], [*tensors[:count]])

    def _unchanged(self, last: _Reading | None) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
        """The tensors that ``last`` found, and this rank's part of each; None if anything is not as it was.

        Whoever calls goes on with that ``last``: another thread may read meanwhile.
        """
        if last is None:
            return None
        traces, tensors = _walk(self._source)
        if traces != last.traces:
            return None
        found = [tensors[position] for position in last.positions]
        locals_ = [_local_of(tensor) for tensor in found]
        return (found, locals_) if list(map(_place, found, locals_)) == last.places else None

    def _read(self) -> list[Held]:
        traces, tensors = _walk(self._source)
        positions = {id(tensor): i for i, tensor in enumerate(tensors)}
        listed = list(_entries(self._source))
        names = [raw for raw, _, _ in listed]
        if names != self._names:
            refuse_what_has_no_weights_of_its_own(names)
            self._names = names
        found: dict[str, tuple[str, Held]] = {}
        by_memory: dict[tuple, str] = {}
        kinds: dict[str, tuple[int, bool]] = {}
        for raw, tensor, is_buffer in listed:
            sharded = self._as_sharded(raw, tensor)
            kinds[raw] = positions.get(id(sharded), -1), is_buffer
            held, memory = self._look(raw, sharded, is_buffer)
            if held is None:
                continue
            other = by_memory.get(memory)
            if other is not None:
                if "embed" not in held.name or "embed" in other:
                    continue
                del found[other]
            if held.name in found:
                raise ConfigError(f"{found[held.name][0]} and {raw} are both {held.name}", tensor=held.name)
            found[held.name] = (raw, held)
            by_memory[memory] = held.name
        self._remember(traces, kinds, [raw for raw, _ in found.values()])
        return [held for _, held in found.values()]

    def _remember(self, traces: list, kinds: dict[str, tuple[int, bool]], given: list[str]) -> None:
        """``kinds``: position and whether a buffer, by name; those ``given`` in their order, the others after them."""
        self.reading += 1
        order = [*given, *(kinds.keys() - set(given))]
        entries = [_Entry(*kinds[raw], self._known[raw], i < len(given)) for i, raw in enumerate(order)]
        positions = [entry.position for entry in entries]
        places = [entry.known.place for entry in entries]
        names = [entry.known.name for entry in entries if entry.given]
        can_glance = all(position >= 0 for position in positions)  # gathered FSDP2 parameters are not in the model
        self._last = _Reading(traces, entries, positions, places, names) if can_glance else None

    def rules(self, held: list[Held]) -> list[Rule]:
        return rules_of({h.name: h.shape for h in held})

    def _look(self, raw: str, tensor: torch.Tensor, is_buffer: bool) -> tuple[Held | None, tuple]:
        """What this rank holds of a tensor, and a key that two names of one tensor share."""
        known, local = self._known.get(raw), _local_of(tensor)
        _check_plain(raw, local)
        place = _place(tensor, local)
        if known is None or known.place != place:
            offset = _offset(raw, tensor, local)
            memory = local.untyped_storage()._cdata, local.storage_offset(), *place[1:], offset
            known = self._known[raw] = _Known(place, plain_name(raw), offset, memory)
        if known.offset is None:
            return None, ()
        return _held(_Entry(-1, is_buffer, known, given=True), tensor, local), known.memory

    def _as_sharded(self, raw: str, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            self._sharded[raw] = tensor
            return tensor
        before = self._sharded.get(raw)
        return tensor if before is None or before.shape != tensor.shape else before


def _place(tensor: torch.Tensor, local: torch.Tensor) -> tuple:
    return id(tensor), local.data_ptr(), local.dtype, local.shape, local.stride(), tensor.shape


def _held(entry: _Entry, tensor: torch.Tensor, local: torch.Tensor) -> Held:
    known = entry.known
    assert known.offset is not None, "this rank holds no part of it"
    return Held(known.name, local.detach(), tuple(tensor.shape), known.offset, entry.is_buffer, tensor)


def _walk(source: nn.Module | Mapping[str, torch.Tensor]) -> tuple[list, list[torch.Tensor]]:
    """Names and identities of all modules and tensors, and the tensors. Quicker by far than ``_entries``."""
    if isinstance(source, Mapping):
        tensors = list(source.values())
        return [*source, *map(id, tensors)], tensors
    modules, seen = [source], {id(source)}
    for module in modules:  # grows meanwhile
        children = module._modules
        if children:
            new = [child for child in children.values() if child is not None and id(child) not in seen]
            seen.update(map(id, new))
            modules.extend(new)
    owns = [own for module in modules for own in (module._parameters, module._buffers) if own]
    tensors = [tensor for own in owns for tensor in own.values()]
    names = [name for own in owns for name in own]
    names += [name for module in modules for name in module._modules]
    return [*names, *map(id, modules), *map(id, tensors)], tensors


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


def _local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part. One outside the DTensor's mesh has an empty one."""
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor._local_tensor
    if tensor.device_mesh.get_coordinate() is None:
        return local.new_empty((0,) * tensor.dim()) if tensor.dim() else local
    return local


def _offset(raw: str, tensor: torch.Tensor, local: torch.Tensor) -> tuple[int, ...] | None:
    """Where this rank's part starts. None: outside the mesh, and no empty box can say so (0-d). Raises ConfigError."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim()
    if tensor.device_mesh.get_coordinate() is None:
        return (0,) * tensor.dim() if tensor.dim() else None
    partial = [p for p in tensor.placements if p.is_partial()]
    if partial:
        raise ConfigError(f"{raw} is not reduced yet ({partial[0]}): its shards are sums, not parts", tensor=raw)
    size, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if local.numel() == 0 and 0 in size:  # by way of FSDP or of TP: other sizes beside the 0
        return tuple(offset)
    if tuple(size) != tuple(local.shape) or not _is_one_box(tensor):
        raise ConfigError(
            f"{raw}: the part {list(local.shape)} that this rank holds by {tensor.placements} is not one box of "
            f"{list(tensor.shape)}",
            tensor=raw,
        )
    return tuple(offset)


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


def _check_plain(raw: str, tensor: torch.Tensor) -> None:
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        raise ConfigError(f"{raw} is a {type(tensor).__name__}, not plain memory that can be read", tensor=raw)
    if tensor.device.type not in ("cpu", "cuda") or tensor.layout != torch.strided:
        raise ConfigError(f"{raw} is {tensor.layout} on {tensor.device}: there is no memory to read", tensor=raw)

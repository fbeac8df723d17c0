"""Whether a trainer's tensors were written to, and the fingerprints of their regions. Runs in training workers.

Three things tell of a write at no cost: version counters, addresses, and the hooks that torch runs around every
optimizer step (a ``foreach`` or fused step on DTensors raises no version counter). What gets past all three, such as
``tensor.data`` or a kernel of someone's own, is seen by fingerprints only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from weightsync.fingerprint import Item, fingerprint_many
from weightsync.spec import SourceRegion
from weightsync.trainers import Held


class OptimizerSteps:
    """Counts, for each parameter, the beginnings and ends of steps of whatever optimizer of this process has it."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = defaultdict(int)
        self._hooks = [register_optimizer_step_pre_hook(self._count), register_optimizer_step_post_hook(self._count)]

    def of(self, parameter: torch.Tensor | None) -> int:
        return self._counts.get(id(parameter), 0)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _count(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._counts[id(parameter)] += 1


class _Mark(NamedTuple):
    """``versions`` are the counters of the memory and of its owner, ``steps`` the owner's optimizer steps."""

    address: int
    versions: tuple[int, int]
    steps: int


class Watch:
    """The state of tensors at one moment, to compare with later ones."""

    def __init__(self, held: Sequence[Held], steps: OptimizerSteps) -> None:
        self._steps = steps
        self._marks = {h.name: self._mark(h) for h in held}

    def changed(self, held: Sequence[Held]) -> list[str]:
        """Names of tensors that were written to, that lie elsewhere, or that came or went."""
        now = {h.name: self._mark(h) for h in held}
        return [name for name in {**self._marks, **now} if self._marks.get(name) != now.get(name)]

    def written(self, held: Sequence[Held]) -> list[str]:
        """Names of tensors that were written to where they are. One that moved is not among them."""
        now = [(h.name, self._marks.get(h.name), self._mark(h)) for h in held]
        return [name for name, old, new in now if old is not None and old.address == new.address and old != new]

    def _mark(self, held: Held) -> _Mark:
        versions = _version(held.tensor), _version(held.owner)
        return _Mark(held.tensor.data_ptr(), versions, self._steps.of(held.owner))


def _version(tensor: torch.Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else tensor._version


def published_fingerprints(views: Sequence[torch.Tensor | None], regions: Sequence[SourceRegion]) -> list[int]:
    """One fingerprint a region of published memory; ``views`` by shard index."""
    by_dtype: list[tuple[torch.Tensor, Sequence[int], torch.dtype]] = []
    for region in regions:
        view = views[region.view.storage]
        assert view is not None, f"a region of shard {region.view.storage}, of which this rank holds nothing"
        by_dtype.append((_region(view, region), region.box.offset, view.dtype))
    return _fingerprints(by_dtype)


def source_fingerprints(
    views: Sequence[torch.Tensor | None], held: Sequence[Held], regions: Sequence[SourceRegion]
) -> list[int]:
    """As ``published_fingerprints``, of the tensors that were published, as they are now, in the published dtype."""
    items: list[tuple[torch.Tensor, Sequence[int], torch.dtype]] = []
    dense: dict[int, torch.Tensor] = {}
    for region in regions:
        index = region.view.storage
        view, source = views[index], held[index].tensor
        assert view is not None, f"a region of shard {index}, of which this rank holds nothing"
        compute = held[index].compute
        if compute is not None or not _lie_alike(view, source):
            if index not in dense:
                source = source if compute is None else compute(source)
                dense = {index: source.contiguous()}  # one at a time: regions come shard by shard
            source = dense[index]
        items.append((_region(source, region), region.box.offset, view.dtype))
    return _fingerprints(items)


def _region(tensor: torch.Tensor, region: SourceRegion) -> torch.Tensor:
    start = tensor.storage_offset() + region.view.offset
    return tensor.as_strided(region.box.size, region.view.strides, start)


def _lie_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return all(s == t for n, s, t in zip(a.shape, a.stride(), b.stride(), strict=True) if n > 1)


def _fingerprints(items: Sequence[tuple[torch.Tensor, Sequence[int], torch.dtype]]) -> list[int]:
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for i, (tensor, _, dtype) in enumerate(items):
        groups[tensor.device, dtype].append(i)
    numbers: dict[int, int] = {}
    for (_, dtype), members in groups.items():
        group: list[Item] = [(items[i][0], items[i][1]) for i in members]
        numbers.update(zip(members, fingerprint_many(group, dtype), strict=True))
    return [numbers[i] for i in range(len(items))]

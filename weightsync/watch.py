"""Whether a trainer's tensors were written to, and the fingerprints of their regions. Runs in training workers.

Three things tell of a write at no cost: version counters, addresses, and the hooks that torch runs around every
optimizer step (a ``foreach`` or fused step on DTensors raises no version counter). What gets past all three, such as
``tensor.data`` or a kernel of someone's own, is seen by fingerprints only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from weightsync.fingerprint import Item, fingerprint_many
from weightsync.spec import SourceRegion
from weightsync.trainers import Held, Seen


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


class Watch:
    """The state of tensors at one moment, to compare with that of a later one: for each its address, the counters of
    its memory and of its owner, and the owner's optimizer steps."""

    def __init__(self, now: Sequence[Held | Seen], steps: OptimizerSteps) -> None:
        of, marks = steps.of, {}
        for seen in now:
            tensor, owner = seen.tensor, seen.owner
            marks[seen.name] = tensor.data_ptr(), _version(tensor), _version(owner), of(owner)
        self._marks = marks

    def changed(self, now: Watch) -> list[str]:
        """Names of tensors that were written to, that lie elsewhere, or that came or went."""
        if self._marks == now._marks:
            return []
        return [n for n in {**self._marks, **now._marks} if self._marks.get(n) != now._marks.get(n)]

    def written(self, now: Watch) -> list[str]:
        """Names of tensors that were written to where they are. One that moved is not among them."""
        if self._marks == now._marks:
            return []
        pairs = [(name, self._marks.get(name), new) for name, new in now._marks.items()]
        return [name for name, old, new in pairs if old is not None and old[0] == new[0] and old != new]


def _version(tensor: torch.Tensor | None) -> int:
    if tensor is None:
        return -1
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode: it has no counter
        return -1


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

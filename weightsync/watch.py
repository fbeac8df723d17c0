"""Whether a trainer's tensors were written to, by version counters and addresses, and the fingerprints of their regions.

Version counters see every in-place operation of torch on a tensor, and cost nothing. Writes past torch (``tensor.data``,
a kernel of someone's own) are seen by fingerprints only. Runs in training workers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from weightsync.fingerprint import Item, fingerprint_many
from weightsync.spec import SourceRegion
from weightsync.trainers import Held


class _Mark(NamedTuple):
    address: int
    version: int


class Watch:
    """The state of tensors at one moment, to compare with later ones."""

    def __init__(self, held: Sequence[Held]) -> None:
        self._marks = {h.name: _mark(h.tensor) for h in held}

    def changed(self, held: Sequence[Held]) -> list[str]:
        """Names of tensors that were written to, that lie elsewhere, or that came or went."""
        now = {h.name: _mark(h.tensor) for h in held}
        return [name for name in {**self._marks, **now} if self._marks.get(name) != now.get(name)]

    def written(self, held: Sequence[Held]) -> list[str]:
        """Names of tensors that were written to where they are. One that moved is not among them."""
        now = [(h.name, self._marks.get(h.name), _mark(h.tensor)) for h in held]
        return [name for name, old, new in now if old is not None and old.address == new.address and old != new]


def _mark(tensor: torch.Tensor) -> _Mark:
    return _Mark(tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version)


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

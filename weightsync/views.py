"""Copies as torch views: what the plan says in numbers, made tensors over mapped memory. Actor and receiver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weightsync.spec import Box, Copy, Shard
from weightsync.transports import Memory

Memories = Sequence[Memory] | Mapping[int, Memory]
"""Mapped segments of one rank, by their position; those that no copy reads may be missing from a mapping."""


class SourceViews:
    """The trainer's side of copies; ``segments`` and ``shards`` are each rank's, mapped here.

    A view is one operation of torch: at every one a receiver may lose the interpreter to the engine's event loop.
    """

    def __init__(self, segments: Mapping[int, Memories], shards: Mapping[int, Sequence[Shard]]) -> None:
        self._segments = segments
        self._shards = shards
        self._whole: dict[tuple[int, int], tuple[torch.Tensor, int]] = {}

    def __call__(self, copy: Copy) -> torch.Tensor:
        """Of shape ``copy.box.size``."""
        key = copy.rank, copy.source.storage
        if key not in self._whole:
            self._whole[key] = self._storage_of(*key)
        storage, start = self._whole[key]
        return storage.as_strided(copy.box.size, copy.source.strides, start + copy.source.offset)

    def _storage_of(self, rank: int, index: int) -> tuple[torch.Tensor, int]:
        """A tensor over the whole storage of a shard, in its dtype, and the element at which the shard begins."""
        shard = self._shards[rank][index]
        memory = self._segments[rank][shard.segment].tensor
        dtype, storage = getattr(torch, shard.dtype), memory.untyped_storage()
        start = memory.storage_offset() + shard.byte_offset
        assert start % dtype.itemsize == 0, f"{shard.tensor} does not start at a multiple of its itemsize"
        whole = torch.empty(0, dtype=dtype, device=memory.device)
        whole.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))
        return whole, start // dtype.itemsize


def source_view(segments: Mapping[int, Memories], shards: Sequence[Shard], copy: Copy) -> torch.Tensor:
    """The trainer's side of one copy."""
    return SourceViews(segments, {copy.rank: shards})(copy)


def box_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The part of ``tensor`` that ``box`` covers, as a view."""
    return tensor[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))]

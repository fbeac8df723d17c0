"""Copies as torch views: what the plan says in numbers, made tensors over mapped memory. Actor and receiver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weightsync.spec import Box, Copy, Shard
from weightsync.transports import Memory

Memories = Sequence[Memory] | Mapping[int, Memory]
"""Mapped segments of one rank, by their position; those that no copy reads may be missing from a mapping."""


def source_view(segments: Mapping[int, Memories], shards: Sequence[Shard], copy: Copy) -> torch.Tensor:
    """The trainer's side of ``copy``, of shape ``copy.box.size``; ``segments`` are each rank's, mapped here."""
    shard = shards[copy.source.storage]
    storage = segments[copy.rank][shard.segment].tensor
    dtype = getattr(torch, shard.dtype)
    start = storage.storage_offset() + shard.byte_offset
    assert start % dtype.itemsize == 0, f"{shard.tensor} does not start at a multiple of its itemsize"
    offset = start // dtype.itemsize + copy.source.offset
    view = torch.empty(0, dtype=dtype, device=storage.device)
    return view.set_(storage.untyped_storage(), offset, copy.box.size, copy.source.strides)


def box_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The part of ``tensor`` that ``box`` covers, as a view."""
    return tensor[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))]

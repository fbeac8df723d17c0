"""A transport whose memory can be exported in place: host tensors that were put into shared memory beforehand.

It does for host memory what CUDA IPC does for a GPU's, so that the in-place paths run everywhere. Install with
``monkeypatch.setitem(transports._MODULES, "in_place", in_place.__name__)``.
"""

from __future__ import annotations

import torch

from weightsync.errors import TransferError
from weightsync.spec import Segment
from weightsync.transports import shm
from weightsync.transports.shm import allocate, make_puller, open_segment

__all__ = ["allocate", "export", "make_puller", "open_segment", "shared"]

NAME = "in_place"
_shared: list[shm.Memory] = []


def shared(tensor: torch.Tensor, *, before: int = 0) -> torch.Tensor:
    """A copy of ``tensor``, dense, in shared memory of its own, ``before`` elements after its start."""
    memory = allocate(max(1, (before + tensor.numel()) * tensor.itemsize))
    _shared.append(memory)
    view = memory.tensor.view(tensor.dtype)[before : before + tensor.numel()].view(tensor.shape)
    return view.copy_(tensor)


def export(tensor: torch.Tensor) -> tuple[Segment, int]:
    for memory in _shared:
        start = memory.tensor.data_ptr()
        if memory.tensor.numel() and start <= tensor.data_ptr() < start + memory.tensor.numel():
            return memory.segment, tensor.data_ptr() - start
    raise TransferError("memory that was mapped has no handle")


def close() -> None:
    for memory in _shared:
        memory.close()
    _shared.clear()

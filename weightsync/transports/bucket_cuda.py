"""Flattened buckets in GPU memory: the actor's arenas, and handles of them that an engine's torch can open.

Runs in the weight-sync actor. SGLang unpickles torch's own CUDA handles, which name a device by index; an engine takes
the GPU's UUID in that place, so neither side depends on the other's numbering.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing import reductions

from weightsync.devices import device_of, uuid_of

_DEVICE = 6  # of rebuild_cuda_tensor's arguments: the device index, or its UUID
_HANDLE = 7  # of rebuild_cuda_tensor's arguments: version byte, kind, and the driver's 64 bytes
_OLDEST_READER = 2  # the version that torch 2.11 still reads; handles of cudaMalloc memory are the same in all


class CudaArena:
    """``nbytes`` of torch's memory on GPU ``uuid``. ``tensor``: uint8, 1-D."""

    def __init__(self, nbytes: int, uuid: str) -> None:
        self.tensor: torch.Tensor | None = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=device_of(uuid))

    def close(self) -> None:
        """Give the memory back to torch. Idempotent."""
        self.tensor = None


def share_by_handle(flat: torch.Tensor) -> tuple[Callable[..., Any], tuple]:
    """A ``bucket.Share`` for CUDA memory. The engine opens the handle once a payload, and lets go after loading."""
    rebuild, arguments = reductions.reduce_tensor(flat)
    given = list(arguments)
    given[_DEVICE] = uuid_of(flat.device).removeprefix("GPU-")
    handle = given[_HANDLE]
    if handle[:1] > bytes([_OLDEST_READER]) and handle[1:2] == b"c":
        given[_HANDLE] = bytes([_OLDEST_READER]) + handle[1:]
    return rebuild, tuple(given)

"""Flattened buckets in GPU memory: the actor's arenas, and handles of them that an engine's torch can open.

Runs in the weight-sync actor. SGLang unpickles torch's own CUDA handles. Those made here name the driver's handle of a
``cudaMalloc`` allocation, which every torch can open, and the GPU by UUID, so neither side depends on the other's torch
or numbering. Torch's own would also make an event for every payload, which the engine opens, waits for and never frees;
whoever fills an arena here has waited for the GPU already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch.multiprocessing import reductions

from weightsync.devices import device_of, uuid_of
from weightsync.transports import cuda_ipc

LIMIT_BYTES = 4 << 30
"""The largest bucket by default: a call costs an engine some ms, in which it loads about a GiB."""
FREE_SHARE = 8
"""A bucket takes at most one part in so many of what is free on its GPU; there are two."""
LEAST_BYTES = 64 << 20

_READER = bytes([2])  # the oldest version of handles that torch still reads: 2.11; those of cudaMalloc are alike in all
_CUDA_MALLOC = b"c"
_EVENT_BYTES = 64
_COUNTERS_BYTES = 8 * 10_000  # what torch maps of a file of reference counters


def limit_bytes(uuid: str) -> int:
    """How large a bucket on that GPU may be, by what is free there now."""
    free, _ = torch.cuda.mem_get_info(device_of(uuid))
    return max(LEAST_BYTES, min(LIMIT_BYTES, free // FREE_SHARE))


class CudaArena:
    """``nbytes`` on GPU ``uuid``, beside torch's allocator. ``tensor``: uint8, 1-D."""

    def __init__(self, nbytes: int, uuid: str) -> None:
        self._memory = cuda_ipc.allocate(max(nbytes, 1), uuid)
        self.tensor: torch.Tensor = self._memory.tensor

    def close(self) -> None:
        """Free the memory. Engines that still map it keep it until they let go. Idempotent."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self._memory.close()


def share_by_handle(flat: torch.Tensor) -> tuple[Callable[..., Any], tuple]:
    """A ``bucket.Share`` for memory of a CudaArena, written and waited for. The engine maps it once a payload, and lets
    go after loading.

    The storage is always the whole arena, so that an engine that still has it open may use it for another bucket.
    """
    segment, byte_offset = cuda_ipc.export(flat)
    handle = msgspec.msgpack.decode(segment.handle, type=cuda_ipc.Handle)
    return reductions.rebuild_cuda_tensor, (
        torch.Tensor,
        flat.size(),
        flat.stride(),
        byte_offset,
        torch.storage.TypedStorage,
        flat.dtype,
        uuid_of(flat.device).removeprefix("GPU-"),
        _READER + _CUDA_MALLOC + handle.ipc,
        segment.nbytes,
        0,  # where the storage starts in the allocation
        False,  # requires_grad
        _counters(),
        0,  # which of the counters
        bytes(_EVENT_BYTES),
        False,  # nothing to wait for
    )


def _counters() -> bytes:
    """The name of a file in which engines count down what they let go of, as torch wants it; nobody reads it."""
    return _counters_file()._share_filename_cpu_()[1]


@functools.cache
def _counters_file() -> torch.UntypedStorage:
    return torch.UntypedStorage._new_using_filename_cpu(_COUNTERS_BYTES)

"""Meta tensors that are all views of one address space, so that any view of one says which tensor and where in it."""

from __future__ import annotations

import bisect
from typing import NamedTuple

import torch

from weightsync.spec import TensorSpec

CASTABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_ALIGN_BYTES = 256
_SPACE_BYTES = 1 << 50  # addresses only: nothing is allocated


class Region(NamedTuple):
    """Addresses that stand for one offered tensor in one dtype. ``cast``: because the loader asked for that dtype."""

    start: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    cast: bool


class AddressSpace:
    """Hands out tensors and tells of any view of one what it is. Floats are offered as ``main_float``."""

    def __init__(self, main_float: torch.dtype) -> None:
        self._memory = torch.empty(_SPACE_BYTES, dtype=torch.uint8, device="meta")
        self._storage = self._memory.untyped_storage()._cdata
        self._main_float = main_float
        self._regions: list[Region] = []
        self._starts: list[int] = []
        self._end = 0

    def offer(self, spec: TensorSpec) -> torch.Tensor:
        """A contiguous meta tensor of that shape."""
        dtype = getattr(torch, spec.dtype)
        dtype = self._main_float if dtype in CASTABLE else dtype
        return self._place(Region(self._end, spec.name, spec.shape, dtype, cast=False))

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The same view of the same offered tensor, as if that had been offered in ``dtype``."""
        region = self.region(tensor)
        assert region is not None
        full = self._place(Region(self._end, region.name, region.shape, dtype, cast=True))
        at = full.storage_offset() + self.offset(tensor, region)
        return full.as_strided(tensor.shape, tensor.stride(), at)

    def holds(self, tensor: object) -> bool:
        """Whether it is a tensor that lies in this address space."""
        return isinstance(tensor, torch.Tensor) and tensor.is_meta and tensor.untyped_storage()._cdata == self._storage

    def name(self, tensor: torch.Tensor) -> str:
        """The offered tensor that one in this space belongs to."""
        return self._at(tensor).name

    def region(self, tensor: object) -> Region | None:
        """Where a tensor looks; None if not into this space, or at the bytes as another dtype."""
        if not isinstance(tensor, torch.Tensor) or not self.holds(tensor):
            return None
        region = self._at(tensor)
        return region if region.dtype == tensor.dtype else None

    @staticmethod
    def offset(tensor: torch.Tensor, region: Region) -> int:
        """Of the tensor's first element, in elements from the region's start."""
        return tensor.storage_offset() - region.start // region.dtype.itemsize

    def names(self) -> list[str]:
        """Of all tensors offered, in order."""
        return [r.name for r in self._regions if not r.cast]

    def _at(self, tensor: torch.Tensor) -> Region:
        return self._regions[bisect.bisect_right(self._starts, tensor.storage_offset() * tensor.itemsize) - 1]

    def _place(self, region: Region) -> torch.Tensor:
        nbytes = torch.Size(region.shape).numel() * region.dtype.itemsize
        self._regions.append(region)
        self._starts.append(region.start)
        self._end += -(-max(1, nbytes) // _ALIGN_BYTES) * _ALIGN_BYTES
        piece = self._memory[region.start : region.start + nbytes]
        return piece.view(region.dtype).view(region.shape)

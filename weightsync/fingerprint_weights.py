"""The weights that fingerprints are sums with, the same on every device. See ``fingerprint``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

MASK = (1 << 64) - 1
MASK31 = (1 << 31) - 1

Item = tuple[torch.Tensor, Sequence[int]]
"""A tensor, and where it starts in the full one."""


def weight[T: (int, torch.Tensor)](dim: int, index: T) -> T:
    """The weight of ``index`` of dim ``dim``, or of each of an int64 tensor of them: odd, below 2**32, no two the same.

    Indices are below 2**31.

    Every step is a bijection on 31 bits: odd multiplier, xor with a shifted self, xor with a constant of the dim.
    """
    h = (index * 0x2C1B3C6D) & MASK31
    h = h ^ (h >> 15) ^ (((dim + 1) * 0x1E3779B1) & MASK31)
    h = (h * 0x297A2D39) & MASK31
    h = h ^ (h >> 13)
    h = (h * 0x5F356495) & MASK31
    h = h ^ (h >> 16)
    return h * 2 + 1

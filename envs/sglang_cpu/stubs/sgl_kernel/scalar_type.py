"""The number formats that SGLang's quantisation code names while it is imported; each is a value to compare by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScalarType:
    """A format of ``size_bits``; ``bias`` is what an unsigned integer is shifted by to mean signed values."""

    name: str
    size_bits: int
    bias: int = 0

    def __str__(self) -> str:
        return self.name


class scalar_types:
    uint4 = ScalarType("uint4", 4)
    uint8 = ScalarType("uint8", 8)
    uint4b8 = ScalarType("uint4b8", 4, bias=8)
    uint8b128 = ScalarType("uint8b128", 8, bias=128)
    float4_e2m1f = ScalarType("float4_e2m1f", 4)
    float8_e4m3fn = ScalarType("float8_e4m3fn", 8)

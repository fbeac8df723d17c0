"""How a trainer's ranks share a model, as a scenario says it. No torch."""

from __future__ import annotations

from benchmarks.rows import Struct


class Parallel(Struct):
    """Sizes of Megatron's axes; what they leave of the ranks is data-parallel. FSDP2 has one axis and needs none."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __str__(self) -> str:
        return " x ".join(f"{axis.upper()}{size}" for axis in ("tp", "pp", "ep") if (size := getattr(self, axis)) > 1)

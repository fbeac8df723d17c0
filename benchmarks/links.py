"""What a plan's bytes cost at the speed of copies: local ones, then those from other GPUs. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from weightsync.spec import Traffic


class Rates(NamedTuple):
    """Bytes/s that a copy writes inside one device, and from one to another."""

    local: float
    peer: float


class Load(NamedTuple):
    """Bytes of an engine rank: from its own GPU and from others; ``seconds``: both one after the other."""

    engine: str
    rank: int
    local: int
    remote: int
    seconds: float


def loads(traffic: Iterable[Traffic], rates: Rates) -> list[Load]:
    """Every engine rank's, the slowest first. GPUs work side by side: its seconds are the floor of the whole push."""
    found: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
    for row in traffic:
        found[row.engine, row.engine_rank][not row.same_device] += row.num_bytes
    rows = [
        Load(engine, rank, local, remote, local / rates.local + remote / rates.peer)
        for (engine, rank), (local, remote) in found.items()
    ]
    return sorted(rows, key=lambda load: -load.seconds)

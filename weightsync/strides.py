"""Strided views of row-major tensors, told as boxes. Pure arithmetic in elements; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weightsync.boxes import dense_strides
from weightsync.spec import Box


class Run(NamedTuple):
    """One dim of a copy: ``size`` elements, ``source`` apart where read and ``target`` apart where written."""

    source: int
    target: int
    size: int


def source_box(shape: tuple[int, ...], offset: int, runs: Sequence[Run]) -> tuple[Box, tuple[int, ...]] | None:
    """The box of a row-major tensor of ``shape`` that ``runs`` read from element ``offset`` on.

    Returns it with the target's stride along each dim of ``shape`` (0 where the box has one element), or None if what
    is read is no box: a stepped or expanded view, a diagonal, or a split dim whose parts lie apart in the target. Dims
    may come in any order, and flattened ones (``view(-1)``) are taken apart again.
    """
    steps = dense_strides(shape)
    start, rest = [], offset
    for step in steps:
        start.append(rest // step)
        rest %= step
    size, strides = [1] * len(shape), [0] * len(shape)
    for source, target, count in _merged(runs):
        d = next((d for d, n in enumerate(shape) if n > 1 and steps[d] == source), None)
        while d is not None and count > shape[d] - start[d]:
            if start[d] or size[d] != 1 or count % shape[d]:
                return None
            size[d], strides[d] = shape[d], target
            target, count = target * shape[d], count // shape[d]
            d = next((e for e in range(d - 1, -1, -1) if shape[e] > 1), None)
        if d is None or size[d] != 1:
            return None
        if count > 1:
            size[d], strides[d] = count, target
    return Box(tuple(start), tuple(size)), tuple(strides)


def _merged(runs: Sequence[Run]) -> list[Run]:
    """Innermost first, without dims of one element, those that continue each other on both sides made one."""
    merged: list[Run] = []
    for run in sorted(r for r in runs if r.size > 1):
        inner = merged[-1] if merged else None
        if inner and (run.source, run.target) == (inner.source * inner.size, inner.target * inner.size):
            merged[-1] = Run(inner.source, inner.target, inner.size * run.size)
        else:
            merged.append(run)
    return merged

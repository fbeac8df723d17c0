"""The proof that a push writes every element of every engine parameter exactly once, made before a byte moves.

Writes are strided views. Each becomes a box of the parameter; boxes that are disjoint, inside, and add up to the
parameter's elements cover it. A view that is no box (every other row) is proved by listing its elements, if few.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from weightsync.boxes import dense_strides, intersect, show, subtract_all, volume, whole
from weightsync.spec import Box, Layout, Param

MAX_LISTED_ELEMENTS = 1 << 20


class Write(NamedTuple):
    """A strided region of a parameter that one need or fill writes: in elements, like ``spec.View``."""

    offset: int
    strides: tuple[int, ...]
    size: tuple[int, ...]


class Hole(NamedTuple):
    """A parameter whose coverage could not be proved. ``unwritten``: nothing writes any of it."""

    param: str
    reason: str
    unwritten: bool


def check_layout(layout: Layout, constants: Iterable[str], proved: dict) -> list[Hole]:
    """The parameters of an engine rank that the needs and fills of ``layout`` do not write exactly once.

    Tensors that are buffers, derived, constant or opaque, or that a pattern in ``constants`` matches, may have elements
    that nothing writes, but no element may be written twice. ``proved`` remembers answers by geometry between calls.
    """
    writes: list[list[Write]] = [[] for _ in layout.params]
    for need in layout.needs:
        view = need.view
        writes[view.storage].append(Write(view.offset, view.strides, need.box.size))
    for fill in layout.fills:
        writes[fill.view.storage].append(Write(fill.view.offset, fill.view.strides, fill.size))
    free = {*layout.constants, *layout.derived, *layout.opaque}
    patterns = [re.compile(p) for p in constants]
    holes = []
    for param, written in zip(layout.params, writes):
        must_cover = param.kind == "parameter" and param.name not in free
        must_cover = must_cover and not any(p.search(param.name) for p in patterns)
        key = (param.shape, must_cover, tuple(written))
        if key not in proved:
            proved[key] = _problem(param, [Write(*w) for w in written], must_cover)
        if proved[key]:
            holes.append(Hole(param.name, proved[key], unwritten=not written))
    return holes


def _problem(param: Param, writes: list[Write], must_cover: bool) -> str:
    writes = [w for w in writes if prod(w.size)]
    numel = prod(param.shape)
    for write in writes:
        if any(s == 0 and n > 1 for s, n in zip(write.strides, write.size)):
            return f"one write stores several elements in the same place: {write}"
        if not 0 <= _first(write) <= _last(write) < numel:
            return f"a write goes outside its {numel} elements: {write}"
    found = boxes_of(param.shape, writes)
    if found is not None:
        return _box_problem(*found, must_cover)
    if numel > MAX_LISTED_ELEMENTS:
        return f"its {numel} elements are written by views that are not boxes, too many to check one by one"
    return _listed_problem(numel, writes, must_cover)


def boxes_of(shape: tuple[int, ...], writes: Sequence[Write]) -> tuple[tuple[int, ...], list[Box]] | None:
    """Each write as a box of a row-major tensor: ``(shape, boxes)``, or None if some write is not a box.

    Tries the parameter's own shape, then one made of the strides that the writes use: that of a parameter stored
    transposed, or of one whose even and odd rows come from two tensors. The writes must lie inside the tensor.
    """
    for candidate in (shape, _shape_by_strides(prod(shape), writes)):
        boxes = [_box_of(candidate, write) for write in writes] if candidate else [None]
        if None not in boxes or not writes:
            return candidate, [box for box in boxes if box is not None]
    return None


def _shape_by_strides(numel: int, writes: Sequence[Write]) -> tuple[int, ...]:
    """The shape of ``numel`` elements whose row-major strides are those in use; () if they do not nest."""
    steps = {1, *(s for w in writes for s, n in zip(w.strides, w.size) if n > 1)}
    ordered = [numel, *sorted(steps, reverse=True)]
    pairs = list(pairwise(ordered))
    if any(inner < 1 or outer % inner for outer, inner in pairs):
        return ()
    return tuple(outer // inner for outer, inner in pairs)


def _box_of(shape: tuple[int, ...], write: Write) -> Box | None:
    """The write as a box of a row-major tensor of ``shape``, or None if it is not one."""
    steps = dense_strides(shape)
    start, rest = [], write.offset
    for step in steps:
        start.append(rest // step)
        rest %= step
    size = [1] * len(shape)
    for stride, count in _runs(write):
        d = next((d for d in range(len(shape)) if steps[d] == stride and shape[d] > 1), None)
        while d is not None and count > shape[d] - start[d]:
            if start[d] or size[d] != 1 or count % shape[d]:
                return None
            size[d] = shape[d]
            count //= shape[d]
            d = next((e for e in range(d - 1, -1, -1) if shape[e] > 1), None)
        if d is None or size[d] != 1:
            return None
        size[d] = count
    return Box(tuple(start), tuple(size))


def _runs(write: Write) -> list[tuple[int, int]]:
    """The view's dims as (stride, count), innermost first, dims that continue each other merged."""
    runs: list[tuple[int, int]] = []
    for stride, count in sorted((s, n) for s, n in zip(write.strides, write.size) if n > 1):
        if runs and stride == runs[-1][0] * runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] * count)
        else:
            runs.append((stride, count))
    return runs


def _box_problem(shape: tuple[int, ...], boxes: list[Box], must_cover: bool) -> str:
    ordered = sorted(boxes, key=lambda b: b.offset)
    for i, a in enumerate(ordered):
        for b in ordered[i + 1 :]:
            if a.offset and b.offset[0] >= a.offset[0] + a.size[0]:
                break
            common = intersect(a, b)
            if common is not None:
                return f"{show(common)} is written more than once"
    if not must_cover or sum(map(volume, boxes)) == prod(shape):
        return ""
    missing = [whole(shape)]
    for box in ordered:
        missing = subtract_all(missing, box)
    return f"{show(missing[0])} of {list(shape)} is written by nothing"


def _listed_problem(numel: int, writes: list[Write], must_cover: bool) -> str:
    written, again = bytearray(numel), 0
    for write in writes:
        places = [write.offset]
        for stride, count in zip(write.strides, write.size):
            places = [place + i * stride for place in places for i in range(count)]
        for place in places:
            again += written[place]
            written[place] = 1
    if again:
        return f"some of its {numel} elements are written more than once"
    unwritten = numel - sum(written)
    return f"{unwritten} of its {numel} elements are written by nothing" if must_cover and unwritten else ""


def _first(write: Write) -> int:
    return write.offset + sum(s * (n - 1) for s, n in zip(write.strides, write.size) if s < 0)


def _last(write: Write) -> int:
    return write.offset + sum(s * (n - 1) for s, n in zip(write.strides, write.size) if s > 0)

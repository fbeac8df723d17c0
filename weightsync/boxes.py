"""Geometry of boxes and strided views, and how a rule carries a shard into Hugging Face coordinates.

Pure functions on ``spec.Box``. A box with a 0 in its size is empty; a 0-d box has no dims and one element.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from weightsync.spec import Box, Rule

ALIGNMENT = 256
"""Bytes: where things begin in memory of ours; what wide GPU reads and the largest element need."""


def aligned(nbytes: int) -> int:
    """The next place, in bytes, where something may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Piece(NamedTuple):
    """A box of a Hugging Face tensor and where it lies in a shard: element offset, one element stride a dim."""

    box: Box
    offset: int
    strides: tuple[int, ...]


def whole(shape: tuple[int, ...]) -> Box:
    """The box of a full tensor of that shape."""
    return Box((0,) * len(shape), shape)


def volume(box: Box) -> int:
    """Elements in the box."""
    return prod(box.size)


def show(box: Box) -> str:
    """``[0:4, 3:8]``: the box as slices."""
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(box.offset, box.size)) + "]"


def intersect(a: Box, b: Box) -> Box | None:
    """The elements of both, or None if there are none. Both must have the same number of dims."""
    assert len(a.size) == len(b.size), f"boxes of different tensors: {a} and {b}"
    offset, size = [], []
    for a_lo, a_n, b_lo, b_n in zip(a.offset, a.size, b.offset, b.size):
        lo = a_lo if a_lo > b_lo else b_lo
        n = min(a_lo + a_n, b_lo + b_n) - lo
        if n <= 0:
            return None
        offset.append(lo)
        size.append(n)
    return Box(tuple(offset), tuple(size))


def subtract(a: Box, b: Box) -> list[Box]:
    """The elements of ``a`` that are not in ``b``, as disjoint boxes, at most two a dim."""
    common = intersect(a, b)
    if common is None:
        return [a] if volume(a) else []
    rest = []
    offset, size = list(a.offset), list(a.size)
    for d, (lo, n) in enumerate(zip(common.offset, common.size)):
        end, common_end = offset[d] + size[d], lo + n
        if lo > offset[d]:
            rest.append(_with_dim(offset, size, d, offset[d], lo - offset[d]))
        if common_end < end:
            rest.append(_with_dim(offset, size, d, common_end, end - common_end))
        offset[d], size[d] = lo, n
    return rest


def subtract_all(boxes: list[Box], b: Box) -> list[Box]:
    """The elements of disjoint ``boxes`` that are not in ``b``, as disjoint boxes."""
    return [rest for box in boxes for rest in subtract(box, b)]


def contains(outer: Box, inner: Box) -> bool:
    """Whether every element of ``inner`` is in ``outer``; True if ``inner`` is empty. False if their dims differ."""
    if len(outer.size) != len(inner.size):
        return False
    spans = zip(outer.offset, outer.size, inner.offset, inner.size)
    return volume(inner) == 0 or all(o <= i and i + n <= o + m for o, m, i, n in spans)


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Element strides of a row-major tensor of that shape."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def distance(start: tuple[int, ...], end: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements of storage between two positions of one tensor: the offset of a sub-box in its box's view."""
    return sum((b - a) * s for a, b, s in zip(start, end, strides))


def rule_problem(rule: Rule, shape: tuple[int, ...]) -> str:
    """Why ``rule`` cannot apply to a trainer tensor of ``shape``; empty if it can."""
    if not contains(whole(shape), rule.box):
        return f"its box {show(rule.box)} does not fit the trainer's shape {list(shape)}"
    if not len(rule.dims) == len(rule.target_shape) == len(rule.target_offset):
        return f"dims {rule.dims}, target shape and target offset differ in length"
    named = [d for d in rule.dims if d is not None]
    if len(set(named)) != len(named) or any(not 0 <= d < len(shape) for d in named):
        return f"dims {rule.dims} name a trainer dim twice, or one that the shape {list(shape)} does not have"
    dropped = [d for d in range(len(shape)) if d not in named and rule.box.size[d] != 1]
    if dropped:
        return f"dims {dropped} are dropped, but their size in the box {show(rule.box)} is not 1"
    if not contains(whole(rule.target_shape), rule_target(rule)):
        return f"box {show(rule_target(rule))} does not fit the target's shape {list(rule.target_shape)}"
    return ""


def rule_target(rule: Rule) -> Box:
    """The box of the Hugging Face tensor that the rule gives."""
    return Box(rule.target_offset, tuple(1 if d is None else rule.box.size[d] for d in rule.dims))


def piece_of(rule: Rule, held: Box, strides: tuple[int, ...]) -> Piece | None:
    """What a shard gives to the rule's target, or None if nothing.

    ``held`` is the shard's box in trainer coordinates, ``strides`` those of its memory. Unit dims that the rule makes
    get stride 0.
    """
    common = intersect(held, rule.box)
    if common is None:
        return None
    offset, size, out_strides = [], [], []
    for start, d in zip(rule.target_offset, rule.dims):
        offset.append(start if d is None else start + common.offset[d] - rule.box.offset[d])
        size.append(1 if d is None else common.size[d])
        out_strides.append(0 if d is None else strides[d])
    return Piece(Box(tuple(offset), tuple(size)), distance(held.offset, common.offset, strides), tuple(out_strides))


def _with_dim(offset: list[int], size: list[int], d: int, lo: int, n: int) -> Box:
    return Box((*offset[:d], lo, *offset[d + 1 :]), (*size[:d], n, *size[d + 1 :]))

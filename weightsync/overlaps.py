"""The writes of one parameter, in the order a loader made them, reduced to what remains when all are done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from weightsync.boxes import contains, dense_strides, intersect, subtract
from weightsync.spec import Box, Fill, Need, View
from weightsync.strides import Run, source_box


class Write(NamedTuple):
    """One copy (``tensor`` and its ``box``) or fill (``value``) into the region ``at`` of ``size``, in elements."""

    at: View
    size: tuple[int, ...]
    tensor: str = ""
    box: Box | None = None
    value: float = 0.0

    @property
    def is_fill(self) -> bool:
        return self.box is None

    def need(self) -> Need:
        assert self.box is not None
        return Need(self.tensor, self.box, self.at)

    def fill(self) -> Fill:
        return Fill(self.at, self.size, self.value)


class Overlap(ValueError):
    """Two writes overlap in a way that no list of disjoint writes says as well."""


def settle(writes: Sequence[Write], shape: tuple[int, ...], strides: tuple[int, ...]) -> list[Write]:
    """The last writes of every element of a parameter of that shape and strides.

    A write that a later one covers is dropped; a fill that a later write overlaps is cut. Raises Overlap where a copy
    would have to be cut, or where the writes are no boxes of the parameter.
    """
    order = sorted(range(len(shape)), key=lambda d: -strides[d])
    layout = tuple(shape[d] for d in order)
    dense = all(shape[d] == 1 or strides[d] == s for d, s in zip(order, dense_strides(layout)))
    settled: list[Write] = []
    for cluster in _clusters(writes):
        settled += cluster if len(cluster) == 1 else _replay(cluster, layout if dense else None)
    return settled


def _clusters(writes: Sequence[Write]) -> Iterable[list[Write]]:
    """Groups whose memory spans touch one another, each in order. Spans of different groups are disjoint."""
    spans = sorted((*_span(w), i) for i, w in enumerate(writes))
    group: list[int] = []
    end = 0
    for lo, hi, i in spans:
        if group and lo >= end:
            yield [writes[j] for j in sorted(group)]
            group = []
        group.append(i)
        end = max(end, hi) if len(group) > 1 else hi
    if group:
        yield [writes[j] for j in sorted(group)]


def _span(write: Write) -> tuple[int, int]:
    reach = sum((n - 1) * s for n, s in zip(write.size, write.at.strides))
    return write.at.offset, write.at.offset + reach + 1


def _replay(writes: list[Write], layout: tuple[int, ...] | None) -> list[Write]:
    kept: dict[tuple, tuple[Write, Box | None]] = {}
    for write in writes:
        box = _box(write, layout)
        kept.pop(_region(write), None)
        for key, (other, other_box) in list(kept.items()):
            pieces = _rest(other, other_box, write, box, layout)
            if pieces is not None:
                del kept[key]
                kept.update((_region(p), (p, _box(p, layout))) for p in pieces)
        kept[_region(write)] = (write, box)
    return [write for write, _ in kept.values()]


def _rest(old: Write, old_box: Box | None, new: Write, new_box: Box | None, layout: tuple | None) -> list[Write] | None:
    """What remains of ``old`` under ``new``; None: all of it."""
    if old_box is None or new_box is None or layout is None:
        (lo, hi), (start, end) = _span(old), _span(new)
        if hi <= start or end <= lo:
            return None
        raise Overlap("it is written by interleaved views that are not boxes of it")
    if intersect(old_box, new_box) is None:
        return None
    if contains(new_box, old_box):
        return []
    if not old.is_fill:
        raise Overlap("it is written again over part of an earlier copy")
    steps = dense_strides(layout)
    return [
        Write(View(old.at.storage, sum(o * s for o, s in zip(b.offset, steps)), steps), b.size, value=old.value)
        for b in subtract(old_box, new_box)
    ]


def _box(write: Write, layout: tuple[int, ...] | None) -> Box | None:
    if layout is None:
        return None
    found = source_box(layout, write.at.offset, [Run(s, s, n) for s, n in zip(write.at.strides, write.size)])
    return found[0] if found else None


def _region(write: Write) -> tuple:
    return write.at.offset, tuple(sorted((s, n) for s, n in zip(write.at.strides, write.size) if n > 1))

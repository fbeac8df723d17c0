"""Rows as a bar chart, on a logarithmic axis: whole pushes, SGLang's own calls, and the floor of each setting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.rows import STOCK, Row, groups, heading, milliseconds

OURS, THEIRS, FLOOR = "#2563eb", "#9ca3af", "#111827"


def draw(rows: Sequence[Row], path: Path) -> bool:
    """Write a PNG; False if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = groups(rows)
    heights = [1 + 0.32 * len(group) for group in found]
    figure, axes = pyplot.subplots(
        len(found), 1, figsize=(10, sum(heights) + 0.5), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for axis, group in zip(axes[:, 0], found, strict=True):
        _bars(axis, heading(group[0]), group)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _bars(axis, title: str, group: Sequence[Row]) -> None:
    floor_s = group[0].floor_s
    bars = [("plain copy of the same bytes", floor_s, FLOOR)] if floor_s else []
    bars += [(row.name, row.push_s.median, THEIRS if row.route == STOCK else OURS) for row in group]
    names, seconds, colours = zip(*bars, strict=True)
    drawn = axis.barh(range(len(bars)), [1e3 * s for s in seconds], color=colours)
    axis.bar_label(drawn, labels=[f"{milliseconds(s)} ms" for s in seconds], padding=3, fontsize=8)
    axis.set_yticks(range(len(bars)), names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlim(min(seconds) * 1e3 / 2, max(seconds) * 1e3 * 3)
    if floor_s:
        axis.axvline(floor_s * 1e3, color=FLOOR, linestyle="--", linewidth=1)
    axis.set_title(title, fontsize=9, loc="left")
    axis.set_xlabel("milliseconds, median of whole pushes", fontsize=8)

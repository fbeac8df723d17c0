"""Rows as a bar chart, on a logarithmic axis: whole pushes, SGLang's own calls, and the floor of each setting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.rows import STOCK, Row, heading

OURS, THEIRS, FLOOR = "#2563eb", "#9ca3af", "#111827"


def draw(rows: Sequence[Row], path: Path) -> bool:
    """Write a PNG; False if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(heading(row), []).append(row)
    heights = [1 + 0.32 * len(group) for group in groups.values()]
    figure, axes = pyplot.subplots(
        len(groups), 1, figsize=(10, sum(heights) + 0.5), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for axis, (title, group) in zip(axes[:, 0], groups.items(), strict=True):
        _bars(axis, title, group)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _bars(axis, title: str, group: Sequence[Row]) -> None:
    milliseconds = [row.push_s.median * 1e3 for row in group]
    floor_ms = group[0].floor_s * 1e3
    colours = [THEIRS if row.route == STOCK else OURS for row in group]
    names = [row.name for row in group]
    bars = axis.barh(range(len(group)), milliseconds, color=colours)
    axis.bar_label(bars, labels=[f"{ms:.3g} ms" for ms in milliseconds], padding=3, fontsize=8)
    axis.set_yticks(range(len(group)), names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlim(right=max([*milliseconds, floor_ms]) * 3)
    if floor_ms:
        axis.axvline(floor_ms, color=FLOOR, linestyle="--", linewidth=1, label=f"plain copy, {floor_ms:.3g} ms")
        axis.legend(loc="lower right", fontsize=8)
    axis.set_title(title, fontsize=9, loc="left")
    axis.set_xlabel("milliseconds, median of whole pushes", fontsize=8)

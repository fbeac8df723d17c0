"""What a benchmark reports: one row a route and setting, always the same fields, as JSON and as a table. No torch."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

PHASES = ("publish", "pause", "begin", "move", "verify", "commit", "continue")
STOCK = "stock"


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the structs of a results file: an unknown field in one is an error."""


class Stats(Struct):
    """Wall times of ``n`` repetitions, in seconds."""

    min: float
    median: float
    max: float
    n: int


class EngineRef(Struct, omit_defaults=True):
    """Which engine was pushed to: ``count`` of them, each of tensor-parallel size ``tp``."""

    name: str
    version: str
    tp: int
    count: int = 1


class Row(Struct):
    """One measured way of bringing a model's weights into an engine.

    ``floor_s`` is a plain copy of the same bytes out of the same trainer memory, measured in the same run; ``push_s``
    the wall time of whole pushes, publish to continue, stock ones with pause, flush and continue too and, if broadcast,
    until the last byte has left; ``phases_s`` the median of each phase (of stock rows, ``move`` alone: the updates);
    ``stock_s`` the medians of ``push_s`` of the stock rows of the same run, by name. A stock row's ``route`` is
    ``stock``.
    """

    name: str
    gpu: str
    num_gpus: int
    model: str
    dtype: str
    num_bytes: int
    num_tensors: int
    trainer: str
    engine: EngineRef
    route: str
    verify: str
    floor_s: float
    push_s: Stats
    phases_s: dict[str, float]
    stock_s: dict[str, float]
    versions: dict[str, str]
    commit: str


def stats(seconds: Sequence[float]) -> Stats:
    """``seconds`` must not be empty."""
    return Stats(min(seconds), statistics.median(seconds), max(seconds), len(seconds))


def median_phases(reports: Iterable[dict[str, float]]) -> dict[str, float]:
    """The median of each phase over the pushes' ``seconds``."""
    found = list(reports)
    return {phase: statistics.median(r.get(phase, 0.0) for r in found) for phase in PHASES}


def read(path: str | Path) -> list[Row]:
    """The rows of a results file; raises msgspec.ValidationError if it is not one."""
    return msgspec.json.decode(Path(path).read_bytes(), type=list[Row])


def write(path: str | Path, rows: Sequence[Row]) -> None:
    """Write a results file whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(list(rows)), indent=2) + b"\n")
    os.replace(beside, path)


def with_stock(rows: Iterable[Row]) -> list[Row]:
    """The rows of one run, each with the medians of all its stock rows in ``stock_s``."""
    rows = list(rows)
    found = {row.name: row.push_s.median for row in rows if row.route == STOCK}
    return [msgspec.structs.replace(row, stock_s=found) for row in rows]


def table(rows: Sequence[Row], title: str = ""):
    """Rows for ``rich`` to print: a table a setting, with the plain copy as its first line."""
    from rich.console import Group

    above = [f"\n[bold]{title}"] if title else []
    return Group(*above, *(_table(found, heading(found[0])) for found in groups(rows)))


def groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that were measured together, side by side: one setting in one run, known by its floor."""
    found: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        found.setdefault((heading(row), row.floor_s), []).append(row)
    return list(found.values())


def _table(rows: Sequence[Row], title: str):
    from rich.table import Table

    shown = Table(title=title, title_justify="left")
    for name in ("what", "verified"):
        shown.add_column(name)
    for name in ("GB", "tensors", "ms (median)", "min", "max", "n", "x copy", *PHASES):
        shown.add_column(name, justify="right")
    if rows[0].floor_s:
        shown.add_row("plain copy of the same bytes", "", *_size(rows[0]), milliseconds(rows[0].floor_s))
    for row in rows:
        shown.add_row(*_cells(row))
    return shown


def heading(row: Row) -> str:
    """The setting that a row was measured in, as a line of text."""
    engine = f"{row.engine.name} {row.engine.version} TP {row.engine.tp}"
    engine = f"{row.engine.count} x {engine}" if row.engine.count > 1 else engine
    where = row.gpu if row.num_gpus < 2 else f"{row.num_gpus} x {row.gpu}"
    return f"{row.model}, {row.dtype}, {row.trainer}, {engine}, {where}"


def _cells(row: Row) -> list[str]:
    factor = f"{row.push_s.median / row.floor_s:.1f}" if row.floor_s else ""
    times = [
        milliseconds(row.push_s.median),
        milliseconds(row.push_s.min),
        milliseconds(row.push_s.max),
        str(row.push_s.n),
        factor,
    ]
    phases = [milliseconds(row.phases_s[phase]) if phase in row.phases_s else "" for phase in PHASES]
    verified = "" if row.route == STOCK else "no" if row.verify == "none" else "yes"
    return [row.name, verified, *_size(row), *times, *phases]


def _size(row: Row) -> list[str]:
    return [f"{row.num_bytes / 1e9:.3g}", str(row.num_tensors)]


def milliseconds(seconds: float) -> str:
    """As text, to three digits."""
    ms = seconds * 1e3
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"

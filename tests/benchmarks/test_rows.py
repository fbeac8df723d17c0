"""Rows: exactly the fields that readers of the results files rely on, and a table that shows all of them."""

from __future__ import annotations

import json

import msgspec
import pytest
from rich.console import Console

from benchmarks import chart, rows
from benchmarks.rows import EngineRef, Row

FIELDS = [
    *("name", "gpu", "num_gpus", "model", "dtype", "num_bytes", "num_tensors", "trainer", "engine", "route", "verify"),
    *("floor_s", "push_s", "phases_s", "stock_s", "versions", "commit"),
]


def row(name: str = "direct", route: str = "direct", seconds: tuple[float, ...] = (0.2, 0.1, 0.4), **fields) -> Row:
    phases = dict.fromkeys(rows.PHASES, 0.01) if route != rows.STOCK else {}
    values = {
        "name": name,
        "gpu": "NVIDIA H200",
        "num_gpus": 1,
        "model": "Qwen3-8B",
        "dtype": "bfloat16",
        "num_bytes": 16_381_470_720,
        "num_tensors": 399,
        "trainer": "FSDP2 over 1, bfloat16",
        "engine": EngineRef("SGLang", "0.5.12", 1),
        "route": route,
        "verify": "none",
        "floor_s": 0.05,
        "push_s": rows.stats(seconds),
        "phases_s": phases,
        "stock_s": {},
        "versions": {"torch": "2.11.0"},
        "commit": "abc",
    }
    return Row(**values | fields)


def test_the_fields_of_a_row_in_json(tmp_path):
    rows.write(tmp_path / "out.json", [row()])
    (found,) = json.loads((tmp_path / "out.json").read_text())
    assert list(found) == FIELDS
    assert found["push_s"] == {"min": 0.1, "median": 0.2, "max": 0.4, "n": 3}
    assert found["engine"] == {"name": "SGLang", "version": "0.5.12", "tp": 1}
    assert list(found["phases_s"]) == ["publish", "pause", "begin", "move", "verify", "commit", "continue"]


def test_several_engines_are_counted(tmp_path):
    kept = row(engine=EngineRef("SGLang", "0.5.12", 2, 2))
    rows.write(tmp_path / "out.json", [kept])
    assert rows.read(tmp_path / "out.json") == [kept]
    assert "2 x SGLang 0.5.12 TP 2" in rows.heading(kept)


def test_rows_come_back_as_they_were_written_and_no_half_file_is_left(tmp_path):
    kept = [row(), row("stock: one call a tensor", rows.STOCK)]
    rows.write(tmp_path / "deep" / "out.json", kept)
    assert rows.read(tmp_path / "deep" / "out.json") == kept
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["out.json"]


def test_a_file_with_an_unknown_field_is_refused(tmp_path):
    raw = msgspec.to_builtins(row()) | {"speed": 1}
    (tmp_path / "out.json").write_text(json.dumps([raw]))
    with pytest.raises(msgspec.ValidationError, match="speed"):
        rows.read(tmp_path / "out.json")


def test_every_row_of_a_run_carries_the_medians_of_its_stock_rows():
    found = rows.with_stock([row(), row("stock: a", rows.STOCK, (3.0, 1.0, 2.0)), row("stock: b", rows.STOCK, (4.0,))])
    assert [r.stock_s for r in found] == [{"stock: a": 2.0, "stock: b": 4.0}] * 3


def test_phases_are_medians_and_a_phase_that_did_not_run_is_zero():
    found = rows.median_phases([{"move": 1.0, "verify": 5.0}, {"move": 3.0}, {"move": 2.0}])
    assert found["move"] == 2.0
    assert found["verify"] == 0.0
    assert tuple(found) == rows.PHASES


def test_the_table_groups_by_setting_and_shows_how_many_times_the_plain_copy_a_push_takes():
    console = Console(width=250, record=True)
    found = [row(), row("stock: one call a tensor", rows.STOCK), row("shm", "shm", model="Qwen2.5-1.5B", verify="x")]
    console.print(rows.table(found))
    text = console.export_text()
    assert text.count("plain copy of the same bytes") == 2
    assert "Qwen3-8B, bfloat16, FSDP2 over 1, bfloat16, SGLang 0.5.12 TP 1, NVIDIA H200" in text
    line = next(line for line in text.splitlines() if "direct" in line)
    assert line.replace("│", " ").split()[:9] == ["direct", "no", "16.4", "399", "200", "100", "400", "3", "4.0"]


def test_the_chart_is_a_png_where_matplotlib_is_installed(tmp_path):
    drawn = chart.draw([row(), row("stock: one call a tensor", rows.STOCK)], tmp_path / "chart.png")
    assert drawn == (tmp_path / "chart.png").exists()
    if drawn:
        assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")

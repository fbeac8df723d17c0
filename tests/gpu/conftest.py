"""The real server that GPU tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.gpu_engine import GpuEngine
from benchmarks.scenario_run import head_commit
from tests.gpu import real


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuEngine]:
    """Started, perhaps not up yet: ``wait`` before use, so that trainers start meanwhile."""
    with real.engine(tmp_path_factory.mktemp("engine"), tp_size=real.num_gpus()) as started:
        yield started


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[[str, dict[str, Any]], None]:
    """Adds a row, and which commit it is of, to NAME.json in the folder that ``--results`` names, if it names one."""

    def add(name: str, row: dict[str, Any]) -> None:
        if folder := request.config.getoption("--results"):
            path = Path(folder) / f"{name}.json"
            rows = msgspec.json.decode(path.read_bytes()) if path.exists() else []
            row = row | {"commit": request.config.getoption("--commit") or head_commit()}
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(msgspec.json.format(msgspec.json.encode([*rows, row])) + b"\n")

    return add

"""The real server that GPU tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.gpu_engine import GpuEngine
from tests.gpu import real


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuEngine]:
    """Started, perhaps not up yet: ``wait`` before use, so that trainers start meanwhile."""
    with real.engine(tmp_path_factory.mktemp("engine"), tp_size=real.num_gpus()) as started:
        yield started

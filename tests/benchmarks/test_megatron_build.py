"""The benchmark's Megatron trainer in its own environment: see ``trainer_side/megatron_bench.py``."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks import models
from weightsync import envs

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(240)
def test_whole_tensors_and_shards_are_as_predicted() -> None:
    done = subprocess.run(
        [envs.resolve("megatron").python, str(ROOT / "tests/trainer_side/megatron_bench.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=220,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    for model, axes in (("tiny-Qwen3", "TP2 x PP2"), ("tiny-Qwen3-MoE", "EP4"), ("tiny-Qwen3-MoE", "TP2 x EP2")):
        shape = models.model(model)
        assert f"{shape.family} {axes}: {len(models.tensors(shape))} whole tensors" in done.stdout

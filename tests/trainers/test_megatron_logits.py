"""Megatron's forward against transformers' on what Megatron's ranks publish: ``trainer_side/megatron_logits.py``."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from weightsync import envs
from weightsync.demo_model import write_model

SCRIPT = Path(__file__).parent.parent / "trainer_side" / "megatron_logits.py"


@pytest.mark.timeout(400)
def test_transformers_says_the_same_as_megatron_after_training(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    done = subprocess.run(
        [envs.resolve("megatron").python, str(SCRIPT), str(model)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=360,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    assert "largest difference" in done.stdout

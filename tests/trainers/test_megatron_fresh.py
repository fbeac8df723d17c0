"""A Megatron publisher under the real distributed optimizer on four ranks: see ``trainer_side/megatron_fresh.py``."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from weightsync import envs

SCRIPT = Path(__file__).parent.parent / "trainer_side" / "megatron_fresh.py"


@pytest.mark.timeout(400)
def test_what_is_published_is_the_steps_own_and_the_trainer_stays_as_it_was() -> None:
    environment = envs.resolve("megatron")
    done = subprocess.run(
        [environment.python, str(SCRIPT)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=360,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    for said in (
        "a pending gather is finished",
        "a gather under way is waited for, and not done twice",
        "settling between backward and step does not cost the step its gather",
        "ten publishes carry their step's values and leave every tensor as it was",
        "weights that are swapped in are refused by name",
    ):
        assert said in done.stdout

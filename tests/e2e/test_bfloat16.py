"""An engine in bfloat16 fed by a trainer in float32, against the trainer's own forward, teacher-forced.

Greedy tokens say nothing here: equal weights give different ones where two words are nearly as likely.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from tests.e2e.training import Training
from tests.servers import PROBE, Kind, Servers, log_probabilities
from weightsync import envs
from weightsync.demo_model import DemoModel, write_model

KIND = Kind("0.5.23", model=DemoModel(family="qwen2", dtype="bfloat16"))
SEED, OTHER_SEED = 3, 2
BOUND = 0.05
"""Of |log-probability, engine minus trainer|, over all prefixes and all next tokens."""

SCRIPT = Path(__file__).parents[1] / "trainer_side" / "teacher_forced.py"

pytestmark = pytest.mark.timeout(900)


def trainers_own(folder: Path) -> dict[str, torch.Tensor]:
    environment = envs.resolve("automodel")
    done = subprocess.run(
        [environment.python, SCRIPT, folder, *map(str, PROBE)],
        env=envs.process_env(environment) | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return {dtype: torch.tensor(rows) for dtype, rows in json.loads(line.removeprefix("RESULT ")).items()}


def test_log_probabilities_are_the_trainers_within_a_bound(
    servers: Servers, training: Training, tmp_path: Path
) -> None:
    url = servers.get(KIND).url
    with training.into(url, KIND.model) as one:
        one.push(OTHER_SEED)
        other = torch.tensor(log_probabilities(url, KIND.model.vocab_size))
        one.push(SEED)
        engine = torch.tensor(log_probabilities(url, KIND.model.vocab_size))
    own = trainers_own(write_model(tmp_path / "model", KIND.model, seed=SEED))
    worst = {dtype: (engine - rows).abs().max().item() for dtype, rows in own.items()}
    wrong = {dtype: (other - rows).abs().max().item() for dtype, rows in own.items()}
    print(f"largest differences: pushed weights {worst}, other weights {wrong}")
    assert max(worst.values()) < BOUND, worst
    assert min(wrong.values()) > 10 * BOUND, f"the bound tells nothing: other weights differ by {wrong}"

"""A real nemo-automodel model under FSDP2 trains on the engine's own GPUs, and a real SGLang says what it would say.

An optimizer step lies between any two pushes. With two GPUs there are two ranks and two engine ranks, on the same two.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.gpu_engine import GpuEngine
from tests.gpu import real
from weightsync.config import load_config
from weightsync.session import Session
from weightsync.spec import PushRequest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560)]

BOUND = 0.2
"""Of |log-probability, engine minus trainer|: the engine computes in bfloat16, and a float32 trainer does not."""
PUSHES = 3
TOKENS = random.Random(1).choices(range(4, real.MODEL.vocab_size), k=64)


@pytest.mark.parametrize(("dtype", "optimizer"), [("bfloat16", "foreach"), ("float32", "fused")])
def test_the_engine_says_what_the_trainer_would(engine: GpuEngine, tmp_path: Path, dtype: str, optimizer: str) -> None:
    places = [f"cuda:{i}" for i in range(real.num_gpus())]
    with real.Ranks(tmp_path, places, dtype=dtype, optimizer=optimizer, tokens=TOKENS) as ranks:
        publishers = ranks.addresses()
        engine.wait(real.START_S)
        pushed(ranks, engine.url, publishers)


def pushed(ranks: real.Ranks, url: str, publishers: list[str], route: str = "direct") -> None:
    """Step, push and compare, again and again."""
    settings = {"pair": "sgl_dtensor_v2", "engines": [{"url": url}], "publishers": publishers, "route": route}
    session = Session(load_config(settings), trainer="dtensor_v2")
    before: list[float] | None = None
    try:
        print("\n".join(session.plan().notes))
        for number in range(1, PUSHES + 1):
            step = ranks.step(number)
            report = session.push(PushRequest(step=number))
            assert report.verified and report.weight_version == str(number)
            said = real.log_probabilities(url, TOKENS)
            off = largest(said, step["own"])
            moved = largest(said, before) if before else float("inf")
            print(f"step {number}: loss {step['loss']:.3f}, engine {off:.4f} from its trainer, {moved:.2f} from before")
            assert off < BOUND
            assert moved > 4 * BOUND, "the bound tells nothing: the step before says the same"
            before = said
    finally:
        session.close()


def largest(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))

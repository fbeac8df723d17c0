"""A real nemo-automodel model under FSDP2 trains on the engine's own GPUs, and a real SGLang says what it would say.

An optimizer step lies between any two pushes. With two GPUs there are two ranks and two engine ranks, on the same two.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_engine import GpuEngine
from tests.gpu import real
from weightsync.config import load_config
from weightsync.reports import PushRequest
from weightsync.session import Session

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560)]

BOUND = 0.2
"""Of |log-probability, engine minus trainer|: the engine computes in bfloat16, and a float32 trainer does not."""
PUSHES = 3
TOKENS = random.Random(1).choices(range(4, real.MODEL.vocab_size), k=64)


@pytest.mark.parametrize(("dtype", "optimizer"), [("bfloat16", "foreach"), ("float32", "fused")])
def test_the_engine_says_what_the_trainer_would(
    engine: GpuEngine, tmp_path: Path, record: Callable[[str, dict], None], dtype: str, optimizer: str
) -> None:
    places = [f"cuda:{i}" for i in range(real.num_gpus())]
    with real.Ranks(tmp_path, places, dtype=dtype, optimizer=optimizer, tokens=TOKENS) as ranks:
        publishers = ranks.addresses()
        engine.wait(real.START_S)
        same = {"gpu": torch.cuda.get_device_name(), "num_gpus": len(places)}
        same |= {"trainer": "nemo-automodel, FSDP2, AdamW", "dtype": dtype, "optimizer": optimizer, "bound": BOUND}
        for row in pushed(ranks, engine.url, publishers):
            record("logprobs", same | row)


def pushed(ranks: real.Ranks, url: str, publishers: list[str], route: str = "direct") -> list[dict]:
    """Step, push and compare, again and again; what was found after each push."""
    rows = []
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
            moved = largest(said, before) if before else None
            rows.append(
                {"step": number, "loss": step["loss"], "largest_difference": off, "moved_since_last_push": moved}
            )
            print(rows[-1])
            assert off < BOUND
            assert moved is None or moved > 4 * BOUND, "the bound tells nothing: the step before says the same"
            before = said
        return rows
    finally:
        session.close()


def largest(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))

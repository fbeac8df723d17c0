"""Logits of Megatron's model against those of transformers', filled by pushes through the real session, on a CPU."""

from __future__ import annotations

import pytest

from tests.megatron_rig import DENSE, MIXTURE, TOKENS, Rig

BOUND = 1e-4  # of the largest logit, in float32


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("shape", "parallel", "route"),
    [(DENSE, {"tp": 2}, "shm"), (MIXTURE, {"ep": 2}, "shm"), (DENSE, {"tp": 2}, "nccl")],
    ids=["dense TP2", "mixture EP2", "dense TP2 over groups"],
)
def test_what_was_pushed_gives_the_trainers_logits(shape, parallel, route):
    with Rig(shape, devices=("cpu", "cpu"), parallel=parallel, route=route) as rig:
        for step in (1, 2):
            rig.all_ranks("train", step)
            report = rig.push(step)
            assert report.verified and report.route == route
            difference, largest = rig.difference()
            assert difference < BOUND * largest, (difference, largest)
        before = rig.all_ranks("logits", TOKENS)[0]
        rig.all_ranks("train", 3)
        rig.push(3)
        difference, largest = rig.difference(was=before)
        assert difference > 100 * BOUND * largest, "the last step's weights would have passed as well"
        assert rig.engine.call("version") == "3"

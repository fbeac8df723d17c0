"""What a scenario would move, by the planner, without anything running."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import links, models
from benchmarks.predict import H200, predict
from benchmarks.scenarios import SCENARIOS
from weightsync.spec import Traffic

ROOT = Path(__file__).parents[2]
MODEL_8B = 16_381_470_720


def test_one_gpu_moves_the_model_once_tensor_by_tensor():
    found = predict(SCENARIOS["colocated-1gpu-8b"])
    assert (found.summary.num_bytes, found.summary.model_bytes) == (MODEL_8B, MODEL_8B)
    assert sum(row.num_copies for row in found.summary.traffic) == 399
    assert found.floor_s == MODEL_8B / H200.local
    assert found.busiest == (0, MODEL_8B, 0, 0)


def test_a_tensor_parallel_trainer_beside_an_engine_cut_alike_crosses_only_where_vocabularies_are_padded_otherwise():
    found = predict(SCENARIOS["megatron-2gpu-tp2"])
    rows = 152_064 // 2 - 151_936 // 2  # of 256 and of 64, halved
    assert (found.busiest.gpu, found.busiest.taken, found.busiest.given) == (0, 0, 2 * rows * 4096 * 2)
    assert found.summary.num_bytes >= MODEL_8B


def test_pipeline_stages_hold_half_of_what_each_engine_rank_needs():
    found = predict(SCENARIOS["megatron-2gpu-pp2"])
    local = sum(row.num_bytes for row in found.summary.traffic if row.same_device)
    assert local / found.summary.num_bytes == pytest.approx(0.5, abs=0.01)


def test_apart_every_byte_crosses_and_two_engines_take_the_model_twice():
    apart = predict(SCENARIOS["disaggregated-4gpu-8b"])
    assert not any(row.same_device for row in apart.summary.traffic)
    twice = predict(SCENARIOS["colocated-4gpu-8b"])
    assert twice.summary.num_bytes == pytest.approx(2 * MODEL_8B, rel=1e-3)
    assert len({(row.engine, row.engine_rank) for row in twice.summary.traffic}) == 4


def test_experts_over_four_ranks_are_read_from_all_of_them():
    scenario = SCENARIOS["megatron-4gpu-moe-ep4"]
    found = predict(scenario)
    whole = models.num_bytes(models.tensors(models.model(scenario.model)))
    assert found.summary.num_bytes == pytest.approx(whole, rel=0.01)
    assert {row.trainer_rank for row in found.summary.traffic if row.engine_rank == 0} == {0, 1, 2, 3}


def test_the_floor_is_that_of_the_engine_rank_that_needs_longest():
    traffic = [
        Traffic("a", 0, 0, "direct", 100, 1, True),
        Traffic("a", 0, 1, "direct", 10, 1, False),
        Traffic("b", 0, 1, "direct", 150, 1, True),
    ]
    first, second = links.loads(traffic, links.Rates(local=100.0, peer=10.0))
    assert (first.engine, first.local, first.remote, first.seconds) == ("a", 100, 10, 2.0)
    assert (second.engine, second.seconds) == ("b", 1.5)


def test_the_command_prints_a_row_a_scenario_and_needs_no_gpu():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.refit_latency", "one-gpu", "colocated-4gpu-8b", "--plan-only"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for name in ("colocated-1gpu-8b", "megatron-1gpu-8b", "colocated-4gpu-8b"):
        (line,) = [line for line in done.stdout.splitlines() if f"│ {name} " in line]
        assert "GPU " in line
    assert "floor ms" in done.stdout

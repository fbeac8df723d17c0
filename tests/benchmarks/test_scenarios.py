"""Scenarios: who is on which GPU, and their tiny forms."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks import models
from benchmarks.refit_latency import groups
from benchmarks.scenarios import SCENARIOS, Scenario, named, tiny


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_has_a_tiny_form_for_a_cpu_that_measures_the_same_things(name):
    real, small = SCENARIOS[name], tiny(SCENARIOS[name])
    assert [s.verify for s in small.settings] == [s.verify for s in real.settings]
    assert {s.route for s in small.settings} <= {"shm", "bucket", "nccl"}
    assert len(small.stock) == len(real.stock)
    assert models.num_bytes(models.tensors(models.model(small.model))) < 10_000_000
    assert msgspec.json.decode(msgspec.json.encode(small), type=Scenario) == small


def test_the_figures_asked_for_are_there():
    colocated = SCENARIOS["colocated-1gpu-8b"]
    assert [(s.route, s.verify) for s in colocated.settings] == [
        ("direct", "none"),
        ("direct", "fingerprint"),
        ("bucket", "none"),
        ("bucket", "fingerprint"),
    ]
    assert [c.limit_bytes for c in colocated.stock] == [0, -1, 512 << 20, 1 << 30, 4 << 30]
    assert any(s.cuda_graphs for s in SCENARIOS.values())
    assert any(s.in_flight for s in SCENARIOS.values())


def test_gpus_are_counted_over_both_sides():
    assert SCENARIOS["colocated-1gpu-8b"].num_gpus == 1
    assert SCENARIOS["colocated-2gpu"].num_gpus == 2
    assert SCENARIOS["disaggregated-2gpu"].engine_gpus == [1]
    masked = SCENARIOS["disaggregated-2gpu-masked"]
    assert (masked.engines[0].first_gpu, masked.engine_gpus, masked.num_gpus) == (0, [1], 2)
    two = SCENARIOS["colocated-8gpu-32b"]
    assert (len(two.engines), two.tp, two.engine_gpus, two.num_gpus) == (2, 4, list(range(8)), 8)
    apart = SCENARIOS["disaggregated-4gpu-8b"]
    assert (apart.trainer_gpus, apart.engine_gpus) == ((0, 1), [2, 3])


def test_a_tiny_form_has_a_trainer_that_its_axes_divide_and_engines_for_two_cores():
    for name, scenario in SCENARIOS.items():
        small = tiny(scenario)
        ranks, axes = len(small.trainer_gpus), small.parallel
        assert ranks <= 4 and ranks % (axes.tp * axes.pp * axes.ep) == 0, name
        assert len(small.engine_gpus) <= 2, name
        assert len(small.engines) == len(scenario.engines), name


def test_scenarios_of_one_engine_share_its_start():
    one_gpu = {name: SCENARIOS[name] for name in named(["one-gpu"])}
    assert groups(one_gpu)[0] == ["colocated-1gpu-8b", "fp32-to-bf16", "automodel", "megatron-1gpu-8b"]
    assert sorted(name for names in groups(one_gpu) for name in names) == sorted(one_gpu)
    assert groups({n: SCENARIOS[n] for n in named(["two-gpus"])})[0][1:] == ["megatron-2gpu-tp2", "megatron-2gpu-pp2"]


def test_sets_are_the_scenarios_in_them_each_once():
    assert named(["sleep-cycle", "one-gpu"])[0] == "sleep-cycle"
    assert len(named(["all", "one-gpu"])) == len(SCENARIOS)


def test_the_pair_follows_the_trainer():
    assert SCENARIOS["megatron-2gpu-tp2"].pair == "sgl_megatron"
    assert SCENARIOS["automodel"].pair == "sgl_dtensor_v2"

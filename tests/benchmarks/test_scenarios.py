"""Scenarios: who is on which GPU, and their tiny forms."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks import models
from benchmarks.scenarios import SCENARIOS, Scenario, tiny


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_has_a_tiny_form_for_a_cpu_that_measures_the_same_things(name):
    real, small = SCENARIOS[name], tiny(SCENARIOS[name])
    assert [s.verify for s in small.settings] == [s.verify for s in real.settings]
    assert {s.route for s in small.settings} <= {"shm", "bucket"}
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
    assert (masked.engine_gpu, masked.engine_gpus, masked.num_gpus) == (0, [1], 2)

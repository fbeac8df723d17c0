"""The benchmark's trainer: every element changes at every step, and stacked experts come apart."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import models, trainer_build
from benchmarks.floor import measure
from benchmarks.rank_wire import FloorRequest


def plain(name: str, dtype: torch.dtype, *, stacked: bool = False) -> nn.Module:
    module = trainer_build._plain(models.model(name), stacked, dtype).to_empty(device="cpu")
    trainer_build._randomise(module)
    return module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_element_changes_at_every_step_even_when_cast(dtype):
    module = plain("tiny-Qwen3", dtype)
    before = [p.detach().to(torch.bfloat16).clone() for p in module.parameters()]
    for step in range(9):
        trainer_build.change(module, step)
        now = [p.detach().to(torch.bfloat16).clone() for p in module.parameters()]
        assert all((a != b).all() for a, b in zip(now, before, strict=True))
        assert all(n.isfinite().all() for n in now)
        before = now


def test_parameters_have_hugging_faces_names_and_shapes():
    module = plain("tiny-Qwen3", torch.float32)
    found = {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert found == {t.name: t.shape for t in models.tensors(models.model("tiny-Qwen3"))}


def test_stacked_experts_come_apart():
    module = plain("tiny-Qwen3-MoE", torch.float32, stacked=True)
    found = dict(trainer_build.full_tensors(module, torch.bfloat16))
    specs = models.tensors(models.model("tiny-Qwen3-MoE"))
    assert {name: tuple(t.shape) for name, t in found.items()} == {t.name: t.shape for t in specs}
    stacked = module.get_parameter("model.layers.1.mlp.experts.gate_and_up_projs").detach().to(torch.bfloat16)
    assert torch.equal(found["model.layers.1.mlp.experts.3.gate_proj.weight"], stacked[3, :, :128].t())
    assert torch.equal(found["model.layers.1.mlp.experts.3.up_proj.weight"], stacked[3, :, 128:].t())


def test_the_floor_counts_the_bytes_that_it_writes():
    tensors = [torch.randn(100, 10), torch.randn(7)]
    found = measure(tensors, FloorRequest("bfloat16", repeats=3))
    assert found.num_bytes == 2 * 1007
    assert 0 < found.best_s < 1
    assert found.best_s == min(found.seconds.values())

"""Where an engine's tensors lie: every way in which one can move is noticed, and asking costs next to nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weightsync.live import LiveWeights, Slot, bits


def model() -> nn.Linear:
    linear = nn.Linear(4, 4)
    linear.register_buffer("rotary", torch.arange(8.0).view(2, 4))
    return linear


def parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def swap(m: nn.Linear, name: str, tensor: torch.Tensor) -> None:
    getattr(m, name).data = tensor


MOVES = {
    "another parameter": lambda m: setattr(m, "weight", parameter(torch.zeros(4, 4))),
    "other memory": lambda m: swap(m, "weight", m.weight.data.clone()),
    "other strides": lambda m: swap(m, "weight", m.weight.data.t()),
    "another shape": lambda m: swap(m, "weight", m.weight.data[:2]),
    "another dtype": lambda m: swap(m, "weight", m.weight.data.view(torch.int32)),
    "gone": lambda m: delattr(m, "weight"),
    "none": lambda m: setattr(m, "weight", None),
    "resized": lambda m: m.rotary.resize_(3, 4),
}


@pytest.mark.parametrize("how", MOVES)
def test_a_tensor_that_moved_is_named(how):
    m = model()
    m.requires_grad_(False)
    live = LiveWeights(m)
    assert live.moved() == ""
    MOVES[how](m)
    assert live.moved().startswith("rotary" if how == "resized" else "weight")


def test_another_object_over_the_same_memory_has_not_moved():
    m = model()
    live = LiveWeights(m)
    m.weight = parameter(m.weight.data)
    assert live.moved() == ""


def test_asking_whether_anything_moved_makes_no_tensor_and_no_list(monkeypatch):
    live = LiveWeights(nn.ModuleList(model() for _ in range(100)))

    def costly(slot: Slot):
        raise AssertionError(f"{slot.name} was looked at closely")

    monkeypatch.setattr(Slot, "tensor", costly)
    monkeypatch.setattr(Slot, "place", costly)
    assert live.moved() == ""
    live.writable()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn]
)
def test_a_constant_of_any_dtype_is_told_from_what_was_kept_by_bits_and_by_fingerprints(dtype):
    m = model()
    m.register_buffer("constant", torch.randint(0, 2, (3, 5)).to(dtype).t())
    live = LiveWeights(m)
    live.keep(["rotary", "constant"])

    def by_fingerprint() -> str:
        prints = live._prints(list(live.constants))
        return prints.first_other(prints.check.run())

    assert (live.changed_constant(), by_fingerprint()) == ("", "")
    bits(m.constant)[1, 2].bitwise_xor_(1)
    assert (live.changed_constant(), by_fingerprint()) == ("constant", "constant")
    live.restore()
    assert (live.changed_constant(), by_fingerprint()) == ("", "")

"""What a push makes of Megatron parameters that are offloaded, each way that can be configured; on any device."""

from __future__ import annotations

import msgspec

from tests.megatron_rig import DENSE, TOKENS, Rig

SHAPE = msgspec.structs.replace(DENSE, num_layers=2)


def check(how: str, *, device: str, bound: float) -> None:
    """Push from the device, from where offloading left the weights, and from the device again.

    ``bound`` is that of logits, as a share of the largest.
    """
    with Rig(SHAPE, devices=(device,), offloaded=how, buffered=True) as rig:
        for step, offload in enumerate((False, True, True, False, True), start=1):
            rig.all_ranks("train", step)
            (expected,) = rig.all_ranks("logits", TOKENS)
            if offload:
                rig.all_ranks("withdraw")
                rig.all_ranks("offload")
            report = rig.push(step)
            assert report.verified
            difference, largest = rig.difference(was=expected)
            assert difference < bound * largest, (step, difference, largest)
            (stays,) = rig.all_ranks("is_offloaded")
            assert stays == (offload and how == "pinned")
            if offload:
                _check_memory(rig, how, device)
            if stays:
                rig.all_ranks("reload")


def _check_memory(rig: Rig, how: str, device: str) -> None:
    if device == "cpu":
        return
    assert rig.all_ranks("are_copies_pinned") == [True]
    notes = " ".join(rig.session.plan().notes)
    assert ("host memory" in notes) == (how == "pinned"), notes


def check_refusal(device: str) -> None:
    """Without a word on it, offloaded parameters are refused by name, and pushed once they are back."""
    with Rig(SHAPE, devices=(device,), buffered=True) as rig:
        rig.push(1)
        rig.all_ranks("withdraw")
        rig.all_ranks("offload")
        (answer,) = rig.all_ranks("step_done", 2)
        assert "is offloaded: reload the parameters before step_done" in answer["error"]
        rig.all_ranks("reload")
        assert rig.push(2).verified

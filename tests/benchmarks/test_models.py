"""Model shapes: as many tensors and bytes as the real models have."""

from __future__ import annotations

import json

import pytest

from benchmarks import models
from weightsync.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "count", "num_bytes"),
    [("Qwen2.5-1.5B", 338, 3_087_428_608), ("Qwen3-8B", 399, 16_381_470_720), ("Qwen3-250M", 223, 1_011_005_440)],
)
def test_real_shapes(name, count, num_bytes):
    found = models.tensors(models.model(name))
    assert (len(found), models.num_bytes(found)) == (count, num_bytes)


def test_stacked_experts_hold_the_same_elements_in_two_tensors_a_layer():
    shape = models.model("tiny-Qwen3-MoE")
    stacked, plain = models.trainer_shapes(shape, stacked=True), models.trainer_shapes(shape, stacked=False)
    assert stacked["model.layers.0.mlp.experts.gate_and_up_projs"] == (8, 128, 256)
    assert stacked["model.layers.0.mlp.experts.down_projs"] == (8, 128, 128)
    assert len(plain) - len(stacked) == shape.num_layers * (8 * 3 - 2)
    assert sum(_count(s) for s in stacked.values()) == sum(_count(s) for s in plain.values())


def test_a_config_alone_is_written(tmp_path):
    models.write_config(tmp_path / "m", models.model("Qwen3-8B"))
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["torch_dtype"] == "bfloat16"


def test_an_unknown_model_is_refused_with_the_names():
    with pytest.raises(ConfigError, match="Qwen3-8B"):
        models.model("gpt")


def _count(size: tuple[int, ...]) -> int:
    count = 1
    for n in size:
        count *= n
    return count

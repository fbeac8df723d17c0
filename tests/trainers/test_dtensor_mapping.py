"""Stacked experts: by nemo-automodel's own adapters, by values that tell where they went, and what is refused."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest
import torch

from weightsync import envs
from weightsync.boxes import rule_problem
from weightsync.errors import ConfigError
from weightsync.spec import Rule
from weightsync.trainers.dtensor_mapping import rules_of

ORACLE = Path(__file__).parent.parent / "trainer_side" / "automodel_oracle.py"
FAMILIES = ["qwen3_moe", "deepseek_v3", "glm4_moe"]
EXPERTS = "model.layers.0.mlp.experts"


def apply(rules: list[Rule], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the rules make of whole tensors; NaN where none of them writes."""
    made: dict[str, torch.Tensor] = {}
    for rule in rules:
        source = tensors[rule.source]
        assert rule_problem(rule, tuple(source.shape)) == ""
        part = source[tuple(slice(o, o + n) for o, n in zip(rule.box.offset, rule.box.size, strict=True))]
        dropped = [d for d in range(part.dim()) if d not in rule.dims]
        part = part.permute(*dropped, *rule.dims).reshape([part.shape[d] for d in rule.dims])
        target = made.setdefault(rule.target, torch.full(rule.target_shape, float("nan")))
        target[tuple(slice(o, o + n) for o, n in zip(rule.target_offset, part.shape, strict=True))] = part
    return made


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what adapters and reader made of each family, all in one process: its imports take long."""
    out = tmp_path_factory.mktemp("automodel")
    command = [envs.resolve("automodel").python, str(ORACLE), str(out), *FAMILIES]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.mark.timeout(700)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_gets_the_names_and_bytes_that_automodels_adapter_exports(oracle, family):
    expected = torch.load(oracle / f"{family}.expected.pt", weights_only=True)
    read = torch.load(oracle / f"{family}.read.pt", weights_only=True)
    assert any(name.endswith("experts.gate_and_up_projs") for name in read["held"])

    made = apply(msgspec.msgpack.decode(read["rules"], type=list[Rule]), read["held"])

    assert set(made) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(made[name], tensor), name


def test_gate_and_up_lie_side_by_side_and_every_matrix_is_transposed():
    experts, hidden, inner = 3, 4, 2
    gate = torch.arange(experts * inner * hidden).float().view(experts, inner, hidden)
    up, down = gate + 100, (gate + 200).transpose(1, 2)
    tensors = {
        f"{EXPERTS}.gate_and_up_projs": torch.cat([gate.transpose(1, 2), up.transpose(1, 2)], dim=2),
        f"{EXPERTS}.down_projs": down.transpose(1, 2).contiguous(),
    }
    made = apply(rules_of({name: tuple(t.shape) for name, t in tensors.items()}), tensors)
    assert len(made) == 3 * experts
    for expert in range(experts):
        assert torch.equal(made[f"{EXPERTS}.{expert}.gate_proj.weight"], gate[expert])
        assert torch.equal(made[f"{EXPERTS}.{expert}.up_proj.weight"], up[expert])
        assert torch.equal(made[f"{EXPERTS}.{expert}.down_proj.weight"], down[expert])


def test_experts_without_a_gate_have_an_up_projection_only():
    rules = rules_of({f"{EXPERTS}.gate_and_up_projs": (2, 4, 6), f"{EXPERTS}.down_projs": (2, 6, 4)})
    assert [r.target.removeprefix(f"{EXPERTS}.") for r in rules] == [
        "0.up_proj.weight",
        "1.up_proj.weight",
        "0.down_proj.weight",
        "1.down_proj.weight",
    ]


def test_everything_else_goes_by_its_own_name():
    shapes = {"model.norm.weight": (4,), f"{EXPERTS}.0.down_proj.weight": (4, 2), "conv.weight": (4, 1, 3), "scale": ()}
    for rule in rules_of(shapes):
        assert rule.target == rule.source
        assert rule.target_shape == rule.box.size == shapes[rule.source]
        assert rule.dims == tuple(range(len(shapes[rule.source])))


@pytest.mark.parametrize(
    ("shapes", "named"),
    [
        ({f"{EXPERTS}.gate_up_proj": (2, 8, 4)}, "gate_up_proj"),
        ({f"{EXPERTS}.gate_projs": (2, 4, 6)}, "gate_projs"),
        ({f"{EXPERTS}.routed_up_weights": (2, 4, 6)}, "routed_up_weights"),
        ({f"{EXPERTS}.gate_up_proj_bias": (2, 8)}, "gate_up_proj_bias"),
        ({f"{EXPERTS}.gate_and_up_projs": (2, 4, 12)}, "not there"),
        ({f"{EXPERTS}.gate_and_up_projs": (2, 4, 11), f"{EXPERTS}.down_projs": (2, 6, 4)}, "gate_and_up_projs"),
        ({f"{EXPERTS}.gate_and_up_projs": (2, 5, 12), f"{EXPERTS}.down_projs": (2, 6, 4)}, "gate_and_up_projs"),
        ({f"{EXPERTS}.down_projs": (2, 6)}, "down_projs"),
    ],
)
def test_a_stack_in_a_layout_that_is_not_known_is_refused_by_name(shapes, named):
    with pytest.raises(ConfigError, match=named):
        rules_of(shapes)

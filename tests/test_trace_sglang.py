"""The traced needs of real SGLang models, replayed bit for bit: in both engine environments, without a server."""

from __future__ import annotations

import functools
import json
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.engine_side import deepseek
from weightsync import envs
from weightsync.demo_model import DemoModel, write_model

ROOT = Path(__file__).parents[1]
ENVS = {"0.5.23": "sglang_cpu", "0.5.12": "sglang_cpu_legacy"}
WORDS = 301  # no multiple of SGLang's padding
DENSE = {
    "llama": DemoModel(family="llama", vocab_size=WORDS),
    "qwen2": DemoModel(family="qwen2", vocab_size=WORDS),
    "qwen3": DemoModel(family="qwen3", vocab_size=WORDS),
    "qwen3_tied": DemoModel(family="qwen3", vocab_size=WORDS, tie_word_embeddings=True),
    "qwen3_moe": DemoModel(family="qwen3_moe", vocab_size=WORDS),
}

pytestmark = pytest.mark.timeout(600)


@functools.cache
def results(version: str) -> dict[str, dict]:
    """What ``tests.engine_side.replay`` found, by model; all models of a version in one process."""
    environment = envs.resolve(ENVS[version])
    with tempfile.TemporaryDirectory() as temporary:
        folders = [write_model(Path(temporary) / name, model) for name, model in DENSE.items()]
        folders.append(deepseek.write(Path(temporary) / "deepseek"))
        done = subprocess.run(
            [environment.python, "-m", "tests.engine_side.replay", *map(str, folders)],
            cwd=ROOT,
            env=envs.process_env(environment) | {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=500,
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return {found["model"]: found for found in map(json.loads, lines)}


@pytest.fixture(params=ENVS)
def version(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("model", DENSE)
def test_needs_say_all_that_load_weights_does(version, model):
    found = results(version)[model]
    assert found["differs"] == [] and found["marked"] == [] and found["holes"] == []
    assert found["opaque"] == {} and found["derived"] == [] and found["ignored"] == []
    assert found["needs"] >= 21
    assert [name.rsplit(".", 1)[1] for name in found["constants"]] == ["cos_sin_cache"]


@pytest.mark.parametrize("model", DENSE)
def test_vocabulary_padding_is_filled(version, model):
    assert results(version)[model]["fills"] >= (1 if model == "qwen3_tied" else 2)


def test_latent_attention_names_what_is_opaque_and_what_is_derived(version):
    found = results(version)["deepseek"]
    assert found["differs"] == [] and found["marked"] == [] and found["ignored"] == []
    layers = range(deepseek.CONFIG["num_hidden_layers"])
    fused = [f"model.layers.{i}.self_attn.fused_qkv_a_proj_with_mqa.weight" for i in layers]
    assert list(found["opaque"]) == fused
    assert all("aten.cat" in reason for reason in found["opaque"].values())
    assert sorted(found["derived"]) == sorted(
        f"model.layers.{i}.self_attn.{w}" for i in layers for w in ("w_kc", "w_vc")
    )
    assert found["holes"] == []

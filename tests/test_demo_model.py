"""The small model on disk: the same bytes for the same seed, and read by transformers as any checkpoint is."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy
import pytest
import torch

from weightsync import envs
from weightsync.demo_model import DemoModel, shapes, weights, write_model
from weightsync.errors import ConfigError

FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe"]


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = (8 + length + at for at in entry["data_offsets"])
            flat = torch.frombuffer(bytearray(data[start:end]), dtype=dtypes[entry["dtype"]])
            tensors[name] = flat.view(entry["shape"])
    return tensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_file_holds_the_seeded_values_rounded_to_nearest(dtype: str, tmp_path: Path) -> None:
    model = DemoModel(dtype=dtype)  # type: ignore[arg-type]
    written = read_safetensors(write_model(tmp_path, model, seed=3) / "model.safetensors")
    expected = {n: torch.from_numpy(v).to(getattr(torch, dtype)) for n, v in weights(model, seed=3).items()}
    assert list(written) == list(expected) == list(shapes(model))
    assert all(torch.equal(written[n], expected[n]) for n in expected)


def test_equal_seeds_give_equal_bytes_and_others_do_not(tmp_path: Path) -> None:
    first, again, other = (
        (write_model(tmp_path / str(i), seed=seed) / "model.safetensors").read_bytes()
        for i, seed in enumerate((1, 1, 2))
    )
    assert first == again != other


def test_no_two_tensors_are_equal() -> None:
    values = list(weights(DemoModel(family="qwen3_moe"), seed=0).values())
    assert len({v.tobytes() for v in values}) == len(values)


def test_tied_embeddings_have_no_head_and_a_vocabulary_may_be_small(tmp_path: Path) -> None:
    model = DemoModel(tie_word_embeddings=True, vocab_size=101)
    written = read_safetensors(write_model(tmp_path, model) / "model.safetensors")
    assert "lm_head.weight" not in written and written["model.embed_tokens.weight"].shape == (101, 128)
    vocab = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocab.values()) == list(range(101))
    assert all(chr(c) in vocab for c in range(0x21, 0x7F))


def test_an_unwritable_folder_and_a_vocabulary_of_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the model folder"):
        write_model(tmp_path / "file" / "model")
    with pytest.raises(ValueError, match="3 or more, got 2"):
        DemoModel(vocab_size=2)


LOAD = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
out = {}
for folder in sys.argv[1:]:
    tokenizer, text = AutoTokenizer.from_pretrained(folder), "Hello, w\\u00f6rld!\\n \\u65e5\\u672c"
    ids = tokenizer(text)["input_ids"]
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    out[folder] = {
        "ids": ids,
        "same": tokenizer.decode(ids) == text,
        "eos": tokenizer.eos_token_id,
        "wrong": [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]],
        "finite": bool(torch.isfinite(model(torch.tensor([ids])).logits).all()),
    }
print(json.dumps(out))
"""


def test_transformers_reads_every_family(tmp_path: Path) -> None:
    folders = [str(write_model(tmp_path / f, DemoModel(family=f))) for f in FAMILIES]  # type: ignore[arg-type]
    environment = envs.resolve("automodel")
    done = subprocess.run(
        [environment.python, "-c", LOAD, *folders],
        env=envs.process_env(environment) | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for folder, found in json.loads(done.stdout.splitlines()[-1]).items():
        length = len("Hello, wörld!\n 日本".encode())
        assert found == {"ids": found["ids"], "same": True, "eos": 0, "wrong": [], "finite": True}, folder
        assert len(found["ids"]) == length and min(found["ids"]) >= 2


def test_values_are_float32_in_memory() -> None:
    assert {v.dtype for v in weights(DemoModel(dtype="bfloat16"), seed=0).values()} == {numpy.dtype("float32")}

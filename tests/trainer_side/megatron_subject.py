"""What is tested: the reader of Megatron models, on what the oracle loaded. Runs in envs/megatron.

    python megatron_subject.py ORACLE_OUT

For each case and form it writes ORACLE_OUT/CASE/FORM.rank{r}.pt: the shards, rules and elements that the reader gives.
The process ends in an error if reading changed a parameter, or gave memory that is not the trainer's.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import megatron_build as build
import megatron_parts
import msgspec
import torch
from megatron_cases import CASES, Case, initialize, run_ranks

from weightsync.boxes import dense_strides
from weightsync.spec import Shard
from weightsync.trainers import megatron
from weightsync.trainers.megatron_names import unwrap


def forms(case: Case, config, states) -> dict[str, list[torch.nn.Module]]:
    result = {
        "te": [build.data_parallel(build.half(c)) for c in build.gpt(case, config, states, te_names=True)],
        "local": [build.half(c) for c in build.gpt(case, config, states, te_names=False)],
    }
    if case.vpp is None and case.model_type in ("llama", "qwen2", "qwen3", "qwen3_moe"):
        result["hybrid"] = build.hybrid(case, config, states)
    return result


def hashes(chunks: list[torch.nn.Module]) -> list[str]:
    tensors = [t for c in map(unwrap, chunks) for t in [*c.parameters(), *c.buffers()]]
    return [hashlib.sha256(t.detach().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest() for t in tensors]


def rank_main(rank: int, out: Path, names: list[str]) -> None:
    megatron_parts.prepare()
    for name in names:
        case = CASES[name]
        initialize(case)
        saved = torch.load(out / name / f"rank{rank}.pt", weights_only=False)
        for form, chunks in forms(case, saved["config"], saved["chunks"]).items():
            before = hashes(chunks)
            answer = read(chunks, out / name)
            assert hashes(chunks) == before, f"{name}.{form}: reading changed a tensor"
            torch.save(answer, out / name / f"{form}.rank{rank}.pt")


def read(chunks: list[torch.nn.Module], hf_config: Path) -> dict:
    reader = megatron.reader(chunks, hf_config=str(hf_config))
    reader.settle()
    held = reader.read()
    own = {t.untyped_storage().data_ptr() for c in map(unwrap, chunks) for t in [*c.parameters(), *c.buffers()]}
    shards = []
    for h in held:
        assert h.tensor.untyped_storage().data_ptr() in own, f"{h.name} is not the trainer's memory"
        strides = dense_strides(tuple(h.tensor.shape))
        shards.append(Shard(h.name, h.shape, h.dtype, h.box, strides, is_buffer=h.is_buffer))
    return {
        "shards": msgspec.msgpack.encode(shards),
        "rules": msgspec.msgpack.encode(reader.rules(held)),
        "elements": [h.tensor.contiguous() for h in held],
    }


if __name__ == "__main__":
    run_ranks(rank_main, Path(sys.argv[1]), sys.argv[2:] or list(CASES))

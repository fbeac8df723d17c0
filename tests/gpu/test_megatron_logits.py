"""Logits of Megatron's model on a GPU against those of transformers' model, filled by pushes over CUDA IPC.

Needs megatron-core and transformers: in this interpreter, or in the environments under ``envs/``.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.megatron_rig import DENSE, MIXTURE, TOKENS, Rig

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

# Of the largest logit. A mixture is asked in float32 only: rounding may send a token to another expert.
BOUNDS = {"float32": 1e-3, "bfloat16": 0.05}
WIDE = {"hidden_size": 1024, "num_layers": 6, "num_heads": 16, "num_kv_heads": 4, "vocab_size": 2000}
SHAPES = {
    "dense": msgspec.structs.replace(DENSE, intermediate_size=2816, **WIDE),
    "mixture": msgspec.structs.replace(MIXTURE, num_experts=16, moe_intermediate_size=384, **WIDE),
}


def check(shape: str, dtype: str, devices: list[str], parallel: dict[str, int]) -> None:
    bound = BOUNDS[dtype]
    with Rig(SHAPES[shape], dtype=dtype, devices=devices, parallel=parallel) as rig:
        for step in (1, 2, 3):
            rig.all_ranks("train", step)
            report = rig.push(step)
            assert (report.verified, report.route) == (True, "direct")
            assert not any("arena" in note for note in report.notes), report.notes
            difference, largest = rig.difference()
            print(f"{shape}, {dtype}, {parallel}: largest difference {difference:.2e} of logits up to {largest:.2f}")
            assert difference < bound * largest, (difference, largest)
        before = rig.all_ranks("logits", TOKENS)[0]
        rig.all_ranks("train", 4)
        rig.push(4)
        difference, largest = rig.difference(was=before)
        assert difference > 2 * bound * largest, "the last step's weights would have passed as well"


@pytest.mark.parametrize(("shape", "dtype"), [("dense", "float32"), ("dense", "bfloat16"), ("mixture", "float32")])
def test_what_was_pushed_gives_the_trainers_logits(shape: str, dtype: str) -> None:
    check(shape, dtype, ["cuda:0"], {})


@pytest.mark.two_gpus
@pytest.mark.parametrize(("shape", "parallel"), [("dense", {"tp": 2}), ("mixture", {"ep": 2})])
def test_from_two_gpus_too(shape: str, parallel: dict[str, int]) -> None:
    check(shape, "float32", ["cuda:0", "cuda:1"], parallel)

"""Runs in envs/automodel: small mixtures of experts of nemo-automodel, as its adapters export them and as ours reads.

    python automodel_oracle.py FOLDER FAMILY...     writes FOLDER/FAMILY.expected.pt and FOLDER/FAMILY.read.pt

A ``read.pt`` holds what the reader gave (``held``: name to whole tensor) and ``rules`` in msgpack.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch
from torch import nn

torch.cuda.current_device = lambda: 0  # nemo-automodel asks where to put rotary tables, and puts them nowhere yet

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 2, "tie_word_embeddings": False, "dtype": "float32", "num_experts_per_tok": 2,
}  # fmt: skip


def build(family: str) -> nn.Module:
    from nemo_automodel.components.models.common import BackendConfig

    backend = BackendConfig(
        attn="sdpa", linear="torch", rms_norm="torch", experts="torch", dispatcher="torch", rope_fusion=False,
        enable_hf_state_dict_adapter=True,
    )  # fmt: skip
    if family == "qwen3_moe":
        from nemo_automodel.components.models.qwen3_moe.model import Qwen3MoeForCausalLM
        from transformers import Qwen3MoeConfig

        return Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**SIZES, num_key_value_heads=1, head_dim=8, num_experts=4), backend=backend
        )
    if family == "glm4_moe":
        from nemo_automodel.components.models.glm4_moe.model import Glm4MoeForCausalLM
        from transformers import Glm4MoeConfig

        config = Glm4MoeConfig(
            **SIZES, num_key_value_heads=1, head_dim=8, n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1,
            first_k_dense_replace=1,
        )  # fmt: skip
        return Glm4MoeForCausalLM(config, backend=backend)
    from nemo_automodel.components.models.deepseek_v3.model import DeepseekV3ForCausalLM
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(
        **SIZES, num_key_value_heads=2, n_routed_experts=4, n_shared_experts=1, n_group=2, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config, backend=backend)


def main(folder: Path, family: str) -> None:
    model = build(family)
    generator = torch.Generator().manual_seed(0)
    for tensor in model.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    expected = model.state_dict_adapter.to_hf(model.state_dict())
    torch.save({name: tensor.clone() for name, tensor in expected.items()}, folder / f"{family}.expected.pt")

    from weightsync.trainers.dtensor_v2 import reader

    source = reader(model)
    held = source.read()
    assert all(h.box.size == h.shape for h in held)
    rules = msgspec.msgpack.encode(source.rules(held))
    torch.save({"held": {h.name: h.tensor.clone() for h in held}, "rules": rules}, folder / f"{family}.read.pt")


if __name__ == "__main__":
    for family in sys.argv[2:]:
        main(Path(sys.argv[1]), family)

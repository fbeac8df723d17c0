"""A tiny DeepSeek-V3 on disk: multi-head latent attention and routed experts. Random seeded weights, no tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from weightsync.demo_model import _write_safetensors

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {  # SGLang on a CPU makes no other kind for this model
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor of CONFIG's model."""
    c = CONFIG
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    found = {
        "model.embed_tokens.weight": (c["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (c["vocab_size"], hidden),
    }
    for i in range(c["num_hidden_layers"]):
        layer, attention = f"model.layers.{i}", f"model.layers.{i}.self_attn"
        found |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{attention}.q_a_proj.weight": (c["q_lora_rank"], hidden),
            f"{attention}.q_a_layernorm.weight": (c["q_lora_rank"],),
            f"{attention}.q_b_proj.weight": (heads * (nope + rope), c["q_lora_rank"]),
            f"{attention}.kv_a_proj_with_mqa.weight": (c["kv_lora_rank"] + rope, hidden),
            f"{attention}.kv_a_layernorm.weight": (c["kv_lora_rank"],),
            f"{attention}.kv_b_proj.weight": (heads * (nope + value), c["kv_lora_rank"]),
            f"{attention}.o_proj.weight": (hidden, heads * value),
        }
        if i < c["first_k_dense_replace"]:
            found |= _mlp(f"{layer}.mlp", c["intermediate_size"])
            continue
        experts = range(c["n_routed_experts"])
        found |= {
            f"{layer}.mlp.gate.weight": (len(experts), hidden),
            f"{layer}.mlp.gate.e_score_correction_bias": (len(experts),),
            **_mlp(f"{layer}.mlp.shared_experts", c["moe_intermediate_size"]),
        }
        for e in experts:
            found |= _mlp(f"{layer}.mlp.experts.{e}", c["moe_intermediate_size"])
    return found


def write(folder: Path, seed: int = 0) -> Path:
    """Write ``config.json`` and ``model.safetensors``; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=generator) * 0.05 for name, shape in shapes().items()}
    _write_safetensors(folder / "model.safetensors", {n: w.numpy() for n, w in weights.items()}, "float32")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def _mlp(prefix: str, size: int) -> dict[str, tuple[int, ...]]:
    hidden = CONFIG["hidden_size"]
    return {
        f"{prefix}.gate_proj.weight": (size, hidden),
        f"{prefix}.up_proj.weight": (size, hidden),
        f"{prefix}.down_proj.weight": (hidden, size),
    }

"""A small model on disk, made on the spot: config, seeded weights, byte-level tokenizer. Needs numpy and no network.

SGLang, transformers and nemo-automodel read the folder like any checkpoint. Used by the demo and by tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from weightsync.errors import ConfigError

if TYPE_CHECKING:
    import numpy

EOS, PAD = "<|end|>", "<|pad|>"

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_SAFETENSORS_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class DemoModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shape of a small model. The defaults split evenly over 2 tensor-parallel ranks, CPU padding included.

    ``vocab_size`` may be below 258: then bytes beyond printable ASCII have no token. ``num_experts`` and the two fields
    after it count for ``qwen3_moe`` only.
    """

    family: Literal["llama", "qwen2", "qwen3", "qwen3_moe"] = "qwen3"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    vocab_size: int = 320
    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    tie_word_embeddings: bool = False
    num_experts: int = 8
    experts_per_token: int = 2
    moe_intermediate_size: int = 128
    max_positions: int = 1024

    def __post_init__(self) -> None:
        if self.vocab_size < 3:
            raise ValueError(f"vocab_size must be 3 or more, got {self.vocab_size}")


def write_model(folder: str | Path, model: DemoModel | None = None, *, seed: int = 0) -> Path:
    """Write ``config.json``, ``model.safetensors``, and the tokenizer's files into ``folder``; returns the folder.

    Equal ``model`` and ``seed`` give equal bytes. Raises ConfigError if the folder cannot be written.
    """
    model = model or DemoModel()
    folder = Path(folder)
    files = {
        "config.json": hf_config(model),
        "generation_config.json": {"eos_token_id": 0, "pad_token_id": 1, "do_sample": False},
        "tokenizer.json": _tokenizer(model.vocab_size),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "model_max_length": model.max_positions,
        },
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False))
        _write_safetensors(folder / "model.safetensors", weights(model, seed=seed), model.dtype)
    except OSError as e:
        raise ConfigError(f"cannot write the model folder {folder}: {e.strerror}") from e
    return folder


def hf_config(model: DemoModel) -> dict[str, Any]:
    """The contents of ``config.json``."""
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[model.family]],
        "model_type": model.family,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": model.max_positions,
        "tie_word_embeddings": model.tie_word_embeddings,
        "attention_bias": model.family == "qwen2",
        "mlp_bias": False,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "torch_dtype": model.dtype,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "bos_token_id": None,
        "use_cache": True,
    }
    if model.family == "qwen3_moe":
        config |= {
            "num_experts": model.num_experts,
            "num_experts_per_tok": model.experts_per_token,
            "moe_intermediate_size": model.moe_intermediate_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.001,
        }
    return config


def shapes(model: DemoModel) -> dict[str, tuple[int, ...]]:
    """Every tensor's Hugging Face name and shape, in checkpoint order."""
    hidden = model.hidden_size
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocab_size, hidden)}
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    for i in range(model.num_layers):
        layer = f"model.layers.{i}"
        out[f"{layer}.input_layernorm.weight"] = (hidden,)
        for name, rows in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
            out[f"{layer}.self_attn.{name}.weight"] = (rows, hidden)
            if model.family == "qwen2":
                out[f"{layer}.self_attn.{name}.bias"] = (rows,)
        if model.family in ("qwen3", "qwen3_moe"):
            out[f"{layer}.self_attn.q_norm.weight"] = (model.head_dim,)
            out[f"{layer}.self_attn.k_norm.weight"] = (model.head_dim,)
        out[f"{layer}.self_attn.o_proj.weight"] = (hidden, query)
        out[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        out |= _mlp_shapes(model, f"{layer}.mlp")
    out["model.norm.weight"] = (hidden,)
    if not model.tie_word_embeddings:
        out["lm_head.weight"] = (model.vocab_size, hidden)
    return out


def _mlp_shapes(model: DemoModel, prefix: str) -> dict[str, tuple[int, ...]]:
    hidden = model.hidden_size
    out: dict[str, tuple[int, ...]] = {}
    if model.family == "qwen3_moe":
        out[f"{prefix}.gate.weight"] = (model.num_experts, hidden)
        blocks = [(f"{prefix}.experts.{e}", model.moe_intermediate_size) for e in range(model.num_experts)]
    else:
        blocks = [(prefix, model.intermediate_size)]
    for block, inner in blocks:
        out[f"{block}.gate_proj.weight"] = (inner, hidden)
        out[f"{block}.up_proj.weight"] = (inner, hidden)
        out[f"{block}.down_proj.weight"] = (hidden, inner)
    return out


def weights(model: DemoModel, *, seed: int) -> dict[str, numpy.ndarray]:
    """Seeded float32 values by name: matrices and biases around 0, norms around 1, so that no two tensors are equal."""
    import numpy

    random = numpy.random.default_rng(seed)
    values = {}
    for name, shape in shapes(model).items():
        value = random.standard_normal(shape, dtype=numpy.float32) * numpy.float32(0.05)
        values[name] = value + numpy.float32(1) if "norm" in name else value
    return values


def _write_safetensors(path: Path, tensors: dict[str, numpy.ndarray], dtype: str) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs, at = [], 0
    for name, value in tensors.items():
        blob = _bytes_of(value, dtype)
        header[name] = {
            "dtype": _SAFETENSORS_NAMES[dtype],
            "shape": list(value.shape),
            "data_offsets": [at, at + len(blob)],
        }
        blobs.append(blob)
        at += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    path.write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *blobs]))


def _bytes_of(value: numpy.ndarray, dtype: str) -> bytes:
    import numpy

    if dtype == "float32":
        return value.tobytes()
    if dtype == "float16":
        return value.astype(numpy.float16).tobytes()
    bits: numpy.ndarray = value.view(numpy.uint32)
    rounded = bits + numpy.uint32(0x7FFF) + ((bits >> numpy.uint32(16)) & numpy.uint32(1))  # to nearest, ties to even
    return (rounded >> numpy.uint32(16)).astype(numpy.uint16).tobytes()


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    """A ``tokenizer.json`` in which each byte is one token; ids 0 and 1 are the end and the padding token."""
    vocab = {EOS: 0, PAD: 1}
    for char in _byte_characters()[: vocab_size - 2]:
        vocab[char] = len(vocab)
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocab[token], "content": token, **special} for token in (EOS, PAD)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }


def _byte_characters() -> list[str]:
    """The 256 characters by which byte-level tokenizers write bytes, the printable ASCII ones and the space first.

    Bytes that have no visible character of their own are written as U+0100 and following, in byte order.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [b for b in range(256) if b not in visible]
    by_byte = {b: chr(b) for b in visible} | {b: chr(0x100 + i) for i, b in enumerate(shifted)}
    first = list(range(0x20, 0x7F))
    return [by_byte[b] for b in [*first, *(b for b in range(256) if b not in first)]]

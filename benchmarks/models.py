"""Model shapes to benchmark with. An engine needs only their ``config.json`` to serve dummy weights. No torch."""

from __future__ import annotations

import json
from pathlib import Path

from weightsync.demo_model import DemoModel, hf_config, shapes
from weightsync.errors import ConfigError
from weightsync.spec import TensorSpec


def _mixture(num_layers: int) -> DemoModel:
    """Qwen3-30B-A3B with that many layers."""
    return DemoModel(
        family="qwen3_moe",
        dtype="bfloat16",
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=num_layers,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        num_experts=128,
        experts_per_token=8,
        moe_intermediate_size=768,
        max_positions=4096,
    )


MODELS = {
    "Qwen2.5-1.5B": DemoModel(
        family="qwen2",
        dtype="bfloat16",
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_layers=28,
        num_heads=12,
        num_kv_heads=2,
        head_dim=128,
        tie_word_embeddings=True,
        max_positions=4096,
    ),
    "Qwen3-8B": DemoModel(
        family="qwen3",
        dtype="bfloat16",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_positions=4096,
    ),
    "Qwen3-32B": DemoModel(
        family="qwen3",
        dtype="bfloat16",
        vocab_size=151936,
        hidden_size=5120,
        intermediate_size=25600,
        num_layers=64,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        max_positions=4096,
    ),
    "Qwen3-30B-A3B": _mixture(48),
    "Qwen3-MoE-30B-A3B/12-layers": _mixture(12),
    "Qwen3-250M": DemoModel(
        family="qwen3",
        dtype="float32",
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=2816,
        num_layers=20,
        num_heads=16,
        num_kv_heads=8,
        head_dim=64,
        max_positions=4096,
    ),
    "tiny-Qwen3": DemoModel(max_positions=4096),
    "tiny-Qwen3-MoE": DemoModel(family="qwen3_moe", max_positions=4096),
}
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def model(name: str) -> DemoModel:
    """The shape of that name; raises ConfigError that lists them."""
    if name not in MODELS:
        raise ConfigError(f"no model {name!r}; there are: {', '.join(MODELS)}")
    return MODELS[name]


def write_config(folder: str | Path, shape: DemoModel) -> Path:
    """Write ``config.json`` into ``folder``, enough for an engine that loads dummy weights and no tokenizer."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(shape), indent=2))
    return folder


def tensors(shape: DemoModel, dtype: str = "") -> list[TensorSpec]:
    """Its Hugging Face tensors in checkpoint order; ``dtype`` in place of the model's own."""
    return [TensorSpec(name, size, dtype or shape.dtype) for name, size in shapes(shape).items()]


def trainer_shapes(shape: DemoModel, *, stacked: bool) -> dict[str, tuple[int, ...]]:
    """Parameters as a trainer holds them, by name.

    ``stacked``: nemo-automodel's layout of experts, one tensor a layer with the expert first and the rest transposed:
    ``gate_and_up_projs`` [experts, hidden, 2 * inner] and ``down_projs`` [experts, inner, hidden].
    """
    if not stacked:
        return shapes(shape)
    experts, hidden, inner = shape.num_experts, shape.hidden_size, shape.moe_intermediate_size
    out: dict[str, tuple[int, ...]] = {}
    for name, size in shapes(shape).items():
        block, found, _ = name.partition(".experts.")
        if not found:
            out[name] = size
            continue
        out[f"{block}.experts.gate_and_up_projs"] = (experts, hidden, 2 * inner)
        out[f"{block}.experts.down_projs"] = (experts, inner, hidden)
    return out


def num_bytes(specs: list[TensorSpec]) -> int:
    """Bytes of all of them together."""
    total = 0
    for spec in specs:
        count = 1
        for size in spec.shape:
            count *= size
        total += count * _BYTES[spec.dtype]
    return total

"""One training rank of the Megatron demo: megatron-core's GPTModel, tensor-parallel on gloo. Runs in envs/megatron.

Forward and backward are megatron-core's own; its optimizers want a GPU, so torch's AdamW takes the steps here. The
driver imports this file to name the class to Ray, so what needs torch is imported inside.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

VOCABULARY_ROWS_MULTIPLE = 128


class MegatronDemoTrainer:
    """Rank ``rank`` of ``world_size`` tensor-parallel ranks. Loads the Qwen3 in folder ``model``, learns by heart."""

    def __init__(self, rank: int, world_size: int, rendezvous: str, model: str, *, learning_rate: float = 3e-3) -> None:
        import torch
        import torch.distributed as dist

        from weightsync.publisher import Publisher

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
        folder = Path(model)
        self.rank = rank
        self._vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        self.model = _gpt_model(folder, world_size)
        _load(self.model, folder)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate)
        self.publisher = Publisher(
            [self.model], rank=rank, world_size=world_size, trainer="megatron", trainer_options={"hf_config": model}
        )

    def address(self) -> str:
        """What ``weightsync.launch`` wants from every rank."""
        return self.publisher.address

    def train(self, tokens: list[int], prompt_length: int, steps: int) -> float:
        """Take ``steps`` optimizer steps towards saying ``tokens[prompt_length:]`` after the prompt; the last loss."""
        import torch
        from torch.nn.functional import cross_entropy

        self.model.train()
        loss = torch.tensor(float("nan"))
        for _ in range(steps):
            logits = self._logits(tokens)[prompt_length - 1 : -1]
            loss = cross_entropy(logits, torch.tensor(tokens[prompt_length:]))
            loss.backward()
            _sum_partial_gradients(self.model)
            self._optimizer.step()
            self._optimizer.zero_grad()
        return loss.item()

    def step_done(self, step: int) -> None:
        """Mark the weights as those of ``step``: from here until the push has returned they stay as they are."""
        self.publisher.step_done(step)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The ``count`` tokens that the trainer's own forward finds likeliest after ``prompt``, one by one."""
        import torch

        self.model.eval()
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(count):
                tokens.append(int(self._logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def modules(self) -> list[str]:
        """Top-level names of everything imported in this process."""
        import sys

        return sorted({name.partition(".")[0] for name in sys.modules})

    def close(self) -> None:
        import torch.distributed as dist

        self.publisher.close()
        dist.destroy_process_group()

    def _logits(self, tokens: list[int]) -> Any:
        """Float32 [len(tokens), true vocabulary]."""
        import torch

        length = len(tokens)
        hidden_from = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        logits = self.model(torch.tensor([tokens]), torch.arange(length)[None], hidden_from)
        return logits[0, :, : self._vocab_size]


def _gpt_model(folder: Path, world_size: int) -> Any:
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.transformer import TransformerConfig

    torch.cuda.current_device = lambda: torch.device("cpu")  # rotary embeddings ask
    get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()  # there is no dropout to seed
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    hf = json.loads((folder / "config.json").read_text())
    config = TransformerConfig(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=hf["head_dim"],
        layernorm_epsilon=hf["rms_norm_eps"],
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        qk_layernorm=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=world_size,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=-(-hf["vocab_size"] // VOCABULARY_ROWS_MULTIPLE) * VOCABULARY_ROWS_MULTIPLE,
        max_sequence_length=hf["max_position_embeddings"],
        position_embedding_type="rope",
        rotary_base=hf["rope_theta"],
        share_embeddings_and_output_weights=hf["tie_word_embeddings"],
        parallel_output=False,
    )


def _load(model: Any, folder: Path) -> None:
    """Put a checkpoint into the model, by the rules that a push reads it with, in the other direction."""
    import torch

    from weightsync.boxes import piece_of
    from weightsync.trainers import megatron
    from weightsync.views import box_of

    checkpoint = _read_safetensors(folder / "model.safetensors")
    reader = megatron.reader(model, hf_config=str(folder))
    held = {h.name: h for h in reader.read()}
    with torch.no_grad():
        for rule in reader.rules(list(held.values())):
            own = held[rule.source]
            piece = piece_of(rule, own.box, own.tensor.stride())
            if piece is not None:
                start = own.tensor.storage_offset() + piece.offset
                view = own.tensor.as_strided(piece.box.size, piece.strides, start)
                view.copy_(box_of(checkpoint[rule.target], piece.box))


def _read_safetensors(path: Path) -> dict[str, Any]:
    """The float32 tensors of a file, by name; this environment has no library for it."""
    import torch

    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    entries = {n: e for n, e in json.loads(data[8:start]).items() if n != "__metadata__"}
    tensors = {}
    for name, entry in entries.items():
        assert entry["dtype"] == "F32", f"{name} is {entry['dtype']}"
        first, end = entry["data_offsets"]
        flat = torch.frombuffer(data, dtype=torch.float32, count=(end - first) // 4, offset=start + first)
        tensors[name] = flat.view(entry["shape"])
    return tensors


def _sum_partial_gradients(model: Any) -> None:
    """Norms of queries and keys are whole on every rank, but see only that rank's heads."""
    import torch.distributed as dist

    for name, parameter in model.named_parameters():
        if name.endswith(("q_layernorm.weight", "k_layernorm.weight")):
            dist.all_reduce(parameter.grad)

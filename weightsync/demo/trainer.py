"""One training rank of the demo: nemo-automodel's Qwen3 under FSDP2 on gloo. Runs in envs/automodel.

This is the whole change that a training worker needs: make a ``Publisher`` once, call ``step_done`` after a step. The
driver imports this file to name the class to Ray, so what needs torch is imported inside.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class DemoTrainer:
    """Rank ``rank`` of ``world_size``. Loads the model in folder ``model`` and learns ``text`` by heart.

    On a CPU build of torch nemo-automodel's ``NeMoAutoModelForCausalLM.from_config`` asks for CUDA, so the model class
    is made directly and sharded with ``fully_shard``.
    """

    def __init__(self, rank: int, world_size: int, rendezvous: str, model: str, *, learning_rate: float = 3e-3) -> None:
        import torch
        import torch.distributed as dist

        from weightsync.publisher import Publisher

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
        self.rank = rank
        self.model = _fsdp2_model(Path(model), world_size)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate)
        self.publisher = Publisher(self.model, rank=rank, world_size=world_size)

    def address(self) -> str:
        """What ``weightsync.launch`` wants from every rank."""
        return self.publisher.address

    def train(self, tokens: list[int], prompt_length: int, steps: int) -> float:
        """Take ``steps`` optimizer steps towards saying ``tokens[prompt_length:]`` after the prompt; the last loss."""
        import torch
        from torch.nn.functional import cross_entropy

        ids = torch.tensor([tokens])
        self.model.train()
        loss = torch.tensor(float("nan"))
        for _ in range(steps):
            logits = self.model(input_ids=ids, use_cache=False).logits[0, prompt_length - 1 : -1]
            loss = cross_entropy(logits, ids[0, prompt_length:])
            loss.backward()
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
                logits = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits
                tokens.append(int(logits[0, -1].argmax()))
        return tokens[len(prompt) :]

    def modules(self) -> list[str]:
        """Top-level names of everything imported in this process."""
        import sys

        return sorted({name.partition(".")[0] for name in sys.modules})

    def close(self) -> None:
        import torch.distributed as dist

        self.publisher.close()
        dist.destroy_process_group()


def _fsdp2_model(folder: Path, world_size: int) -> Any:
    import torch
    from nemo_automodel.components.models.qwen3.model import Qwen3ForCausalLM
    from safetensors.torch import load_file
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import Qwen3Config

    config = Qwen3Config(**json.loads((folder / "config.json").read_text()))
    config.dtype = torch.float32
    model = Qwen3ForCausalLM(config)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)

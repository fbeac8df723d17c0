"""A rank of a real nemo-automodel Qwen3 under FSDP2 that takes optimizer steps when told to.

    python automodel_steps.py SPEC

SPEC is JSON with folder, rank, ranks, rendezvous, device, dtype, optimizer and tokens. Prints ``READY ADDRESS``. Each
line on standard input is a step: it takes one, marks it, and prints ``STEP`` with JSON: the step's loss before it and,
after it, the log-probability of each token but the first. Ends with its standard input.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from nemo_automodel.components.models.qwen3.model import Qwen3ForCausalLM
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config

from weightsync.publisher import Publisher

LEARNING_RATE = 1e-3


def main() -> None:
    spec = json.loads(sys.argv[1])
    device = torch.device(spec["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=spec["rendezvous"],
        rank=spec["rank"],
        world_size=spec["ranks"],
    )
    model = _model(spec, device)
    kind = {spec["optimizer"]: True}  # foreach or fused
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, **kind)
    tokens = torch.tensor([spec["tokens"]], device=device)
    with Publisher(model, rank=spec["rank"], world_size=spec["ranks"]) as publisher:
        print("READY", publisher.address, flush=True)
        for line in sys.stdin:
            loss = -_log_probabilities(model, tokens).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            publisher.step_done(int(line))
            with torch.no_grad():
                own = _log_probabilities(model, tokens)
            print("STEP", json.dumps({"loss": loss.item(), "own": own.tolist()}), flush=True)


def _model(spec: dict, device: torch.device) -> nn.Module:
    """Sharded a layer at a time, every rank with the same random weights; rotary tables stay in float32."""
    config = Qwen3Config(**json.loads((Path(spec["folder"]) / "config.json").read_text()))
    config.dtype = torch.float32
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        parameter.data.uniform_(-0.05, 0.05).add_(1.0 if "norm" in name else 0.0)
        parameter.data = parameter.data.to(getattr(torch, spec["dtype"]))
    model.to(device)
    mesh = init_device_mesh(device.type, (spec["ranks"],))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _log_probabilities(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Of each token after the ones before it."""
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]


if __name__ == "__main__":
    main()

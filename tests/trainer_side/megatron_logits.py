"""Logits of a trained Megatron model against transformers' model, loaded with what the Megatron ranks publish.

    python megatron_logits.py MODEL_FOLDER

Two tensor-parallel ranks train a few steps; then the tensors that their readers give, put together, go into
transformers' Qwen3, and both models are asked about the same tokens. Prints the largest difference. Runs in
envs/megatron.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from weightsync.boxes import piece_of
from weightsync.demo.megatron_trainer import MegatronDemoTrainer
from weightsync.trainers import megatron
from weightsync.views import box_of

TOKENS = [17, 5, 96, 33, 64, 250, 81, 12]
WORLD_SIZE = 2


def gathered(model: torch.nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """Every Hugging Face tensor, from all ranks' parts."""
    reader = megatron.reader(model, hf_config=str(folder))
    held = {h.name: h for h in reader.read()}
    pieces = []
    for rule in reader.rules(list(held.values())):
        own = held[rule.source]
        piece = piece_of(rule, own.box, own.tensor.stride())
        if piece is not None:
            view = own.tensor.as_strided(piece.box.size, piece.strides, own.tensor.storage_offset() + piece.offset)
            pieces.append((rule.target, rule.target_shape, piece.box, view.clone()))
    everyone: list = [None] * WORLD_SIZE
    dist.all_gather_object(everyone, pieces)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape, box, part in (piece for pieces in everyone for piece in pieces):
        box_of(tensors.setdefault(name, torch.full(shape, float("nan"))), box).copy_(part)
    return tensors


def rank_main(rank: int, folder: Path, store: str) -> None:
    trainer = MegatronDemoTrainer(rank, WORLD_SIZE, store, str(folder))
    before = trainer.train(TOKENS, 2, steps=1)
    after = trainer.train(TOKENS, 2, steps=8)
    assert after < before / 2, (before, after)
    trainer.model.eval()
    with torch.no_grad():
        ours = trainer._logits(TOKENS)
    tensors = gathered(trainer.model, folder)
    if rank == 0:
        from transformers import AutoConfig, AutoModelForCausalLM

        reference = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()
        reference.load_state_dict(tensors)
        with torch.no_grad():
            theirs = reference(torch.tensor([TOKENS])).logits[0]
        assert ours.shape == theirs.shape
        difference = (ours - theirs).abs().max().item()
        print(f"largest difference {difference:.2e} of logits up to {theirs.abs().max().item():.2f}", flush=True)
        assert difference < 1e-4, difference
    trainer.close()


def main() -> None:
    import multiprocessing
    import tempfile

    folder = Path(sys.argv[1])
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [(rank, folder, f"file://{scratch}/store") for rank in range(WORLD_SIZE)]
        ranks = [context.Process(target=rank_main, args=a) for a in arguments]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    raise SystemExit(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    main()

"""The same trainer without Ray: ranks of a torchrun job, rank 0 pushing through an actor that runs as a plain process.

    uv run --project envs/automodel torchrun --nproc-per-node 2 -m weightsync.demo.torchrun \\
        --model MODEL_DIR --addresses FILE --actor FILE

Each rank appends its publisher's address to ``--addresses``; ``weightsync serve`` reads them from there and writes its
own address to ``--actor``, which rank 0 waits for.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import weightsync
from weightsync.demo.trainer import DemoTrainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--addresses", required=True, type=Path)
    parser.add_argument("--actor", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    trainer = DemoTrainer(rank, world_size, "env://", arguments.model)
    with open(arguments.addresses, "a") as file:
        file.write(trainer.address() + "\n")
    sync = weightsync.connect(_wait_for(arguments.actor)) if rank == 0 else None
    tokens = [10, 20, 30, 40, 50, 60]
    for step in range(1, arguments.steps + 1):
        loss = trainer.train(tokens, 2, steps=2)
        trainer.step_done(step)
        if sync is not None:
            report = sync.push(step)
            print(f"step {step} loss {loss:.3f} {report.route} verified={report.verified}", flush=True)
        _barrier()
    if sync is not None:
        sync.close()
    trainer.close()


def _wait_for(file: Path, timeout_s: float = 120.0) -> str:
    give_up = time.monotonic() + timeout_s
    while not file.exists() or not file.read_text().endswith("\n"):
        if time.monotonic() > give_up:
            raise TimeoutError(f"no actor wrote its address to {file} within {timeout_s:g} s")
        time.sleep(0.1)
    return file.read_text().strip()


def _barrier() -> None:
    import torch.distributed as dist

    dist.barrier()


if __name__ == "__main__":
    main()

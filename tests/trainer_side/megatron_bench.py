"""The benchmark's Megatron trainer on four gloo ranks, against what is predicted of it. Runs in envs/megatron.

    python megatron_bench.py

Whole tensors come out complete, with Hugging Face's names and shapes, and the same on every rank; replicas hold the
same values; every rank holds the boxes that the prediction says. Prints a line a case.
"""

from __future__ import annotations

import megatron.core.models.gpt.gpt_layer_specs
import torch
import torch.distributed as dist
from megatron_cases import WORLD_SIZE, run_ranks

from benchmarks import megatron_build, models, predict, trainer_build
from benchmarks.parallel import Parallel
from benchmarks.scenarios import Scenario
from weightsync.trainers import megatron

CASES = [
    ("tiny-Qwen3", Parallel(tp=2, pp=2)),
    ("tiny-Qwen3-MoE", Parallel(ep=4)),
    ("tiny-Qwen3-MoE", Parallel(2, 1, 2)),
]


def rank_main(rank: int, name: str, parallel: Parallel) -> None:
    torch.set_num_threads(1)
    shape = models.model(name)
    module = megatron_build.build(shape, parallel=parallel, dtype=torch.float32, device=torch.device("cpu"))
    held = megatron.reader(module, **megatron_build.options_of(shape)).read()
    scenario = Scenario(name, trainer_kind="megatron", parallel=parallel, trainer_gpus=tuple(range(WORLD_SIZE)))
    exports, _ = predict._megatron(scenario, shape)
    assert {(h.name, h.shape, h.box) for h in held} == {(s.tensor, s.shape, s.box) for s in exports[rank]}
    check_replicas(held)

    whole_tensors = megatron_build.WholeTensors(module, shape)
    before = dict(whole_tensors(torch.float32))
    assert {n: tuple(t.shape) for n, t in before.items()} == {t.name: t.shape for t in models.tensors(shape)}
    trainer_build.change(module, 3)
    after = dict(whole_tensors(torch.float32))
    for name_, tensor in after.items():
        assert bool((tensor != before[name_]).all()), name_
        others = [torch.empty_like(tensor) for _ in range(WORLD_SIZE)]
        dist.all_gather(others, tensor)
        assert all(torch.equal(tensor, other) for other in others), name_
    if rank == 0:
        print(f"{shape.family} {parallel}: {len(after)} whole tensors", flush=True)


def check_replicas(held: list) -> None:
    """Ranks that hold the same box of a tensor hold the same values."""
    everyone: list = [None] * WORLD_SIZE
    dist.all_gather_object(everyone, {(h.name, h.box): h.tensor.clone() for h in held})
    first: dict = {}
    for tensors in everyone:
        for key, tensor in tensors.items():
            assert torch.equal(first.setdefault(key, tensor), tensor), key


if __name__ == "__main__":
    for case in CASES:
        run_ranks(rank_main, *case)

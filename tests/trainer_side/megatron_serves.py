"""One Megatron rank that tests push from: a GPTModel, its publisher, and commands over standard input and output.

    python -m tests.trainer_side.megatron_serves SPEC      SPEC: ``Spec`` as JSON

Prints a line of JSON (its publisher's address), then one for each line that it reads, ``[method, argument...]``: what
the method returned, or ``{"error": ...}``. Runs in envs/megatron, on a CPU or a GPU.
"""

from __future__ import annotations

import contextlib
import json
import sys
import zlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks import megatron_build
from benchmarks.parallel import Parallel
from weightsync.demo_model import DemoModel
from weightsync.errors import WeightSyncError
from weightsync.publisher import Publisher
from weightsync.trainers import megatron


class Spec(NamedTuple):
    """``shape``: fields of a DemoModel. ``buffered``: parameters lie in the buffers of DistributedDataParallel."""

    rank: int
    ranks: int
    rendezvous: str
    device: str
    dtype: str
    shape: dict[str, Any]
    parallel: dict[str, int]
    offloaded: str = "refuse"
    buffered: bool = False


class Rank:
    """The commands."""

    def __init__(self, spec: Spec) -> None:
        self._shape = DemoModel(**spec.shape)
        self._device = torch.device(spec.device)
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self._device)
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, init_method=spec.rendezvous, rank=spec.rank, world_size=spec.ranks)
        self._no_gpu = contextlib.nullcontext() if on_gpu else _without_gpu()
        with self._no_gpu:
            self.model = megatron_build.build(
                self._shape, parallel=Parallel(**spec.parallel), dtype=getattr(torch, spec.dtype), device=self._device
            ).eval()
            self._chunk = _buffered(self.model) if spec.buffered else self.model
        if on_gpu:
            _seed()
        options = megatron_build.options_of(self._shape)
        self._reader = megatron.reader(self.model, **options)
        self.publisher = Publisher(
            [self._chunk],
            rank=spec.rank,
            world_size=spec.ranks,
            trainer="megatron",
            trainer_options={**options, "offloaded": spec.offloaded},
        )

    def train(self, step: int) -> None:
        """Other weights, which replicas share."""
        with torch.no_grad():
            for held in self._reader.read():
                seed = zlib.crc32(f"{held.name} {held.offset} {step}".encode())
                generator = torch.Generator(held.tensor.device).manual_seed(seed)
                held.tensor.add_(torch.empty_like(held.tensor).uniform_(-0.05, 0.05, generator=generator))

    def step_done(self, step: int) -> None:
        self.publisher.step_done(step)

    def logits(self, tokens: list[int]) -> list[list[float]]:
        """[len(tokens), true vocabulary], by megatron-core's own forward."""
        ids = torch.tensor([tokens], device=self._device)
        positions = torch.arange(len(tokens), device=self._device)[None]
        hidden_from = torch.ones(len(tokens), len(tokens), dtype=torch.bool, device=self._device).triu(1)[None, None]
        with torch.no_grad(), self._no_gpu:
            found = self.model(ids, positions, hidden_from)
        return found[0, :, : self._shape.vocab_size].float().tolist()

    def withdraw(self) -> None:
        self.publisher.withdraw()

    def offload(self) -> None:
        for buffer in self._buffers():
            buffer.offload_to_cpu(move_params=True, move_grads=False)

    def reload(self) -> None:
        for buffer in self._buffers():
            buffer.reload_from_cpu(move_params=True, move_grads=False)

    def is_offloaded(self) -> bool:
        return all(not buffer.param_data.untyped_storage().nbytes() for buffer in self._buffers())

    def are_copies_pinned(self) -> bool:
        return all(buffer.param_data_cpu.is_pinned() for buffer in self._buffers())

    def allocated(self) -> int:
        """Bytes that torch's allocator holds on the GPU."""
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def _buffers(self) -> list[Any]:
        found = [*self._chunk.buffers, *self._chunk.expert_parallel_buffers]
        assert found, "there is nothing to offload"
        return found


def _buffered(model: torch.nn.Module) -> torch.nn.Module:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    return DistributedDataParallel(model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)


def _seed() -> None:
    """Attention asks for a state of random numbers, though there is no dropout."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1)


def _without_gpu() -> Any:
    """What lets megatron-core run where there is no GPU."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from tests.trainer_side.megatron_parts import OnCpu

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.current_stream = lambda *_: None
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.Tensor.pin_memory = lambda self, *_: self.clone()
    get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()  # there is no dropout to seed
    return OnCpu()


def main() -> None:
    rank = Rank(Spec(**json.loads(sys.argv[1])))
    print(json.dumps(rank.publisher.address), flush=True)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        try:
            answer = getattr(rank, method)(*arguments)
        except WeightSyncError as e:
            answer = {"error": str(e)}
        print(json.dumps(answer), flush=True)
    rank.publisher.close()


if __name__ == "__main__":
    main()

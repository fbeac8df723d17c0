"""Training ranks for tests: real processes in one gloo group, each doing what the test tells it."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from weightsync.errors import WeightSyncError
from weightsync.publisher import Publisher

START_S = 240.0
SHAPES = [(5, 3), (7, 4), (1, 1), (1, 8), (3, 4), (13, 6)]  # of Linear layers, [out, in]; biases are 1-D of [out]


class Layers(nn.Module):
    """One Linear a shape, each run on its own input, a norm-like vector, and buffers of both kinds."""

    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n_in, n_out) for n_out, n_in in shapes)
        self.scale = nn.Parameter(torch.empty(3))
        self.register_buffer("router_bias", torch.arange(6.0))
        self.register_buffer("inv_freq", torch.arange(2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x[..., : layer.in_features]).sum() for layer in self.layers) * self.scale.sum()


def unsharded(shapes: list[tuple[int, int]] = SHAPES) -> dict[str, torch.Tensor]:
    """The same values in every process: no two elements alike."""
    state = Layers(shapes).state_dict()
    numbers = torch.arange(float(sum(t.numel() for t in state.values()))) + 0.5
    return {name: part.view(t.shape) for (name, t), part in zip(
        state.items(), numbers.split([t.numel() for t in state.values()]), strict=True)}  # fmt: skip


def build(layout: str) -> nn.Module:
    """The model of ``unsharded``, cut as ``layout`` says: fsdp, hsdp, column or row (TP=2 under FSDP), ddp."""
    model = Layers(SHAPES)
    model.load_state_dict(unsharded())
    world = dist.get_world_size()
    if layout == "ddp":
        return model
    if layout == "fsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    if layout == "fsdp_each":
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    if layout == "hsdp":
        return fully_shard(model, mesh=mesh)
    style = {"column": ColwiseParallel, "row": RowwiseParallel}[layout]
    parallelize_module(model, mesh["tp"], {f"layers.{i}": style() for i in range(len(SHAPES))})
    return fully_shard(model, mesh=mesh["dp"])


class Rank:
    """What a training process holds. Tests call its methods from outside."""

    def __init__(self) -> None:
        self.model: nn.Module | None = None
        self.publisher: Publisher | None = None

    def offer(self, layout: str, dtype: str = "float32") -> str:
        self.close()
        self.model = build(layout).to(getattr(torch, dtype))
        self.publisher = Publisher(self.model, rank=dist.get_rank(), world_size=dist.get_world_size())
        return self.publisher.address

    def offer_experts(self, layout: str) -> str:
        """8 stacked experts, expert i filled with i: over EP=4, or EP=2 and every expert cut over the other two."""
        self.close()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep_shard", "ep"))
        where, cut = (mesh, [Shard(1), Shard(0)]) if layout == "ep2" else (init_device_mesh("cpu", (4,)), [Shard(0)])
        numbers = torch.arange(8.0).view(8, 1, 1)
        tensors = {
            "model.layers.0.mlp.experts.gate_and_up_projs": numbers.expand(8, 3, 4) + torch.tensor([0, 0, 0.5, 0.5]),
            "model.layers.0.mlp.experts.down_projs": numbers.expand(8, 2, 3) + 0.25,
        }
        cut_up = {name: distribute_tensor(t.contiguous(), where, cut) for name, t in tensors.items()}
        self.publisher = Publisher(cut_up, rank=dist.get_rank(), world_size=dist.get_world_size())
        return self.publisher.address

    def offer_again(self) -> str:
        self.close()
        self.publisher = Publisher(self.model, rank=dist.get_rank(), world_size=dist.get_world_size())
        return self.publisher.address

    def step_done(self, step: int) -> None:
        self.publisher.step_done(step)

    def optimize(self, how: str) -> None:
        """One optimizer step, of gradients set by hand, so that it works on any mesh."""
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        torch.optim.AdamW(self.model.parameters(), lr=0.1, foreach=how == "foreach", fused=how == "fused").step()

    def forward(self) -> list[str]:
        """A forward pass without backward; names of parameters that are gathered now."""
        with torch.no_grad():
            self.model(torch.ones(2, 8))
        return [n for n, p in self.model.named_parameters() if not isinstance(p, DTensor)]

    def write_past_torch(self) -> None:
        """Change one element in a way that no version counter sees."""
        local = dict(self.model.named_parameters())["layers.0.weight"].to_local().detach()
        local.numpy().reshape(-1)[0] += 1.0

    def replace_memory(self) -> None:
        self.model.to(torch.float64)

    def refused(self, what: str) -> str:
        """The error that a Publisher of something impossible raises."""
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
        parameter = distribute_tensor(torch.arange(8.0), mesh, [Replicate(), Replicate()])
        if what == "partial":
            from torch.distributed.tensor import Partial

            parameter = DTensor.from_local(torch.ones(4), mesh, [Partial(), Replicate()])
        if what == "strided":
            from torch.distributed.tensor.placement_types import _StridedShard

            rows = torch.arange(8.0)[dist.get_rank() // 2 * 2 :][[0, 1, 4, 5]]
            parameter = DTensor.from_local(
                rows, mesh, [_StridedShard(0, split_factor=2), Replicate()], run_check=False, shape=(8,), stride=(1,)
            )
        try:
            Publisher({"layers.0.weight": parameter}, rank=dist.get_rank(), world_size=dist.get_world_size()).close()
        except WeightSyncError as e:
            return f"{type(e).__name__}: {e}"
        return "nothing was refused"

    def close(self) -> list[str]:
        """Names of shared memory files of this process that are left."""
        if self.publisher is not None:
            self.publisher.close()
        return [n for n in os.listdir("/dev/shm") if n.startswith("weightsync-") and f"-{os.getpid()}-" in n]


def _serve(rank: int, world: int, store: str, pipe: Connection, kind: type) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    target = kind()
    try:
        while (call := pipe.recv()) is not None:
            name, args = call
            try:
                pipe.send((True, getattr(target, name)(*args)))
            except Exception:
                pipe.send((False, traceback.format_exc()))
    finally:
        target.close()
        dist.destroy_process_group()


class Ranks:
    """``world`` processes, each with a ``kind``. ``call`` runs a method of it in all at once, ``call_one`` in one."""

    def __init__(self, world: int, store: str, kind: type = Rank) -> None:
        context = multiprocessing.get_context("forkserver")  # imports torch once for all ranks
        context.set_forkserver_preload(["tests.trainers.ranks", kind.__module__])
        self._pipes, self._processes = [], []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, store, there, kind), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def call(self, method: Callable[..., Any] | str, *args: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((method, args))
        return [self._receive(pipe) for pipe in self._pipes]

    def call_one(self, rank: int, method: str, *args: Any) -> Any:
        self._pipes[rank].send((method, args))
        return self._receive(self._pipes[rank])

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()

    @staticmethod
    def _receive(pipe: Connection) -> Any:
        assert pipe.poll(START_S), "a training rank does not answer"
        ok, value = pipe.recv()
        assert ok, value
        return value

"""Training ranks, engines and the actor as processes of their own on GPUs, told what to do over pipes.

Tensors of all ranks are ``blocks.I.a.weight`` and ``blocks.I.b.weight``; rank ``r`` of ``n`` holds those where I % n is
r. The engines are fakes with real receivers and real CUDA memory. On places named ``cpu`` all runs without a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from tests.fakes.engine import FakeEngine
from tests.gpu import owner
from weightsync import devices
from weightsync.config import load_config
from weightsync.publisher import Publisher
from weightsync.reports import PushRequest
from weightsync.session import Session

AS_SGLANG = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""What SGLang sets in its processes: members of a group that differ there do not connect."""


@dataclass(frozen=True)
class Size:
    """``blocks`` pairs of tensors of ``rows`` x ``columns`` in bf16."""

    blocks: int = 12
    rows: int = 4096
    columns: int = 4096

    def shapes(self, rank: int, ranks: int) -> dict[str, tuple[int, ...]]:
        """What that rank holds."""
        numbers = range(rank, self.blocks, ranks)
        return {f"blocks.{i}.{half}.weight": (self.rows, self.columns) for i in numbers for half in ("a", "b")}


class Blocks(nn.Module):
    """The engine's model: ``a`` and ``b`` of a block lie one above the other in one parameter."""

    def __init__(self, size: Size, device: str) -> None:
        super().__init__()
        shape, self._rows = (2 * size.rows, size.columns), size.rows
        made = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(size.blocks)]
        self.fused = nn.ParameterList([nn.Parameter(tensor, requires_grad=False) for tensor in made])

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            _, block, half, _ = name.split(".")
            first = self._rows * (half == "b")
            self.fused[int(block)].data[first : first + self._rows].copy_(weight)


class Process:
    """What every role can be asked."""

    def memory(self) -> dict[str, int]:
        """Bytes of torch's allocator on all devices, resident host memory, open descriptors, contexts, also by GPU."""
        gc.collect()
        on_gpu = torch.cuda.is_initialized()
        contexts = devices.contexts_here() if on_gpu else []
        return {f"context on {uuid}": 1 for uuid in contexts} | {
            "allocated": sum(torch.cuda.memory_allocated(i) for i in range(torch.cuda.device_count())) if on_gpu else 0,
            "reserved": sum(torch.cuda.memory_reserved(i) for i in range(torch.cuda.device_count())) if on_gpu else 0,
            "resident": int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "contexts": len(contexts),
        }


class TrainingRank(Process):
    """Holds whole tensors of the ``shapes`` by name."""

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], device: str, dtype: str = "bfloat16", rank: int = 0, ranks: int = 1
    ) -> None:
        self._rank, self._device = rank, device
        kind = getattr(torch, dtype)
        self._tensors = {name: torch.zeros(shape, dtype=kind, device=device) for name, shape in shapes.items()}
        self._publisher = Publisher(self._tensors, rank=rank, world_size=ranks)

    def address(self) -> str:
        return self._publisher.address

    def change(self, step: int, mark: bool = True) -> None:
        """New values everywhere, those of ``step``."""
        torch.manual_seed(1000 * self._rank + step)
        for tensor in self._tensors.values():
            tensor.normal_()
        if mark:
            self._publisher.step_done(step)
        _synchronise(self._device)

    def sums(self) -> dict[str, int]:
        return {name: bits_of(tensor.to(torch.bfloat16)) for name, tensor in self._tensors.items()}

    def withdraw(self) -> None:
        self._publisher.withdraw()

    def offload(self) -> int:
        """Withdraw, bring all tensors to the host and give their memory back; the bytes."""
        self._publisher.withdraw()
        for name, tensor in self._tensors.items():
            self._tensors[name] = tensor.to("cpu", copy=True)
        del tensor
        self._empty()
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def onload(self) -> None:
        for name, tensor in self._tensors.items():
            self._tensors[name] = tensor.to(self._device)

    def _empty(self) -> None:
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def close(self) -> None:
        self._publisher.close()


class Engine(Process):
    def __init__(self, size: Size, device: str, receiver: bool = True) -> None:
        os.environ |= AS_SGLANG
        self._size, self._model = size, Blocks(size, device)
        info = {"device": "cuda" if device.startswith("cuda") else "cpu"}
        self._engine = FakeEngine(version="0.5.12", models=[self._model], receiver=receiver, info=info)

    def url(self) -> str:
        return self._engine.url

    def version(self) -> str:
        """The weight version that it serves; "" while it is paused."""
        return "" if self._engine.paused else self._engine.weight_version

    def sums(self) -> dict[str, int]:
        rows = self._size.rows
        parts = {"a": slice(0, rows), "b": slice(rows, None)}
        fused = enumerate(self._model.fused)
        return {f"blocks.{i}.{half}.weight": bits_of(p[part]) for i, p in fused for half, part in parts.items()}

    def memory(self) -> dict[str, int]:
        self._engine.calls.clear()
        return super().memory()

    def close(self) -> None:
        self._engine.close()


class Actor(Process):
    _session: Session | None = None

    def connect(self, **config: Any) -> list[str]:
        """Make the session; the notes of its plan."""
        settings = {"pair": "sgl_dtensor_v2", "timeout_s": 60.0, "connect_timeout_s": 100.0, **config}
        self._session = Session(load_config(settings), trainer="dtensor_v2")
        return self._session.plan().notes

    def push(self, step: int) -> dict:
        assert self._session is not None
        return self._session.push(PushRequest(step=step)).to_dict()

    def states(self) -> list[str]:
        assert self._session is not None
        return [engine.state for engine in self._session.status().engines]

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = None


class World:
    """Two training ranks and two engines, on GPU 0 and the last one, each a process; and the actor, another.

    ``ranks_on`` and ``engines_on`` are other places; ``sees`` is the ``CUDA_VISIBLE_DEVICES`` of "ranks", "engines" and
    "actor" (not there: all GPUs), in whose numbering the places are.
    """

    def __init__(
        self,
        stack: ExitStack,
        size: Size,
        *,
        ranks_on: Sequence[str] = (),
        engines_on: Sequence[str] = (),
        sees: Mapping[str, str] = MappingProxyType({}),
        dtype: str = "bfloat16",
        receiver: bool = True,
        actor: type[Actor] = Actor,
    ) -> None:
        def start(role: str, make: Callable[[], object]) -> owner.Remote:
            environment = {"CUDA_VISIBLE_DEVICES": sees[role]} if role in sees else {}
            return stack.enter_context(owner.started(make, **environment))

        places = [f"cuda:{i % max(1, torch.cuda.device_count())}" for i in range(2)]
        ranks_on, engines_on = ranks_on or places, engines_on or places
        self.size = size
        self.ranks = [
            start("ranks", partial(TrainingRank, size.shapes(rank, len(ranks_on)), place, dtype, rank, len(ranks_on)))
            for rank, place in enumerate(ranks_on)
        ]
        self.engines = [start("engines", partial(Engine, size, place, receiver)) for place in engines_on]
        self.actor = start("actor", actor)
        self.publishers = [rank.call("address") for rank in self.ranks]
        self.urls = [engine.call("url") for engine in self.engines]

    @property
    def processes(self) -> dict[str, owner.Remote]:
        named = {f"training rank {i}": rank for i, rank in enumerate(self.ranks)}
        return named | {f"engine {i}": engine for i, engine in enumerate(self.engines)} | {"actor": self.actor}

    def connect(self, **config: Any) -> list[str]:
        engines = [{"url": url} for url in self.urls]
        return self.actor.call("connect", engines=engines, publishers=self.publishers, **config)

    def change(self, step: int) -> None:
        for rank in self.ranks:
            rank.call("change", step)

    def push(self, step: int) -> dict:
        self.change(step)
        return self.actor.call("push", step)

    def trained(self) -> dict[str, int]:
        return {name: total for rank in self.ranks for name, total in rank.call("sums").items()}

    def assert_served(self, step: int) -> None:
        trained = self.trained()
        for engine in self.engines:
            assert engine.call("version") == str(step)
            assert engine.call("sums") == trained


@contextlib.contextmanager
def world(size: Size, **options: Any) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack, size, **options)


def used_bytes() -> dict[str, int]:
    """In use by all processes, contexts included, by UUID of the GPUs that this process sees."""
    return {uuid: devices.used_bytes(uuid) for uuid in devices.visible_uuids()} if torch.cuda.is_available() else {}


def fuller_by(before: dict[str, int]) -> dict[str, int]:
    """How many bytes more than ``before`` each of the first two GPUs has in use, by number."""
    now = used_bytes()
    return {f"GPU {number}": now[uuid] - before[uuid] for number, uuid in enumerate([*now][:2])}


def bits_of(tensor: torch.Tensor) -> int:
    """The sum of the raw 16-bit words, each times its place: a swap shows."""
    words = tensor.detach().contiguous().view(torch.int16).reshape(-1).long()
    return int((words * (1 + torch.arange(len(words), device=words.device) % 8191)).sum())


def _synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)

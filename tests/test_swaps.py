"""Faults that keep every shape and byte count: what an engine of two TP ranks holds is not what was published.

Each is made in the engine's live memory after the move and before the read-back. Verification must name the engine,
the TP rank and the tensors, stamp nothing, fence the engine, and the next push must heal it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from tests.fakes.engine import FakeEngine
from weightsync.config import load_config
from weightsync.errors import VerifyMismatch
from weightsync.publisher import Publisher
from weightsync.reports import PushRequest
from weightsync.session import Session

LAYERS, ROWS, COLUMNS = 3, 8, 4


class Stack(nn.Module):
    """One TP rank of equal-shaped layers, each cut by rows, and a norm that is whole on every rank."""

    def __init__(self, tp_rank: int, tp_size: int = 2) -> None:
        super().__init__()
        self.tp_rank, self.own = tp_rank, ROWS // tp_size
        self.layers = nn.ParameterList(
            nn.Parameter(torch.full((self.own, COLUMNS), -1.0), False) for _ in range(LAYERS)
        )
        self.norm = nn.Parameter(torch.full((COLUMNS,), -1.0), False)

    def load_weights(self, weights) -> None:
        for name, weight in weights:
            if name == "norm.weight":
                self.norm.data.copy_(weight)
            else:
                self.layers[int(name.split(".")[1])].data.copy_(weight.narrow(0, self.tp_rank * self.own, self.own))


class World:
    """A trainer, an engine with two TP ranks, and a fault that strikes once, when a push has moved its bytes."""

    def __init__(self, route: str) -> None:
        names = {f"layers.{i}.weight": (ROWS, COLUMNS) for i in range(LAYERS)} | {"norm.weight": (COLUMNS,)}
        self.tensors = {name: torch.zeros(shape) for name, shape in names.items()}
        self.publisher = Publisher(self.tensors, rank=0, world_size=1)
        self.ranks = [Stack(rank) for rank in range(2)]
        self.engine = FakeEngine(models=self.ranks, receiver=True)
        settings = {"pair": "sgl_dtensor_v2", "route": route, "timeout_s": 20.0, "bucket_bytes": 256}
        peers = {"engines": [{"url": self.engine.url}], "publishers": [self.publisher.address]}
        self.session = Session(load_config(settings | peers), trainer="dtensor_v2")
        self.fault: Callable[[], None] = lambda: None
        self._end = self.session._links[0].client.end
        self.session._links[0].client.end = self._end_and_strike

    def push(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for tensor in self.tensors.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        self.publisher.step_done(step)
        assert self.session.push(PushRequest(step=step)).verified

    def _end_and_strike(self, deadline) -> None:
        self._end(deadline)
        fault, self.fault = self.fault, lambda: None
        fault()

    def close(self) -> None:
        self.session.close()
        self.publisher.close()
        self.engine.close()


@pytest.fixture(params=["shm", "bucket"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    one = World(request.param)
    yield one
    one.close()


def swap(a: torch.Tensor, b: torch.Tensor) -> None:
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)


def flip_a_bit(ranks: list[Stack]) -> None:
    ranks[1].layers[2].data.view(torch.int32)[3, 1] ^= 1


def swap_two_rows(ranks: list[Stack]) -> None:
    swap(ranks[0].layers[1].data[0], ranks[0].layers[1].data[3])


def swap_two_layers(ranks: list[Stack]) -> None:
    for rank in ranks:
        swap(rank.layers[0].data, rank.layers[2].data)


def swap_the_ranks(ranks: list[Stack]) -> None:
    swap(ranks[0].layers[1].data, ranks[1].layers[1].data)


FAULTS = {
    "one flipped bit": (flip_a_bit, 1, ["layers.2.weight"]),
    "two swapped rows": (swap_two_rows, 0, ["layers.1.weight"]),
    "two swapped layers": (swap_two_layers, 0, ["layers.0.weight", "layers.2.weight"]),
    "two swapped ranks": (swap_the_ranks, 0, ["layers.1.weight"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_what_was_published_is_detected_and_named(world: World, fault: str) -> None:
    strike, rank, tensors = FAULTS[fault]
    world.push(1)
    world.fault = lambda: strike(world.ranks)
    assert_refused(world, 2, rank, tensors)


def test_a_rank_left_old_is_detected_and_named_with_all_that_is_old_in_it(world: World) -> None:
    world.push(1)
    old = {name: value.clone() for name, value in world.ranks[1].state_dict().items()}

    def turn_back() -> None:
        for name, value in world.ranks[1].state_dict().items():
            value.copy_(old[name])

    world.fault = turn_back
    assert_refused(world, 2, 1, [*(f"layers.{i}.weight" for i in range(LAYERS)), "norm.weight"])


def assert_refused(world: World, step: int, rank: int, tensors: list[str]) -> None:
    with pytest.raises(VerifyMismatch) as caught:
        world.push(step)
    error = caught.value
    assert (error.engine, error.rank, error.phase) == (world.engine.url, rank, "verify"), error
    assert error.tensor in tensors
    assert [n for n in world.tensors if n in error.message] == tensors, error
    assert world.engine.weight_version == "1" and world.engine.paused
    assert [e["state"] for e in error.report] == ["fenced"]
    world.push(step + 1)
    assert world.engine.weight_version == str(step + 1) and not world.engine.paused

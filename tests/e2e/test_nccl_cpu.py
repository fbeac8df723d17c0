"""Route ``nccl`` over gloo to a real SGLang, from two training ranks, beside a second engine of another TP.

The real engine is asked greedily: what it says after a broadcast is what it said after the same weights arrived in
slices and were verified. The second engine is a fake that joins the same groups and loads by the same calls.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.fakes.engine import FakeEngine
from tests.fakes.rows import RowTrainer
from tests.servers import BOOT_SEED, Kind, Servers, ask
from weightsync import routes_broadcast
from weightsync.config import load_config
from weightsync.deadline import Deadline
from weightsync.demo_model import DemoModel, shapes, weights
from weightsync.engines import Tensors
from weightsync.engines import sglang as client_module
from weightsync.errors import EngineRejected
from weightsync.reports import PushRequest, SyncReport
from weightsync.session import Session

KIND = Kind("0.5.23")
PROMPT = "The quick brown fox jumps over"
OTHER_SEED = 2
FAIL_S = 15.0

pytestmark = pytest.mark.timeout(900)


class Keeper(nn.Module):
    """One TP rank that keeps its rows of every tensor of the demo's model, under the tensor's name."""

    def __init__(self, model: DemoModel, *, tp_rank: int, tp_size: int) -> None:
        super().__init__()
        self.tp_rank, self.tp_size = tp_rank, tp_size
        self.held = nn.ParameterDict(
            {
                name.replace(".", "/"): nn.Parameter(torch.full(self.rows(torch.empty(shape)).shape, -1.0), False)
                for name, shape in shapes(model).items()
            }
        )

    def rows(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's rows; tensors of one dim are kept whole."""
        if full.dim() < 2:
            return full
        count = full.shape[0] // self.tp_size
        return full.narrow(0, self.tp_rank * count, count)

    def load_weights(self, tensors) -> None:
        for name, tensor in tensors:
            if name.replace(".", "/") in self.held:
                self.held[name.replace(".", "/")].data.copy_(self.rows(tensor))


class Trainer:
    """Two ranks that hold half the rows of every tensor each."""

    def __init__(self) -> None:
        self._rows = RowTrainer(shapes(KIND.model), [socket.gethostname()] * 2)
        self.addresses, self.close = self._rows.addresses, self._rows.close

    def train(self, step: int, seed: int) -> None:
        made = weights(KIND.model, seed=seed)
        self._rows.train(step, {name: torch.from_numpy(value) for name, value in made.items()})


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    one = Trainer()
    yield one
    one.close()


@pytest.fixture
def second() -> Iterator[FakeEngine]:
    keepers = [Keeper(KIND.model, tp_rank=rank, tp_size=2) for rank in range(2)]
    with FakeEngine(models=keepers, receiver=True) as engine:
        yield engine


def session(trainer: Trainer, *urls: str, **config) -> Session:
    settings = {
        "pair": "sgl_dtensor_v2",
        "route": "nccl",
        "bucket_bytes": 300_000,
        "engines": [{"url": url} for url in urls],
        "publishers": trainer.addresses,
    }
    return Session(load_config(settings | config), trainer="dtensor_v2")


def push(sync: Session, trainer: Trainer, step: int, seed: int) -> SyncReport:
    trainer.train(step, seed)
    return sync.push(PushRequest(step=step, timeout_s=120.0))


def assert_holds(engine: FakeEngine, seed: int) -> None:
    for name, value in weights(KIND.model, seed=seed).items():
        for keeper in engine.models:
            held, wanted = keeper.held[name.replace(".", "/")], keeper.rows(torch.from_numpy(value))
            assert torch.equal(held, wanted), (name, keeper.tp_rank)


@pytest.fixture
def as_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine counts as having our receiver."""
    monkeypatch.setattr(client_module, "RECEIVER_LOADER", "nobody's")


@pytest.fixture(scope="module")
def said() -> dict[int, list[int]]:
    """By seed, what the real engine answered when a verified push had brought these weights."""
    return {}


def test_slices_over_groups_are_verified_in_both_engines(servers: Servers, trainer, second, said) -> None:
    url = servers.get(KIND).url
    sync = session(trainer, url, second.url)
    try:
        for step, seed in ((1, OTHER_SEED), (2, BOOT_SEED), (3, OTHER_SEED)):
            report = push(sync, trainer, step, seed)
            assert report.verified and report.route == "nccl"
            assert [e.weight_version for e in report.engines] == [str(step)] * 2
            assert_holds(second, seed)
            said.setdefault(seed, ask(url, PROMPT).tokens)
            assert ask(url, PROMPT).tokens == said[seed]
    finally:
        sync.close()
    assert said[OTHER_SEED] != said[BOOT_SEED]


@pytest.mark.parametrize("part_bytes", [routes_broadcast.PART_BYTES, 1], ids=["flattened", "tensor by tensor"])
def test_a_broadcast_says_the_same_to_stock_engines(
    servers: Servers, trainer, second, said, as_stock, monkeypatch, part_bytes: int
) -> None:
    monkeypatch.setattr(routes_broadcast, "PART_BYTES", part_bytes)
    url = servers.get(KIND).url
    sync = session(trainer, url, second.url, verify="none")
    try:
        for step, seed in ((1, BOOT_SEED), (2, OTHER_SEED)):
            report = push(sync, trainer, step, seed)
            assert not report.verified and [e.state for e in report.engines] == ["serving", "serving"]
            assert_holds(second, seed)
            answer = ask(url, PROMPT)
            assert answer.cached == 0 and answer.tokens == said[seed]
    finally:
        sync.close()


def test_an_engine_whose_sender_is_killed_answers_and_is_healed(servers: Servers, trainer, said, as_stock) -> None:
    """SIGKILL while the engine waits in the collective: it must say so at once, and take the next push."""
    url = servers.get(KIND).url
    sync = session(trainer, url, verify="none")
    try:
        push(sync, trainer, 1, BOOT_SEED)
        group = sync._groundwork.routes["nccl"]._whole._groups[url]
        client, soon = group.link.client, Deadline(60.0, "test")
        client.pause("abort", soon)
        client.begin(soon)
        threading.Timer(1.0, group.give_up).start()
        started = time.monotonic()
        waiting_for = Tensors(["model.norm.weight"], ["float32"], [(KIND.model.hidden_size,)])
        with pytest.raises(EngineRejected, match="Failed to receive weights"):
            client.update_from_distributed(waiting_for, "weightsync-0", soon).make(soon)
        assert 0.9 < time.monotonic() - started < FAIL_S
        client.end(soon)
        client.resume(soon)
        push(sync, trainer, 2, OTHER_SEED)
        assert ask(url, PROMPT).tokens == said[OTHER_SEED]
    finally:
        sync.close()


def test_the_group_of_a_run_that_died_is_taken_down_by_the_next(servers: Servers, trainer, said, as_stock) -> None:
    url = servers.get(KIND).url
    dead = session(trainer, url, verify="none")
    push(dead, trainer, 1, BOOT_SEED)
    dead._groundwork.routes["nccl"]._nursery.close()  # as if the actor had been killed: nobody says goodbye
    living = session(trainer, url, verify="none")
    try:
        push(living, trainer, 2, OTHER_SEED)
        assert ask(url, PROMPT).tokens == said[OTHER_SEED]
    finally:
        living.close()
        dead._groundwork.routes["nccl"]._whole._groups[url]._joined = False  # the name is the living one's
        dead.close()

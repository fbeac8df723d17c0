"""Sender processes as tests use them: the nursery that they share, whose children there are, and a whole broadcast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.fakes.engine import FakeEngine
from tests.test_session import World, engine
from weightsync import routes_nccl
from weightsync.deadline import Deadline
from weightsync.transports import nccl_wire
from weightsync.transports.sender import Nursery

BUCKET_BYTES = 384
"""So that the fake model's tensors go alone, each beside the one before."""


class Shared:
    """A nursery that its route does not end."""

    def __init__(self, nursery: Nursery) -> None:
        self.start, self.pid = nursery.start, nursery._process.pid

    def close(self) -> None:
        pass


def children(nursery: Nursery) -> set[int]:
    """Process ids of its senders."""
    with open(f"/proc/{nursery._process.pid}/task/{nursery._process.pid}/children") as file:
        return {int(pid) for pid in file.read().split()}


def stock(tp_size: int = 1, version: str = "0.5.23") -> FakeEngine:
    return engine(tp_size, receiver=False, version=version)


def worlds(nursery: Nursery, monkeypatch: pytest.MonkeyPatch, **defaults: Any) -> Iterator[Callable[..., World]]:
    """What a fixture yields that makes worlds of route ``nccl``, of engines and further settings; all are closed."""
    made: list[World] = []
    monkeypatch.setattr(routes_nccl, "Nursery", lambda: Shared(nursery))
    common = {"route": "nccl", "bucket_bytes": BUCKET_BYTES, "timeout_s": 60.0, "connect_timeout_s": 60.0, **defaults}

    def make(*engines: FakeEngine, **config: Any) -> World:
        unverified = {} if all(e.loaders for e in engines) else {"verify": "none"}
        made.append(World(*engines, **{**common, **config, **unverified}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def broadcast(sender: Any, request: nccl_wire.Broadcast, deadline: Deadline) -> None:
    """The sender's part, from beginning to end."""
    number = sender.call("begin", request, deadline=deadline, returns=int)
    sender.call("finish", nccl_wire.Finish(number, request.timeout_s), deadline=deadline)


def receive(group: Any, tensor: torch.Tensor, deadline: Deadline) -> None:
    """A member's part, from beginning to end."""
    group.finish(group.start_broadcasts([tensor], deadline), deadline, doing="broadcast")

"""Two training ranks in processes of their own, and the session that pushes what they hold into a real server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.trainers.ranks import Ranks
from weightsync import trainers
from weightsync.config import load_config
from weightsync.demo_model import DemoModel, weights
from weightsync.publisher import Publisher
from weightsync.reports import PushRequest, SyncReport
from weightsync.session import Session

WORLD_SIZE = 2

trainers.get("dtensor_v2")  # imported once, by the process that all ranks are forked from


class TrainingRank:
    """Holds float32 rows of every tensor of a model, as FSDP2 does: DTensors cut along dim 0, unevenly if need be."""

    def __init__(self) -> None:
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = DemoModel()
        self.tensors: dict[str, DTensor] = {}
        self.publisher: Publisher | None = None

    def offer(self, model: DemoModel, without: list[str], extra: dict[str, list[int]]) -> str:
        """Publish the model's tensors but ``without``, and ``extra`` ones by name and shape. Returns the address."""
        self.close()
        self.model = model
        names = {n: torch.empty(v.shape) for n, v in weights(model, seed=0).items() if n not in without}
        names |= {name: torch.empty(shape) for name, shape in extra.items()}
        self.tensors = {name: self._cut(value) for name, value in names.items()}
        self.publisher = Publisher(self.tensors, rank=dist.get_rank(), world_size=dist.get_world_size())
        return self.publisher.address

    def train(self, step: int, seed: int) -> list[int]:
        """Hold the weights of ``seed`` and mark them as those of ``step``. Returns how many rows of each are here."""
        for name, value in weights(self.model, seed=seed).items():
            if name in self.tensors:
                self.tensors[name].to_local().copy_(self._cut(torch.from_numpy(value)).to_local())
        self.publisher.step_done(step)
        return [tensor.to_local().shape[0] for tensor in self.tensors.values()]

    def close(self) -> None:
        if self.publisher is not None:
            self.publisher.close()
            self.publisher = None

    def pid(self) -> int:
        return os.getpid()

    def _cut(self, value: torch.Tensor) -> DTensor:
        return distribute_tensor(value, self.mesh, [Shard(0)])


class Training:
    """Both ranks. ``into`` connects them to an engine."""

    def __init__(self, store: Path) -> None:
        self.ranks = Ranks(WORLD_SIZE, str(store), TrainingRank)

    @contextmanager
    def into(
        self, url: str, model: DemoModel, *, without: list[str] | None = None, extra: dict | None = None, **config: Any
    ) -> Iterator[Pushing]:
        """A session between the ranks, which now hold ``model``, and the engine at ``url``."""
        publishers = self.ranks.call("offer", model, without or [], extra or {})
        settings = {"pair": "sgl_dtensor_v2", "engines": [{"url": url}], "publishers": publishers, "timeout_s": 60.0}
        session = Session(load_config(settings | config), trainer="dtensor_v2")
        try:
            yield Pushing(self, session)
        finally:
            session.close()

    def train(self, step: int, seed: int) -> list[list[int]]:
        return self.ranks.call("train", step, seed)

    def close(self) -> None:
        self.ranks.close()


class Pushing:
    """A session and the ranks behind it; steps count up."""

    def __init__(self, training: Training, session: Session) -> None:
        self.session = session
        self._training = training
        self.step = 0

    def push(self, seed: int) -> SyncReport:
        """Train to ``seed`` and push that as the next step; the report, having checked what every report must say."""
        self.train(seed)
        report = self.push_again()
        assert report.verified and report.weight_version == str(self.step), report
        assert [e.state for e in report.engines] == ["serving"], report.engines
        return report

    def train(self, seed: int) -> None:
        """The next step's weights are those of ``seed``."""
        self.step += 1
        self._training.train(self.step, seed)

    def push_again(self) -> SyncReport:
        """Push the step that was trained last."""
        return self.session.push(PushRequest(step=self.step))

    @property
    def link(self):
        """The engine as the session sees it: for what no user does, such as poisoning."""
        return self.session._links[0]

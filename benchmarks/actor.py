"""The weight-sync actor of a benchmark: in this process, or under Ray as in production."""

from __future__ import annotations

from typing import Protocol

from weightsync.config import Config
from weightsync.plan import PlanSummary
from weightsync.spec import PushRequest, SyncReport

TRAINERS = {"sgl_dtensor_v2": "dtensor_v2", "sgl_megatron": "megatron"}  # by pair


class Actor(Protocol):
    """What a benchmark needs of a session."""

    def push(self, step: int) -> SyncReport: ...

    def plan(self) -> PlanSummary: ...

    def close(self) -> None: ...


class InProcess:
    """The session without anything between it and the stopwatch."""

    def __init__(self, config: Config) -> None:
        from weightsync.session import Session

        self._session = Session(config, trainer=TRAINERS[config.pair])

    def push(self, step: int) -> SyncReport:
        return self._session.push(PushRequest(step=step))

    def plan(self) -> PlanSummary:
        return self._session.plan()

    def close(self) -> None:
        self._session.close()


def open_actor(kind: str, config: Config) -> Actor:
    """``kind``: ``inline``, or ``ray`` (the actor then runs in the environment that ``config.envs`` names)."""
    if kind == "inline":
        return InProcess(config)
    import weightsync

    return weightsync.launch(config, publishers=config.publishers, engines=config.engines)

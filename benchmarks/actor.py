"""The weight-sync actor of a benchmark: in this process, or under Ray as in production."""

from __future__ import annotations

import gc
from typing import Protocol

from weightsync.config import Config
from weightsync.plan import PlanSummary
from weightsync.reports import PushRequest, SyncReport

TRAINERS = {"sgl_dtensor_v2": "dtensor_v2", "sgl_megatron": "megatron"}  # by pair


class Actor(Protocol):
    """What a benchmark needs of a session."""

    def push(self, step: int) -> SyncReport: ...

    def plan(self) -> PlanSummary: ...

    def close(self) -> None: ...


class InProcess:
    """The session without anything between it and the stopwatch."""

    def __init__(self, config: Config, *, as_stock: bool = False) -> None:
        from weightsync.engines import sglang
        from weightsync.session import Session

        loader = sglang.RECEIVER_LOADER
        if as_stock:
            sglang.RECEIVER_LOADER = "no engine's"
        try:
            self._session = Session(config, trainer=TRAINERS[config.pair])
        finally:
            sglang.RECEIVER_LOADER = loader
        gc.freeze()  # as the actor's process does

    def push(self, step: int) -> SyncReport:
        return self._session.push(PushRequest(step=step))

    def plan(self) -> PlanSummary:
        return self._session.plan()

    def close(self) -> None:
        self._session.close()


def open_actor(kind: str, config: Config, *, as_stock: bool = False) -> Actor:
    """``kind``: ``inline``, or ``ray`` (the actor then runs in the environment that ``config.envs`` names).

    ``as_stock``: take engines for stock ones, though they have our receiver; inline only.
    """
    if kind == "inline":
        return InProcess(config, as_stock=as_stock)
    if as_stock:
        raise ValueError("an engine with our receiver passes for a stock one with the inline actor only")
    import weightsync

    return weightsync.launch(config, publishers=config.publishers, engines=config.engines)

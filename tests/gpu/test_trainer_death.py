"""A trainer is killed while its memory is mapped: the push says so, the engine lives, and the next trainer connects."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks import models
from benchmarks.gpu_engine import GpuEngine
from tests.gpu import owner, real
from tests.gpu.world import TrainingRank
from weightsync.config import load_config
from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.fleet import EngineLink
from weightsync.push import Push
from weightsync.reports import PushRequest
from weightsync.session import Session
from weightsync.workers import Workers

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

TIMEOUT_S = 60.0
AT_ONCE_S = 20.0
ARENA_BYTES = 8 << 20  # two of its largest tensors
SHAPES = {spec.name: spec.shape for spec in models.tensors(real.MODEL)}


@contextmanager
def trained(
    url: str, device: str, route: str, dtype: str = "bfloat16", **config: object
) -> Iterator[tuple[owner.Remote, Session]]:
    """A trainer of the model, and its session with the engine at ``url``, which then holds step 1."""
    with owner.started(functools.partial(TrainingRank, SHAPES, device, dtype)) as rank:
        settings = {"pair": "sgl_dtensor_v2", "engines": [{"url": url}], "publishers": [rank.call("address")]}
        settings |= {"route": route, "timeout_s": TIMEOUT_S, "connect_timeout_s": 100.0, **config}
        session = Session(load_config(settings), trainer="dtensor_v2")
        try:
            rank.call("change", 1)
            assert session.push(PushRequest(step=1)).verified
            yield rank, session
        finally:
            session.close()


def kill(rank: owner.Remote) -> None:
    os.kill(rank.pid, signal.SIGKILL)


def state_after(session: Session, url: str) -> str:
    """What became of the engine, which must answer."""
    (engine,) = session.status().engines
    real.log_probabilities(url, [5, 6, 7]) if engine.state == "serving" else real.version(url)
    assert engine.url == url
    return engine.state


def test_killed_before_its_step_is_ready(engine: GpuEngine) -> None:
    engine.wait(real.START_S)
    dies_before_its_step(engine.url, "cuda:0", "direct")


def dies_before_its_step(url: str, device: str, route: str) -> None:
    with trained(url, device, route) as (rank, session):
        rank.call("change", 2, mark=False)
        threading.Timer(1.0, kill, [rank]).start()
        started = time.monotonic()
        with pytest.raises(WeightSyncError) as caught:
            session.push(PushRequest(step=2))
        print(f"killed while step 2 was awaited, {time.monotonic() - started:.1f} s: {caught.value}")
        assert time.monotonic() - started < AT_ONCE_S
        assert "publisher" in str(caught.value) and caught.value.phase == "publish"
        assert state_after(session, url) == "serving", "nothing was applied"


def test_killed_before_its_memory_is_read(engine: GpuEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.wait(real.START_S)
    dies_before_the_move(engine.url, "cuda:0", "direct", monkeypatch)


def test_killed_between_the_rounds_of_its_arena(engine: GpuEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.wait(real.START_S)
    dies_between_rounds(engine.url, "cuda:0", "direct", monkeypatch)


def dies_before_the_move(url: str, device: str, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after it has published: the engine then reads memory that was mapped and has lost its owner."""
    with trained(url, device, route) as (rank, session):
        rank.call("change", 2)
        begin = Push._begin

        def killed(push: Push, link: EngineLink) -> None:
            kill(rank)
            time.sleep(1.0)  # until the driver has taken note
            begin(push, link)

        monkeypatch.setattr(Push, "_begin", killed)
        state = fails(session, url)
        monkeypatch.undo()
        assert state == "fenced", "its weights were written, and nobody can say with what"
    heals(url, device, route)


def dies_between_rounds(url: str, device: str, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed when part of the model has been read from an arena that is smaller than it: float32 must be cast."""
    with trained(url, device, route, "float32", arena_bytes=ARENA_BYTES) as (rank, session):
        rank.call("change", 2)
        fill = Workers.fill

        def killed(workers: Workers, step: int, number: int, deadline: Deadline) -> None:
            kill(rank)
            fill(workers, step, number, deadline)

        monkeypatch.setattr(Workers, "fill", killed)
        assert fails(session, url) == "fenced"
        monkeypatch.undo()
    heals(url, device, route)


def fails(session: Session, url: str) -> str:
    """Push step 2, which must fail by name; the engine's state then."""
    started = time.monotonic()
    with pytest.raises(WeightSyncError) as caught:
        session.push(PushRequest(step=2))
    error, took = caught.value, time.monotonic() - started
    print(f"killed during the move, {took:.1f} s: phase {error.phase}, {error.report}: {error}")
    assert took < AT_ONCE_S and error.phase and error.report[0]["url"] == url
    return state_after(session, url)


def heals(url: str, device: str, route: str) -> None:
    """The next trainer connects to the engine that the last one left fenced; its push makes it serve."""
    with trained(url, device, route) as (_, session):
        assert state_after(session, url) == "serving"
        assert real.version(url) == "1"

"""One trainer and its engines, and everything that is measured between them. Rows are written as they come."""

from __future__ import annotations

import itertools
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import links, models, rows
from benchmarks.actor import Actor, open_actor
from benchmarks.in_flight import generate
from benchmarks.rank_wire import Floor, FloorRequest
from benchmarks.rows import EngineRef, Row, Struct
from benchmarks.trainers import Trainers
from weightsync.config import Config, EngineConfig, EnvConfig
from weightsync.engines import PauseMode
from weightsync.engines.local import LocalEngine
from weightsync.errors import WeightSyncError
from weightsync.reports import SyncReport

WARMUP = 2
CALL_TIMEOUT_S = 300.0


class StockCalls(Struct):
    """A way to push by SGLang's own calls. ``limit_bytes``: as in ``StockRequest``."""

    name: str
    limit_bytes: int
    flattened: bool = False
    distributed: bool = False


class Setting(Struct):
    """A way to push with weightsync. ``as_stock``: as if the engines had no receiver; ``label`` then tells it apart."""

    route: str
    verify: str = "none"
    bucket_bytes: int | None = None
    pause: PauseMode = "abort"
    as_stock: bool = False
    label: str = ""

    @property
    def name(self) -> str:
        """What its rows are called."""
        verified = "" if self.verify == "none" else "verified"
        paused = "" if self.pause == "abort" else f"pause {self.pause}"
        return ", ".join(filter(None, [self.route, self.label, verified, paused]))


class Subject(Struct):
    """What is measured, as every row says it. ``dtype`` is the engine's, ``engine_gpus`` UUIDs by rank (on GPUs)."""

    pair: str
    model: str
    dtype: str
    gpu: str
    num_gpus: int
    engine: EngineRef
    engine_gpus: list[str]
    versions: dict[str, str]
    commit: str


class Plan(Struct):
    """How often, how long: ``n`` pushes each; stock calls end after ``stock_budget_s``; ``actor``: see open_actor."""

    n: int = 10
    stock_budget_s: float = 20.0
    actor: str = "inline"
    timeout_s: float = 60.0
    envs: dict[str, EnvConfig] = msgspec.field(default_factory=dict)


class Bench:
    """Measures one subject. A measurement that fails is noted in ``failures``, and the next one is tried."""

    def __init__(
        self, subject: Subject, plan: Plan, trainers: Trainers, engines: Sequence[LocalEngine], out: Path
    ) -> None:
        self.subject, self.plan, self.trainers = subject, plan, trainers
        self.urls = [engine.url for engine in engines]
        self.steps = itertools.count(1)
        self.rows: list[Row] = []
        self.failures: dict[str, str] = {}
        self.details: dict[str, Any] = {"failures": self.failures}
        self._specs = models.tensors(models.model(subject.model), subject.dtype)
        self._out = out
        self._floor_s = 0.0

    # -------------------------------------------------------------------------------------------------- measuring

    def attempt(self, name: str, measure: Callable[[], None]) -> bool:
        """Run ``measure``; False if it failed. Then everything found so far is written."""
        started = time.monotonic()
        try:
            measure()
        except Exception as e:  # the benchmark's own boundary: one setting must not cost the others
            if not isinstance(e, WeightSyncError):
                traceback.print_exc()
            self.failures[name] = f"{type(e).__name__}: {e}"
        print(f"  {name}: {self.failures.get(name, 'done')[:300]} ({time.monotonic() - started:.1f} s)", flush=True)
        self.write()
        return name not in self.failures

    def floor(self, setting: Setting) -> None:
        """Copy the plan's bytes plainly: each engine rank's local bytes at copy speed, remote ones at peer speed."""
        actor = self.open(setting)
        summary = actor.plan()
        actor.close()
        self.details["plan"] = summary.explain()
        loads = links.loads(summary.traffic, self._copy_rates(self.subject.engine_gpus))
        self._floor_s = loads[0].seconds
        self.details["floor_s"] = self._floor_s
        self.details["loads"] = [load._asdict() for load in loads]

    def _copy_rates(self, engine_gpus: Sequence[str]) -> links.Rates:
        """Of a copy on one device and between two; the slowest of all ranks at once."""
        homes = [info.device_uuid for info in self.trainers.infos]
        local = self._rate("local", [FloorRequest(self.subject.dtype) for _ in homes])
        if not engine_gpus:
            return links.Rates(local, local)  # one host memory
        elsewhere = [peer_of(number, home, engine_gpus) for number, home in enumerate(homes)]
        if not all(elsewhere):
            return links.Rates(local, local)  # there is but one GPU
        return links.Rates(
            local, self._rate("peer", [FloorRequest(self.subject.dtype, device=gpu) for gpu in elsewhere])
        )

    def _rate(self, name: str, requests: list[FloorRequest]) -> float:
        found = self.trainers.each_its("floor", requests, returns=Floor, timeout_s=CALL_TIMEOUT_S)
        self.details[f"copies, {name}"] = [msgspec.to_builtins(f) for f in found]
        return min(f.num_bytes / f.best_s for f in found)

    def push(
        self,
        setting: Setting,
        *,
        label: str = "",
        beside: AbstractContextManager | None = None,
        at_most: int = 1000,
        tokens: int = 0,
    ) -> None:
        """``plan.n`` pushes of changed weights, phases apart. ``beside`` is entered for their time.

        ``tokens``: so many pushes more, each timed until an engine has answered a request for one token after it.
        """
        started = time.perf_counter()
        actor = self.open(setting)
        connected_s = time.perf_counter() - started
        name = setting.name + (f", {label}" if label else "")
        try:
            with beside or nullcontext():
                first, reports, seconds = self._pushes(actor, min(self.plan.n, at_most))
            assert all(r.verified for r in reports) or setting.verify == "none", reports[-1].notes
            phases = rows.median_phases(r.seconds for r in reports)
            self.add(name, reports[-1].route, setting.verify, seconds, phases)
            self.details[name] = self._details(connected_s, first, reports)
            if tokens:
                self.attempt(f"{name}, first token", lambda: self._tokens(actor, name, tokens))
        finally:
            actor.close()

    def _details(self, connected_s: float, first: SyncReport, reports: Sequence[SyncReport]) -> dict[str, Any]:
        return {
            "notes": reports[-1].notes,
            "connect_s": connected_s,
            "first_push_s": first.seconds,
            "pushes_s": [r.seconds | {f"trainer {k}": s for k, s in r.trainer_seconds.items()} for r in reports],
            "engine_s": [median_seconds([r.engines[i].seconds for r in reports]) for i in range(len(self.urls))],
            "moved_bytes": reports[-1].num_bytes,
        }

    def _tokens(self, actor: Actor, name: str, n: int) -> None:
        told = self._pushes(actor, n, then=lambda: generate(self.urls[0], 1))[2]
        self.details[name]["token_s"] = msgspec.to_builtins(rows.stats(told))

    def open(self, setting: Setting) -> Actor:
        """An actor that pushes as ``setting`` says."""
        config = Config(
            pair=self.subject.pair,
            engines=[EngineConfig(url=url) for url in self.urls],
            publishers=self.trainers.publishers,
            route=setting.route,
            verify=setting.verify,
            bucket_bytes=setting.bucket_bytes,
            pause=setting.pause,
            timeout_s=self.plan.timeout_s,
            connect_timeout_s=CALL_TIMEOUT_S,
            envs=self.plan.envs,
        )
        return open_actor(self.plan.actor, config, as_stock=setting.as_stock)

    def _pushes(
        self, actor: Actor, n: int, then: Callable[[], None] = lambda: None
    ) -> tuple[SyncReport, list[SyncReport], list[float]]:
        """The report of the first push, and reports and seconds, with what comes ``then``, of those that count."""
        reports, seconds = [], []
        for step in itertools.islice(self.steps, WARMUP + n):
            self.trainers.each("change", step)
            started = time.perf_counter()
            reports.append(actor.push(step))
            then()
            seconds.append(time.perf_counter() - started)
        return reports[0], reports[WARMUP:], seconds[WARMUP:]

    # ---------------------------------------------------------------------------------------------------- results

    def add(self, name: str, route: str, verify: str, seconds: list[float], phases: dict[str, float]) -> None:
        """Keep a row of this subject."""
        s = self.subject
        self.rows.append(
            Row(
                name=name,
                gpu=s.gpu,
                num_gpus=s.num_gpus,
                model=s.model,
                dtype=s.dtype,
                num_bytes=models.num_bytes(self._specs),
                num_tensors=len(self._specs),
                trainer=self.trainers.infos[0].trainer,
                engine=s.engine,
                route=route,
                verify=verify,
                floor_s=self._floor_s,
                push_s=rows.stats(seconds),
                phases_s=phases,
                stock_s={},
                versions=s.versions,
                commit=s.commit,
            )
        )

    def write(self) -> None:
        """Write ``rows`` and, beside them, what does not fit into a row."""
        rows.write(self._out, rows.with_stock(self.rows))
        beside = self._out.with_suffix(".details.json")
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(self.details), indent=2))


def peer_of(number: int, home: str, gpus: Sequence[str]) -> str:
    """The GPU that a training rank copies to: of ``gpus`` another one than its ``home``, and as far as there are
    enough, another one for each rank; "" if there is none."""
    others = [gpus[(number + step) % len(gpus)] for step in range(len(gpus))]
    start = others[1:] + others[:1] if home in gpus else others
    return next((gpu for gpu in start if gpu != home), "")


def median_seconds(found: list[dict[str, float]]) -> dict[str, float]:
    """The median of every key over dicts that have the same ones."""
    return {key: statistics.median(f[key] for f in found) for key in found[0]}

"""The colocated cycle: the trainer's parameters and the engine's weights and KV cache take turns on the GPU.

    engine sleeps -> trainer onload -> engine wakes its weights -> push -> trainer offload -> engine wakes its KV cache
    -> (generation) -> ...

The trainer's memory is another one at every push, so each maps it anew. An engine on a CPU cannot sleep (asked to, it
ends), so there only the trainer's parts are tried.
"""

from __future__ import annotations

import itertools
import statistics
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import msgspec

from benchmarks import rows
from benchmarks.actor import Actor
from benchmarks.bench import CALL_TIMEOUT_S, Bench, Setting
from benchmarks.rank_wire import Memory
from weightsync import devices
from weightsync.reports import SyncReport

PARTS = ("sleep", "onload", "wake weights", "push", "offload", "wake KV cache")
WARMUP = 1
MAX_CYCLES = 4  # that count: each moves the whole model to the host and back


def measure(bench: Bench, setting: Setting) -> None:
    """A row of the pushes inside the cycle; the other parts, and memory after each, go to the details."""
    actor = bench.open(setting)
    cycle = _Cycle(bench, actor)
    reports: list[SyncReport] = []
    try:
        for step in itertools.islice(bench.steps, WARMUP + min(bench.plan.n, MAX_CYCLES)):
            reports.append(cycle.run(step))
    finally:
        actor.close()
        bench.trainers.each("onload", timeout_s=CALL_TIMEOUT_S)
    kept = {part: seconds[WARMUP:] for part, seconds in cycle.seconds.items()}
    phases = rows.median_phases(r.seconds for r in reports[WARMUP:])
    name = f"{setting.name}, in the sleep cycle"
    bench.add(name, reports[-1].route, setting.verify, kept["push"], phases)
    memory = bench.trainers.each("memory", returns=Memory)
    bench.details[name] = {
        "median_s": {part: statistics.median(seconds) for part, seconds in kept.items()},
        "gpu_bytes_after": cycle.used_bytes,
        "trainer_memory": [msgspec.to_builtins(m) for m in memory],
        "notes": reports[-1].notes,
    }


class _Cycle:
    """``seconds`` of each part, one a cycle, and the most bytes in use after it on the first GPU, by all processes."""

    def __init__(self, bench: Bench, actor: Actor) -> None:
        self._bench, self._actor = bench, actor
        self._gpus = bench.subject.engine_gpus
        self.seconds: dict[str, list[float]] = {part: [] for part in PARTS}
        self.used_bytes: dict[str, int] = {}

    def run(self, step: int) -> SyncReport:
        self._timed("sleep", lambda: self._engine("release", "kv_cache", "weights"))
        self._timed("onload", lambda: self._trainers("onload"))
        self._bench.trainers.each("change", step)
        self._timed("wake weights", lambda: self._engine("resume", "weights"))
        report = self._timed("push", lambda: self._actor.push(step))
        self._timed("offload", lambda: self._trainers("offload"))
        self._timed("wake KV cache", lambda: self._engine("resume", "kv_cache"))
        return report

    def _timed(self, part: str, run: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = run()
        self.seconds[part].append(time.perf_counter() - started)
        if self._gpus:
            self.used_bytes[part] = max(self.used_bytes.get(part, 0), devices.used_bytes(self._gpus[0]))
        return result

    def _engine(self, verb: str, *tags: str) -> None:
        for url in self._bench.urls if self._gpus else ():
            _post(f"{url}/{verb}_memory_occupation", {"tags": list(tags)})

    def _trainers(self, verb: str) -> None:
        self._bench.trainers.each(verb, timeout_s=CALL_TIMEOUT_S)


def _post(url: str, body: dict) -> None:
    request = urllib.request.Request(url, msgspec.json.encode(body), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=CALL_TIMEOUT_S) as answer:
        answer.read()

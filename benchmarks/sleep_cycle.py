"""The colocated cycle: the trainer's parameters and the engine's weights and KV cache take turns on the GPU.

    trainer onload -> engine wakes its weights -> push -> trainer offload -> engine wakes its KV cache -> (generation)
    -> engine sleeps -> ...

The trainer's memory is another one at every push, so each maps it anew. An engine on a CPU cannot sleep (asked to, it
ends), so there only the trainer's parts are tried.
"""

from __future__ import annotations

import itertools
import statistics
import time
import urllib.request
from collections.abc import Callable

import msgspec

from benchmarks import rows
from benchmarks.bench import CALL_TIMEOUT_S, Bench, Setting
from benchmarks.rank_wire import Memory
from weightsync.spec import SyncReport

PARTS = ("sleep", "onload", "wake weights", "push", "offload", "wake KV cache")
WARMUP = 1


def measure(bench: Bench, setting: Setting) -> None:
    """A row of the pushes inside the cycle; the other parts and the trainer's memory go to the details."""
    actor = bench.open(setting)
    parts: dict[str, list[float]] = {part: [] for part in PARTS}
    reports: list[SyncReport] = []
    try:
        for step in itertools.islice(bench.steps, WARMUP + bench.plan.n):
            reports.append(_cycle(bench, step, actor.push, parts))
    finally:
        actor.close()
    kept = {part: seconds[WARMUP:] for part, seconds in parts.items()}
    phases = rows.median_phases(r.seconds for r in reports[WARMUP:])
    name = f"{setting.name}, in the sleep cycle"
    bench.add(name, reports[-1].route, setting.verify, kept["push"], phases)
    memory = bench.trainers.each("memory", returns=Memory)
    bench.details[name] = {
        "median_s": {part: statistics.median(seconds) for part, seconds in kept.items()},
        "notes": reports[-1].notes,
        "trainer_memory": [msgspec.to_builtins(m) for m in memory],
    }


def _cycle(bench: Bench, step: int, push: Callable[[int], SyncReport], parts: dict[str, list[float]]) -> SyncReport:
    def timed(part: str, run: Callable):
        started = time.perf_counter()
        result = run()
        parts[part].append(time.perf_counter() - started)
        return result

    def engine(verb: str, *tags: str) -> Callable[[], None]:
        if not bench.subject.num_gpus:
            return lambda: None
        return lambda: _post(f"{bench.engine.url}/{verb}_memory_occupation", {"tags": list(tags)})

    def trainer(verb: str) -> Callable[[], object]:
        return lambda: bench.trainers.each(verb, timeout_s=CALL_TIMEOUT_S)

    timed("sleep", engine("release", "kv_cache", "weights"))
    timed("onload", trainer("onload"))
    bench.trainers.each("change", step)
    timed("wake weights", engine("resume", "weights"))
    report = timed("push", lambda: push(step))
    timed("offload", trainer("offload"))
    timed("wake KV cache", engine("resume", "kv_cache"))
    return report


def _post(url: str, body: dict) -> None:
    request = urllib.request.Request(url, msgspec.json.encode(body), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=CALL_TIMEOUT_S) as answer:
        answer.read()

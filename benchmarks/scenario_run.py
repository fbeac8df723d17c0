"""Scenarios that share their engines, from start to end, in a process of its own that ``refit_latency`` watches.

python -m benchmarks.scenario_run JOB       JOB: ``Job`` as JSON
"""

from __future__ import annotations

import contextlib
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import msgspec

from benchmarks import models, sleep_cycle, stock_bench
from benchmarks.bench import Bench, Plan, Setting, Subject
from benchmarks.gpu_engine import GpuEngine
from benchmarks.in_flight import Requests
from benchmarks.rows import EngineRef, Struct
from benchmarks.scenarios import Scenario
from benchmarks.stock import Engine
from benchmarks.trainers import REPOSITORY, Interpreter, Trainers
from weightsync.engines import PauseMode
from weightsync.engines.local import LocalEngine
from weightsync.versions import library_versions

ENGINE_START_S = {"cuda": 150.0, "cpu": 400.0}


BUSY_PAUSES: tuple[PauseMode, ...] = ("abort", "in_place")
BUSY_PUSHES = 5  # SGLang's abort takes a second each


class Part(Struct):
    """One scenario of a job. ``out``: its rows file; ``trainer``: where its training ranks run."""

    name: str
    scenario: Scenario
    trainer: Interpreter
    out: str


class Job(Struct):
    """Scenarios that share their engines, on a machine. ``device``: ``cuda`` or ``cpu``; ``logs``: a folder.

    ``engine`` is where an engine on GPUs runs, ``engine_env`` the environment of one on a CPU.
    """

    parts: list[Part]
    device: str
    logs: str
    plan: Plan
    engine: Interpreter
    commit: str
    threads: int = 1
    engine_env: str = "sglang_cpu"


def run(job: Job) -> bool:
    """Start the engines, then a trainer for each scenario, and measure what it names. True if all was measured."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weightsync-bench-")))
        scenario = job.parts[0].scenario
        shape = msgspec.structs.replace(models.model(scenario.model), dtype=scenario.engine_dtype)
        model = models.write_config(folder / "model", shape)
        engines = [stack.enter_context(_engine(job, model, number)) for number in range(len(scenario.engines))]
        measured = [_run_part(job, part, engines) for part in job.parts]
        return all(measured)


def _run_part(job: Job, part: Part, engines: list[LocalEngine]) -> bool:
    """One scenario. If it fails the others need not: a push heals whatever the last one left in the engines."""
    print(f"-- {part.name}", flush=True)
    started = time.monotonic()
    whole = False
    try:
        with _trainers(job, part) as trainers:
            for engine in engines:
                engine.wait(timeout_s=ENGINE_START_S[job.device])
            print(f"  started ({time.monotonic() - started:.1f} s)", flush=True)
            bench = Bench(_subject(job, part, trainers, engines), job.plan, trainers, engines, Path(part.out))
            _measure(bench, part.scenario)
            whole = bench.details["whole"] = not bench.failures
            bench.write()
    except Exception:  # the benchmark's own boundary, as in Bench.attempt
        traceback.print_exc()
    print(f"-- {part.name}: {'done' if whole else 'incomplete'}, {time.monotonic() - started:.0f} s", flush=True)
    return whole


def _measure(bench: Bench, scenario: Scenario) -> None:
    bench.attempt("floor", lambda: bench.floor(scenario.settings[0]))
    if scenario.sleeps:
        for setting in scenario.settings:
            bench.attempt(f"{setting.name}, in the sleep cycle", lambda s=setting: sleep_cycle.measure(bench, s))
        return
    for setting in scenario.settings:
        bench.attempt(setting.name, lambda s=setting: bench.push(s, label=_label(scenario), tokens=scenario.tokens))
    if scenario.in_flight:
        for pause in BUSY_PAUSES:
            busy = msgspec.structs.replace(scenario.settings[0], pause=pause)
            bench.attempt(f"{busy.name}, requests in flight", lambda s=busy: _push_busy(bench, s, scenario))
    if scenario.stock:
        stock_bench.measure(bench, scenario.stock, tokens=scenario.tokens)


def _push_busy(bench: Bench, setting: Setting, scenario: Scenario) -> None:
    requests = Requests(bench.urls, scenario.in_flight)
    label = ", ".join(filter(None, [_label(scenario), f"{scenario.in_flight} requests in flight"]))
    bench.push(setting, label=label, beside=requests, at_most=BUSY_PUSHES)
    bench.details[f"{setting.name}, {label}, requests"] = {"answered": requests.answered, "failed": requests.failed}


def _label(scenario: Scenario) -> str:
    return ", ".join(
        filter(None, ["CUDA graphs" * scenario.cuda_graphs, "own GPU only" * bool(scenario.engines[0].sees)])
    )


# ------------------------------------------------------------------------------------------------------ the parts


def _engine(job: Job, model: Path, number: int) -> LocalEngine:
    scenario = job.parts[0].scenario
    place, log = scenario.engines[number], Path(job.logs) / f"engine-{number}.log"
    if job.device == "cpu":
        args = ["--load-format", "dummy", "--skip-tokenizer-init"]
        return LocalEngine(
            model,
            env=job.engine_env,
            tp_size=place.tp,
            dtype=scenario.engine_dtype,
            sleeps=len(scenario.engine_gpus) > 1,  # a core each that does not is too much
            args=args,
            log=log,
        )
    return GpuEngine(
        model,
        interpreter=job.engine,
        log=log,
        tp_size=place.tp,
        first_gpu=place.first_gpu,
        visible=place.sees,
        cuda_graphs=scenario.cuda_graphs,
        memory_saver=scenario.sleeps,
        args=["--moe-runner-backend", "triton"] if models.model(scenario.model).family == "qwen3_moe" else [],
    )


def _trainers(job: Job, part: Part) -> Trainers:
    scenario = part.scenario
    group = any(calls.distributed for calls in scenario.stock)
    env = part.trainer.env | ({"NCCL_CUMEM_ENABLE": "0"} if group else {})  # as in the engine, or they do not connect
    return Trainers(
        scenario.model,
        dtype=scenario.trainer_dtype,
        devices=[f"cuda:{gpu}" if job.device == "cuda" else "cpu" for gpu in scenario.trainer_gpus],
        interpreter=msgspec.structs.replace(part.trainer, env=env),
        log=Path(job.logs) / f"trainers-{part.name}.log",
        kind=scenario.trainer_kind,
        parallel=scenario.parallel,
        stacked=scenario.stacked,
        threads=job.threads,
    )


def _subject(job: Job, part: Part, trainers: Trainers, engines: list[LocalEngine]) -> Subject:
    scenario, info = part.scenario, trainers.infos[0]
    client = Engine(engines[0].url)
    version = client.call("GET", "/server_info")["version"]
    client.close()
    on_gpu = job.device == "cuda"
    versions = {f"trainer {name}": v for name, v in info.versions.items()}
    versions |= {f"actor {name}": v for name, v in library_versions().items() if name != "weightsync"}
    return Subject(
        pair=scenario.pair,
        model=scenario.model,
        dtype=scenario.engine_dtype,
        gpu=info.device_name if on_gpu else f"none; CPU {_cpu_name()}",
        num_gpus=scenario.num_gpus if on_gpu else 0,
        engine=EngineRef("SGLang", version, scenario.tp, len(engines)),
        engine_gpus=_engine_gpus(scenario) if on_gpu else [],
        versions=versions,
        commit=job.commit,
    )


def _engine_gpus(scenario: Scenario) -> list[str]:
    from weightsync import devices

    uuids = devices.visible_uuids()
    return [uuids[gpu] for gpu in scenario.engine_gpus]


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def head_commit() -> str:
    """The checkout's commit, with a mark if files differ from it; "" where there is no git."""
    try:
        said = [
            subprocess.run(["git", *command], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.strip()
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return ""
    return said[0] + ("+changes" if said[1] else "")


def main() -> None:
    raise SystemExit(0 if run(msgspec.json.decode(sys.argv[1], type=Job)) else 1)


if __name__ == "__main__":
    main()

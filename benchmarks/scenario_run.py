"""One scenario from start to end, in a process of its own that ``refit_latency`` watches.

python -m benchmarks.scenario_run JOB       JOB: ``Job`` as JSON
"""

from __future__ import annotations

import contextlib
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from benchmarks import models, sleep_cycle
from benchmarks.bench import Bench, Plan, Setting, Subject
from benchmarks.gpu_engine import GpuEngine
from benchmarks.in_flight import Requests
from benchmarks.rows import EngineRef, Struct
from benchmarks.scenarios import Scenario
from benchmarks.stock import Engine
from benchmarks.trainers import REPOSITORY, Interpreter, Trainers
from weightsync.engines.local import LocalEngine
from weightsync.versions import library_versions


class Job(Struct):
    """A scenario on a machine. ``device``: ``cuda`` or ``cpu``; ``out``: the rows file; ``logs``: a folder.

    ``engine`` is where an engine on GPUs runs, ``engine_env`` the environment of one on a CPU.
    """

    scenario: Scenario
    device: str
    out: str
    logs: str
    plan: Plan
    trainer: Interpreter
    engine: Interpreter
    commit: str
    threads: int = 1
    engine_env: str = "sglang_cpu"


def run(job: Job) -> Bench:
    """Start trainer and engine, measure all that the scenario names, and stop them."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weightsync-bench-")))
        engine = stack.enter_context(_engine(job, folder))
        trainers = stack.enter_context(_trainers(job))
        engine.wait(timeout_s=job.scenario.timeout_s * 0.6)
        bench = Bench(_subject(job, trainers, engine), job.plan, trainers, engine, Path(job.out))
        _measure(bench, job.scenario)
    return bench


def _measure(bench: Bench, scenario: Scenario) -> None:
    bench.attempt("floor", lambda: bench.floor(scenario.settings[0]))
    if scenario.sleeps:
        for setting in scenario.settings:
            bench.attempt(f"{setting.name}, in the sleep cycle", lambda s=setting: sleep_cycle.measure(bench, s))
        return
    for setting in scenario.settings:
        bench.attempt(setting.name, lambda s=setting: bench.push(s, label=_label(scenario)))
        if scenario.in_flight and setting.route in ("direct", "shm"):
            bench.attempt(f"{setting.name}, requests in flight", lambda s=setting: _push_busy(bench, s, scenario))
    if scenario.stock:
        bench.stock(scenario.stock)


def _push_busy(bench: Bench, setting: Setting, scenario: Scenario) -> None:
    requests = Requests(bench.engine.url, scenario.in_flight)
    label = ", ".join(filter(None, [_label(scenario), f"{scenario.in_flight} requests in flight"]))
    bench.push(setting, label=label, beside=requests)
    bench.details[f"{setting.name}, {label}, requests"] = {"answered": requests.answered, "failed": requests.failed}


def _label(scenario: Scenario) -> str:
    return ", ".join(filter(None, ["CUDA graphs" * scenario.cuda_graphs, "own GPU only" * bool(scenario.engine_sees)]))


# ------------------------------------------------------------------------------------------------------ the parts


def _engine(job: Job, folder: Path) -> LocalEngine:
    scenario, log = job.scenario, Path(job.logs) / "engine.log"
    shape = msgspec.structs.replace(models.model(scenario.model), dtype=scenario.engine_dtype)
    model = models.write_config(folder / "model", shape)
    if job.device == "cpu":
        args = ["--load-format", "dummy", "--skip-tokenizer-init"]
        return LocalEngine(
            model,
            env=job.engine_env,
            tp_size=scenario.tp,
            dtype=scenario.engine_dtype,
            sleeps=False,
            args=args,
            log=log,
        )
    return GpuEngine(
        model,
        interpreter=job.engine,
        log=log,
        tp_size=scenario.tp,
        first_gpu=scenario.engine_gpu,
        visible=scenario.engine_sees,
        cuda_graphs=scenario.cuda_graphs,
        memory_saver=scenario.sleeps,
        args=["--moe-runner-backend", "triton"] if shape.family == "qwen3_moe" else [],
    )


def _trainers(job: Job) -> Trainers:
    scenario = job.scenario
    group = any(calls.distributed for calls in scenario.stock)
    env = job.trainer.env | ({"NCCL_CUMEM_ENABLE": "0"} if group else {})  # as in the engine, or they do not connect
    return Trainers(
        scenario.model,
        dtype=scenario.trainer_dtype,
        devices=[f"cuda:{gpu}" if job.device == "cuda" else "cpu" for gpu in scenario.trainer_gpus],
        interpreter=msgspec.structs.replace(job.trainer, env=env),
        log=Path(job.logs) / "trainers.log",
        kind=scenario.trainer_kind,
        stacked=scenario.stacked,
        threads=job.threads,
    )


def _subject(job: Job, trainers: Trainers, engine: LocalEngine) -> Subject:
    scenario, info = job.scenario, trainers.infos[0]
    client = Engine(engine.url)
    version = client.call("GET", "/server_info")["version"]
    client.close()
    on_gpu = job.device == "cuda"
    versions = {f"trainer {name}": v for name, v in info.versions.items()}
    versions |= {f"actor {name}": v for name, v in library_versions().items() if name != "weightsync"}
    return Subject(
        model=scenario.model,
        dtype=scenario.engine_dtype,
        gpu=info.device_name if on_gpu else f"none; CPU {_cpu_name()}",
        num_gpus=scenario.num_gpus if on_gpu else 0,
        engine=EngineRef("SGLang", version, scenario.tp),
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
    bench = run(msgspec.json.decode(sys.argv[1], type=Job))
    raise SystemExit(1 if bench.failures else 0)


if __name__ == "__main__":
    main()

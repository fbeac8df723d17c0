"""How long a push takes on GPUs, beside a plain copy and SGLang's own calls, in one run.

    python -m benchmarks.refit_latency colocated-1gpu-8b disaggregated-2gpu --out DIR \\
        --engine-pythonpath /opt/engine --trainer-pythonpath /opt/ray --models-pythonpath /opt/trainer
    python -m benchmarks.refit_latency all --plan-only

Scenarios of one engine follow each other in one process with a time limit, so that it starts once; what they measured
until they failed is kept. Rows of all scenarios are in DIR/refit_latency.json and in the table, a bar chart (where
matplotlib is installed) in DIR/refit_latency.png, logs and details in one file each beside them. ``--device cpu
--tiny`` runs the same code on a small model, no GPU; ``--plan-only`` runs nothing and says what each would move.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks import chart, predict, rows, watchdog
from benchmarks.actor import TRAINERS
from benchmarks.bench import Plan
from benchmarks.rows import Row
from benchmarks.scenario_run import ENGINE_START_S, Job, Part, head_commit
from benchmarks.scenarios import SCENARIOS, SETS, Scenario, named, tiny
from benchmarks.trainers import REPOSITORY, Interpreter
from weightsync import envs
from weightsync.config import EnvConfig

NAME = "refit_latency"
LOG_TAIL_BYTES = 200_000


def main() -> None:
    arguments = _parse()
    console = Console(width=220)
    if arguments.plan_only:
        console.print(predict.table({name: _scenario(name, arguments) for name in arguments.scenarios}))
        return
    out, failed = arguments.out, []
    rows.write(out / f"{NAME}.json", [])
    for names in groups({name: _scenario(name, arguments) for name in arguments.scenarios}):
        for name, measured, whole in _run(names, arguments):
            failed += [] if whole else [name]
            console.print(rows.table(measured, title=name if whole else f"{name} (incomplete)"))
    found = rows.read(out / f"{NAME}.json")
    if found and chart.draw(found, out / f"{NAME}.png"):
        console.print(f"chart: {out / NAME}.png")
    if failed:
        console.print(f"incomplete: {', '.join(failed)}")
    raise SystemExit(1 if failed else 0)


def groups(scenarios: dict[str, Scenario]) -> list[list[str]]:
    """Names of scenarios that share their engines, in the order of the first of each."""
    found: dict[tuple, list[str]] = {}
    for name, scenario in scenarios.items():
        found.setdefault(scenario.engine_key, []).append(name)
    return list(found.values())


def _scenario(name: str, arguments: argparse.Namespace) -> Scenario:
    scenario = tiny(SCENARIOS[name]) if arguments.tiny else SCENARIOS[name]
    if arguments.idle:
        scenario = msgspec.structs.replace(scenario, in_flight=0)
    if arguments.unstocked:
        scenario = msgspec.structs.replace(scenario, stock=())
    return scenario


def _run(names: list[str], arguments: argparse.Namespace) -> list[tuple[str, list[Row], bool]]:
    """Scenarios of one engine in a process of their own: of each its rows, and whether all was measured."""
    with tempfile.TemporaryDirectory(prefix="weightsync-bench-") as folder:
        job = _job(names, Path(folder), arguments)
        limits = [arguments.scenario_timeout_s or part.scenario.timeout_s for part in job.parts]
        timeout_s, started = ENGINE_START_S[job.device] + sum(limits), time.monotonic()
        print(f"== {', '.join(names)} (at most {timeout_s:g} s)", flush=True)
        command = [sys.executable, "-m", "benchmarks.scenario_run", msgspec.json.encode(job).decode()]
        try:
            status = watchdog.run(command, timeout_s=timeout_s, env=Interpreter(pythonpath=_own_path()).variables())
            why = "out of time" if status == watchdog.TIMED_OUT else f"exit status {status}"
            print(f"== {', '.join(names)}: {why}, {time.monotonic() - started:.0f} s", flush=True)
        finally:  # also when this process is told to end
            kept = [_keep(part, arguments.out, Path(folder)) for part in job.parts]
        return kept


def _own_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(REPOSITORY)]


def _job(names: list[str], folder: Path, arguments: argparse.Namespace) -> Job:
    own = EnvConfig(python=sys.executable, pythonpath=[*_own_path(), str(REPOSITORY)])
    plan = Plan(n=arguments.n, actor=arguments.actor, stock_budget_s=arguments.stock_budget_s)
    if arguments.actor == "ray" and arguments.device == "cuda":
        plan = msgspec.structs.replace(plan, envs=dict.fromkeys(TRAINERS, own))
    parts = []
    for name in names:
        scenario = _scenario(name, arguments)
        parts.append(Part(name, scenario, _trainer(scenario, arguments), str(folder / f"{name}.json")))
    return Job(
        parts=parts,
        device=arguments.device,
        logs=str(folder),
        plan=plan,
        engine=Interpreter(arguments.engine_python, arguments.engine_pythonpath),
        commit=arguments.commit or head_commit(),
        threads=arguments.threads,
        engine_env=arguments.engine_env,
    )


def _trainer(scenario: Scenario, arguments: argparse.Namespace) -> Interpreter:
    """Where training ranks run: trainers that are a library's need that library."""
    plain = scenario.trainer_kind == "plain"
    path = arguments.trainer_pythonpath if plain else arguments.models_pythonpath or arguments.trainer_pythonpath
    if arguments.device == "cpu" and not arguments.trainer_python:
        env = "megatron" if scenario.trainer_kind == "megatron" else "automodel"
        return Interpreter(str(envs.resolve(env).python), path)
    return Interpreter(arguments.trainer_python, path)


def _keep(part: Part, out: Path, folder: Path) -> tuple[str, list[Row], bool]:
    """Add a scenario's rows and details, and the ends of its logs, to the files of the whole run."""
    measured = rows.read(part.out) if Path(part.out).exists() else []
    rows.write(out / f"{NAME}.json", rows.read(out / f"{NAME}.json") + measured)
    found, file = Path(part.out).with_suffix(".details.json"), out / f"{NAME}.details.json"
    details = msgspec.json.decode(file.read_bytes()) if file.exists() else {}
    details[part.name] = msgspec.json.decode(found.read_bytes()) if found.exists() else {}
    file.write_bytes(msgspec.json.format(msgspec.json.encode(details), indent=2) + b"\n")
    with open(out / f"{NAME}.log", "ab") as log:
        for text in [*sorted(folder.glob("engine-*.log")), *folder.glob(f"trainers-{part.name}.log")]:
            log.write(f"==== {part.name}: {text.name}\n".encode() + text.read_bytes()[-LOG_TAIL_BYTES:] + b"\n")
            text.unlink()  # engines serve several scenarios, and are to be read about once
    return part.name, measured, bool(details[part.name].get("whole"))


def _parse() -> argparse.Namespace:
    def paths(text: str) -> list[str]:
        return [path for path in text.split(os.pathsep) if path]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*SCENARIOS, *SETS]
    parser.add_argument("scenarios", nargs="+", choices=known, metavar="SCENARIO", help=", ".join(known))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plan-only", action="store_true", help="say what each would move, and run nothing")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, a CPU's routes")
    parser.add_argument("--idle", action="store_true", help="leave out what is measured with requests in flight")
    parser.add_argument("--unstocked", action="store_true", help="leave SGLang's own calls out")
    parser.add_argument("--n", type=int, default=10, help="pushes a setting, after 2 that do not count")
    parser.add_argument("--actor", choices=("inline", "ray"), default="inline")
    parser.add_argument("--engine-python", default="")
    parser.add_argument("--engine-env", default="sglang_cpu", help="of an engine on a CPU: sglang_cpu_legacy")
    parser.add_argument("--engine-pythonpath", type=paths, default=[])
    parser.add_argument("--trainer-python", default="")
    parser.add_argument("--trainer-pythonpath", type=paths, default=[])
    parser.add_argument("--models-pythonpath", type=paths, default=[], help="of nemo-automodel's and Megatron's ranks")
    parser.add_argument("--stock-budget-s", type=float, default=10.0, help="for each kind of stock call")
    parser.add_argument("--scenario-timeout-s", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of a training rank on a CPU")
    parser.add_argument("--commit", default="", help="of this checkout, where git is not there to ask")
    arguments = parser.parse_args()
    arguments.scenarios = named(arguments.scenarios)
    if arguments.plan_only:
        return arguments
    if arguments.out is None:
        parser.error("--out is needed")
    if (arguments.device == "cpu") != arguments.tiny:
        parser.error("--device cpu and --tiny go together; benchmarks.cpu_refit is the benchmark for CPUs")
    return arguments


if __name__ == "__main__":
    main()

"""How long a push takes on GPUs, beside a plain copy and SGLang's own calls, in one run.

    python -m benchmarks.refit_latency colocated-1gpu-8b disaggregated-2gpu --out DIR \\
        --engine-pythonpath /opt/engine --trainer-pythonpath /opt/ray

Each scenario is a process of its own with a time limit; what it measured until it failed is kept. Rows of all scenarios
are in DIR/refit_latency.json and in the table, a bar chart (where matplotlib is installed) in DIR/refit_latency.png,
logs and details in one file each beside them. ``--device cpu --tiny`` runs the same code on a small model, no GPU.
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

from benchmarks import chart, rows, watchdog
from benchmarks.bench import Plan
from benchmarks.rows import Row
from benchmarks.scenario_run import Job, head_commit
from benchmarks.scenarios import SCENARIOS, Scenario, tiny
from benchmarks.trainers import REPOSITORY, Interpreter
from weightsync import envs

NAME = "refit_latency"
LOG_TAIL_BYTES = 200_000


def main() -> None:
    arguments = _parse()
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    console, found, failed = Console(width=220), [], []
    for name in arguments.scenarios:
        measured, status = _run(name, arguments)
        found += measured
        failed += [name] if status else []
        rows.write(out / f"{NAME}.json", found)
        console.print(rows.table(measured, title=f"{name}{' (incomplete)' if status else ''}"))
    if found and chart.draw(found, out / f"{NAME}.png"):
        console.print(f"chart: {out / NAME}.png")
    if failed:
        console.print(f"incomplete: {', '.join(failed)}")
    raise SystemExit(1 if failed else 0)


def _run(name: str, arguments: argparse.Namespace) -> tuple[list[Row], int]:
    """One scenario in a process of its own; its rows, and 0 if it measured all that it should."""
    scenario = tiny(SCENARIOS[name]) if arguments.tiny else SCENARIOS[name]
    if arguments.idle:
        scenario = msgspec.structs.replace(scenario, in_flight=0)
    with tempfile.TemporaryDirectory(prefix="weightsync-bench-") as folder:
        file = Path(folder) / f"{name}.json"
        job = _job(scenario, file, Path(folder), arguments)
        timeout_s = arguments.scenario_timeout_s or scenario.timeout_s
        started = time.monotonic()
        print(f"== {name} (at most {timeout_s:g} s)", flush=True)
        command = [sys.executable, "-m", "benchmarks.scenario_run", msgspec.json.encode(job).decode()]
        status = watchdog.run(command, timeout_s=timeout_s, env=Interpreter(pythonpath=_own_path()).variables())
        why = "out of time" if status == watchdog.TIMED_OUT else f"exit status {status}"
        print(f"== {name}: {why}, {time.monotonic() - started:.0f} s", flush=True)
        _keep(Path(folder), name, arguments.out)
        return (rows.read(file) if file.exists() else []), status


def _own_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(REPOSITORY)]


def _job(scenario: Scenario, file: Path, folder: Path, arguments: argparse.Namespace) -> Job:
    trainer = Interpreter(arguments.trainer_python, arguments.trainer_pythonpath)
    if arguments.device == "cpu" and not arguments.trainer_python:
        trainer = Interpreter(str(envs.resolve("automodel").python), arguments.trainer_pythonpath)
    own = {"python": sys.executable, "pythonpath": [*_own_path(), str(REPOSITORY)]}
    plan = Plan(n=arguments.n, actor=arguments.actor, stock_budget_s=arguments.stock_budget_s)
    if arguments.actor == "ray" and arguments.device == "cuda":
        plan = msgspec.structs.replace(plan, envs={"sgl_dtensor_v2": own})
    return Job(
        scenario=scenario,
        device=arguments.device,
        out=str(file),
        logs=str(folder),
        plan=plan,
        trainer=trainer,
        engine=Interpreter(arguments.engine_python, arguments.engine_pythonpath),
        commit=arguments.commit or head_commit(),
        threads=arguments.threads,
        engine_env=arguments.engine_env,
    )


def _keep(folder: Path, name: str, out: Path) -> None:
    """Add the scenario's details and the ends of its logs to the files of the whole run."""
    found, file = folder / f"{name}.details.json", out / f"{NAME}.details.json"
    details = msgspec.json.decode(file.read_bytes()) if file.exists() else {}
    details[name] = msgspec.json.decode(found.read_bytes()) if found.exists() else None
    file.write_bytes(msgspec.json.format(msgspec.json.encode(details), indent=2) + b"\n")
    with open(out / f"{NAME}.log", "ab") as log:
        for part in sorted(folder.glob("*.log")):
            log.write(f"==== {name}: {part.name}\n".encode() + part.read_bytes()[-LOG_TAIL_BYTES:] + b"\n")


def _parse() -> argparse.Namespace:
    def paths(text: str) -> list[str]:
        return [path for path in text.split(os.pathsep) if path]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="+", choices=SCENARIOS, metavar="SCENARIO", help=", ".join(SCENARIOS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, a CPU's routes")
    parser.add_argument("--idle", action="store_true", help="leave out what is measured with requests in flight")
    parser.add_argument("--n", type=int, default=10, help="pushes a setting, after 2 that do not count")
    parser.add_argument("--actor", choices=("inline", "ray"), default="inline")
    parser.add_argument("--engine-python", default="")
    parser.add_argument("--engine-env", default="sglang_cpu", help="of an engine on a CPU: sglang_cpu_legacy")
    parser.add_argument("--engine-pythonpath", type=paths, default=[])
    parser.add_argument("--trainer-python", default="")
    parser.add_argument("--trainer-pythonpath", type=paths, default=[])
    parser.add_argument("--stock-budget-s", type=float, default=20.0, help="for each kind of stock call")
    parser.add_argument("--scenario-timeout-s", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of a training rank on a CPU")
    parser.add_argument("--commit", default="", help="of this checkout, where git is not there to ask")
    arguments = parser.parse_args()
    if (arguments.device == "cpu") != arguments.tiny:
        parser.error("--device cpu and --tiny go together; benchmarks.cpu_refit is the benchmark for CPUs")
    return arguments


if __name__ == "__main__":
    main()

"""About 1 GB through each CPU route, beside a plain copy of the same bytes and SGLang's own calls, in one run.

    weightsync bench        or, in the actor's environment:        python -m benchmarks.cpu_refit

Starts a real SGLang on this machine's CPU and one training rank, each in its own environment. Prints a table and writes
``benchmarks/results/cpu_refit.json``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks import rows, watchdog
from benchmarks.bench import Plan, Setting
from benchmarks.scenario_run import Job, Part, head_commit
from benchmarks.scenarios import MIB, Scenario, StockCalls
from benchmarks.trainers import REPOSITORY, Interpreter
from weightsync import envs

RESULTS = REPOSITORY / "benchmarks" / "results" / "cpu_refit.json"
BUCKET_MIB = 256
SCENARIO = Scenario(
    "Qwen3-250M",
    trainer_dtype="float32",
    engine_dtype="float32",
    settings=tuple(
        Setting(route, verify, bucket_bytes=BUCKET_MIB * MIB)
        for route in ("shm", "bucket")
        for verify in ("none", "fingerprint")
    ),
    stock=(
        StockCalls("one call a tensor", 0),
        StockCalls(f"flattened buckets of {BUCKET_MIB} MiB", BUCKET_MIB * MIB, flattened=True),
        StockCalls("one flattened bucket", -1, flattened=True),
    ),
    timeout_s=900.0,
)


def run(*, out: Path = RESULTS, model: str = "", n: int = 10, threads: int = 1) -> int:
    """Measure and print; 0 and rows in ``out`` if all was measured. ``threads``: torch threads of the training rank."""
    console, started = Console(width=200), time.monotonic()
    for name in ("automodel", "sglang_cpu"):
        envs.ensure(name, progress=lambda line: console.print(line, style="dim", highlight=False))
    scenario = msgspec.structs.replace(SCENARIO, model=model) if model else SCENARIO
    with tempfile.TemporaryDirectory(prefix="weightsync-bench-") as folder:
        measured = Path(folder) / out.name
        trainer = Interpreter(str(envs.resolve("automodel").python))
        job = Job(
            parts=[Part("cpu-refit", scenario, trainer, str(measured))],
            device="cpu",
            logs=folder,
            plan=Plan(n=n, stock_budget_s=60.0, timeout_s=120.0),
            engine=Interpreter(),
            commit=head_commit(),
            threads=threads,
        )
        command = [sys.executable, "-m", "benchmarks.scenario_run", msgspec.json.encode(job).decode()]
        status = watchdog.run(command, timeout_s=scenario.timeout_s, env=Interpreter().variables())
        if status:
            for log in sorted(Path(folder).glob("*.log")):
                print(f"---- the end of {log.name}", *log.read_text(errors="replace").splitlines()[-20:], sep="\n")
        found = rows.read(measured) if measured.exists() else []
    if found:
        console.print(rows.table(found, title=f"pushes to SGLang on a CPU, {time.monotonic() - started:.0f} s"))
    if not status:
        rows.write(out, found)
        console.print(f"rows: {out}")
    return status


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--model", default="", help="a name in benchmarks/models.py, for a quick try: tiny-Qwen3")
    parser.add_argument("--n", type=int, default=10, help="pushes a setting, after 2 that do not count")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of the training rank")
    arguments = parser.parse_args()
    raise SystemExit(run(out=arguments.out, model=arguments.model, n=arguments.n, threads=arguments.threads))


if __name__ == "__main__":
    main()

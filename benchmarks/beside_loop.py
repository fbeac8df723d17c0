"""What the receiver's threads take beside the event loop of an idle engine that does not sleep: a real SGLang on a CPU.

    python -m benchmarks.beside_loop --out FILE

A model of many small tensors, so that there is much to do in Python and little to move: connecting (which installs a
plan in a thread of the engine) and pushes that are verified there.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.scenario_run import head_commit
from weightsync.config import load_config
from weightsync.demo_model import DemoModel, weights, write_model
from weightsync.engines.local import LocalEngine
from weightsync.publisher import Publisher
from weightsync.reports import PushRequest
from weightsync.session import Session

MODEL = DemoModel(num_layers=64, hidden_size=64, intermediate_size=64)
PAIR = "sgl_dtensor_v2"
START_S = 420.0


def measure(env: str, version: str, pushes: int) -> dict[str, Any]:
    """Seconds, by what was done."""
    tensors = {name: torch.from_numpy(value) for name, value in weights(MODEL, seed=1).items()}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", MODEL, seed=1)
        with LocalEngine(model, env=env, sleeps=False, log=Path(folder) / "engine.log") as engine:
            engine.wait(START_S)
            publisher = Publisher(tensors, rank=0, world_size=1)
            peers = {"engines": [{"url": engine.url}], "publishers": [publisher.address]}
            started = time.perf_counter()
            session = Session(load_config({"pair": PAIR, **peers}), trainer="dtensor_v2")
            connect_s = time.perf_counter() - started
            try:
                verify_s = [_verified(session, publisher, step) for step in range(pushes)]
            finally:
                session.close()
                publisher.close()
    return {
        "engine": f"SGLang {version}, TP 1, idle, on a CPU",
        "num_tensors": len(tensors),
        "pushes": pushes,
        "connect_s": connect_s,
        "verify_s": {"min": min(verify_s), "median": statistics.median(verify_s), "max": max(verify_s)},
        "commit": head_commit(),
    }


def _verified(session: Session, publisher: Publisher, step: int) -> float:
    publisher.step_done(step)
    report = session.push(PushRequest(step=step))
    assert report.verified, report
    return report.seconds["verify"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pushes", type=int, default=8)
    arguments = parser.parse_args()
    row = measure("sglang_cpu", "0.5.23", arguments.pushes)
    print(msgspec.json.format(msgspec.json.encode(row), indent=2).decode())
    arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(row), indent=2) + b"\n")


if __name__ == "__main__":
    main()

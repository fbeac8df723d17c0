"""A Megatron trainer, transformers' model as the engine, and the session between them, each where its libraries are.

The libraries are looked for in this interpreter, then where ``TRAINER_PYTHONPATH`` says, then in the environments under
``envs/``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from weightsync import envs
from weightsync.config import load_config
from weightsync.demo_model import DemoModel, hf_config
from weightsync.reports import PushRequest, SyncReport
from weightsync.session import Session

ROOT = Path(__file__).parents[1]
TOKENS = [17, 5, 96, 33, 64, 250, 81, 12, 200, 3, 41, 41, 7]
ANSWER_S = 180.0

DENSE = DemoModel(hidden_size=256, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=48, intermediate_size=704)
MIXTURE = DemoModel(
    family="qwen3_moe", hidden_size=256, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=48, num_experts=8
)


class Process:
    """A child that answers commands, a line of JSON each."""

    def __init__(self, module: str, *arguments: str, env: str, needs: str, log: Path) -> None:
        here = importlib.util.find_spec(needs.partition(".")[0]) is not None
        carried = os.environ.get("PYTHONPATH" if here else "TRAINER_PYTHONPATH", "")
        python = sys.executable if here or carried else str(envs.resolve(env).python)
        path = os.pathsep.join(filter(None, [str(ROOT), carried]))
        self._log = log
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [python, "-m", module, *arguments],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
            )

    def send(self, *command: Any) -> None:
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        """The next line that is JSON; what libraries print is passed over."""
        while select.select([self._process.stdout], [], [], ANSWER_S)[0]:
            line = self._process.stdout.readline()
            if not line:
                break
            try:
                return json.loads(line)
            except ValueError:
                continue
        raise AssertionError(f"no answer; the end of its log:\n{self._log.read_text(errors='replace')[-4000:]}")

    def call(self, *command: Any) -> Any:
        self.send(*command)
        return self.receive()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


class Rig:
    """``parallel`` divides the ranks, one a device of ``devices``; the engine is on the first. A context manager."""

    def __init__(
        self,
        shape: DemoModel,
        *,
        dtype: str = "float32",
        devices: Sequence[str] = ("cpu",),
        parallel: dict[str, int] | None = None,
        route: str = "",
        **trainer: Any,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="weightsync-rig-")
        folder = Path(self._folder.name)
        (folder / "config.json").write_text(json.dumps(hf_config(msgspec.structs.replace(shape, dtype=dtype))))
        self._session: Session | None = None
        self.ranks: list[Process] = []
        self.engine = Process(
            "tests.engine_side.transformers_serves",
            *(str(folder), devices[0], dtype),
            env="automodel",
            needs="transformers",
            log=folder / "engine.log",
        )
        for rank, device in enumerate(devices):
            spec = {
                "rank": rank,
                "ranks": len(devices),
                "rendezvous": f"file://{folder / 'store'}",
                "device": device,
                "dtype": dtype,
                "shape": msgspec.to_builtins(shape),
                "parallel": parallel or {},
            }
            self.ranks.append(
                Process(
                    "tests.trainer_side.megatron_serves",
                    json.dumps(spec | trainer),
                    env="megatron",
                    needs="megatron.core",
                    log=folder / "ranks.log",
                )
            )
        self._route = route or ("shm" if devices[0] == "cpu" else "direct")

    def __enter__(self) -> Rig:
        self._addresses = [rank.receive() for rank in self.ranks]
        self._url = self.engine.receive()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._session is not None:
            self._session.close()
        for process in [*self.ranks, self.engine]:
            process.close()
        self._folder.cleanup()

    @property
    def session(self) -> Session:
        """Connected when it is first asked for."""
        if self._session is None:
            config = load_config(
                {
                    "pair": "sgl_megatron",
                    "engines": [{"url": self._url}],
                    "publishers": self._addresses,
                    "route": self._route,
                    "timeout_s": 60.0,
                }
            )
            self._session = Session(config, trainer="megatron")
        return self._session

    def all_ranks(self, *command: Any) -> list[Any]:
        """A command to every rank at once: it may be a collective."""
        for rank in self.ranks:
            rank.send(*command)
        return [rank.receive() for rank in self.ranks]

    def push(self, step: int) -> SyncReport:
        """Mark the weights as they are, and push them."""
        marked = self.all_ranks("step_done", step)
        assert not any(marked), marked
        return self.session.push(PushRequest(step=step))

    def difference(self, *, was: list[list[float]] | None = None) -> tuple[float, float]:
        """The largest difference of the engine's logits from the trainer's (or from ``was``), and their largest."""
        ours = was or self.all_ranks("logits", TOKENS)[0]
        theirs = self.engine.call("logits", TOKENS)
        pairs = [(a, b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True)]
        return max(abs(a - b) if a == a and b == b else float("inf") for a, b in pairs), max(abs(a) for a, _ in pairs)

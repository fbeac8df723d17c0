"""A real SGLang and real training ranks on GPUs, each with the ``PYTHONPATH`` that the run's environment names.

``ENGINE_PYTHONPATH`` and ``TRAINER_PYTHONPATH`` say where SGLang and nemo-automodel are, if not beside pytest;
``tests/gpu/run.sh`` sets them.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import models
from benchmarks.gpu_engine import GpuEngine
from benchmarks.trainers import REPOSITORY, Interpreter
from weightsync.demo_model import DemoModel
from weightsync.engines.local import free_port

MODEL = DemoModel(
    family="qwen3",
    dtype="bfloat16",
    vocab_size=1024,
    hidden_size=1024,
    intermediate_size=2048,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=128,
    max_positions=512,
)
START_S = 300.0
STEP_S = 120.0
SCRIPT = REPOSITORY / "tests" / "trainer_side" / "automodel_steps.py"


def num_gpus() -> int:
    """How many GPUs the engine and the trainer share: two where there are."""
    import torch

    return min(2, torch.cuda.device_count())


def interpreter(variable: str) -> Interpreter:
    """This interpreter with the ``PYTHONPATH`` that an environment variable of the run holds."""
    return Interpreter(pythonpath=[path for path in os.environ.get(variable, "").split(os.pathsep) if path])


@contextmanager
def engine(folder: Path, *, tp_size: int = 1, visible: str = "") -> Iterator[GpuEngine]:
    """A server of ``MODEL`` with random weights. ``wait`` before use, so that trainers may start meanwhile."""
    written = models.write_config(folder / "model", MODEL)
    options = {"interpreter": interpreter("ENGINE_PYTHONPATH"), "log": folder / "engine.log"}
    with GpuEngine(written, tp_size=tp_size, visible=visible, **options) as started:
        yield started


def log_probabilities(url: str, tokens: Sequence[int]) -> list[float]:
    """Teacher-forced, from an empty cache: of each token after the ones before it, but for the first."""
    _post(f"{url}/flush_cache", {})
    body = {
        "input_ids": list(tokens),
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    found = json.loads(_post(f"{url}/generate", body))["meta_info"]["input_token_logprobs"]
    assert [token for _, token, *_ in found] == list(tokens)
    return [value for value, *_ in found][1:]


def version(url: str) -> str:
    """The weight version that the engine reports."""
    with urllib.request.urlopen(f"{url}/model_info", timeout=30) as answer:
        return json.loads(answer.read())["weight_version"]


def _post(url: str, body: dict) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read()


class Ranks:
    """nemo-automodel ranks (``trainer_side/automodel_steps.py``), one a device. A context manager.

    ``spec`` are the script's ``dtype``, ``optimizer`` and ``tokens``; ``python`` another interpreter than this one.
    """

    def __init__(self, folder: Path, devices: Sequence[str], *, python: str = "", **spec: Any) -> None:
        runs = msgspec.structs.replace(interpreter("TRAINER_PYTHONPATH"), python=python)
        spec |= {"folder": str(models.write_config(folder / "model", MODEL)), "ranks": len(devices)}
        spec |= {"rendezvous": f"tcp://127.0.0.1:{free_port()}"}
        self._log = folder / "trainers.log"
        with open(self._log, "ab") as output:
            self.processes = [
                subprocess.Popen(
                    runs.command(str(SCRIPT), json.dumps(spec | {"rank": rank, "device": device})),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    env=runs.variables() | {"OMP_NUM_THREADS": "1"},
                )
                for rank, device in enumerate(devices)
            ]

    def addresses(self) -> list[str]:
        """The publishers', once all ranks stand."""
        return [self._line(process, "READY", START_S) for process in self.processes]

    def step(self, number: int) -> dict:
        """Take an optimizer step and mark it; rank 0's loss before it and log-probabilities after it."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(b"%d\n" % number)
            process.stdin.flush()
        said = [self._line(process, "STEP", STEP_S) for process in self.processes]
        return json.loads(said[0])

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _line(self, process: subprocess.Popen, word: str, timeout_s: float) -> str:
        """The rest of the next line that begins with ``word``; libraries may print others."""
        give_up = time.monotonic() + timeout_s
        output = process.stdout
        assert output is not None
        while time.monotonic() < give_up and select.select([output], [], [], max(0.0, give_up - time.monotonic()))[0]:
            line = output.readline().decode()
            if line.startswith(word + " "):
                return line[len(word) + 1 :].strip()
            if not line:
                break
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-25:])
        raise AssertionError(f"a training rank did not say {word}; the last words of all:\n{tail}")

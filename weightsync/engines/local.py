"""A real SGLang as a child process on this machine's CPU: for the demo, the benchmarks and the tests."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from weightsync import envs
from weightsync.deadline import Deadline
from weightsync.errors import EngineLost

RECEIVER = "weightsync.receiver.load"


class LocalEngine:
    """One SGLang server in environment ``env``, serving ``model``, a folder. ``url`` answers once ``wait`` returned.

    ``receiver`` loads our receiver into it; ``tp_size`` ranks share the CPU. An idle rank takes a whole core unless it
    ``sleeps``, but some of those that do answer the first call after a rest only after up to a second. ``log`` is
    its output file. A context manager; ``close`` ends the server and all its children.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        env: str = "sglang_cpu",
        receiver: bool = True,
        tp_size: int = 1,
        dtype: str = "float32",
        sleeps: bool = True,
        args: Sequence[str] = (),
        log: str | Path | None = None,
    ) -> None:
        environment = envs.resolve(env)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = Path(log) if log else Path(tempfile.mkstemp(prefix="sglang-", suffix=".log")[1])
        options = ["--tp-size", str(tp_size), *args]
        options += ["--custom-weight-loader", RECEIVER] if receiver else []
        options += ["--sleep-on-idle"] if sleeps else []
        variables = envs.process_env(environment) | {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
        if tp_size > 1:
            threads = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(tp_size))
            variables |= {"SGLANG_CPU_OMP_THREADS_BIND": threads, "SGLANG_NCCL_SO_PATH": "/nonexistent"}
        with open(self.log, "wb") as output:
            self._process = subprocess.Popen(
                [environment.python, *_command(model, dtype, self.port), *options],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, timeout_s: float = 240.0) -> LocalEngine:
        """Return once the server answers. Raises EngineLost with the end of its log if it dies or is not up in time."""
        deadline = Deadline(timeout_s, f"starting SGLang on port {self.port}")
        while not self._answers():
            if self._process.poll() is not None or deadline.passed():
                status = self._process.poll()
                self.close()
                why = f"ended with status {status}" if status is not None else f"not up after {timeout_s:g} s"
                raise EngineLost(f"SGLang {why}; its last words ({self.log}):\n{self._tail()}", engine=self.url)
            time.sleep(0.25)
        return self

    def close(self) -> None:
        """Kill the server's whole process group. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/model_info", timeout=2) as response:
                return response.status == 200
        except OSError:
            return False

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])


def free_port() -> int:
    """A TCP port that was free a moment ago, below those that the kernel hands out by itself.

    SGLang 0.5.12 adds 10 000 to it for a second port, so it must be well below 55 536.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _command(model: str | Path, dtype: str, port: int) -> list[str]:
    options = {
        "--model-path": str(model),
        "--device": "cpu",
        "--dtype": dtype,
        "--attention-backend": "torch_native",
        "--sampling-backend": "pytorch",
        "--grammar-backend": "none",
        "--max-total-tokens": "4096",
        "--mem-fraction-static": "0.1",
        "--host": "127.0.0.1",
        "--port": str(port),
    }
    flags = ["--disable-overlap-schedule", "--skip-server-warmup"]
    return ["-m", "sglang.launch_server", *[part for pair in options.items() for part in pair], *flags]

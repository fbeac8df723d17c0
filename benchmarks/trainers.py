"""All training ranks of a benchmark, started as processes and asked all at once. Runs in the benchmark; no torch."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.parallel import Parallel
from benchmarks.rank_wire import Info, RankSpec, Ready
from benchmarks.rows import Struct
from weightsync.deadline import Deadline
from weightsync.engines.local import free_port
from weightsync.errors import EngineLost
from weightsync.rpc import Client

REPOSITORY = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 180.0


class Interpreter(Struct):
    """Where a process runs: an interpreter ("": this one), what is on its ``PYTHONPATH``, further variables."""

    python: str = ""
    pythonpath: list[str] = msgspec.field(default_factory=list)
    env: dict[str, str] = msgspec.field(default_factory=dict)

    def command(self, *arguments: str) -> list[str]:
        return [self.python or sys.executable, *arguments]

    def variables(self) -> dict[str, str]:
        """This process's variables with ours; the repository comes last on ``PYTHONPATH``."""
        kept = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONHOME", "PYTHONPATH")}
        return kept | {"PYTHONPATH": os.pathsep.join([*self.pythonpath, str(REPOSITORY)])} | self.env


class Trainers:
    """``len(devices)`` ranks of one job; ``devices[r]`` is rank r's. A context manager."""

    def __init__(
        self,
        model: str,
        *,
        dtype: str,
        devices: Sequence[str],
        interpreter: Interpreter,
        log: Path,
        kind: str = "plain",
        parallel: Parallel = Parallel(),
        stacked: bool = False,
        threads: int = 1,
    ) -> None:
        rendezvous = f"tcp://127.0.0.1:{free_port()}"
        self._pool = ThreadPoolExecutor(len(devices))
        self._processes: list[subprocess.Popen] = []
        self._clients: list[Client] = []
        self._log = log
        try:
            with open(log, "ab") as output:
                for rank, device in enumerate(devices):
                    spec = RankSpec(
                        rank, len(devices), rendezvous, model, dtype, device, kind, stacked, threads, parallel
                    )
                    self._processes.append(_start(spec, interpreter, output))
            ready = list(self._pool.map(self._ready, self._processes))
            self.publishers = [r.publisher for r in ready]
            self._clients = [Client(r.control, what=f"training rank {i}") for i, r in enumerate(ready)]
            self.infos: list[Info] = self.each("info", returns=Info)
        except BaseException:
            self.close()
            raise

    def each(self, method: str, argument: Any = None, *, returns: Any = None, timeout_s: float = 60.0) -> list[Any]:
        """Call ``method`` on every rank at once; answers by rank."""
        return self.each_its(method, [argument] * len(self._clients), returns=returns, timeout_s=timeout_s)

    def each_its(
        self, method: str, arguments: Sequence[Any], *, returns: Any = None, timeout_s: float = 60.0
    ) -> list[Any]:
        """The same with an argument a rank."""
        deadline = Deadline(timeout_s, f"benchmark's {method}")

        def ask(client: Client, argument: Any) -> Any:
            return client.call(method, argument, deadline=deadline, returns=returns)

        return list(self._pool.map(ask, self._clients, arguments))

    def close(self) -> None:
        """End the ranks. Idempotent."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for client in self._clients:
            client.close()
        self._processes, self._clients = [], []
        self._pool.shutdown(wait=False)

    def __enter__(self) -> Trainers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _ready(self, process: subprocess.Popen) -> Ready:
        """The line that a rank prints once it can be pushed from."""
        give_up = time.monotonic() + START_TIMEOUT_S
        while True:
            if select.select([process.stdout], [], [], max(0.0, give_up - time.monotonic()))[0]:
                line = process.stdout.readline()
                if line.startswith(b'{"publisher"'):
                    return msgspec.json.decode(line, type=Ready)
                if line:
                    continue
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
            raise EngineLost(f"a training rank did not start; the last words of all ranks ({self._log}):\n{tail}")


def _start(spec: RankSpec, interpreter: Interpreter, output: Any) -> subprocess.Popen:
    return subprocess.Popen(
        interpreter.command("-m", "benchmarks.trainer_rank", msgspec.json.encode(spec).decode()),
        env=interpreter.variables(),
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=output,
    )

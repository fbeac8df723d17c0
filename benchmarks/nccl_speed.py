"""What NCCL moves between two GPUs of one machine, by the settings that a user may give it, beside a plain peer copy.

    python -m benchmarks.nccl_speed --out rows.json

Every setting has two processes of its own, since NCCL reads its variables once. All of them start at the same time and
measure one after the other. ``NCCL_CUMEM_ENABLE=0`` is what SGLang's engines have, unless a setting says otherwise.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import statistics
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from weightsync.engines.local import free_port

NBYTES = 1 << 30
ROUNDS, WAIT_S = 9, 100
ANSWER_S = 40.0
MIB = 1 << 20


class Setting(NamedTuple):
    """Environment variables, and fields of the communicator's own configuration (``ncclConfig_t``)."""

    name: str
    variables: dict[str, str]
    config: dict[str, int]


def _of(text: str, **config: int) -> Setting:
    pairs = dict(part.split("=") for part in text.split())
    name = ", ".join([text, *(f"config.{k}={v}" for k, v in config.items())]).strip(", ")
    return Setting(name or "as SGLang has it", {"NCCL_CUMEM_ENABLE": "0", **pairs}, config)


SETTINGS = (
    _of(""),
    _of("NCCL_CUMEM_ENABLE=1"),
    _of("", min_ctas=32, max_ctas=32),
    _of("NCCL_MIN_NCHANNELS=32 NCCL_MIN_P2P_NCHANNELS=32"),
    _of("NCCL_MIN_NCHANNELS=64 NCCL_MIN_P2P_NCHANNELS=64 NCCL_MAX_P2P_NCHANNELS=64"),
    _of(f"NCCL_BUFFSIZE={16 * MIB}"),
    _of(f"NCCL_P2P_NVL_CHUNKSIZE={2 * MIB}"),
    _of(f"NCCL_BUFFSIZE={16 * MIB} NCCL_P2P_NVL_CHUNKSIZE={2 * MIB} NCCL_MIN_P2P_NCHANNELS=32"),
    _of("NCCL_P2P_USE_CUDA_MEMCPY=1"),
    _of("NCCL_NTHREADS=512"),
    _of("NCCL_PROTO=Simple"),
)


def take_part(rank: int, port: int, setting: Setting, connection: Connection) -> None:
    """One of a setting's two processes: join, wait to be told to measure, answer with GB/s by operation."""
    faulthandler.dump_traceback_later(WAIT_S, exit=True)
    os.environ |= setting.variables
    torch.cuda.set_device(rank)
    options = dist.ProcessGroupNCCL.Options()
    for name, value in setting.config.items():
        setattr(options.config, name, value)
    where = f"tcp://127.0.0.1:{port}"
    timeout = timedelta(seconds=WAIT_S)
    dist.init_process_group("nccl", rank=rank, world_size=2, init_method=where, timeout=timeout, pg_options=options)
    data = torch.ones(NBYTES, dtype=torch.uint8, device="cuda")
    dist.barrier()
    connection.send("ready")
    connection.recv()
    ways: dict[str, Callable[[], object]] = {
        "broadcast": lambda: dist.broadcast(data, 0),
        "send and receive": lambda: dist.send(data, 1) if rank == 0 else dist.recv(data, 0),
    }
    connection.send({name: NBYTES / _seconds(way) / 1e9 for name, way in ways.items()})
    connection.recv()


def _seconds(run: Callable[[], object]) -> float:
    found = []
    for _ in range(ROUNDS + 2):
        dist.barrier()
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return statistics.median(found[2:])


def peer_copy() -> float:
    """GB/s of a plain copy from GPU 0 to GPU 1."""
    source = torch.ones(NBYTES, dtype=torch.uint8, device="cuda:0")
    target = torch.empty(NBYTES, dtype=torch.uint8, device="cuda:1")
    found = []
    for _ in range(ROUNDS + 2):
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return NBYTES / statistics.median(found[2:]) / 1e9


class Pair:
    """A setting's two processes."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        context, port = multiprocessing.get_context("spawn"), free_port()
        ends = [context.Pipe() for _ in range(2)]
        self._connections = [ours for ours, _ in ends]
        self._processes = [
            context.Process(target=take_part, args=(rank, port, setting, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process in self._processes:
            process.start()

    def measure(self) -> dict[str, float] | str:
        """GB/s by operation as the receiving process saw it; or what went wrong."""
        found: list = []
        try:
            for expected in ("ready", "go"):
                for connection in self._connections:
                    if expected == "go":
                        connection.send("go")
                for connection in self._connections:
                    if not connection.poll(ANSWER_S):
                        return "no answer in time"
                    found.append(connection.recv())
        except (EOFError, OSError):
            return "a process ended"
        return found[-1]

    def end(self) -> None:
        for process in self._processes:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    about = {
        "gpu": torch.cuda.get_device_name(0),
        "num_gpus": 2,
        "num_bytes": NBYTES,
        "versions": {"torch": torch.__version__, "nccl": ".".join(map(str, torch.cuda.nccl.version()))},
        "commit": arguments.commit,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    rows = [about | {"setting": "plain peer copy", "gb_per_s": {"copy": peer_copy()}}]
    torch.cuda.empty_cache()
    pairs = [Pair(setting) for setting in SETTINGS]
    for pair in pairs:
        found = pair.measure()
        pair.end()
        result = {"error": found} if isinstance(found, str) else {"gb_per_s": found}
        rows.append(about | {"setting": pair.setting.name} | result)
        arguments.out.write_text(json.dumps(rows, indent=2) + "\n")
    for row in rows:
        print(f"{row['setting']:110}", row.get("gb_per_s") or row["error"], flush=True)


if __name__ == "__main__":
    main()

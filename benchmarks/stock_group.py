"""SGLang's distributed update as a sender makes it: one group over the trainer's rank 0 and all engine ranks.

NCCL on GPUs (both sides need one NCCL version, and the sender ``NCCL_CUMEM_ENABLE=0`` as SGLang has it), gloo on CPUs.
Runs in training ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from benchmarks.in_flight import generate
from benchmarks.rank_wire import StockRequest, Took
from benchmarks.stock import FLATTENED, Engine, Named, chunks, flatten

NAME = "benchmark"
TIMEOUT_S = 60.0


class Group:
    """The group, made on both sides. Rank 0 is this process, the engine's TP ranks follow."""

    def __init__(self, engine: Engine, *, backend: str, port: int) -> None:
        self._engine = engine
        self._on_gpu = backend == "nccl"
        size = 1 + engine.tp_size
        where = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": size}
        body = {**where, "group_name": NAME, "backend": backend}
        joining = _Call(engine, "/init_weights_update_group", body)
        timeout = timedelta(seconds=TIMEOUT_S)
        store = dist.TCPStore("127.0.0.1", port, size, is_master=True, timeout=timeout)
        self.group, _ = c10d._new_process_group_helper(
            size, 0, [], c10d.Backend(backend), c10d.PrefixStore(NAME, store), group_name=NAME, timeout=timeout
        )
        c10d._world.pg_group_ranks[self.group] = {rank: rank for rank in range(size)}
        joining.result()

    def push(self, tensors: Iterable[Named], request: StockRequest) -> Took:
        """One push. The engine answers when its part of a broadcast is queued: the bytes may come long after that."""
        started = time.perf_counter()
        self._engine.pause()
        paused, clock = time.perf_counter(), _Clock(self._on_gpu)
        self._engine.begin()
        for chunk in chunks(tensors, request.limit_bytes):
            self._send(chunk, request.flattened)
        clock.mark()
        self._engine.end()
        updated = time.perf_counter()
        self._engine.resume()
        resumed = time.perf_counter()
        if request.with_token:
            generate(self._engine.url, 1)
        told = time.perf_counter()
        over = paused + clock.seconds()
        return Took(max(resumed, over) - started, max(updated, over) - paused, resumed - started, told - started)

    def _send(self, chunk: list[Named], flattened: bool) -> None:
        body: dict[str, Any] = {
            "names": [name for name, _ in chunk],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in chunk],
            "shapes": [list(tensor.shape) for _, tensor in chunk],
            "group_name": NAME,
            "load_format": FLATTENED if flattened else None,
            "flush_cache": False,
        }
        receiving = _Call(self._engine, "/update_weights_from_distributed", body)
        sent = [flatten(chunk)["flattened_tensor"]] if flattened else [tensor.detach() for _, tensor in chunk]
        for work in [dist.broadcast(t, src=0, group=self.group, async_op=True) for t in sent]:
            work.wait()
        receiving.result()

    def close(self) -> None:
        """Take the group apart on both sides at once, since each may wait for the other."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        leaving = _Call(self._engine, "/destroy_weights_update_group", {"group_name": NAME})
        dist.destroy_process_group(self.group)
        leaving.result()


class _Clock:
    """How long, from now on, the current stream of this process's GPU takes; always 0 s if not ``on_gpu``."""

    def __init__(self, on_gpu: bool) -> None:
        self._marks: list[torch.cuda.Event] = []
        self._on_gpu = on_gpu
        self.mark()

    def mark(self) -> None:
        """What was queued before counts."""
        if self._on_gpu:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()

    def seconds(self) -> float:
        """Until the last mark; waits for that."""
        if not self._marks:
            return 0.0
        self._marks[-1].synchronize()
        return self._marks[0].elapsed_time(self._marks[-1]) / 1e3


class _Call:
    """A POST under way in a thread, since the engine answers only after this process has taken part."""

    def __init__(self, engine: Engine, path: str, body: dict) -> None:
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(engine, path, body), daemon=True)
        self._thread.start()

    def _run(self, engine: Engine, path: str, body: dict) -> None:
        try:
            engine.call("POST", path, body)
        except Exception as e:  # handed to the thread that waits
            self._error = e

    def result(self) -> None:
        self._thread.join(timeout=TIMEOUT_S)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine did not answer within {TIMEOUT_S:g} s")
        if self._error is not None:
            raise self._error

"""One training rank as a plain process: FSDP2 parameters, a publisher, and a server for the benchmark's commands.

    python -m benchmarks.trainer_rank SPEC      SPEC: ``RankSpec`` as JSON

Prints one line of JSON (``Ready``) when it can be pushed from, and ends when its standard input does.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from benchmarks.rank_wire import Floor, FloorRequest, Info, Memory, RankSpec, Ready, StockRuns, StockSetup, Times, Took

INIT_TIMEOUT_S = 120.0


def _in_turn(method: Callable) -> Callable:
    """Commands come in a server's threads: one at a time, on this rank's GPU."""

    @functools.wraps(method)
    def run(self: Rank, *arguments: Any) -> Any:
        import torch

        with self._lock:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            return method(self, *arguments)

    return run


class Rank:
    """The object that the command server offers."""

    def __init__(self, spec: RankSpec) -> None:
        import torch
        import torch.distributed as dist

        from benchmarks import trainer_kinds
        from weightsync.publisher import Publisher

        torch.set_num_threads(spec.threads)
        self._lock = threading.Lock()
        self._spec, self._device = spec, torch.device(spec.device)
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self._device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            init_method=spec.rendezvous,
            rank=spec.rank,
            world_size=spec.ranks,
            timeout=datetime.timedelta(seconds=INIT_TIMEOUT_S),
        )
        self._trainer = trainer_kinds.make(spec, self._device)
        self._module = self._trainer.module
        self.publisher = Publisher(
            self._module,
            rank=spec.rank,
            world_size=spec.ranks,
            trainer=self._trainer.reader,
            trainer_options=self._trainer.options,
        )
        self._engine: Any = None
        self._group: Any = None
        self._share: Any = None
        self._hosted: list[Any] = []

    @_in_turn
    def info(self) -> Info:
        import torch

        from benchmarks.trainer_build import locals_of
        from weightsync import devices
        from weightsync.versions import library_versions

        on_gpu = self._device.type == "cuda"
        return Info(
            trainer=self._trainer.title,
            device_name=torch.cuda.get_device_name(self._device) if on_gpu else "",
            device_uuid=devices.uuid_of(self._device) if on_gpu else "",
            num_bytes=sum(part.nbytes for part in locals_of(self._module)),
            versions={k: v for k, v in library_versions().items() if k != "weightsync"},
        )

    @_in_turn
    def change(self, step: int) -> None:
        """Change every weight and mark the result as the weights of ``step``."""
        from benchmarks import trainer_build

        trainer_build.change(self._module, step)
        self.publisher.step_done(step)
        self._synchronize()

    @_in_turn
    def floor(self, request: FloorRequest) -> Floor:
        """A plain copy of this rank's parameters."""
        import torch

        from benchmarks import floor, trainer_build

        measured = floor.measure(trainer_build.locals_of(self._module), request)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return measured

    @_in_turn
    def stock_setup(self, setup: StockSetup) -> None:
        from benchmarks import stock, stock_group

        self._share = stock.share(len(setup.urls), setup.tp_size)
        if self._spec.rank == self._share.first:
            self._engine = stock.Engine(setup.urls[self._share.engine])
        if self._spec.rank == 0 and setup.group_port:
            assert len(setup.urls) == 1, "a group for distributed updates is made with one engine"
            backend = "nccl" if self._device.type == "cuda" else "gloo"
            self._group = stock_group.Group(self._engine, backend=backend, port=setup.group_port)

    @_in_turn
    def stock(self, runs: StockRuns) -> Times:
        """Push by stock calls, changing the weights before each. A collective: ask every rank at once."""
        import torch
        import torch.distributed as dist

        from benchmarks import stock, trainer_build

        request = runs.request
        step = iter(range(1_000_000))

        def run() -> Took:
            trainer_build.change(self._module, next(step))
            tensors = self._trainer.whole_tensors(getattr(torch, request.dtype))
            self._synchronize()
            dist.barrier()
            if not request.distributed:
                return stock.push(self._engine, tensors, request, self._share)
            if self._group is not None:
                return self._group.push(tensors, request)
            for _ in tensors:  # each is gathered from all ranks
                pass
            return Took()

        pushes = stock.repeat(run, runs.n, runs.budget_s, agree=stock.agree)
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
        return Times(pushes if self._engine is not None else [])

    @_in_turn
    def stock_close(self) -> None:
        if self._group is not None:
            self._group.close()
        if self._engine is not None:
            self._engine.close()
        self._group = self._engine = None

    @_in_turn
    def offload(self) -> None:
        """What a colocated trainer does before generation: no consumer maps its memory, parameters go to the host."""
        self.publisher.withdraw()
        order = itertools.count()
        self._move(lambda parameter: self._host_copy(next(order), parameter))

    @_in_turn
    def onload(self) -> None:
        """Parameters back on the GPU, in new storage."""
        self._move(lambda parameter: parameter.to(self._device, non_blocking=True))

    def _host_copy(self, number: int, parameter: Any) -> Any:
        """The parameter in host memory, pinned and the same at every offload."""
        import torch

        from benchmarks.trainer_build import local

        if number < len(self._hosted):
            local(self._hosted[number]).copy_(local(parameter), non_blocking=True)
            return self._hosted[number]
        self._hosted.append(hosted := parameter.to("cpu"))
        if self._device.type == "cuda" and (part := local(hosted)).numel():
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(part.data_ptr(), part.nbytes, 0))
        return hosted

    def _move(self, move: Callable[[Any], Any]) -> None:
        import torch

        with torch.no_grad():
            self._module._apply(move)
        self._synchronize()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        import torch

        if self._device.type == "cuda":
            torch.cuda.synchronize()

    @_in_turn
    def memory(self) -> Memory:
        import torch

        if self._device.type != "cuda":
            return Memory(0, 0)
        return Memory(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())


def main() -> None:
    from weightsync.rpc import Server

    rank = Rank(msgspec.json.decode(sys.argv[1], type=RankSpec))
    server = Server(rank, host="127.0.0.1")
    print(msgspec.json.encode(Ready(rank.publisher.address, server.address)).decode(), flush=True)
    sys.stdin.read()
    server.close()
    rank.publisher.close()


if __name__ == "__main__":
    main()

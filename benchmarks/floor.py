"""The floor: how fast the same bytes can be copied at all, out of the trainer's own memory. Runs in a training rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.rank_wire import Floor, FloorRequest
from weightsync import devices

STREAMS = 4


def measure(tensors: list[torch.Tensor], request: FloorRequest) -> Floor:
    """Copy ``tensors`` (all on one device) into one new buffer, in each way that fits. The buffer is freed after."""
    dtype, own = getattr(torch, request.dtype), tensors[0].device
    to = devices.device_of(request.device) if request.device else own
    flat = torch.zeros(sum(t.numel() for t in tensors), dtype=dtype, device=to)
    targets, at = [], 0
    for tensor in tensors:
        targets.append(flat[at : at + tensor.numel()].view(tensor.shape))
        at += tensor.numel()
    time_it = _host_seconds if own.type == "cpu" else _cuda_seconds(own, to)
    ways = _ways(tensors, targets, flat, own, to)
    seconds = {name: statistics.median(time_it(way, request.repeats)) for name, way in ways.items()}
    return Floor(flat.nbytes, seconds)


def _ways(
    tensors: list[torch.Tensor], targets: list[torch.Tensor], flat: torch.Tensor, own: torch.device, to: torch.device
) -> dict[str, Callable[[], object]]:
    def each() -> None:
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor, non_blocking=True)

    ways: dict[str, Callable[[], object]] = {"one copy a tensor": each}
    if own.type == "cpu":
        return ways
    if own == to:
        ways["one copy a tensor, CUDA graph"] = _graph(each)
        ways["foreach copy"] = lambda: torch._foreach_copy_(targets, tensors, non_blocking=True)
        if tensors[0].dtype == flat.dtype:
            one = torch.zeros_like(flat)
            ways["one flat copy"] = lambda: flat.copy_(one)
    else:
        ways[f"one copy a tensor, {STREAMS} streams"] = _streams(tensors, targets, own)
        one = torch.zeros(flat.shape, dtype=flat.dtype, device=own)
        ways["one flat copy"] = lambda: flat.copy_(one, non_blocking=True)
    return ways


def _graph(run: Callable[[], None]) -> Callable[[], None]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _streams(tensors: list[torch.Tensor], targets: list[torch.Tensor], own: torch.device) -> Callable[[], None]:
    streams = [torch.cuda.Stream(own) for _ in range(STREAMS)]

    def run() -> None:
        current = torch.cuda.current_stream(own)
        for number, stream in enumerate(streams):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for target, tensor in zip(targets[number::STREAMS], tensors[number::STREAMS], strict=True):
                    target.copy_(tensor, non_blocking=True)
        for stream in streams:
            current.wait_stream(stream)

    return run


def _host_seconds(run: Callable[[], object], repeats: int) -> list[float]:
    run()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return seconds


def _cuda_seconds(own: torch.device, to: torch.device) -> Callable[[Callable[[], object], int], list[float]]:
    def timed(run: Callable[[], object], repeats: int) -> list[float]:
        seconds = []
        for _ in range(repeats + 2):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize(own)
            torch.cuda.synchronize(to)
            start.record(torch.cuda.current_stream(own))
            run()
            end.record(torch.cuda.current_stream(own))
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        return seconds[2:]

    return timed

"""Copies and fingerprints on a GPU against their floor: one flat device copy of the same bytes, in the same run.

    python benchmarks/gpu_kernels.py --out rows.json [--tune] [--owner-device 1] [--scale 0.1]

A second process owns the tensors of a model's shape, in its own allocator; this one maps them and pulls. With
``--owner-device`` they lie on another GPU and the floor is a flat peer copy. Prints a table, writes a list of rows.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import msgspec
import torch

from weightsync import devices, fingerprint_cuda
from weightsync.spec import Segment
from weightsync.transports import cuda_copy, cuda_ipc, cuda_tables

Shape = tuple[int, ...]
ROUNDS, WAIT_S = 9, 120


def qwen3_8b(scale: float) -> list[Shape]:
    """The shapes of Qwen3-8B's 399 tensors; ``scale`` keeps that part of the layers."""
    layer = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (128,), (128,)]
    layer += [(12288, 4096), (12288, 4096), (4096, 12288), (4096,), (4096,)]
    return [(151936, 4096), *layer * max(1, int(36 * scale)), (4096,), (151936, 4096)]


def numel_of(shapes: list[Shape]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def own(connection: Connection, shapes: list[Shape], device: int) -> None:
    """The owner process: bfloat16 tensors of ``shapes``, exported in place, and an arena as large as all of them."""
    faulthandler.dump_traceback_later(400, exit=True)
    torch.cuda.set_device(device)
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_() for shape in shapes]
    arena = cuda_ipc.allocate(2 * numel_of(shapes))
    arena.tensor.view(torch.bfloat16).normal_()
    torch.cuda.synchronize()
    exported = [cuda_ipc.export(tensor) for tensor in tensors]
    connection.send(msgspec.msgpack.encode((arena.segment, exported)))
    connection.recv()


@contextlib.contextmanager
def mapped(shapes: list[Shape], device: int) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """The owner's arena and its tensors, mapped here."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=own, args=(theirs, shapes, device), daemon=True)
    process.start()
    theirs.close()
    assert mine.poll(WAIT_S), "the owner does not answer"
    segment, exported = msgspec.msgpack.decode(mine.recv(), type=tuple[Segment, list[tuple[Segment, int]]])
    start = time.perf_counter()
    memories = [cuda_ipc.open_segment(s) for s in [segment, *(s for s, _ in exported)]]
    opened_s = time.perf_counter() - start
    tensors = []
    for memory, (_, offset), shape in zip(memories[1:], exported, shapes, strict=True):
        nbytes = 2 * torch.Size(shape).numel()
        tensors.append(memory.tensor[offset : offset + nbytes].view(torch.bfloat16).view(shape))
    print(f"mapped {len({s.handle for s, _ in exported}) + 1} segments, {len(exported)} tensors in {opened_s:.3f} s")
    yield memories[0].tensor, tensors
    for memory in memories:
        memory.close()
    mine.send(None)
    process.join(20)
    process.kill()


def carve(shapes: list[Shape], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Fresh tensors that lie one after the other, as the parts of an engine's fused parameters do."""
    flat = torch.zeros(numel_of(shapes), dtype=dtype, device="cuda")
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


class Table:
    """The rows; ``add`` times a function and prints its row."""

    def __init__(self) -> None:
        self.rows: list[dict] = []

    def add(self, case: str, name: str, moved: int, run: Callable[[], object], **more: object) -> float:
        """Median seconds of ``run`` with the GPU idle before and after. ``moved``: bytes read and written together."""
        seconds = [timed(run) for _ in range(ROUNDS + 2)][2:]
        median = statistics.median(seconds)
        row = {"case": case, "name": name, "median_s": median, "min_s": min(seconds), "max_s": max(seconds)}
        self.rows.append({**row, "moved_bytes": moved, "bytes_per_s": moved / median, **more})
        extra = " ".join(f"{k}={v}" for k, v in more.items())
        print(f"{case:12} {name:34} {median * 1e3:9.3f} ms {moved / median / 1e12:7.3f} TB/s  {extra}", flush=True)
        return median


def timed(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def built(make: Callable[[], object]) -> tuple[object, float]:
    start = time.perf_counter()
    return make(), round(time.perf_counter() - start, 4)


@contextlib.contextmanager
def tuned(module: ModuleType, **constants: object) -> Iterator[None]:
    """The module's constants replaced for a while: what is built meanwhile uses them."""
    before = {name: getattr(module, name) for name in constants}
    for name, value in constants.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def dense(table: Table, shapes: list[Shape], owner_device: int, tune: bool) -> None:
    """Contiguous bf16 to bf16, from another process's tensors."""
    nbytes, targets = 2 * numel_of(shapes), carve(shapes)
    whole = torch.as_strided(targets[0], (nbytes // 2,), (1,)).view(torch.uint8)
    with mapped(shapes, owner_device) as (arena, sources):
        pairs = list(zip(targets, sources, strict=True))
        table.add("dense", "floor: one flat copy", 2 * nbytes, lambda: whole.copy_(arena))
        table.add("dense", "torch._foreach_copy_", 2 * nbytes, lambda: torch._foreach_copy_(targets, sources))
        graph = captured(lambda: [t.copy_(s) for t, s in pairs])
        table.add("dense", "CUDA graph of copy_", 2 * nbytes, graph.replay)
        for method in ("auto", "kernel", "batch", "streams"):
            puller, seconds = built(lambda method=method: cuda_ipc.make_puller(pairs, method=method))
            whole.zero_()
            puller.run()
            assert all(torch.equal(t, s) for t, s in pairs[:: len(pairs) // 9]), method
            table.add(
                "dense", f"puller {method}", 2 * nbytes, puller.run, build_s=seconds, launches=puller.num_launches
            )
        table.add("dense", "floor again", 2 * nbytes, lambda: whole.copy_(arena))
        if tune:
            tune_chunks(table, "dense", pairs, nbytes)
        prints(table, "dense", sources, None, tune)
        ours = fingerprint_cuda.fingerprint_many([(t, (0,) * t.dim()) for t in targets])
        assert ours == fingerprint_cuda.fingerprint_many([(s, (0,) * s.dim()) for s in sources])


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def tune_chunks(table: Table, case: str, pairs: list[cuda_tables.Pair], nbytes: int) -> None:
    """Other chunk lengths, step sizes, warps and programs than those in the code, everything by the kernel."""
    for chunk, step, warps, programs in itertools.product((32 << 10, 64 << 10), (8 << 10, 16 << 10), (4, 8), (16, 32)):
        with (
            tuned(cuda_tables, CHUNK_BYTES=chunk),
            tuned(cuda_copy, _CHUNK_STEP_BYTES=step, _CHUNK_WARPS=warps, _PROGRAMS_PER_SM=programs),
        ):
            puller = cuda_ipc.make_puller(pairs, method="kernel")
        name = f"{chunk >> 10}K by {step >> 10}K, {warps} warps, {programs}/SM"
        table.add(f"{case} tune", name, 2 * nbytes, puller.run)


def prints(table: Table, case: str, tensors: list[torch.Tensor], dtype: torch.dtype | None, tune: bool) -> None:
    """Fingerprints of all ``tensors``; the floor is what reading them takes at the speed of a copy."""
    items = [(tensor, (0,) * tensor.dim()) for tensor in tensors]
    nbytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    prepared, seconds = built(lambda: fingerprint_cuda.Fingerprints(items, dtype))
    table.add(case, "fingerprints", nbytes, prepared.run, build_s=seconds)
    if not tune:
        return
    for shape, programs in itertools.product(((128, 512, 16), (256, 512, 16), (128, 512, 8), (128, 1024, 8)), (16, 32)):
        shapes = {**fingerprint_cuda._SHAPES, "wide": shape}
        with tuned(fingerprint_cuda, _SHAPES=shapes, _PROGRAMS_PER_SM=programs):
            prepared = fingerprint_cuda.Fingerprints(items, dtype)
        table.add(f"{case} tune", f"fingerprints {shape} {programs}/SM", nbytes, prepared.run)


def casting(table: Table, shapes: list[Shape], tune: bool) -> None:
    """float32 shards into bfloat16 targets."""
    targets = carve(shapes)
    sources = [torch.empty(shape, dtype=torch.float32, device="cuda").normal_() for shape in shapes]
    pairs, moved = list(zip(targets, sources, strict=True)), 6 * numel_of(shapes)
    table.add("fp32 to bf16", "torch copy_ each", moved, lambda: [t.copy_(s) for t, s in pairs])
    puller, seconds = built(lambda: cuda_ipc.make_puller(pairs))
    table.add("fp32 to bf16", "puller kernel", moved, puller.run, build_s=seconds, launches=puller.num_launches)
    assert torch.equal(targets[1], sources[1].to(torch.bfloat16))
    prints(table, "fp32 as bf16", sources, torch.bfloat16, tune)


def experts(table: Table, layers: int, tune: bool) -> None:
    """Qwen3-30B-A3B's experts as automodel stacks them, transposed, into the engine's fused parameters."""
    count, hidden, inter = 128, 2048, 768
    up = [torch.randn(count, hidden, 2 * inter, dtype=torch.bfloat16, device="cuda") for _ in range(layers)]
    down = [torch.randn(count, inter, hidden, dtype=torch.bfloat16, device="cuda") for _ in range(layers)]
    w13, w2 = (
        [torch.zeros_like(u.transpose(1, 2).contiguous()) for u in up],
        [torch.zeros_like(d.mT.contiguous()) for d in down],
    )
    pairs = [(w2[n][e], down[n][e].t()) for n in range(layers) for e in range(count)]
    for n, e, at in itertools.product(range(layers), range(count), (0, inter)):
        pairs.append((w13[n][e, at : at + inter], up[n][e][:, at : at + inter].t()))
    moved = 2 * 2 * 3 * layers * count * hidden * inter
    table.add(
        "experts",
        "floor: flat copies",
        moved,
        lambda: [a.view(-1).copy_(b.view(-1)) for a, b in zip(w13 + w2, up + down, strict=True)],
    )
    table.add(
        "experts",
        "torch copy_ a layer",
        moved,
        lambda: [a.copy_(b.mT) for a, b in zip(w13 + w2, up + down, strict=True)],
    )
    shapes = (
        itertools.product(((64, 128), (128, 128), (256, 128), (128, 256)), (8, 16))
        if tune
        else [(cuda_copy._TRANSPOSE, 8)]
    )
    for shape, warps in shapes:
        with tuned(cuda_copy, _TRANSPOSE=shape, _TILE_WARPS=warps):
            puller, seconds = built(lambda: cuda_ipc.make_puller(pairs))
        name = f"puller {shape}, {warps} warps"
        table.add("experts", name, moved, puller.run, build_s=seconds, copies=len(pairs), launches=puller.num_launches)
    assert torch.equal(w13[0], up[0].transpose(1, 2))
    assert torch.equal(w2[-1], down[-1].transpose(1, 2))
    prints(table, "experts", [u[e].t() for u in up for e in range(count)], None, False)


def slices(table: Table, tune: bool) -> None:
    """Half the columns of 40 row-parallel weights: what one of two engine ranks takes."""
    sources = [torch.randn(4096, 12288, dtype=torch.bfloat16, device="cuda") for _ in range(40)]
    targets = carve([(4096, 6144)] * 40)
    pairs, moved = [(t, s[:, 6144:]) for t, s in zip(targets, sources, strict=True)], 4 * 40 * 4096 * 6144
    table.add("slices", "torch copy_ each", moved, lambda: [t.copy_(s) for t, s in pairs])
    for shape, warps in (
        itertools.product(((32, 256), (8, 512), (4, 1024)), (4, 8))
        if tune
        else [(cuda_copy._WIDE, cuda_copy._TILE_WARPS)]
    ):
        with tuned(cuda_copy, _WIDE=shape, _TILE_WARPS=warps):
            puller = cuda_ipc.make_puller(pairs)
        table.add("slices", f"puller {shape}, {warps} warps", moved, puller.run)


def pieces(table: Table, tune: bool) -> None:
    """Contiguous expert matrices of 3 MiB, too small for the driver's copies and too many: what the kernel is for."""
    shapes = [(768, 2048)] * 4096
    sources = list(torch.randn(4096, 768, 2048, dtype=torch.bfloat16, device="cuda").unbind())
    targets, nbytes = carve(shapes)[::-1], 2 * numel_of(shapes)
    pairs = list(zip(targets, sources, strict=True))
    for method in ("auto", "batch", "streams"):
        puller, seconds = built(lambda method=method: cuda_ipc.make_puller(pairs, method=method))
        table.add("3 MiB pieces", f"puller {method}", 2 * nbytes, puller.run, build_s=seconds, copies=len(pairs))
    if tune:
        tune_chunks(table, "3 MiB pieces", pairs, nbytes)


def small(table: Table) -> None:
    """Launch overhead: a thousand tensors of 256 bytes."""
    sources = [torch.randn(128, dtype=torch.bfloat16, device="cuda") for _ in range(1000)]
    pairs = list(zip(carve([(128,)] * 1000), sources, strict=True))
    for method in ("auto", "kernel", "batch", "streams"):
        puller = cuda_ipc.make_puller(pairs, method=method)
        table.add("1000 small", f"puller {method}", 2 * 256 * 1000, puller.run)
    prints(table, "1000 small", sources, None, False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_kernels.json"))
    parser.add_argument("--tune", action="store_true", help="also time other tile shapes than those in the code")
    parser.add_argument("--owner-device", type=int, default=0, help="index of the GPU that the owner process uses")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the model's layers")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(400, exit=True)
    torch.cuda.set_device(0)
    table, shapes = Table(), qwen3_8b(options.scale)
    cases: list[Callable[[], object]] = [lambda: dense(table, shapes, options.owner_device, options.tune)]
    if options.owner_device == 0:
        cases += [
            lambda: casting(table, shapes, options.tune),
            lambda: experts(table, max(1, int(12 * options.scale)), options.tune),
        ]
        cases += [lambda: slices(table, options.tune), lambda: pieces(table, options.tune), lambda: small(table)]
    for case in cases:
        case()
        torch.cuda.empty_cache()
        about = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "contexts": devices.contexts_here()}
        options.out.write_text(json.dumps([{**about, **row} for row in table.rows], indent=1))


if __name__ == "__main__":
    main()

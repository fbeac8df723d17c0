"""The GPU kernels run by Triton's interpreter on CPU memory: a program that test_cuda_kernels starts.

Each function is a check; the interpreter dereferences the addresses in the tables, so the tables are checked too.
Casts go to float16 here, because the interpreter truncates to bfloat16 where a GPU rounds.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch

from weightsync import fingerprint_cuda
from weightsync.fingerprint import fingerprint
from weightsync.fingerprint_weights import MASK
from weightsync.transports import cuda_copy, cuda_tables
from weightsync.transports.cuda_tables import chunks_of, split

torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=1)
# Small tiles: quick to interpret, and every case takes several.
fingerprint_cuda._SHAPES = {"wide": (16, 64, 8), "flat": (1, 256, 1)}
cuda_tables.CHUNK_BYTES, cuda_copy._CHUNK_STEP_BYTES = 4096, 1024
cuda_copy._TRANSPOSE, cuda_copy._WIDE, cuda_copy._NARROW = (32, 32), (8, 128), (16, 64)
CPU = torch.device("cpu")


def raw(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bits, NaNs and negative zeros among them."""
    numel = torch.Size(shape).numel()
    return (
        torch.randint(0, 256, (max(numel, 1) * dtype.itemsize,), dtype=torch.uint8)[: numel * dtype.itemsize]
        .view(dtype)
        .view(shape)
    )


def on_kernel(tensor: torch.Tensor, origin: tuple[int, ...], dtype: torch.dtype | None = None) -> int:
    out = torch.zeros(1, dtype=torch.int64)
    for launch in fingerprint_cuda.Fingerprints([(tensor, origin)], dtype)._launches:
        launch(out)
    return out.item() & MASK


def pull(pairs: list[cuda_copy.Pair]) -> None:
    pieces, boxes = split(pairs)
    steps = [cuda_copy._Chunks(key, table, CPU) for key, table in chunks_of(pieces).items()]
    for step in steps + [cuda_copy._Tiles(group, CPU) for group in boxes]:
        step()


def check_fingerprints() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.uint8, torch.int64):
        whole = raw((40, 136), dtype) if dtype != torch.int64 else raw((10, 48), dtype)
        views = [
            whole,
            whole.t(),
            whole[3:20, 5:100],
            whole[::3, ::2],
            whole[:, 16:48],
            whole[0],
            whole[2, 3],
            whole[:0],
        ]
        views += [raw((3, 5, 2, 16), dtype).permute(2, 0, 3, 1), raw((1000,), dtype)]
        for view in views:
            origin = tuple(range(7, 7 + view.dim()))
            assert on_kernel(view, origin) == fingerprint(view, origin), (dtype, view.shape, view.stride())


def check_fingerprint_of_cast() -> None:
    x = torch.randn(33, 64)
    for view in (x, x.t(), x[1:, 4:60]):
        assert on_kernel(view, (1, 2), torch.float16) == fingerprint(view.to(torch.float16), (1, 2))


def check_copies() -> None:
    for dtype in (torch.bfloat16, torch.uint8, torch.float64):
        source = raw((6, 70, 96), dtype)
        target = torch.zeros_like(source)
        flat = torch.zeros(40000, dtype=dtype)
        pairs = [(target[0], source[0]), (target[1], source[1]), (target[2, :, 16:80], source[2, :, 16:80])]
        pairs += [(target[3, ::2, 1::3], source[3, ::2, 1::3]), (flat[1:31], source[4].view(-1)[3:33])]
        pairs += [(flat[64 : 64 + 96 * 70].view(96, 70), source[5].t()), (flat[32], source[4, 2, 3])]
        pairs += [(flat[8000 : 8000 + 64 * 64].view(64, 64), source[4, 3:67, 8:72].t())]
        pull(pairs)
        for to, at in pairs:
            assert torch.equal(to.contiguous().view(-1).view(torch.uint8), at.contiguous().view(-1).view(torch.uint8))
        assert target[2, :, :16].eq(0).all()
        assert flat[0] == flat[31] == 0, "wrote outside"


def check_casting_copies() -> None:
    source = torch.randn(3, 80, 96)
    target = torch.zeros(3, 96, 80, dtype=torch.float16)
    flat = torch.zeros(8000, dtype=torch.float16)
    pairs = [
        (target[0], source[0].t()),
        (target[1, :, 3:19], source[1, 3:19].t()),
        (flat[5:4999], source[2].view(-1)[:4994]),
    ]
    pull([*pairs, (flat[5008:5116], source[2].view(-1)[16:124])])
    for to, at in pairs:
        assert torch.equal(to, at.to(torch.float16))
    assert flat[:5].eq(0).all()
    assert flat[4999:5008].eq(0).all()


if __name__ == "__main__":
    torch.manual_seed(0)
    globals()[sys.argv[1]]()
    print("ok")

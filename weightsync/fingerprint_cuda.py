"""``fingerprint`` on a CUDA GPU: the same numbers, at the speed of its memory, in one or two launches for all tensors.

Every tensor becomes *slabs* of two dims, whatever its strides (the dim of unit stride becomes the columns, the largest
other one the rows, what remains is unrolled with its weights multiplied into a prefix), and every slab *tiles*, the
units of work. A thread sums 16 bytes of a row with 32-bit weights into 64 bits, then multiplies by the row's weight.
Runs in training workers and engines, on the current stream; imports Triton, so only code that has a GPU imports it.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from weightsync.errors import PlanError
from weightsync.fingerprint_weights import MASK, Item, weight
from weightsync.transports.cuda_tables import tiles_of

_RAW = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32}
_FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_FIELDS = 10  # of a slab: address, rows, cols, row stride, col stride, row at, col at, row salt, col salt, prefix
_NO_DIM = (1, 0, 0, -1)  # size, stride, origin, salt
_SHAPES = {"wide": (128, 512, 16), "flat": (1, 4096, 1)}  # rows and cols of a tile, rows at a time
_PROGRAMS_PER_SM = 32


def fingerprint_many(items: Sequence[Item], dtype: torch.dtype | None = None) -> list[int]:
    """``fingerprint`` of each (tensor, origin), all on CUDA, cast to ``dtype`` first if given. Waits for the GPU.

    Casts between float32, bfloat16 and float16 happen inside the kernel; any other makes a temporary of one tensor.
    """
    return starter(items, dtype)()() if items else []


def starter(items: Sequence[Item], dtype: torch.dtype | None) -> Callable[..., Callable[[], list[int]]]:
    """``fingerprint_many`` in three parts: tables now, launches at each call, results when that is called.

    The call takes the pinned int64 [items] that results are to be written to, if it matters; nothing is cast then.
    """
    fused = [i for i, (tensor, _) in enumerate(items) if _can_fuse(tensor.dtype, dtype)]
    others = [i for i in range(len(items)) if not _can_fuse(items[i][0].dtype, dtype)]
    tables = Fingerprints([items[i] for i in fused], dtype)

    def start(words: torch.Tensor | None = None) -> Callable[[], list[int]]:
        assert words is None or not others, "casts are made by torch"
        numbers: dict[int, int] = {}
        for i in others:
            tensor, origin = items[i]
            numbers[i] = Fingerprints([(tensor.detach().to(dtype), origin)]).run()[0]
        finish = tables.start(words)

        def finished() -> list[int]:
            numbers.update(zip(fused, finish(), strict=True))
            return [numbers[i] for i in range(len(items))]

        return finished

    return start


def _can_fuse(source: torch.dtype, target: torch.dtype | None) -> bool:
    return target is None or source == target or (source in _FLOATS and target in _FLOATS)


class Fingerprints:
    """A fixed list of (tensor, origin) whose tables stay on the GPU; ``run`` reads their memory as it is then.

    All tensors on one CUDA device; those of one source dtype share their launches. Raises PlanError on an element size
    that has no fingerprint or a cast that the kernel cannot do. Tensors are kept alive.
    """

    def __init__(self, items: Sequence[Item], dtype: torch.dtype | None = None) -> None:
        self._kept = [tensor.untyped_storage() for tensor, _ in items]
        self._count = len(items)
        self._launches: list[_Launch] = []
        if not items:
            return
        devices = {tensor.device for tensor, _ in items}
        assert len(devices) == 1, f"tensors of several devices: {devices}"
        self.device = devices.pop()
        groups: dict[tuple, list[list[int]]] = {}
        for index, (tensor, origin) in enumerate(items):
            target = dtype or tensor.dtype
            if not _can_fuse(tensor.dtype, target) or target.itemsize not in (1, 2, 4, 8):
                raise PlanError(f"no fingerprint on the GPU for {tensor.dtype} as {target}")
            for slab in slabs_of(tensor, origin):
                groups.setdefault(_class_of(slab, tensor.dtype, target), []).append([*slab, index])
        self._launches = [_Launch(key, torch.tensor(rows), self.device) for key, rows in groups.items()]

    def start(self, words: torch.Tensor | None = None) -> Callable[[], list[int]]:
        """Launch after the current stream's work; what is returned waits and gives one an item, in [0, 2**64).

        ``words``: pinned int64 [items] to write them to.
        """
        if not self._count:
            return list
        with torch.cuda.device(self.device):
            out = torch.zeros(self._count, dtype=torch.int64, device=self.device)
            for launch in self._launches:
                launch(out)
            found = torch.empty(self._count, dtype=torch.int64, pin_memory=True) if words is None else words
            found.copy_(out, non_blocking=True)
            done = torch.cuda.Event()
            done.record()

        def finish() -> list[int]:
            done.synchronize()
            return [number & MASK for number in found.tolist()]

        return finish

    def run(self) -> list[int]:
        """The fingerprints now. Ordered after the current stream's work; waits for it."""
        return self.start()()


class _Launch:
    """One kernel over all tiles of one class: (source dtype, target dtype, tile shape, aligned)."""

    def __init__(self, key: tuple, slabs: torch.Tensor, device: torch.device) -> None:
        source, target, shape, self.aligned = key
        self.rows, self.cols, self.step = _SHAPES[shape]
        size = min(source.itemsize, 4)
        self.read = _RAW[size] if source == target else _FLOATS[source]
        self.cast = None if source == target else _FLOATS[target]
        self.bits = _RAW[min(target.itemsize, 4)]
        self.vector = 16 // size if self.aligned else 1
        tiles = tiles_of(slabs[:, 1], slabs[:, 2], self.rows, self.cols)
        self.num_tiles = len(tiles)
        self.slabs, self.tiles = slabs.to(device), tiles.to(device)
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.grid = (min(self.num_tiles, sms * _PROGRAMS_PER_SM),)

    def __call__(self, out: torch.Tensor) -> None:
        _hash_tiles[self.grid](
            self.tiles, self.slabs, out, self.num_tiles, READ=self.read, CAST=self.cast, BITS=self.bits,
            ALIGNED=self.aligned, ROWS=self.rows, COLS=self.cols, STEP=self.step, VECTOR=self.vector, num_warps=8,
        )  # fmt: skip


def slabs_of(tensor: torch.Tensor, origin: Sequence[int]) -> list[list[int]]:
    """The two-dim slabs of a strided tensor, each as in ``_FIELDS``. None if it has no elements.

    In plain integers, not tensors: an engine's receiver shares the interpreter with a loop that never rests, and would
    lose it at every operation of torch.
    """
    assert len(origin) == tensor.dim(), f"origin {tuple(origin)} of a tensor of shape {tuple(tensor.shape)}"
    address, slabs = tensor.data_ptr(), _slabs(tensor.shape, tensor.stride(), tuple(origin), tensor.itemsize)
    return [[address + at, *rest] for at, *rest in slabs]


@functools.lru_cache(maxsize=256)
def _slabs(shape: tuple[int, ...], strides: tuple[int, ...], origin: tuple[int, ...], itemsize: int) -> list[list[int]]:
    """``slabs_of`` a tensor at address 0: thousands of experts lie alike."""
    if 0 in shape:
        return []
    assert all(o + n < 1 << 31 for o, n in zip(origin, shape, strict=True)), "a dim beyond 2**31 elements"
    words = 2 if itemsize == 8 else 1
    dims = [(n, s * words, o, _salt(d)) for d, (n, s, o) in enumerate(zip(shape, strides, origin))]
    if words == 2:
        dims.append((2, 1, 0, _salt(len(shape))))
    wide = sorted((d for d in dims if d[0] > 1), key=lambda d: (d[1] != 1, -d[0]))
    col = wide.pop(0) if wide else _NO_DIM
    row = wide.pop(0) if wide else _NO_DIM
    starts = [(0, 1)]  # address and prefix
    for size, stride, at, salt in [*wide, *(d for d in dims if d[0] == 1)]:
        step, dim = stride * min(itemsize, 4), _dim_of(salt)
        factors = [weight(dim, at + i) for i in range(size)]
        starts = [(a + i * step, p * factors[i] & MASK) for a, p in starts for i in range(size)]
    same = [row[0], col[0], row[1], col[1], row[2], col[2], row[3], col[3]]
    return [[address, *same, _signed(prefix)] for address, prefix in starts]


def _signed(number: int) -> int:
    """The int64 of the same bits."""
    return number - (1 << 64) if number >> 63 else number


def _salt(dim: int) -> int:
    return ((dim + 1) * 0x1E3779B1) & 0x7FFFFFFF


def _dim_of(salt: int) -> int:
    return salt * pow(0x1E3779B1, -1, 1 << 31) % (1 << 31) - 1


def _class_of(slab: list[int], source: torch.dtype, target: torch.dtype) -> tuple:
    """By which launch a slab is read: 16-byte reads need alignment of address, row stride and column count."""
    size = min(source.itemsize, 4)
    address, rows, cols, row_stride, col_stride = slab[:5]
    even = col_stride == 1 and cols * size % 16 == 0 and (rows == 1 or row_stride * size % 16 == 0)
    return source, target, "flat" if rows < 8 else "wide", even and address % 16 == 0


@triton.jit
def _weight(index, salt):
    h = (index.to(tl.uint32) * 0x2C1B3C6D) & 0x7FFFFFFF
    h = h ^ (h >> 15) ^ salt.to(tl.uint32)
    h = (h * 0x297A2D39) & 0x7FFFFFFF
    h = h ^ (h >> 13)
    h = (h * 0x5F356495) & 0x7FFFFFFF
    h = h ^ (h >> 16)
    return tl.where(salt < 0, 1, h * 2 + 1).to(tl.uint64)


@triton.jit(do_not_specialize=["num_tiles"])
def _hash_tiles(
    tiles, slabs, out, num_tiles, READ: tl.constexpr, CAST: tl.constexpr, BITS: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        slab = slabs + tl.load(tiles + tile * 3).to(tl.int64) * 11
        first_row, first_col = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
        address, rows, cols = tl.load(slab), tl.load(slab + 1).to(tl.int32), tl.load(slab + 2).to(tl.int32)
        row_stride, col_stride = tl.load(slab + 3), tl.load(slab + 4)
        row_at, col_at = tl.load(slab + 5).to(tl.int32), tl.load(slab + 6).to(tl.int32)
        row_salt, col_salt = tl.load(slab + 7).to(tl.int32), tl.load(slab + 8).to(tl.int32)
        if ALIGNED:
            address, row_stride = tl.multiple_of(address, 16), tl.multiple_of(row_stride, VECTOR)
            cols, first_col = tl.multiple_of(cols, VECTOR), tl.multiple_of(first_col, VECTOR)
        base = address.to(tl.pointer_type(READ))
        if ALIGNED:
            base = tl.multiple_of(base, 16)
        col = first_col + tl.arange(0, COLS)
        weights = _weight(col_at + col, col_salt)
        across = col.to(tl.int64) if ALIGNED else col.to(tl.int64) * col_stride
        total = tl.zeros([STEP, COLS // VECTOR], tl.uint64)
        for start in range(0, ROWS, STEP):
            row = first_row + start + tl.arange(0, STEP)
            inside = (row < rows)[:, None] & (col < cols)[None, :]
            x = tl.load(base + row.to(tl.int64)[:, None] * row_stride + across[None, :], mask=inside, other=0)
            if CAST is not None:
                x = x.to(CAST).to(BITS, bitcast=True)
            products = x.to(tl.uint64) * weights[None, :]
            sums = tl.sum(tl.reshape(products, [STEP, COLS // VECTOR, VECTOR]), axis=2)
            total += sums * _weight(row_at + row, row_salt)[:, None]
        number = tl.sum(total).to(tl.int64) * tl.load(slab + 9)
        tl.atomic_add(out + tl.load(slab + 10), number, sem="relaxed")

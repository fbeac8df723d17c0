"""Fingerprints of tensor memory that add up: one 64-bit number a box, whoever holds it and however it is cut.

    fingerprint(box) = sum over elements of  bits(element) * product over dims d of weight(d, index in the full tensor)

modulo 2**64. ``bits`` are the raw bits, zero-extended; an 8-byte element counts as two 4-byte words (low first) along
one more dim at the end. A 0-d tensor's product is 1. Weights are odd and no two indices of a dim share one, so a
flipped bit always shows, and the numbers of disjoint boxes sum to that of their union: a trainer's shards and an
engine's fused slices become comparable without moving either.

Runs in the training worker and in the engine. CPU tensors are summed here, exactly, in float64 products over
16-bit words; CUDA tensors in ``fingerprint_cuda``, which gives the same numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from weightsync.errors import PlanError
from weightsync.fingerprint_weights import MASK, MASK31, Item, weight

_ROW_WORDS = 1 << 12  # 2**12 words * 2**16 * 2**16 < 2**53: every partial sum is exact in float64
_PIECE_WORDS = 1 << 19  # scratch of 4 MiB: few operations, for an engine's event loop makes a thread wait at each
_BLOCK_WORDS = 1 << 23  # shares one set of multipliers; a copy of it (strided views) takes 16 MiB
_BLOCK_ROWS = 1 << 16


def fingerprint(tensor: torch.Tensor, origin: Sequence[int], dtype: torch.dtype | None = None) -> int:
    """The fingerprint of ``tensor``, any strided view, as the box that starts at ``origin`` of the full tensor.

    ``origin`` has one index a dim of ``tensor``. With ``dtype`` the elements are cast first (a piece at a time, the
    source is untouched). Returns an integer in [0, 2**64); an empty tensor gives 0. On CUDA this waits for the GPU.
    """
    return fingerprint_many([(tensor, origin)], dtype)[0]


def fingerprint_many(items: Sequence[Item], dtype: torch.dtype | None = None) -> list[int]:
    """``fingerprint`` of each (tensor, origin). All of them on one kind of device; on CUDA in few launches."""
    if any(tensor.is_cuda for tensor, _ in items):
        from weightsync import fingerprint_cuda

        return fingerprint_cuda.fingerprint_many(items, dtype)
    scratch = torch.empty(_PIECE_WORDS, dtype=torch.float64)
    with torch.no_grad():
        return [_on_cpu(tensor, tuple(origin), dtype or tensor.dtype, scratch) for tensor, origin in items]


class Fingerprinter:
    """Fingerprints of the same tensors, of one kind of device or several, again and again.

    ``items`` are (tensor, origin, dtype to cast to). Tensors are kept alive; whoever calls sees to it that they are
    still what is meant.
    """

    def __init__(self, items: Sequence[tuple[torch.Tensor, Sequence[int], torch.dtype]]) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, (tensor, _, dtype) in enumerate(items):
            groups.setdefault((tensor.device, dtype), []).append(i)
        self._count = len(items)
        self._groups = [
            (members, _starter([(items[i][0], items[i][1]) for i in members], device, dtype))
            for (device, dtype), members in groups.items()
        ]

    def start(self) -> Callable[[], list[int]]:
        """Begin, after what the current streams hold; what is returned waits and gives one fingerprint an item.

        On a CPU everything is done at once.
        """
        begun = [(members, start()) for members, start in self._groups]

        def finish() -> list[int]:
            numbers = [0] * self._count
            for members, found in begun:
                for i, number in zip(members, found(), strict=True):
                    numbers[i] = number
            return numbers

        return finish

    @property
    def order(self) -> list[int]:
        """Which item each word is of that ``write`` writes."""
        return [i for members, _ in self._groups for i in members]

    def write(self, words: torch.Tensor) -> None:
        """Have the GPU write int64 [items], in ``order``, after what the current stream holds. For CUDA alone."""
        at = 0
        for members, start in self._groups:
            start(words[at : at + len(members)])
            at += len(members)

    def run(self) -> list[int]:
        """The fingerprints now, one an item."""
        return self.start()()


def _starter(items: list[Item], device: torch.device, dtype: torch.dtype) -> Callable[..., Callable[[], list[int]]]:
    if device.type == "cuda":
        from weightsync import fingerprint_cuda

        return fingerprint_cuda.starter(items, dtype)

    def start(words: torch.Tensor | None = None) -> Callable[[], list[int]]:
        assert words is None, "nobody but a GPU writes them by itself"
        numbers = fingerprint_many(items, dtype)
        return lambda: numbers

    return start


def _on_cpu(tensor: torch.Tensor, origin: tuple[int, ...], dtype: torch.dtype, scratch: torch.Tensor) -> int:
    assert len(origin) == tensor.dim(), f"origin {origin} of a tensor of shape {tuple(tensor.shape)}"
    if dtype.itemsize not in (1, 2, 4, 8):
        raise PlanError(f"no fingerprint for dtype {dtype}: elements of {dtype.itemsize} bytes")
    blocks = _blocks(tensor.detach(), origin, max(1, dtype.itemsize // 2))
    return sum(_of_block(block, at, dtype, scratch) for block, at in blocks) & MASK


def _blocks(tensor: torch.Tensor, origin: tuple[int, ...], words_each: int) -> Iterator[tuple[torch.Tensor, tuple]]:
    """Cut until rows (the last dim) are short and blocks small: first the columns, then the longest other dim."""
    if tensor.numel() == 0:
        return
    columns = tensor.shape[-1] if tensor.dim() else 1
    rows = tensor.numel() // columns
    if columns * words_each > _ROW_WORDS:
        dim, count = tensor.dim() - 1, _ROW_WORDS // words_each
    elif (cut := min(_BLOCK_ROWS, _BLOCK_WORDS // (columns * words_each))) < rows:
        dim = max(range(tensor.dim() - 1), key=lambda d: tensor.shape[d])
        count = max(1, cut * tensor.shape[dim] // rows)
    else:
        yield tensor, origin
        return
    for start in range(0, tensor.shape[dim], count):
        at = (*origin[:dim], origin[dim] + start, *origin[dim + 1 :])
        part = tensor.narrow(dim, start, min(count, tensor.shape[dim] - start))
        yield from _blocks(part, at, words_each)


def _of_block(block: torch.Tensor, origin: tuple[int, ...], dtype: torch.dtype, scratch: torch.Tensor) -> int:
    columns = block.shape[-1] if block.dim() else 1
    rows = block.reshape(-1, columns)
    digits = _word_digits(len(origin), origin[-1] if origin else 0, columns, dtype.itemsize)
    step = max(1, _PIECE_WORDS // digits.shape[1])
    sums = torch.empty(len(digits), len(rows), dtype=torch.float64)
    for start in range(0, len(rows), step):
        words = _words(rows[start : start + step], dtype, scratch)
        for d, digit in enumerate(digits):  # not one matrix product: that would spread over threads and wait for them
            torch.mv(words, digit, out=sums[d, start : start + step])
    sums = sums.to(torch.int64)
    total = sums[0]
    for d in range(1, len(sums)):
        total = total + sums[d] * (1 << 16 * d)  # int64 wraps: that is the modulus
    return int((total * _row_weights(origin, tuple(block.shape))).sum())


def _words(rows: torch.Tensor, dtype: torch.dtype, scratch: torch.Tensor) -> torch.Tensor:
    """The elements of [rows, columns] as float64 words of 16 bits (8 for one-byte dtypes), in ``scratch``."""
    if rows.dtype != dtype or rows.stride(1) != 1:
        rows = torch.empty(rows.shape, dtype=dtype).copy_(rows)
    words = rows.view(torch.uint8 if dtype.itemsize == 1 else torch.uint16)
    return scratch[: words.numel()].view(words.shape).copy_(words)


@functools.lru_cache(maxsize=32)
def _row_weights(origin: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """For each row (all dims but the last, flattened) the product of its weights, modulo 2**64, as int64."""
    product = torch.ones(1, dtype=torch.int64)
    for dim in range(len(origin) - 1):
        own = _weights(dim, origin[dim], shape[dim])
        product = (product[:, None] * own).reshape(-1)
    return product


def _weights(dim: int, start: int, count: int) -> torch.Tensor:
    assert start + count <= MASK31, f"dim {dim} is longer than 2**31 elements"
    return weight(dim, torch.arange(start, start + count))


@functools.lru_cache(maxsize=32)
def _word_digits(ndim: int, start: int, columns: int, itemsize: int) -> torch.Tensor:
    """The multiplier of each word of a row, in base 2**16: float64 [digits, words], low digit first."""
    multiplier = _weights(ndim - 1, start, columns) if ndim else torch.ones(1, dtype=torch.int64)
    if itemsize == 8:
        multiplier = (multiplier[:, None] * _weights(ndim, 0, 2)).reshape(-1)
    if itemsize >= 4:
        multiplier = (multiplier[:, None] * torch.tensor([1, 1 << 16])).reshape(-1)
    num_digits = {1: 2, 2: 2, 4: 3, 8: 4}[itemsize]
    return torch.stack([(multiplier >> 16 * d) & 0xFFFF for d in range(num_digits)]).to(torch.float64)

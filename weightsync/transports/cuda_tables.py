"""Pairs of GPU views as the tables that the copy kernels read. Pure arithmetic on addresses: needs no GPU.

A pair whose dims merge into one contiguous range is a *piece*: neighbouring pieces join, and long ones are cut into
chunks. Everything else (slices of rows, transposed experts) becomes two-dim *boxes*, cut into tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from weightsync.errors import TransferError

Pair = tuple[torch.Tensor, torch.Tensor]
BoxClass = tuple[torch.dtype, torch.dtype, int, int, int]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CHUNK_BYTES = 64 << 10
_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Piece(NamedTuple):
    """A contiguous copy: addresses, and elements of the two dtypes (bytes as int8 where they are one)."""

    target: int
    source: int
    length: int
    write: torch.dtype
    read: torch.dtype


class Boxes(NamedTuple):
    """Two-dim boxes that share a launch: int64 [n, 8] as ``cuda_kernels.copy_tiles`` reads them, and their class."""

    write: torch.dtype
    read: torch.dtype
    target_unit: int
    source_unit: int
    vector: int
    rows: torch.Tensor


def split(pairs: Iterable[Pair]) -> tuple[list[Piece], list[Boxes]]:
    """Pairs as merged contiguous pieces and, by class, boxes.

    In plain integers, and the arithmetic of each geometry once: thousands of experts share one, and an engine's
    receiver may lose the interpreter at every operation of torch.
    """
    pieces: list[Piece] = []
    groups: dict[BoxClass, list[tuple[int, ...]]] = {}
    for target, source in pairs:
        write, read = _dtypes(target, source)
        sizes, to, at = canonical(target.shape, target.stride(), source.stride())
        assert not any(n > 1 and s == 0 for n, s in zip(sizes, to, strict=True)), "a target that overlaps itself"
        if not sizes or (len(sizes) == 1 and to == at == (1,)):
            pieces.append(_piece(target.data_ptr(), source.data_ptr(), sizes[0] if sizes else 1, write, read))
            continue
        key, rows = _boxes(target.data_ptr(), source.data_ptr(), sizes, to, at, write, read)
        groups.setdefault(key, []).extend(rows)
    return merge(pieces), [Boxes(*key, torch.tensor(rows)) for key, rows in groups.items()]


def _dtypes(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.dtype, torch.dtype]:
    assert target.shape == source.shape, f"target {tuple(target.shape)}, source {tuple(source.shape)}"
    if target.dtype == source.dtype and target.itemsize in _INTS:
        return _INTS[target.itemsize], _INTS[target.itemsize]
    if target.dtype not in FLOATS or source.dtype not in FLOATS:
        raise TransferError(f"a copy cannot cast {source.dtype} to {target.dtype}: publish it through an arena")
    return target.dtype, source.dtype


def _piece(target: int, source: int, count: int, write: torch.dtype, read: torch.dtype) -> Piece:
    if write == read:
        return Piece(target, source, count * write.itemsize, torch.int8, torch.int8)
    return Piece(target, source, count, write, read)


@functools.lru_cache(maxsize=1024)
def canonical(
    shape: tuple[int, ...], target: tuple[int, ...], source: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Sizes, target and source strides with unit dims dropped, outermost target stride first, and dims merged that
    are contiguous in both."""
    dims = [d for d in zip(shape, target, source, strict=True) if d[0] != 1]
    merged: list[tuple[int, int, int]] = []
    for size, to, at in sorted(dims, key=lambda d: (-d[1], -d[2])):
        if merged and merged[-1][1] == to * size and merged[-1][2] == at * size:
            merged[-1] = (merged[-1][0] * size, to, at)
        else:
            merged.append((size, to, at))
    sizes, targets, sources = zip(*merged, strict=True) if merged else ((), (), ())
    return tuple(sizes), tuple(targets), tuple(sources)


def merge(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces by target address, neighbours in both source and target joined."""
    out: list[Piece] = []
    for piece in sorted(pieces):
        last = out[-1] if out else None
        if last and last[3:] == piece[3:] and _follows(last, piece):
            out[-1] = last._replace(length=last.length + piece.length)
        else:
            out.append(piece)
    return out


def within_allocations(piece: Piece, allocation_of: Callable[[int], tuple[int, int]]) -> list[Piece]:
    """A piece of plain bytes cut where an allocation ends: neighbours in address space need not be one allocation,
    and the driver refuses a copy over two. ``allocation_of`` gives an address's allocation as (base, bytes).
    """
    assert piece.read == piece.write == torch.int8, "driver copies move bytes"
    parts, end = [], piece.length
    at = 0
    while at < end:
        ends = [sum(allocation_of(start + at)) - start for start in (piece.target, piece.source)]
        length = min(end, *ends) - at
        assert length > 0, f"address {piece.target + at:#x} or {piece.source + at:#x} is in no allocation"
        parts.append(piece._replace(target=piece.target + at, source=piece.source + at, length=length))
        at += length
    return parts


def _follows(last: Piece, piece: Piece) -> bool:
    return (
        last.target + last.length * last.write.itemsize == piece.target
        and last.source + last.length * last.read.itemsize == piece.source
    )


def chunks_of(pieces: Iterable[Piece]) -> dict[tuple, torch.Tensor]:
    """Cut pieces into chunks for ``cuda_kernels.copy_chunks``: (read, write, vector) -> int64 [n, 3].

    Plain bytes go as 16-byte vectors of int32 where source and target are aligned alike, with the ends as bytes.
    """
    rows: dict[tuple, list[tuple[int, int, int]]] = {}
    for piece in pieces:
        for key, row in _aligned_parts(piece):
            rows.setdefault(key, []).append(row)
    return {key: _cut(torch.tensor(found), *key) for key, found in rows.items()}


def _aligned_parts(piece: Piece) -> list[tuple[tuple, tuple[int, int, int]]]:
    target, source, count, write, read = piece
    if write != read:
        vector = 16 // min(write.itemsize, read.itemsize)
        body = count - count % vector if target % 16 == 0 and source % 16 == 0 else 0
        parts = [((read, write, vector), (source, target, body))]
        rest = (source + body * read.itemsize, target + body * write.itemsize, count - body)
        return [p for p in [*parts, ((read, write, 1), rest)] if p[1][2]]
    same, bytewise = (target - source) % 16 == 0, (torch.int8, torch.int8, 1)
    unit = next(u for u in (4, 2, 1) if (target - source) % u == 0)
    head = min(count, -target % (16 if same else unit))
    body = (count - head) // (16 if same else unit) * (16 if same else unit)
    kind = _INTS[4 if same else unit]
    parts = [
        (bytewise, (source, target, head)),
        ((kind, kind, 4 if same else 1), (source + head, target + head, body // kind.itemsize)),
        (bytewise, (source + head + body, target + head + body, count - head - body)),
    ]
    return [p for p in parts if p[1][2]]


def _cut(rows: torch.Tensor, read: torch.dtype, write: torch.dtype, vector: int) -> torch.Tensor:
    """Rows of (source, target, count) in chunks of at most CHUNK_BYTES written."""
    length = chunk_elements(read, write, vector)
    counts = (rows[:, 2] + length - 1) // length
    row = torch.repeat_interleave(torch.arange(len(rows)), counts)
    first = (torch.arange(len(row)) - (torch.cumsum(counts, 0) - counts)[row]) * length
    source, target = rows[row, 0] + first * read.itemsize, rows[row, 1] + first * write.itemsize
    return torch.stack([source, target, torch.clamp(rows[row, 2] - first, max=length)], dim=1)


def chunk_elements(read: torch.dtype, write: torch.dtype, vector: int) -> int:
    """Elements of a full chunk: CHUNK_BYTES of the wider dtype; a sixteenth where there are no vectors."""
    return CHUNK_BYTES // max(read.itemsize, write.itemsize) // (1 if vector > 1 else 16)


def _boxes(
    target: int, source: int, sizes: tuple, to: tuple, at: tuple, write: torch.dtype, read: torch.dtype
) -> tuple[BoxClass, list[tuple[int, ...]]]:
    """A pair's boxes and their class."""
    target_unit, source_unit, vector, starts, same = _box_geometry(sizes, to, at, write, read)
    rows = [(source + read_at, target + write_at, *same) for read_at, write_at in starts]
    if vector > 1 and any(row[0] % 16 or row[1] % 16 for row in rows):
        vector = 1
    return (write, read, target_unit, source_unit, vector), rows


@functools.lru_cache(maxsize=256)
def _box_geometry(
    sizes: tuple, to: tuple, at: tuple, write: torch.dtype, read: torch.dtype
) -> tuple[int, int, int, list[tuple[int, int]], tuple[int, ...]]:
    """Of a pair's boxes, wherever it lies: target and source unit, elements of a vector, the bytes at which each
    begins in source and target, and rows, columns and strides, which all share.

    Columns are the target's inner dim, rows the source's inner or the longest.
    """
    if len(sizes) == 1:
        sizes, to, at = (1, *sizes), (0, *to), (0, *at)
    col, others = len(sizes) - 1, list(range(len(sizes) - 1))
    row = next((d for d in others if at[d] == 1 and at[col] != 1), max(others, key=lambda d: sizes[d]))
    starts = [(0, 0)]
    for d in others:
        if d != row:
            read_step, write_step = at[d] * read.itemsize, to[d] * write.itemsize
            starts = [(r + i * read_step, w + i * write_step) for r, w in starts for i in range(sizes[d])]
    same = (sizes[row], sizes[col], at[row], at[col], to[row], to[col])
    source_unit = 1 if at[col] == 1 else 0 if at[row] == 1 else -1
    target_unit = 1 if to[col] == 1 else -1
    vector = 16 // min(read.itemsize, write.itemsize)
    strides = [s for s in same[2:] if s != 1]
    sizes_fit = sizes[col] % vector == 0 and (source_unit != 0 or sizes[row] % vector == 0)
    even = sizes_fit and -1 not in (source_unit, target_unit) and all(s % vector == 0 for s in strides)
    return target_unit, source_unit, vector if even else 1, starts, same


def tiles_of(rows: torch.Tensor, cols: torch.Tensor, tile_rows: int, tile_cols: int) -> torch.Tensor:
    """Cut slabs of ``rows`` x ``cols`` (int64, one a slab) into tiles: int32 [tiles, 3], slab, first row, first col."""
    down, across = (rows + tile_rows - 1) // tile_rows, (cols + tile_cols - 1) // tile_cols
    counts = down * across
    slab = torch.repeat_interleave(torch.arange(len(rows)), counts)
    local = torch.arange(int(counts.sum())) - (torch.cumsum(counts, 0) - counts)[slab]
    row, col = local // across[slab] * tile_rows, local % across[slab] * tile_cols
    return torch.stack([slab, row, col], dim=1).to(torch.int32)

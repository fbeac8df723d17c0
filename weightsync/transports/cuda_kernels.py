"""Triton kernels that execute tables of copies: contiguous pieces, and tiles of strided, transposed or cast boxes.

Addresses come from tables, so one launch serves thousands of tensors. Each program loops over its share of the table.
Imported only where there is a GPU.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_chunks"])
def copy_chunks(
    chunks, num_chunks, READ: tl.constexpr, WRITE: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """``chunks`` is int64 [num_chunks, 3]: source address, target address, elements (at most BLOCK * STEPS).

    With VECTOR > 1 addresses are multiples of 16 bytes and counts of VECTOR elements.
    """
    for chunk in range(tl.program_id(0), num_chunks, tl.num_programs(0)):
        at = chunks + tl.cast(chunk, tl.int64) * 3
        source, target, count = tl.load(at), tl.load(at + 1), tl.load(at + 2).to(tl.int32)
        source, target = source.to(tl.pointer_type(READ)), target.to(tl.pointer_type(WRITE))
        if VECTOR > 1:
            source, target, count = (
                tl.multiple_of(source, 16),
                tl.multiple_of(target, 16),
                tl.multiple_of(count, VECTOR),
            )
        for step in tl.static_range(STEPS):
            offsets = step * BLOCK + tl.arange(0, BLOCK)
            inside = offsets < count
            x = tl.load(source + offsets, mask=inside)
            tl.store(target + offsets, x.to(WRITE), mask=inside)


@triton.jit(do_not_specialize=["num_tiles"])
def copy_tiles(
    tiles, boxes, num_tiles, READ: tl.constexpr, WRITE: tl.constexpr, SOURCE_UNIT: tl.constexpr,
    TARGET_UNIT: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """``tiles`` is int32 [num_tiles, 3]: box, first row, first column; ``boxes`` int64 [boxes, 8]: source and target
    address, rows, columns, source strides (row, column), target strides.

    SOURCE_UNIT and TARGET_UNIT name the dim of unit stride: 0 rows, 1 columns, -1 neither. With VECTOR > 1 addresses
    are multiples of 16 bytes; the columns, the rows if SOURCE_UNIT is 0, and all other strides multiples of VECTOR.
    """
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        box = boxes + tl.load(tiles + tile * 3).to(tl.int64) * 8
        first_row, first_col = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
        source, target = tl.load(box), tl.load(box + 1)
        rows, cols = tl.load(box + 2).to(tl.int32), tl.load(box + 3).to(tl.int32)
        source_row, source_col = tl.load(box + 4), tl.load(box + 5)
        target_row, target_col = tl.load(box + 6), tl.load(box + 7)
        source, target = source.to(tl.pointer_type(READ)), target.to(tl.pointer_type(WRITE))
        if VECTOR > 1:
            source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
            cols = tl.multiple_of(cols, VECTOR)
            if SOURCE_UNIT == 0:
                rows = tl.multiple_of(rows, VECTOR)
            first_row, first_col = tl.multiple_of(first_row, VECTOR), tl.multiple_of(first_col, VECTOR)
            source_row, source_col = tl.multiple_of(source_row, VECTOR), tl.multiple_of(source_col, VECTOR)
            target_row, target_col = tl.multiple_of(target_row, VECTOR), tl.multiple_of(target_col, VECTOR)
        row, col = first_row + tl.arange(0, ROWS), first_col + tl.arange(0, COLS)
        inside = (row < rows)[:, None] & (col < cols)[None, :]
        row, col = row.to(tl.int64)[:, None], col.to(tl.int64)[None, :]
        read_row = row if SOURCE_UNIT == 0 else row * source_row
        read_col = col if SOURCE_UNIT == 1 else col * source_col
        write_row = row if TARGET_UNIT == 0 else row * target_row
        write_col = col if TARGET_UNIT == 1 else col * target_col
        x = tl.load(source + read_row + read_col, mask=inside)
        tl.store(target + write_row + write_col, x.to(WRITE), mask=inside)

"""Copy tables: what merges, what is cut, what is refused. The addresses are of CPU tensors, never read here."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.errors import TransferError
from weightsync.transports.cuda_tables import (
    CHUNK_BYTES,
    Piece,
    canonical,
    chunks_of,
    merge,
    split,
    tiles_of,
    within_allocations,
)

BYTE = torch.int8


def test_dims_contiguous_in_both_become_one() -> None:
    assert canonical((2, 3, 4), (12, 4, 1), (12, 4, 1)) == ((24,), (1,), (1,))
    assert canonical((2, 3, 4), (12, 4, 1), (24, 8, 1)) == ((6, 4), (4, 1), (8, 1))
    assert canonical((3, 4), (4, 1), (1, 3)) == ((3, 4), (4, 1), (1, 3))
    assert canonical((1, 5, 1), (9, 1, 3), (7, 1, 2)) == ((5,), (1,), (1,))
    assert canonical((), (), ()) == ((), (), ())


def test_dims_merge_whatever_their_order_in_the_tensor() -> None:
    assert canonical((4, 3), (1, 4), (1, 4)) == ((12,), (1,), (1,))


def test_neighbours_in_both_source_and_target_join() -> None:
    pieces = [Piece(100, 900, 10, BYTE, BYTE), Piece(110, 910, 5, BYTE, BYTE), Piece(115, 990, 5, BYTE, BYTE)]
    assert merge(reversed(pieces)) == [Piece(100, 900, 15, BYTE, BYTE), Piece(115, 990, 5, BYTE, BYTE)]


def test_pieces_of_another_cast_do_not_join() -> None:
    pieces = [Piece(100, 900, 4, torch.bfloat16, torch.float32), Piece(108, 916, 4, torch.bfloat16, torch.float16)]
    assert merge(pieces) == pieces


def test_consecutive_rows_become_one_piece() -> None:
    source, target = torch.zeros(8, 16), torch.zeros(8, 16)
    pieces, boxes = split([(target[i], source[i]) for i in (2, 0, 1)])
    assert pieces == [Piece(target.data_ptr(), source.data_ptr(), 3 * 16 * 4, BYTE, BYTE)]
    assert boxes == []


def test_transposed_experts_share_one_launch() -> None:
    source, target = torch.zeros(4, 32, 64), torch.zeros(4, 64, 32)
    pieces, boxes = split([(target[e], source[e].t()) for e in range(4)])
    assert pieces == []
    assert len(boxes) == 1
    assert (boxes[0].target_unit, boxes[0].source_unit, boxes[0].rows.shape) == (1, 0, (4, 8))


def test_pairs_that_lie_alike_keep_their_own_addresses_and_alignment() -> None:
    """The geometry that they share is worked out once; where they begin decides whether vectors can be read."""
    memory, target = torch.zeros(4096, dtype=torch.int16), torch.zeros(8, 16, 16, dtype=torch.int16)
    starts = [0, 256, 512 + 1, 1024]  # the third is not at a multiple of 16 bytes
    sources = [memory.as_strided((16, 16), (1, 16), start) for start in starts]
    pieces, boxes = split([(target[i], source) for i, source in enumerate(sources)])
    assert pieces == []
    assert [(b.vector, len(b.rows)) for b in boxes] == [(8, 3), (1, 1)]
    found = {tuple(row[:2]) for b in boxes for row in b.rows.tolist()}
    assert found == {(source.data_ptr(), target[i].data_ptr()) for i, source in enumerate(sources)}


def test_a_box_of_three_dims_is_a_row_of_boxes() -> None:
    source, target = torch.zeros(3, 8, 4), torch.zeros(3, 4, 8)
    _, (boxes,) = split([(target, source.transpose(1, 2))])
    steps = [(source[i].data_ptr(), target[i].data_ptr()) for i in range(3)]
    assert [tuple(row[:2]) for row in boxes.rows.tolist()] == steps


def test_a_cast_that_copying_cannot_do_is_refused() -> None:
    with pytest.raises(TransferError, match=r"int32.*bfloat16.*arena"):
        split([(torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32))])


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 20), st.integers(1, 300_000)), min_size=1, max_size=5
    )
)
def test_chunks_cover_each_byte_once(parts: list[tuple[int, int, int]]) -> None:
    spaced = [Piece(t + (i << 30), s + (i << 40), n, BYTE, BYTE) for i, (t, s, n) in enumerate(parts)]
    ranges = []
    for (read, write, vector), table in chunks_of(spaced).items():
        assert read == write
        for source, target, count in table.tolist():
            assert 0 < count * read.itemsize <= CHUNK_BYTES
            if vector > 1:
                assert source % 16 == target % 16 == count % vector == 0
            assert source % read.itemsize == target % read.itemsize == 0
            ranges.append((target, source, count * read.itemsize))
    assert merge([Piece(*r, BYTE, BYTE) for r in ranges]) == merge(spaced)
    assert sum(r[2] for r in ranges) == sum(p.length for p in spaced)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), min_size=1, max_size=6))
def test_tiles_cover_each_box_once(shapes: list[tuple[int, int]]) -> None:
    rows, cols = torch.tensor(shapes).unbind(1)
    seen = [torch.zeros(shape, dtype=torch.int32) for shape in shapes]
    for box, row, col in tiles_of(rows, cols, 32, 64).tolist():
        assert row < shapes[box][0]
        assert col < shapes[box][1]
        seen[box][row : row + 32, col : col + 64] += 1
    assert all(bool(s.eq(1).all()) for s in seen)


def test_driver_copies_never_span_two_allocations():
    """Neighbours in address space may be different allocations, on either side; the driver refuses a copy over both."""
    targets, sources = [(1000, 300), (1300, 700)], [(5000, 450), (5450, 550)]

    def allocation_of(address: int) -> tuple[int, int]:
        return next((b, n) for b, n in targets + sources if b <= address < b + n)

    whole = Piece(1000, 5000, 1000, torch.int8, torch.int8)
    parts = within_allocations(whole, allocation_of)
    assert [(p.target, p.source, p.length) for p in parts] == [(1000, 5000, 300), (1300, 5300, 150), (1450, 5450, 550)]

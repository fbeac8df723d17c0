"""A parameter's writes, replayed element by element, against what ``settle`` says remains of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.boxes import dense_strides
from weightsync.overlaps import Overlap, Write, settle
from weightsync.spec import Box, View

SHAPE = (4, 6)


def fill(rows, columns, value):
    strides = dense_strides(SHAPE)
    offset = rows[0] * strides[0] + columns[0]
    return Write(View(0, offset, strides), (rows[1] - rows[0], columns[1] - columns[0]), value=value)


def copy(rows, columns, tensor):
    return fill(rows, columns, 0.0)._replace(
        tensor=tensor, box=Box((0, 0), (rows[1] - rows[0], columns[1] - columns[0]))
    )


def painted(writes):
    memory = torch.full(SHAPE, -1.0)
    for w in writes:
        memory.as_strided(w.size, w.at.strides, w.at.offset).fill_(w.value if w.is_fill else float(w.tensor))
    return memory


def test_the_same_region_again_replaces_the_earlier_write():
    writes = [copy((0, 2), (0, 6), "1"), copy((0, 2), (0, 6), "2")]
    assert settle(writes, SHAPE, dense_strides(SHAPE)) == writes[1:]


def test_a_fill_is_cut_where_a_copy_follows():
    writes = [fill((0, 4), (0, 6), 7.0), copy((1, 3), (2, 4), "2")]
    settled = settle(writes, SHAPE, dense_strides(SHAPE))
    assert torch.equal(painted(settled), painted(writes))
    assert sum(w.size[0] * w.size[1] for w in settled) == 24


def test_a_copy_that_is_partly_overwritten_is_refused():
    with pytest.raises(Overlap, match="over part of an earlier copy"):
        settle([copy((0, 2), (0, 6), "1"), copy((1, 3), (0, 6), "2")], SHAPE, dense_strides(SHAPE))


def test_interleaved_columns_do_not_overlap():
    writes = [copy((0, 4), (0, 3), "1"), copy((0, 4), (3, 6), "2")]
    assert settle(writes, SHAPE, dense_strides(SHAPE)) == writes


def test_memory_with_gaps_is_told_by_spans_only():
    rows = [Write(View(0, 0, (8, 1)), (1, 6), value=1.0), Write(View(0, 8, (8, 1)), (1, 6), value=2.0)]
    assert settle(rows, SHAPE, (8, 1)) == rows
    with pytest.raises(Overlap, match="not boxes"):
        settle(
            [Write(View(0, 0, (8, 1)), (4, 3), value=1.0), Write(View(0, 3, (8, 1)), (4, 3), value=2.0)], SHAPE, (8, 1)
        )


@st.composite
def some_writes(draw):
    writes = []
    for i in range(draw(st.integers(1, 5))):
        r, c = draw(st.integers(0, 3)), draw(st.integers(0, 5))
        rows, columns = (r, draw(st.integers(r + 1, 4))), (c, draw(st.integers(c + 1, 6)))
        writes.append(copy(rows, columns, str(i)) if draw(st.booleans()) else fill(rows, columns, float(i)))
    return writes


@given(some_writes())
def test_what_remains_paints_the_same_and_nothing_twice(writes):
    try:
        settled = settle(writes, SHAPE, dense_strides(SHAPE))
    except Overlap:
        assert sum(not w.is_fill for w in writes) >= 1
        return
    assert torch.equal(painted(settled), painted(writes))
    times = torch.zeros(SHAPE)
    for w in settled:
        times.as_strided(w.size, w.at.strides, w.at.offset).add_(1)
    assert times.max() <= 1

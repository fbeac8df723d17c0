"""Views told as boxes: what torch's own views of a tensor select is exactly the box, and what is no box is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.spec import Box
from weightsync.strides import Run, source_box


def told(shape, view, target=None):
    """``source_box`` of a view of arange(shape), written into ``target`` (default: a new row-major tensor)."""
    target = torch.empty(view.shape) if target is None else target
    runs = [Run(s, t, n) for s, t, n in zip(view.stride(), target.stride(), view.shape)]
    return source_box(shape, view.storage_offset(), runs)


def replay(shape, view):
    """The target as the box says it must look: every element of the box put where its strides say."""
    source = torch.arange(torch.Size(shape).numel()).view(shape)
    found = told(shape, view)
    if found is None:
        return None
    box, strides = found
    target = torch.full((view.numel(),), -1)
    part = source[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size))]
    target.as_strided(box.size, strides).copy_(part)
    return target


def numbered(*shape):
    return torch.arange(torch.Size(shape).numel()).view(shape)


@pytest.mark.parametrize(
    ("make", "offset", "size"),
    [
        (lambda t: t.narrow(0, 1, 2), (1, 0, 0), (2, 4, 5)),
        (lambda t: t.narrow(2, 3, 2).narrow(1, 1, 2), (0, 1, 3), (3, 2, 2)),
        (lambda t: t.transpose(0, 2), (0, 0, 0), (3, 4, 5)),
        (lambda t: t[1].t(), (1, 0, 0), (1, 4, 5)),
        (lambda t: t[1:].reshape(-1), (1, 0, 0), (2, 4, 5)),
        (lambda t: t.view(12, 5)[4:8], (1, 0, 0), (1, 4, 5)),
        (lambda t: t.view(3, 2, 2, 5), (0, 0, 0), (3, 4, 5)),
        (lambda t: t[2, 3, 4], (2, 3, 4), (1, 1, 1)),
        (lambda t: t.unsqueeze(1)[:, :, 2:3], (0, 2, 0), (3, 1, 5)),
    ],
)
def test_views_that_are_boxes(make, offset, size):
    view = make(numbered(3, 4, 5))
    box, _ = told((3, 4, 5), view)
    assert box == Box(offset, size)
    assert torch.equal(replay((3, 4, 5), view), view.reshape(-1))


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t[::2],
        lambda t: t[:, ::3],
        lambda t: t.narrow(0, 0, 1).expand(4, 4, 5),
        lambda t: t.diagonal(),
        lambda t: t.view(12, 5)[2:6],
        lambda t: t.view(3, 2, 2, 5).transpose(0, 1),
    ],
)
def test_views_that_are_no_boxes(make):
    assert told((3, 4, 5), make(numbered(3, 4, 5))) is None


def test_no_dims_and_unit_dims():
    assert source_box((), 0, []) == (Box((), ()), ())
    assert source_box((1, 1), 0, [Run(1, 1, 1), Run(1, 1, 1)]) == (Box((0, 0), (1, 1)), (0, 0))


@st.composite
def shape_and_view(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    view = numbered(*shape)
    for d in range(len(shape)):
        start = draw(st.integers(0, shape[d] - 1))
        view = view.narrow(d, start, draw(st.integers(1, shape[d] - start)))
    view = view.permute(draw(st.permutations(range(view.dim()))))
    if draw(st.booleans()):
        view = view.unsqueeze(draw(st.integers(0, view.dim())))
    return shape, view


@given(shape_and_view())
def test_any_slice_in_any_order_is_its_box(case):
    shape, view = case
    assert torch.equal(replay(shape, view), view.reshape(-1))

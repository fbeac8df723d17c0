"""Boxes against numpy: a box is a set of positions, and the functions are set operations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.weights import dense, slices, view_of, whole
from weightsync import boxes
from weightsync.spec import Box, Rule

SPACE = 6


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Box, Box]:
    ndim = draw(st.integers(0, 3))
    return tuple(
        Box(
            offset := tuple(draw(st.integers(0, SPACE - 1)) for _ in range(ndim)),
            tuple(draw(st.integers(0, SPACE - o)) for o in offset),
        )
        for _ in range(2)
    )


def mask(box: Box) -> np.ndarray:
    cells = np.zeros((SPACE,) * len(box.size), bool)
    cells[slices(box)] = True
    return cells


@given(pairs())
def test_intersection_holds_the_elements_of_both(pair: tuple[Box, Box]) -> None:
    a, b = pair
    common = boxes.intersect(a, b)
    expected = mask(a) & mask(b)
    assert (common is None) == (not expected.any())
    if common is not None:
        assert (mask(common) == expected).all()


@given(pairs())
def test_difference_is_disjoint_and_exact(pair: tuple[Box, Box]) -> None:
    a, b = pair
    rest = boxes.subtract(a, b)
    assert (
        sum((mask(box).astype(int) for box in rest), np.zeros((SPACE,) * len(a.size), int)) == (mask(a) & ~mask(b))
    ).all()
    assert all(boxes.volume(box) for box in rest)


@given(pairs())
def test_contains_is_the_subset_relation(pair: tuple[Box, Box]) -> None:
    outer, inner = pair
    assert boxes.contains(outer, inner) == (not (mask(inner) & ~mask(outer)).any())


@pytest.mark.parametrize("shape", [(), (1,), (4,), (3, 1, 5), (2, 3, 4)])
def test_dense_strides_are_those_of_a_row_major_array(shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, np.uint8)
    assert boxes.dense_strides(shape) == array.strides


def test_a_box_is_shown_as_slices() -> None:
    assert boxes.show(Box((0, 3), (4, 5))) == "[0:4, 3:8]"


# A stacked, transposed expert tensor [expert, in, out]: expert 2 is a Hugging Face tensor [out, in].
EXPERTS = Rule("experts", Box((2, 0, 0), (1, 4, 5)), "experts.2.weight", (5, 4), (0, 0), (2, 1))


@pytest.mark.parametrize("held", [whole((3, 4, 5)), Box((2, 1, 0), (1, 2, 5)), Box((1, 0, 3), (2, 4, 2))])
def test_a_piece_is_the_shards_part_in_target_coordinates(held: Box) -> None:
    full = np.arange(60).reshape(3, 4, 5)
    strides = dense(held.size, (2, 0, 1))
    flat = np.zeros(np.prod(held.size), full.dtype)
    view_of(flat, 0, held.size, strides)[...] = full[slices(held)]
    piece = boxes.piece_of(EXPERTS, held, strides)
    assert piece is not None
    assert (view_of(flat, piece.offset, piece.box.size, piece.strides) == full[2].T[slices(piece.box)]).all()


def test_a_shard_outside_the_rule_gives_nothing() -> None:
    assert boxes.piece_of(EXPERTS, Box((0, 0, 0), (2, 4, 5)), (20, 5, 1)) is None
    assert boxes.piece_of(EXPERTS, Box((2, 0, 0), (1, 0, 5)), (20, 5, 1)) is None


def test_a_rule_makes_unit_dims() -> None:
    rule = Rule("bias", whole((6,)), "bias", (1, 6), (0, 0), (None, 0))
    piece = boxes.piece_of(rule, Box((2,), (3,)), (1,))
    assert piece == boxes.Piece(Box((0, 2), (1, 3)), 0, (0, 1))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"box": Box((3, 0, 0), (1, 4, 5))}, "does not fit the trainer's shape [3, 4, 5]"),
        ({"box": Box((1, 0, 0), (2, 4, 5))}, "dims [0] are dropped"),
        ({"target_shape": (5, 3)}, "does not fit the target's shape [5, 3]"),
        ({"target_offset": (1, 0)}, "box [1:6, 0:4] does not fit the target's shape"),
        ({"dims": (1, 1)}, "name a trainer dim twice"),
        ({"dims": (3, 1)}, "name a trainer dim twice, or one that"),
        ({"dims": (1,)}, "differ in length"),
    ],
)
def test_a_rule_that_does_not_fit_says_why(change: dict, says: str) -> None:
    fields = {name: getattr(EXPERTS, name) for name in EXPERTS.__struct_fields__}
    assert boxes.rule_problem(EXPERTS, (3, 4, 5)) == ""
    assert says in boxes.rule_problem(Rule(**{**fields, **change}), (3, 4, 5))

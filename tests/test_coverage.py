"""The proof of coverage against counting every write of every element."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.weights import FakeEngineRank, dense, view_of, whole
from weightsync import coverage
from weightsync.coverage import Hole, Write, check_layout
from weightsync.spec import Box, Fill, View


def holes_of(rank: FakeEngineRank, constants: tuple[str, ...] = ()) -> list[Hole]:
    return check_layout(rank.layout(), constants, {})


def one_param(shape: tuple[int, ...], *writes: Write, kind: str = "parameter") -> list[Hole]:
    rank = FakeEngineRank()
    param = rank.param("p", shape, kind)
    for write in writes:
        rank.need("t", whole(write.size), param, write.offset, write.strides)
    return holes_of(rank)


def test_fused_halves_cover() -> None:
    assert one_param((4, 3), Write(0, (3, 1), (2, 3)), Write(6, (3, 1), (2, 3))) == []


def test_column_halves_cover() -> None:
    assert one_param((4, 6), Write(0, (6, 1), (4, 2)), Write(2, (6, 1), (4, 4))) == []


def test_a_gap_names_the_elements() -> None:
    (hole,) = one_param((4, 6), Write(0, (6, 1), (4, 2)), Write(3, (6, 1), (4, 3)))
    assert hole == Hole("p", "[0:4, 2:3] of [4, 6] is written by nothing", unwritten=False)


def test_an_overlap_names_the_elements() -> None:
    (hole,) = one_param((4, 3), Write(0, (3, 1), (3, 3)), Write(6, (3, 1), (2, 3)))
    assert "[2:3, 0:3] is written more than once" in hole.reason


def test_nothing_at_all_is_unwritten() -> None:
    assert one_param((4, 3)) == [Hole("p", "[0:4, 0:3] of [4, 3] is written by nothing", unwritten=True)]


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_an_empty_parameter_needs_nothing(shape: tuple[int, ...]) -> None:
    assert one_param(shape) == []
    assert one_param(shape, Write(0, dense(shape), shape)) == []


def test_a_scalar_is_written_once() -> None:
    assert one_param((), Write(0, (), ())) == []
    assert one_param((), Write(0, (), ()), Write(0, (), ()))[0].reason.endswith("written more than once")
    assert one_param(())[0].unwritten


def test_unit_dims_may_have_any_stride() -> None:
    assert one_param((5, 1), Write(0, (1, 77), (5, 1))) == []
    assert one_param((1, 5), Write(0, (0, 1), (1, 5))) == []


def test_a_flat_view_covers_a_parameter_of_many_dims() -> None:
    assert one_param((2, 3, 4), Write(0, (1,), (12,)), Write(12, (4, 1), (3, 4))) == []


def test_a_parameter_that_is_stored_transposed_is_covered() -> None:
    shape = (3000, 2000)  # too many elements to list: this must be proved by geometry
    halves = [Write(0, (1, 3000), (1000, 2000)), Write(1000, (1, 3000), (2000, 2000))]
    assert one_param(shape, *halves) == []
    assert "is written by nothing" in one_param(shape, halves[0])[0].reason


def test_even_and_odd_rows_from_two_tensors_cover() -> None:
    even, odd = Write(0, (4000, 1), (1000, 2000)), Write(2000, (4000, 1), (1000, 2000))
    assert one_param((2000, 2000), even, odd) == []
    assert one_param((2000, 2000), even, even)[0].reason.endswith("written more than once")


def test_views_that_are_no_boxes_are_listed_if_few() -> None:
    writes = [Write(0, (1,), (7,)), Write(7, (1,), (5,)), Write(12, (3, 1), (2, 3))]
    assert coverage.boxes_of((6, 3), writes) is None
    assert one_param((6, 3), *writes) == []
    assert one_param((6, 3), *writes[1:])[0].reason == "7 of its 18 elements are written by nothing"
    assert "more than once" in one_param((6, 3), *writes, writes[0])[0].reason


def test_views_that_are_no_boxes_are_refused_if_many() -> None:
    numel = coverage.MAX_LISTED_ELEMENTS + 3
    (hole,) = one_param((3, (numel + 2) // 3), Write(0, (1,), (7,)), Write(7, (5, 1), (4, 3)))
    assert "too many to check" in hole.reason


@pytest.mark.parametrize("write", [Write(4, (3, 1), (3, 3)), Write(-1, (1,), (3,)), Write(0, (6, 1), (3, 3))])
def test_a_write_outside_is_a_hole(write: Write) -> None:
    (hole,) = one_param((4, 3), write)
    assert "outside its 12 elements" in hole.reason


def test_an_expanded_target_is_a_hole() -> None:
    (hole,) = one_param((4, 3), Write(0, (0, 1), (4, 3)))
    assert "in the same place" in hole.reason


def test_fills_count_as_writes() -> None:
    rank = FakeEngineRank()
    param = rank.param("embed", (8, 4))
    rank.need("embed", Box((0, 0), (5, 4)), param)
    assert "[5:8, 0:4]" in holes_of(rank)[0].reason
    rank.fills.append(Fill(View(param, 20, (4, 1)), (3, 4), 0.0))
    assert holes_of(rank) == []
    rank.fills.append(Fill(View(param, 16, (4, 1)), (1, 4), 0.0))
    assert "[4:5, 0:4] is written more than once" in holes_of(rank)[0].reason


def test_what_no_push_writes_may_stay_unwritten_but_not_be_written_twice() -> None:
    rank = FakeEngineRank(constants=["rotary"], opaque={"w_kc": "cat"})
    for name, kind in (("rotary", "parameter"), ("w_kc", "parameter"), ("bias", "buffer"), ("w_vc", "derived")):
        rank.param(name, (2,), kind)
    rank.param("scale", (2,))
    assert [hole.param for hole in holes_of(rank)] == ["scale"]
    assert holes_of(rank, constants=("^scale$",)) == []
    for param in range(5):
        rank.need("t", whole((2,)), param)
    assert holes_of(rank) == []
    rank.need("t", whole((1,)), 2)
    assert [hole.param for hole in holes_of(rank)] == ["bias"]


def random_writes(rng: random.Random, shape: tuple[int, ...]) -> list[Write]:
    """Strided regions of a tensor of ``shape``: a partition into boxes, then perhaps one dropped, doubled or moved."""
    boxes = [whole(shape)]
    for _ in range(rng.randint(0, 4)):
        box = boxes.pop(rng.randrange(len(boxes)))
        d = rng.randrange(len(shape))
        cut = rng.randint(0, box.size[d])
        for lo, n in ((0, cut), (cut, box.size[d] - cut)):
            offset, size = list(box.offset), list(box.size)
            offset[d], size[d] = offset[d] + lo, n
            boxes.append(Box(tuple(offset), tuple(size)))
    order = rng.sample(range(len(shape)), len(shape))
    strides = dense(shape, tuple(order))
    writes = [Write(sum(o * s for o, s in zip(b.offset, strides)), strides, b.size) for b in boxes]
    fault = rng.randint(0, 5)
    if fault == 0:
        writes.pop(rng.randrange(len(writes)))
    if fault == 1:
        writes.append(rng.choice(writes))
    if fault == 2:
        step = rng.choice([1, 2, 3])
        writes.append(Write(rng.randrange(2), (step,), (rng.randint(0, 3),)))
    return writes


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_proof_agrees_with_counting(rng: random.Random) -> None:
    shape = tuple(rng.choice([1, 2, 3, 4]) for _ in range(rng.randint(1, 4)))
    writes = random_writes(rng, shape)
    times = np.zeros(int(np.prod(shape)) + 16, np.int64)
    for write in writes:
        view_of(times, write.offset, write.size, write.strides)[...] += 1
    numel = times.size - 16
    exact = bool((times[:numel] == 1).all() and not times[numel:].any())
    assert (one_param(shape, *writes) == []) == exact
    overlaps = bool((times > 1).any() or times[numel:].any())
    assert (one_param(shape, *writes, kind="buffer") == []) == (not overlaps)

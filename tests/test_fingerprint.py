"""Fingerprints against their definition, and against everything that must change or not change them."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.errors import PlanError
from weightsync.fingerprint import fingerprint, fingerprint_many
from weightsync.fingerprint_weights import MASK, weight

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8,
    torch.int32, torch.int64, torch.float64, torch.bool,
]  # fmt: skip
RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SHAPES = [(), (1,), (7,), (3, 5), (5, 1), (2, 3, 4), (2, 1, 3, 2), (0, 4)]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Any bits: NaN payloads, infinities, denormals and negative zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator) == 1
    count = dtype.itemsize * torch.Size(shape).numel()
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def by_definition(tensor: torch.Tensor, origin: tuple[int, ...]) -> int:
    """The sum of the docstring, in Python's integers."""
    total, dims = 0, tensor.dim()
    for index in itertools.product(*(range(n) for n in tensor.shape)):
        raw = tensor[index].clone().view(1).view(torch.uint8).tolist()
        bits = int.from_bytes(bytes(raw), "little")
        product = 1
        for dim, (start, i) in enumerate(zip(origin, index)):
            product *= int(weight(dim, torch.tensor(start + i)))
        if tensor.itemsize == 8:
            low, high = (int(w) for w in weight(dims, torch.arange(2)))
            bits = (bits & 0xFFFFFFFF) * low + (bits >> 32) * high
        total += bits * product
    return total & MASK


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_what_it_is_defined_to_be(shape, dtype):
    tensor, origin = random_bits(shape, dtype), tuple(range(3, 3 + len(shape)))
    assert fingerprint(tensor, origin) == by_definition(tensor, origin)


def test_known_numbers_so_that_no_two_versions_or_devices_differ_unseen():
    numbers = torch.arange(12, dtype=torch.float32).view(3, 4)
    assert fingerprint(numbers, (0, 0)) == KNOWN["float32"]
    assert fingerprint(numbers.bfloat16(), (5, 7)) == KNOWN["bfloat16"]
    assert fingerprint(numbers.double(), (1 << 20, 0)) == KNOWN["float64"]
    assert fingerprint(torch.tensor(1.0), ()) == 0x3F800000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(9000,), (3, 9000), (70000, 1), (700, 300), (2, 60, 500), (40000, 2, 3)], ids=str)
def test_large_tensors_are_cut_into_blocks_without_a_trace(shape, dtype):
    tensor = random_bits(shape, dtype)
    origin = tuple(11 * (d + 1) for d in range(len(shape)))
    raw = tensor.reshape(-1).view(torch.uint8).view(*shape, dtype.itemsize).to(torch.int64)
    halves = [raw[..., 0:4], raw[..., 4:8]] if dtype.itemsize == 8 else [raw]
    product = torch.ones((), dtype=torch.int64)
    for dim, (start, size) in enumerate(zip(origin, shape)):
        product = product[..., None] * weight(dim, torch.arange(start, start + size))
    words = [sum(half[..., b] << 8 * b for b in range(half.shape[-1])) for half in halves]
    scales = weight(len(shape), torch.arange(2)) if len(words) == 2 else torch.ones(1, dtype=torch.int64)
    total = sum(int((word * product * scale).sum()) for word, scale in zip(words, scales))
    assert fingerprint(tensor, origin) == total & MASK


@st.composite
def cut_tensors(draw):
    """A tensor, where it starts, and boxes that part it: cut again and again along a dim."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    tensor = random_bits(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
    boxes = [(tensor, tuple(draw(st.lists(st.integers(0, 10**6), min_size=len(shape), max_size=len(shape)))))]
    start = boxes[0][1]
    for _ in range(draw(st.integers(0, 5))):
        part, at = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, part.shape[dim]))
        boxes.append((part.narrow(dim, 0, cut), at))
        boxes.append((part.narrow(dim, cut, part.shape[dim] - cut), (*at[:dim], at[dim] + cut, *at[dim + 1 :])))
    return tensor, start, boxes


@settings(deadline=None, max_examples=60)
@given(cut_tensors())
def test_disjoint_boxes_add_up(case):
    tensor, start, boxes = case
    assert sum(fingerprint_many(boxes)) & MASK == fingerprint(tensor, start)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(DTYPES[:-1]), st.integers(0, 10**9), st.data())
def test_one_flipped_bit_always_shows(dtype, seed, data):
    tensor = random_bits((3, 4), dtype, seed % 1000)
    bit = data.draw(st.integers(0, 12 * 8 * dtype.itemsize - 1))
    flipped = tensor.clone()
    flipped.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    assert fingerprint(flipped, (seed, 0)) != fingerprint(tensor, (seed, 0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swapped_rows_columns_and_elements_show(dtype):
    tensor = random_bits((64, 48), dtype, 5)
    for dim in (0, 1):
        order = torch.arange(tensor.shape[dim])
        order[[3, 17]] = order[[17, 3]]
        assert fingerprint(tensor.index_select(dim, order), (0, 0)) != fingerprint(tensor, (0, 0))
    square = tensor[:48]
    assert fingerprint(square.t(), (0, 0)) != fingerprint(square, (0, 0))


def test_no_two_indices_of_a_dim_share_a_weight():
    for dim in range(3):
        weights = weight(dim, torch.arange(1 << 18))
        assert len(weights.unique()) == 1 << 18
        assert bool((weights % 2 == 1).all())
        assert int(weights.min()) > 0
        assert int(weights.max()) < 1 << 32


def test_the_same_bytes_elsewhere_have_another_fingerprint():
    tensor = random_bits((4, 4), torch.bfloat16)
    assert len({fingerprint(tensor, origin) for origin in [(0, 0), (4, 0), (0, 4), (8, 8)]}) == 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_do_not_matter(dtype):
    base = random_bits((6, 8, 5), dtype)
    views = [
        base.permute(2, 0, 1), base[::2], base[:, 1:7:3], base.transpose(1, 2), base[1], base[:, 2], base[..., 3],
        base[:, :1].expand(6, 4, 5), torch.as_strided(base, (2, 3), (1, 7), 4),
    ]  # fmt: skip
    for view in views:
        origin = tuple(range(view.dim()))
        assert fingerprint(view, origin) == fingerprint(view.clone(memory_format=torch.contiguous_format), origin)


def test_raw_bits_count_not_values():
    zeros = torch.tensor([0.0, -0.0])
    assert fingerprint(zeros[:1], (0,)) != fingerprint(zeros[1:], (0,))
    nans = torch.tensor([0x7FC00000, 0x7FC00001, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert fingerprint(nans[:1], (0,)) != fingerprint(nans[1:2], (0,))
    assert fingerprint(nans[1:2], (0,)) == fingerprint(nans[2:3], (0,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64], ids=str)
def test_a_dtype_asked_for_is_cast_to_first_and_the_source_is_left_alone(dtype):
    source = torch.randn(300, 200, generator=torch.Generator().manual_seed(1))
    before = source.clone()
    for view, origin in [(source, (1, 2)), (source.t(), (0, 0)), (source[:, ::3], (5, 5)), (source[0, 0], ())]:
        assert fingerprint(view, origin, dtype) == fingerprint(view.to(dtype), origin)
    assert torch.equal(source, before)


def test_parameters_and_inference_tensors_are_read_like_any():
    values = torch.randn(4, 4)
    with torch.inference_mode():
        inferred = values.clone()
    assert fingerprint(torch.nn.Parameter(values), (0, 0)) == fingerprint(values, (0, 0))
    assert fingerprint(inferred, (0, 0)) == fingerprint(values, (0, 0))


def test_many_are_each_as_alone():
    items = [(random_bits(s, torch.bfloat16, i), tuple([i] * len(s))) for i, s in enumerate(SHAPES)]
    assert fingerprint_many(items) == [fingerprint(t, o) for t, o in items]
    assert fingerprint_many([]) == []


def test_a_dtype_of_sixteen_bytes_is_refused():
    with pytest.raises(PlanError, match="complex128"):
        fingerprint(torch.zeros(2, dtype=torch.complex128), (0,))


KNOWN = {"float32": 0x126FA66BCE800000, "bfloat16": 0xE5E4EA5E756C0AC0, "float64": 0x2DD62653BD400000}

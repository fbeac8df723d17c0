"""Bucket arithmetic, bytes, and payloads: opened here as strictly as 0.5.23 does, and by both SGLangs' own code."""

from __future__ import annotations

import base64
import itertools
import json
import pickletools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.payloads import open_payload, unflatten
from weightsync import envs
from weightsync.boxes import ALIGNMENT, aligned
from weightsync.errors import ConfigError
from weightsync.spec import TensorSpec
from weightsync.transports import bucket
from weightsync.transports.bucket import (
    Arena,
    Bucket,
    at_both_ends,
    fill,
    payloads,
    plan_buckets,
    share_by_file,
    share_by_value,
)

SHARES = {"file": share_by_file, "value": share_by_value}
DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "uint8", "int64", "bool"]


def specs(*sizes: int) -> list[TensorSpec]:
    return [TensorSpec(f"t{i}", (size,), "uint8") for i, size in enumerate(sizes)]


def names(buckets: list[bucket.Bucket]) -> list[list[str]]:
    return [[e.tensor.name for e in b.entries] for b in buckets]


# -------------------------------------------------------------------------------------------------- arithmetic


def test_twenty_tensors_of_100_bytes_under_250_bytes_make_ten_buckets() -> None:
    buckets = plan_buckets([TensorSpec(f"t{i}", (25,), "float32") for i in range(20)], 250)
    assert [b.nbytes for b in buckets] == [200] * 10
    assert [n for b in names(buckets) for n in b] == [f"t{i}" for i in range(20)]


def test_what_is_larger_than_the_limit_travels_alone_and_in_order() -> None:
    assert names(plan_buckets(specs(100, 4096, 100, 100), 1024)) == [["t0"], ["t1"], ["t2", "t3"]]
    assert names(plan_buckets(specs(4096), 1024)) == [["t0"]]


def test_a_bucket_may_be_full_to_the_byte() -> None:
    assert names(plan_buckets(specs(100, 150, 1), 250)) == [["t0", "t1"], ["t2"]]


@pytest.mark.parametrize("limit", [0, -1])
def test_limits_that_are_not_positive_are_refused_with_their_value(limit: int) -> None:
    with pytest.raises(ConfigError, match=f"positive, got {limit}$"):
        plan_buckets(specs(1), limit)


def test_no_tensors_make_no_bucket() -> None:
    assert plan_buckets([], 10) == []


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="no dtype 'float7'"):
        plan_buckets([TensorSpec("t", (1,), "float7")], 10)


def test_one_latent_attention_stays_in_one_bucket() -> None:
    attention = ["q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"]
    tensors = [TensorSpec("model.embed.weight", (60,), "uint8")]
    tensors += [TensorSpec(f"model.layers.0.self_attn.{n}.weight", (30,), "uint8") for n in attention]
    tensors += [TensorSpec("model.layers.0.mlp.up_proj.weight", (30,), "uint8")]
    assert [len(b.entries) for b in plan_buckets(tensors, 100)] == [1, 7, 1]


dims = st.lists(st.integers(0, 5), max_size=3).map(tuple)
any_specs = st.lists(st.tuples(dims, st.sampled_from(DTYPES)), max_size=30).map(
    lambda items: [TensorSpec(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(items)]
)


@given(any_specs, st.integers(1, 600))
def test_buckets_hold_all_in_order_aligned_and_within_the_limit(tensors: list[TensorSpec], limit: int) -> None:
    buckets = plan_buckets(tensors, limit)
    assert [e.tensor for b in buckets for e in b.entries] == tensors
    for b in buckets:
        assert b.nbytes <= limit or len(b.entries) == 1
        end = 0
        for entry in b.entries:
            itemsize = getattr(torch, entry.tensor.dtype).itemsize
            assert entry.start % itemsize == 0 and end <= entry.start < end + itemsize
            assert entry.end - entry.start == torch.Size(entry.tensor.shape).numel() * itemsize
            end = entry.end
        assert end == b.nbytes


# ------------------------------------------------------------------------------------------------------- bytes


def awkward_tensors() -> dict[str, torch.Tensor]:
    """Every layout in every dtype, from random bits: NaN payloads, infinities and negative zeros among them."""
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for name in ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "uint8"):
        dtype = getattr(torch, name)

        def bits(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
            return raw.view(dtype).view(shape)

        tensors[f"{name}.transposed"] = bits(5, 3).t()
        tensors[f"{name}.every_other_row"] = bits(6, 3)[::2]
        tensors[f"{name}.expanded"] = bits(1, 3).expand(4, 3)
        tensors[f"{name}.scalar"] = bits(1).reshape(())
        tensors[f"{name}.empty"] = bits(0, 3)
        tensors[f"{name}.plain"] = bits(7)
    tensors["nan_payloads"] = torch.tensor([0x7F800001, 0x7FC12345, -0x400000, -0x80000000], dtype=torch.int32).view(
        torch.float32
    )
    tensors["negative_zero"] = torch.tensor([-0.0, 0.0])
    return tensors


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def packed(tensors: dict[str, torch.Tensor]) -> tuple[Arena, bucket.Bucket]:
    planned = [TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()]
    (one,) = plan_buckets(planned, 1 << 20)
    arena = Arena(one.nbytes + 64)
    fill(arena.tensor, one, tensors.values())
    return arena, one


@pytest.mark.parametrize("share", SHARES)
def test_bytes_survive_the_trip_and_sources_are_untouched(share: str) -> None:
    tensors = awkward_tensors()
    before = {name: raw(t) for name, t in tensors.items()}
    arena, one = packed(tensors)
    (payload,) = payloads(arena.tensor, one, tp_size=1, share=SHARES[share])
    arrived = dict(unflatten(open_payload(payload)))
    assert list(arrived) == list(tensors)
    for name, tensor in tensors.items():
        assert (arrived[name].shape, arrived[name].dtype) == (tensor.shape, tensor.dtype)
        assert raw(arrived[name]) == before[name] == raw(tensor), name
    arena.close()


OPEN_WITH_SGLANG = """
import hashlib, json, sys
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
import torch
out = []
for payload in json.load(sys.stdin):
    content = MultiprocessingSerializer.deserialize(payload)
    bucket = FlattenedTensorBucket(flattened_tensor=content["flattened_tensor"], metadata=content["metadata"])
    found = []
    for name, t in bucket.reconstruct_tensors():
        raw = bytes(t.contiguous().view(-1).view(torch.uint8).tolist()) if t.numel() else b""
        found.append([name, list(t.shape), str(t.dtype), raw.hex()])
    out.append(found)
print(json.dumps(out))
"""


@pytest.mark.parametrize("env", ["sglang_cpu", "sglang_cpu_legacy"])
def test_sglangs_own_code_gets_the_same_bytes(env: str) -> None:
    tensors = awkward_tensors()
    arena, one = packed(tensors)
    sent = [p for share in SHARES.values() for p in payloads(arena.tensor, one, tp_size=2, share=share)]
    environment = envs.resolve(env)
    done = subprocess.run(
        [environment.python, "-c", OPEN_WITH_SGLANG],
        input=json.dumps(sent),
        env=envs.process_env(environment) | {"SGLANG_USE_CPU_ENGINE": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    expected = [[n, list(t.shape), str(t.dtype), raw(t).hex()] for n, t in tensors.items()]
    assert json.loads(done.stdout.splitlines()[-1]) == [expected] * 4
    arena.close()


# ------------------------------------------------------------------------------------------------- the payload


@pytest.mark.parametrize("share", SHARES)
def test_a_payload_names_no_global_of_ours_or_of_sglang(share: str) -> None:
    arena, one = packed({"a": torch.zeros(2), "b": torch.zeros(3, dtype=torch.bfloat16)})
    (payload,) = payloads(arena.tensor, one, tp_size=1, share=SHARES[share])
    text = pickletools.optimize(base64.b64decode(payload))
    for word in (b"weightsync", b"sglang", b"numpy", b"builtins"):
        assert word not in text
    arena.close()


def test_by_value_carries_the_bucket_only_not_the_whole_arena() -> None:
    arena = Arena(1 << 20)
    (one,) = plan_buckets(specs(10), 100)
    (payload,) = payloads(arena.tensor, one, tp_size=1, share=share_by_value)
    assert len(payload) < 5000
    arena.close()


@given(st.lists(st.integers(1, 5000), max_size=12), st.integers(1, 3000))
def test_buckets_lie_at_both_ends_of_an_arena_of_two(sizes: list[int], limit: int) -> None:
    placed, nbytes = at_both_ends([Bucket((), size) for size in sizes], limit)
    assert nbytes <= max([2 * aligned(limit), *map(aligned, sizes)])
    assert [b.nbytes for b in placed] == sizes
    assert all(b.start % ALIGNMENT == 0 and 0 <= b.start <= nbytes - b.nbytes for b in placed)
    for one, other in itertools.pairwise(placed):
        assert not one.overlaps(other) or max(one.nbytes, other.nbytes) > limit


READER = """
import sys
from tests.fakes.payloads import open_payload, unflatten
for payload in sys.argv[1:]:
    print(unflatten(open_payload(payload))[0][1].tolist())
"""


def test_one_payload_a_tp_rank_opened_in_another_process_and_nothing_is_left() -> None:
    arena, one = packed({"a": torch.arange(5)})
    sent = payloads(arena.tensor, one, tp_size=3, share=share_by_file)
    opened = sent[:2]  # the third is never opened
    done = subprocess.run([sys.executable, "-c", READER, *opened], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["[0, 1, 2, 3, 4]"] * 2, done.stderr
    assert Path(arena._path).exists()
    arena.close()
    arena.close()
    assert not Path(arena._path).exists()


def test_memory_outlives_a_closed_arena_for_whoever_still_reads_it() -> None:
    arena, one = packed({"a": torch.arange(5)})
    path, view = Path(arena._path), arena.tensor[: one.nbytes]
    (payload,) = payloads(arena.tensor, one, tp_size=1, share=share_by_file)
    mapped = dict(unflatten(open_payload(payload)))["a"]
    assert path.exists()
    arena.close()
    assert not path.exists()
    view.view(torch.int64)[0] = 9
    assert mapped.tolist() == [9, 1, 2, 3, 4]
    del view, mapped  # the last users of a file that is gone already


def test_an_arena_is_refilled_and_read_again() -> None:
    arena, one = packed({"a": torch.zeros(4)})
    for value in (1.0, 2.0, 3.0):
        fill(arena.tensor, one, [torch.full((4,), value)])
        (payload,) = payloads(arena.tensor, one, tp_size=1, share=share_by_file)
        assert dict(unflatten(open_payload(payload)))["a"].tolist() == [value] * 4
    arena.close()

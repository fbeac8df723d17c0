"""Buckets in GPU memory: another process opens our handles as an engine does, and nothing is left of it."""

from __future__ import annotations

import base64
import pickletools
from collections.abc import Iterator

import pytest
import torch

from tests.fakes.payloads import Killed, open_payload, unflatten
from tests.gpu import owner
from tests.gpu.world import Process, bits_of
from weightsync import devices
from weightsync.errors import TransferError
from weightsync.spec import TensorSpec
from weightsync.transports import bucket, bucket_cuda
from weightsync.transports.bucket_cuda import CudaArena, limit_bytes, share_by_handle

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

TENSORS = [TensorSpec(f"t{i}", (513 + i, 1024), "bfloat16") for i in range(40)]
OPENINGS = 200


class Consumer(Process):
    """Opens payloads as an engine does, computes, and lets go."""

    def sums(self, payload: str) -> dict[str, int] | str:
        try:
            return {name: bits_of(tensor) for name, tensor in unflatten(open_payload(payload))}
        except Killed as e:
            return str(e)


@pytest.fixture(scope="module")
def consumer() -> Iterator[owner.Remote]:
    with owner.started(Consumer) as started:
        yield started


@pytest.fixture
def arena() -> Iterator[CudaArena]:
    (one,) = bucket.plan_buckets(TENSORS, 1 << 30)
    made = CudaArena(one.nbytes, devices.uuid_of(0))
    yield made
    made.close()
    made.close()


def filled(arena: CudaArena, seed: int) -> tuple[str, dict[str, int]]:
    """A payload of the arena with new contents, and their sums."""
    (one,) = bucket.plan_buckets(TENSORS, 1 << 30)
    views = bucket.views(arena.tensor, one)
    torch.manual_seed(seed)
    for view in views:
        view.normal_()
    torch.cuda.synchronize()
    (payload,) = bucket.payloads(arena.tensor, one, tp_size=1, share=share_by_handle)
    return payload, {entry.tensor.name: bits_of(view) for entry, view in zip(one.entries, views, strict=True)}


def test_an_arena_is_filled_opened_and_let_go_of_again_and_again(consumer: owner.Remote, arena: CudaArena) -> None:
    for seed in range(2):
        payload, expected = filled(arena, seed)
        assert consumer.call("sums", payload) == expected
    used, before = devices.used_bytes(devices.uuid_of(0)), consumer.call("memory")
    for seed in range(OPENINGS):
        payload, expected = filled(arena, seed)
        assert consumer.call("sums", payload) == expected
    after = consumer.call("memory")
    assert abs(devices.used_bytes(devices.uuid_of(0)) - used) <= 4 << 20
    assert after["descriptors"] == before["descriptors"] and after["allocated"] == before["allocated"]
    assert after["resident"] - before["resident"] < 32 << 20


def test_a_payload_names_the_gpu_by_uuid_and_no_torch_handle(arena: CudaArena) -> None:
    payload, _ = filled(arena, 0)
    text = pickletools.optimize(base64.b64decode(payload))
    assert devices.uuid_of(0).removeprefix("GPU-").encode() in text
    assert b"weightsync" not in text and b"sglang" not in text
    _, arguments = share_by_handle(arena.tensor)
    handle, event_is_waited_for = arguments[7], arguments[14]
    assert handle[:2] == b"\x02c" and len(handle) == 66 and event_is_waited_for is False


def test_torchs_own_memory_is_refused_where_it_has_no_handle() -> None:
    with owner.started(NoHandles, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True") as remote:
        with pytest.raises(TransferError, match="expandable_segments"):
            remote.call("share")
        assert remote.call("share_arena") == 66


class NoHandles:
    """Torch maps its memory here, so that no handle can be made of it; an arena beside it has one."""

    def share(self) -> None:
        share_by_handle(torch.zeros(1024, dtype=torch.uint8, device="cuda"))

    def share_arena(self) -> int:
        arena = CudaArena(1024, devices.uuid_of(0))
        return len(share_by_handle(arena.tensor)[1][7])


def test_a_bucket_takes_a_part_of_what_is_free() -> None:
    uuid = devices.uuid_of(0)
    free, _ = torch.cuda.mem_get_info(0)
    assert bucket_cuda.LEAST_BYTES <= limit_bytes(uuid) <= bucket_cuda.LIMIT_BYTES
    assert limit_bytes(uuid) <= max(bucket_cuda.LEAST_BYTES, free // 4)


@pytest.mark.two_gpus
def test_a_gpu_that_is_masked_from_the_engine_is_the_engines_death_so_it_is_asked_by_uuid(arena: CudaArena) -> None:
    payload, expected = filled(arena, 3)
    with owner.started(Consumer, CUDA_VISIBLE_DEVICES="1,0") as permuted:
        assert permuted.call("sums", payload) == expected
    payload, _ = filled(arena, 4)
    with owner.started(Consumer, CUDA_VISIBLE_DEVICES="1") as masked:
        assert "Invalid device_uuid" in masked.call("sums", payload)

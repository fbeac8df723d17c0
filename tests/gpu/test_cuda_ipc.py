"""Memory shared between two processes by CUDA IPC handles, on one GPU and, where there are two, across them."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import msgspec
import pytest
import torch

from tests.gpu import owner
from weightsync import devices
from weightsync.errors import TransferError
from weightsync.fingerprint import fingerprint
from weightsync.spec import Segment
from weightsync.transports import cuda_ipc

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def remote() -> Iterator[owner.Remote]:
    with owner.started() as started:
        yield started


def view_of(memory: cuda_ipc.Memory, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return memory.tensor[offset : offset + nbytes].view(dtype).view(shape)


def pulled(source: torch.Tensor, device: str = "cuda:0") -> torch.Tensor:
    target = torch.full_like(source, 77, device=device)
    cuda_ipc.make_puller([(target, source)]).run()
    return target


def test_in_place_memory_is_mapped_and_pulled(remote: owner.Remote) -> None:
    remote.call("make", "a", (333, 257), "bfloat16")
    segment, offset = remote.segment_of("a")
    memory = cuda_ipc.open_segment(segment)
    source = view_of(memory, offset, (333, 257), torch.bfloat16)
    first = pulled(source)
    assert fingerprint(first, (0, 0)) == remote.call("fingerprint", "a")
    remote.call("refill", "a", 5)
    second = pulled(source)
    assert fingerprint(second, (0, 0)) == remote.call("fingerprint", "a")
    assert not torch.equal(first, second)
    memory.close()


def test_tensors_of_one_allocation_share_a_handle_and_a_mapping(remote: owner.Remote) -> None:
    for name in ("s1", "s2"):
        remote.call("make", name, (64, 64), "float32")
    (one, at_one), (two, at_two) = remote.segment_of("s1"), remote.segment_of("s2")
    assert one == two
    assert at_one != at_two
    first, second = cuda_ipc.open_segment(one), cuda_ipc.open_segment(two)
    assert first.tensor.data_ptr() == second.tensor.data_ptr()
    first.close()
    first.close()
    assert fingerprint(view_of(second, at_two, (64, 64), torch.float32), (0, 0)) == remote.call("fingerprint", "s2")
    second.close()
    assert not cuda_ipc._process.mapped


def test_an_arena_is_pulled(remote: owner.Remote) -> None:
    segment = msgspec.msgpack.decode(remote.call("arena", "arena", 1_000_001), type=Segment)
    assert segment.nbytes == 1_000_001
    memory = cuda_ipc.open_segment(segment)
    assert fingerprint(pulled(memory.tensor), (0,)) == remote.call("fingerprint", "arena")
    memory.close()
    remote.call("drop", "arena")


def test_own_segments_are_aliased() -> None:
    mine = cuda_ipc.allocate(4096)
    again = cuda_ipc.open_segment(mine.segment)
    assert again.tensor.data_ptr() == mine.tensor.data_ptr()
    tensor = torch.arange(5000, device="cuda")
    segment, offset = cuda_ipc.export(tensor[3:])
    alias = cuda_ipc.open_segment(segment)
    assert torch.equal(view_of(alias, offset, (4997,), torch.int64), tensor[3:])
    for memory in (again, alias, mine):
        memory.close()


def test_memory_freed_and_allocated_again_has_another_handle() -> None:
    first = cuda_ipc.allocate(64 << 20)
    address, handle = first.tensor.data_ptr(), first.segment.handle
    first.close()
    second = cuda_ipc.allocate(64 << 20)
    assert second.tensor.data_ptr() == address, "the case needs the same address again"
    assert second.segment.handle != handle
    second.close()


def test_host_memory_is_refused_by_name() -> None:
    with pytest.raises(TransferError, match="host memory"):
        cuda_ipc.export(torch.zeros(4))


@pytest.mark.parametrize(
    ("setting", "reason"), [("expandable_segments:True", "expandable_segments"), ("backend:cudaMallocAsync", "pool")]
)
def test_memory_that_has_no_handle_is_refused_and_an_arena_works(setting: str, reason: str) -> None:
    with owner.started(PYTORCH_CUDA_ALLOC_CONF=setting) as remote:
        remote.call("make", "a", (1024, 1024), "bfloat16")
        with pytest.raises(TransferError, match=reason):
            remote.call("export", "a")
        segment = msgspec.msgpack.decode(remote.call("arena", "arena", 4096), type=Segment)
        memory = cuda_ipc.open_segment(segment)
        assert fingerprint(pulled(memory.tensor), (0,)) == remote.call("fingerprint", "arena")
        memory.close()


def test_a_masked_gpu_is_refused_by_uuid(remote: owner.Remote) -> None:
    remote.call("make", "m", (8, 8), "float32")
    segment, _ = remote.segment_of("m")
    elsewhere = msgspec.structs.replace(segment, device="GPU-00000000-0000-0000-0000-000000000000")
    with pytest.raises(TransferError, match=r"GPU-00000000.*masked.*relay"):
        cuda_ipc.open_segment(elsewhere)


def test_a_dead_owner_is_named() -> None:
    with owner.started() as remote:
        remote.call("make", "a", (1024, 1024), "bfloat16")
        segment, _ = remote.segment_of("a")
        remote.send("die")
    with pytest.raises(TransferError, match=r"cannot map .* bytes of process"):
        cuda_ipc.open_segment(segment)


def test_an_arena_too_large_is_refused_with_sizes() -> None:
    with pytest.raises(TransferError, match=r"no arena of .* bytes on GPU-.* are free"):
        cuda_ipc.allocate(1 << 42)


def test_fifty_pulls_and_maps_grow_nothing(remote: owner.Remote) -> None:
    remote.call("make", "g", (4096, 4096), "bfloat16")
    segment, offset = remote.segment_of("g")
    uuid, used = devices.uuid_of(0), []
    target = torch.empty(4096, 4096, dtype=torch.bfloat16, device="cuda")
    for _ in range(50):
        memory = cuda_ipc.open_segment(segment)
        cuda_ipc.make_puller([(target, view_of(memory, offset, (4096, 4096), torch.bfloat16))]).run()
        memory.close()
        gc.collect()
        used.append(devices.used_bytes(uuid))
    assert used[-1] == used[1]


def test_one_context_a_process() -> None:
    torch.zeros(1, device="cuda")
    assert devices.contexts_here() == [devices.uuid_of(0)]


def test_devices_are_found_by_uuid() -> None:
    uuid = devices.uuid_of(0)
    assert devices.device_of(uuid) == torch.device("cuda", 0)
    assert devices.used_bytes(uuid) > 0
    assert isinstance(devices.processes(uuid), dict)


def test_one_process_reads_a_segment_and_its_own_memory_on_both_gpus(remote: owner.Remote) -> None:
    """As an actor does that relays to engines on several GPUs."""
    remote.call("make", "both", (777, 513), "bfloat16")
    segment, offset = remote.segment_of("both")
    own = cuda_ipc.allocate(1 << 20, devices.uuid_of(0))
    own.tensor.fill_(7)
    torch.cuda.synchronize()
    for device in range(torch.cuda.device_count()):
        with torch.cuda.device(device):
            memory, alias = cuda_ipc.open_segment(segment), cuda_ipc.open_segment(own.segment)
            target = pulled(view_of(memory, offset, (777, 513), torch.bfloat16), f"cuda:{device}")
            assert fingerprint(target.to("cuda:0"), (0, 0)) == remote.call("fingerprint", "both")
            assert pulled(alias.tensor, f"cuda:{device}").eq(7).all()
            alias.close()
            memory.close()
    own.close()


@pytest.mark.two_gpus
def test_a_peer_is_mapped_through_the_consumers_own_gpu(remote: owner.Remote) -> None:
    before = devices.contexts_here()
    remote.call("make", "p", (777, 513), "bfloat16", 1)
    segment, offset = remote.segment_of("p")
    assert segment.device == devices.uuid_of(1)
    memory = cuda_ipc.open_segment(segment)
    target = pulled(view_of(memory, offset, (777, 513), torch.bfloat16))
    assert fingerprint(target, (0, 0)) == remote.call("fingerprint", "p")
    print("contexts before and after a peer mapping:", before, devices.contexts_here())
    memory.close()

"""Groups over NCCL between two GPUs: a sender on the first, this process as an engine's receiver on the second."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests import senders
from weightsync import devices
from weightsync.boxes import whole
from weightsync.deadline import Deadline
from weightsync.errors import TransferError
from weightsync.spec import Copy, Shard, View
from weightsync.transports import cuda_ipc, nccl, nccl_wire
from weightsync.transports.exchange import Buffers, Incoming, streams
from weightsync.transports.sender import Nursery, SenderProcess

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus, pytest.mark.timeout(180)]

SETTINGS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
GIB = 1 << 30


def soon(seconds: float = 60.0) -> Deadline:
    return Deadline(seconds, "test")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)  # as SGLang sets them in an engine; NCCL reads them once
        one = Nursery()
        yield one
        one.close()


def pair(nursery: Nursery, name: str, backend: str = "nccl") -> tuple[SenderProcess, Any]:
    """A sender on GPU 0 and this process on GPU 1, joined and greeted."""
    sender = nursery.start(devices.uuid_of(0), SETTINGS, soon())
    port = sender.call("listen", nccl_wire.Listen("127.0.0.1", 30.0), deadline=soon(), returns=int)
    joins = [nccl_wire.Join(name, "127.0.0.1", port, rank, 2, backend, 30.0) for rank in range(2)]

    def send() -> None:
        sender.call("join", joins[0], deadline=soon())
        sender.call("greet", nccl_wire.Greet([1], 30.0), deadline=soon())

    sending = threading.Thread(target=send)
    sending.start()
    with torch.cuda.device(1):
        group = nccl.join(joins[1], torch.device("cuda", 1), in_engine=True)
        byte = torch.zeros(1, dtype=torch.uint8, device="cuda:1")
        group.finish(group.start([], [(0, byte)]), soon())
    sending.join()
    assert byte.item() == 1
    return sender, group


def broadcast(sender: SenderProcess, group: Any, memory: cuda_ipc.Memory, target: torch.Tensor) -> float:
    """Seconds until both ends are done."""
    request = nccl_wire.Broadcast("", memory.segment, target.numel(), 30.0)
    sending = threading.Thread(target=lambda: senders.broadcast(sender, request, soon()))
    started = time.perf_counter()
    sending.start()
    with torch.cuda.device(1):
        senders.receive(group, target, soon())
    sending.join()
    return time.perf_counter() - started


def test_a_broadcast_arrives_bit_for_bit_and_fast(nursery: Nursery) -> None:
    sender, group = pair(nursery, "broadcast")
    memory = cuda_ipc.allocate(GIB, devices.uuid_of(0))
    memory.tensor.copy_(torch.randint(0, 256, (GIB,), dtype=torch.uint8, device="cuda:0"))
    torch.cuda.synchronize(0)
    target = torch.zeros(GIB, dtype=torch.uint8, device="cuda:1")
    times = [broadcast(sender, group, memory, target) for _ in range(6)]
    assert torch.equal(target.cpu(), memory.tensor.cpu())
    print(f"broadcast of 1 GiB: first {times[0] * 1e3:.1f} ms, best {GIB / min(times) / 1e9:.0f} GB/s")
    group.abort()
    sender.kill()
    memory.close()


@pytest.mark.parametrize("backend", ["nccl", "cupy"])
def test_slices_arrive_packed_and_unpacked(nursery: Nursery, backend: str) -> None:
    sender, group = pair(nursery, f"slices-{backend}", backend)
    rows, columns, count = 512, 4096, 24
    memory = cuda_ipc.allocate(count * rows * columns * 2, devices.uuid_of(0))
    values = torch.randn(count, rows, columns, device="cuda:0").bfloat16()
    memory.tensor.view(torch.bfloat16).view(values.shape).copy_(values)
    torch.cuda.synchronize(0)
    box, strides = whole((rows, columns)), (columns, 1)
    shards = {
        0: [Shard(f"t{i}", (rows, columns), "bfloat16", box, strides, 0, i * rows * columns * 2) for i in range(count)]
    }
    half = whole((rows, columns // 2))
    copies = [Copy(f"t{i}", half, 0, View(i, 0, strides), View(i, 0, (columns // 2, 1))) for i in range(count)]
    limit = 8 << 20
    load = nccl_wire.Load(segments={0: [memory.segment]}, shards=shards, parts=[{1: copies}], chunk_bytes=limit)
    sender.call("load", load, deadline=soon())
    got = torch.zeros(count, rows, columns // 2, dtype=torch.bfloat16, device="cuda:1")
    chunks = streams(copies, shards, {0: 0}, limit)
    with torch.cuda.device(1):
        buffers = Buffers(torch.device("cuda", 1))
        buffers.reserve([chunks])
        incoming = Incoming(chunks, shards, lambda copy: got[copy.target.storage], buffers)
    for _ in range(3):
        got.zero_()
        torch.cuda.synchronize(1)
        sending = threading.Thread(target=lambda: sender.call("send", nccl_wire.Send(30.0), deadline=soon()))
        sending.start()
        with torch.cuda.device(1), torch.inference_mode():
            incoming.run(group, soon())
        sending.join()
        assert torch.equal(got.cpu(), values[:, :, : columns // 2].cpu())
    group.abort()
    sender.kill()
    memory.close()


def test_a_cupy_groups_member_that_is_killed_is_given_up_by_the_deadline(nursery: Nursery) -> None:
    """As a training worker sees it: its other groups, and its thread, must not be caught in this one."""
    sender, group = pair(nursery, "cupy-killed", "cupy")
    sender.kill()
    target = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda:1")
    started = time.monotonic()
    with torch.cuda.device(1), pytest.raises(TransferError):
        group.finish(group.start([], [(0, target)]), soon(3.0))
    print(f"given up after {time.monotonic() - started:.1f} s")
    assert time.monotonic() - started < 10
    torch.cuda.synchronize(1)
    assert int((target + 1).sum()) == 1 << 20, "the GPU works on"


def test_a_cupy_group_whose_other_member_never_comes_is_given_up(nursery: Nursery) -> None:
    sender = nursery.start(devices.uuid_of(0), SETTINGS, soon())
    port = sender.call("listen", nccl_wire.Listen("127.0.0.1", 30.0), deadline=soon(), returns=int)
    started = time.monotonic()
    with pytest.raises(TransferError):
        nccl.join(
            nccl_wire.Join("nobody", "127.0.0.1", port, 1, 2, "cupy", 3.0), torch.device("cuda", 1), in_engine=True
        )
    assert time.monotonic() - started < 10
    sender.kill()


def test_a_sender_killed_in_the_middle_is_given_up_by_the_deadline_and_a_new_group_works(nursery: Nursery) -> None:
    sender, group = pair(nursery, "killed")
    target = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda:1")
    threading.Timer(0.5, sender.kill).start()
    started = time.monotonic()
    with torch.cuda.device(1), pytest.raises(TransferError):
        senders.receive(group, target, soon(5.0))
    print(f"given up after {time.monotonic() - started:.1f} s")
    group.abort()
    torch.cuda.synchronize(1)
    assert time.monotonic() - started < 15
    again, fresh = pair(nursery, "killed")
    memory = cuda_ipc.allocate(1 << 20, devices.uuid_of(0))
    memory.tensor.fill_(7)
    torch.cuda.synchronize(0)
    broadcast(again, fresh, memory, target)
    assert bool((target == 7).all())
    fresh.abort()
    again.kill()
    memory.close()

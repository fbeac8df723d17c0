"""GPU memory shared between processes of one node by raw CUDA IPC handles: 64 bytes of the driver, no pickles.

A segment is one whole ``cudaMalloc`` allocation. Its handle is the same for every torch, each consumer process maps it
once through each device that reads it, however many tensors lie in it, and devices are named by UUID. The owner exports
in training workers and in the actor; the consumer maps in engines, and in an actor that copies. It maps a peer GPU's
memory through its own device, if it sees that GPU.

What lies behind a mapped tensor changes when its owner writes; reading it is right after the owner has synchronised its
stream. An owner must not free exported memory before its consumers have closed it.
"""

from __future__ import annotations

import os
import secrets
import threading
from dataclasses import dataclass, field

import msgspec
import torch

from weightsync import devices
from weightsync.errors import TransferError
from weightsync.spec import Segment
from weightsync.transports import cuda_driver
from weightsync.transports.cuda_copy import make_puller

__all__ = ["Memory", "allocate", "export", "make_puller", "open_segment"]

NAME = "cuda_ipc"
_BLOCK_BYTES = 2 << 20  # smaller allocations share a block of the driver, and with it a handle


class Handle(msgspec.Struct, frozen=True, array_like=True):
    """What ``Segment.handle`` holds, as msgpack. ``owner`` tells processes apart where their ids cannot (containers).

    ``allocation`` is the driver's number of the allocation, so that memory freed and allocated again at one address has
    another handle. ``base`` is its address in the owner.
    """

    ipc: bytes
    owner: bytes
    pid: int
    base: int
    allocation: int


class Memory:
    """Device memory as a tensor: ``tensor`` is torch.uint8 of one dim, ``segment`` names it to other processes.

    The tensor's device is the GPU through which the driver reaches the memory. ``close`` frees or unmaps it (nothing
    else does before the process ends), after which tensors that view it must not be used. Idempotent.
    """

    def __init__(self, segment: Segment, address: int, release: _Release) -> None:
        self.segment = segment
        self.tensor = _as_tensor(address, segment.nbytes)
        self._release: _Release | None = release

    def close(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()


@dataclass
class _Release:
    """Undoes an allocation or one use of a mapping."""

    device: torch.device
    address: int = 0
    mapping: _Mapping | None = None

    def __call__(self) -> None:
        with cuda_driver.on(self.device):
            if self.mapping is not None:
                _let_go(self.mapping)
            elif self.address:
                torch.cuda.synchronize(self.device)
                cuda_driver.free(self.address)


_Key = tuple[bytes, int]
"""A handle, and the index of the device that it was mapped through: kernels of another one cannot read there."""


@dataclass
class _Mapping:
    key: _Key
    address: int
    device: torch.device
    is_alias: bool
    uses: int = 0


@dataclass
class _Process:
    """What this process has exported and mapped."""

    token: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    pid: int = field(default_factory=os.getpid)
    lock: threading.RLock = field(default_factory=threading.RLock)
    exported: dict[tuple[int, int], Segment] = field(default_factory=dict)
    mapped: dict[_Key, _Mapping] = field(default_factory=dict)


_process = _Process()


def allocate(nbytes: int, device: str = "") -> Memory:
    """New memory beside torch's allocator on the GPU with UUID ``device`` ("": this thread's current one).

    Raises TransferError if there is not enough, with what was asked for and what is free.
    """
    assert nbytes > 0, f"an arena of {nbytes} bytes"
    where = devices.device_of(device) if device else torch.device("cuda", torch.cuda.current_device())
    size = -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES
    with cuda_driver.on(where):
        try:
            address = cuda_driver.allocate(size)
        except TransferError as e:
            free, _ = torch.cuda.mem_get_info(where)
            raise TransferError(f"no arena of {size} bytes on {devices.uuid_of(where)}, {free} are free: {e}") from e
        segment = msgspec.structs.replace(_segment_at(address, where), nbytes=nbytes)
        return Memory(segment, address, _Release(where, address=address))


def export(tensor: torch.Tensor) -> tuple[Segment, int]:
    """The segment in which a CUDA tensor's memory lies, and the byte offset of its first element in it.

    Raises TransferError that says why memory cannot be shared in place: host memory, memory that was mapped rather than
    allocated (``expandable_segments``, a memory saver), stream-ordered pools, or memory mapped from another process.
    """
    if not tensor.is_cuda:
        raise TransferError(f"host memory ({tensor.device}) has no CUDA IPC handle")
    assert tensor.numel() > 0, "an empty tensor has no memory to export"
    address = tensor.data_ptr()
    with cuda_driver.on(tensor.device):
        if not cuda_driver.shares_by_handle(address):
            raise TransferError(_why_not(address))
        base, size = cuda_driver.allocation_of(address)
        end = address + (_span(tensor) + 1) * tensor.itemsize
        assert base <= address, "a tensor begins before its allocation"
        assert end <= base + size, "a tensor reaches beyond its allocation"
        return _segment_at(base, tensor.device), address - base


def _why_not(address: int) -> str:
    if cuda_driver.is_pooled(address):
        return "memory from a stream-ordered pool (backend:cudaMallocAsync) has no CUDA IPC handle"
    return "memory mapped by expandable_segments or a memory saver has no CUDA IPC handle"


def _span(tensor: torch.Tensor) -> int:
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _segment_at(base: int, device: torch.device) -> Segment:
    allocation = cuda_driver.buffer_id(base)
    with _process.lock:
        segment = _process.exported.get((base, allocation))
        if segment is None:
            for stale in [key for key in _process.exported if key[0] == base]:
                del _process.exported[stale]
            handle = Handle(cuda_driver.handle_of(base), _process.token, _process.pid, base, allocation)
            size = cuda_driver.allocation_of(base)[1]
            segment = Segment(NAME, msgspec.msgpack.encode(handle), size, devices.uuid_of(device))
            _process.exported[base, allocation] = segment
        return segment


def open_segment(segment: Segment) -> Memory:
    """Map a segment for this thread's current GPU, once however often it is opened; this process's own are aliased.

    Memory of that GPU and of peers that this process sees can be mapped. Raises TransferError if the GPU is masked from
    this process, no peer, or the owner is gone.
    """
    if segment.transport != NAME:
        raise TransferError(f"a segment of {segment.transport!r} opened as {NAME!r}")
    handle = msgspec.msgpack.decode(segment.handle, type=Handle)
    owner_device = devices.device_of(segment.device)
    key = segment.handle, torch.cuda.current_device()
    with _process.lock:
        mapping = _process.mapped.get(key) or _map(segment, key, handle, owner_device)
        mapping.uses += 1
        _process.mapped[key] = mapping
    return Memory(segment, mapping.address, _Release(mapping.device, mapping=mapping))


def _map(segment: Segment, key: _Key, handle: Handle, owner_device: torch.device) -> _Mapping:
    own = torch.device("cuda", key[1])
    if own != owner_device and not torch.cuda.can_device_access_peer(own, owner_device):
        raise TransferError(f"GPU {devices.uuid_of(own)} has no peer access to {segment.device}: needs a relay")
    if handle.owner == _process.token:
        if own != owner_device:
            with cuda_driver.on(owner_device), cuda_driver.on(own):
                cuda_driver.enable_peer_access(owner_device.index)
        return _Mapping(key, handle.base, owner_device, is_alias=True)
    with cuda_driver.on(own):
        try:
            address = cuda_driver.open_handle(handle.ipc)
        except TransferError as e:
            gone = (
                "" if _is_alive(handle.pid) else "; there is no such process here: it has ended, or runs in a container"
            )
            raise TransferError(
                f"cannot map {segment.nbytes} bytes of process {handle.pid} on GPU {segment.device}: {e}{gone}"
            ) from e
    return _Mapping(key, address, own, is_alias=False)


def _is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def _let_go(mapping: _Mapping) -> None:
    with _process.lock:
        mapping.uses -= 1
        if mapping.uses or _process.mapped.get(mapping.key) is not mapping:
            return
        del _process.mapped[mapping.key]
        if not mapping.is_alias:
            torch.cuda.synchronize(mapping.device)
            cuda_driver.close_handle(mapping.address)


@dataclass
class _Array:
    __cuda_array_interface__: dict


def _as_tensor(address: int, nbytes: int) -> torch.Tensor:
    device = torch.device("cuda", cuda_driver.ordinal_of(address))
    interface = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None}
    with torch.cuda.device(device):
        tensor = torch.as_tensor(_Array(interface), device=device)
    assert tensor.data_ptr() == address, "torch copied memory that it should only name"
    return tensor

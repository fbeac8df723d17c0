"""The few calls of the CUDA driver that torch does not offer, through ``libcuda.so.1`` itself.

The driver's C interface is the same for every torch, CuPy and cuda-bindings, so a trainer and an engine with different
ones (or none) agree here, and nothing needs to be installed. Addresses, sizes and streams are plain integers. All calls
act in the calling thread's current context; ``on(device)`` makes a torch device's primary context current.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Sequence

import torch

from weightsync.errors import TransferError

HANDLE_BYTES = 64
_BUFFER_ID, _IPC_CAPABLE, _MEMPOOL, _ORDINAL = 7, 10, 17, 9  # CUpointer_attribute
_LAZY_PEER_ACCESS = 1
_ALREADY_ENABLED = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * HANDLE_BYTES)]


class _Location(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("id", ctypes.c_int)]


class _CopyAttributes(ctypes.Structure):
    _fields_ = [("order", ctypes.c_int), ("source", _Location), ("target", _Location), ("flags", ctypes.c_uint)]


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise TransferError(f"the NVIDIA driver is not there: {e}") from e
    address, size = ctypes.c_ulonglong, ctypes.c_size_t
    library.cuMemFree_v2.argtypes = library.cuIpcCloseMemHandle.argtypes = [address]
    library.cuMemAlloc_v2.argtypes = [ctypes.c_void_p, size]
    library.cuMemGetAddressRange_v2.argtypes = [ctypes.c_void_p, ctypes.c_void_p, address]
    library.cuIpcGetMemHandle.argtypes = [ctypes.c_void_p, address]
    library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, _Handle, ctypes.c_uint]
    library.cuPointerGetAttribute.argtypes = [ctypes.c_void_p, ctypes.c_int, address]
    library.cuMemcpyAsync.argtypes = [address, address, size, ctypes.c_void_p]
    return library


def _call(name: str, *arguments: object, accepted: int = 0) -> None:
    library = _library()
    status = getattr(library, name)(*arguments)
    if status not in (0, accepted):
        text = ctypes.c_char_p()
        library.cuGetErrorString(status, ctypes.byref(text))
        raise TransferError(f"{name}: {(text.value or b'unknown error').decode()} (CUDA error {status})")


@contextlib.contextmanager
def on(device: torch.device) -> Iterator[None]:
    """Make ``device`` current in this thread, its context created if there is none, and restore the former one."""
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).query()  # creates the primary context, which the plain switch may not
        yield


def allocate(nbytes: int) -> int:
    """Address of ``nbytes`` of new device memory, beside torch's allocator."""
    address = ctypes.c_ulonglong()
    _call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
    return address.value


def free(address: int) -> None:
    _call("cuMemFree_v2", address)


def allocation_of(address: int) -> tuple[int, int]:
    """Base address and bytes of the allocation that holds ``address``."""
    base, size = ctypes.c_ulonglong(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
    return base.value, size.value


def buffer_id(address: int) -> int:
    """The driver's number of that allocation, never given twice in a process: a new one differs from a freed one."""
    return _attribute(_BUFFER_ID, address, ctypes.c_ulonglong())


def ordinal_of(address: int) -> int:
    """Index, in this process, of the device that an address belongs to or was mapped through."""
    return _attribute(_ORDINAL, address, ctypes.c_int())


def shares_by_handle(address: int) -> bool:
    """Whether an IPC handle can be made of that memory: plain ``cudaMalloc`` yes; pools and mapped memory no."""
    return bool(_attribute(_IPC_CAPABLE, address, ctypes.c_int()))


def is_pooled(address: int) -> bool:
    """Whether that memory comes from a stream-ordered pool (``cudaMallocAsync``)."""
    return bool(_attribute(_MEMPOOL, address, ctypes.c_void_p()))


def _attribute(which: int, address: int, out: ctypes._SimpleCData) -> int:
    _call("cuPointerGetAttribute", ctypes.byref(out), which, address)
    return out.value or 0


def handle_of(base: int) -> bytes:
    """The 64-byte IPC handle of the allocation that starts at ``base``."""
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return bytes(handle.bytes)


def open_handle(handle: bytes) -> int:
    """Map another process's allocation into the current device's address space, with peer access if it is elsewhere."""
    address = ctypes.c_ulonglong()
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
    return address.value


def close_handle(address: int) -> None:
    _call("cuIpcCloseMemHandle", address)


def enable_peer_access(index: int) -> None:
    """Let kernels of the current device read this process's own memory on its device ``index``. Idempotent."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(device), index)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        _call("cuCtxEnablePeerAccess", context, 0, accepted=_ALREADY_ENABLED)
    finally:
        _call("cuDevicePrimaryCtxRelease_v2", device)


def has_context(index: int) -> bool:
    """Whether this process's primary context on its device ``index`` is active."""
    device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    _call("cuInit", 0)
    _call("cuDeviceGet", ctypes.byref(device), index)
    _call("cuDevicePrimaryCtxGetState", device, ctypes.byref(flags), ctypes.byref(active))
    return bool(active.value)


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Queue one copy of ``nbytes`` between device addresses on ``stream`` (a raw handle)."""
    _call("cuMemcpyAsync", target, source, nbytes, stream)


def has_batch() -> bool:
    """Whether this driver copies many pieces in one call (CUDA 13 and later)."""
    return hasattr(_library(), "cuMemcpyBatchAsync_v2")


def copy_batch(targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int) -> None:
    """Queue many copies in one call, in any order among themselves. ``stream`` must not be the legacy default one."""
    count = len(sizes)
    arrays = [(kind * count)(*values) for kind, values in zip(
        (ctypes.c_ulonglong, ctypes.c_ulonglong, ctypes.c_size_t), (targets, sources, sizes), strict=True)]  # fmt: skip
    attributes, first = _CopyAttributes(order=1), ctypes.c_size_t(0)  # 1: in stream order
    _call(
        "cuMemcpyBatchAsync_v2", *arrays, ctypes.c_size_t(count), ctypes.byref(attributes), ctypes.byref(first),
        ctypes.c_size_t(1), ctypes.c_void_p(stream),
    )  # fmt: skip

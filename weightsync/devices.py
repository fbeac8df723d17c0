"""GPUs by UUID, never by index, and how much of their memory is used by whom (NVML, over all processes).

UUIDs are NVIDIA's own spelling, ``GPU-8a1b...``. NVML is asked through its C library, which the driver brings along, so
no Python package is needed. Runs in training workers, engines and the actor; torch is imported where it is used.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import TYPE_CHECKING

from weightsync.errors import TransferError

if TYPE_CHECKING:
    import torch


def uuid_of(device: torch.device | int | None = None) -> str:
    """The UUID of a CUDA device of this process; None: the current one of this thread."""
    import torch

    index = device.index if isinstance(device, torch.device) else device
    return _uuid_at(torch.cuda.current_device() if index is None else index)


@functools.cache
def _uuid_at(index: int) -> str:
    import torch

    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def visible_uuids() -> list[str]:
    """The UUIDs of all CUDA devices that this process sees, in the order of their indices."""
    import torch

    return [_uuid_at(index) for index in range(torch.cuda.device_count())]


def device_of(uuid: str) -> torch.device:
    """The device of this process with that UUID; raises TransferError if it is masked from this process."""
    import torch

    visible = visible_uuids()
    if uuid not in visible:
        raise TransferError(
            f"GPU {uuid} is masked from process {os.getpid()} (it sees {', '.join(visible) or 'none'}): "
            "its memory cannot be mapped here and needs a relay, or CUDA_VISIBLE_DEVICES must include it"
        )
    return torch.device("cuda", visible.index(uuid))


def contexts_here() -> list[str]:
    """UUIDs of the devices on which this process has an active primary context (each costs hundreds of MB there)."""
    from weightsync.transports import cuda_driver

    return [uuid for index, uuid in enumerate(visible_uuids()) if cuda_driver.has_context(index)]


def contexts_elsewhere(own: str) -> list[str]:
    """Contexts that this process has on GPUs other than ``own``, in words: mapping a peer's memory may make them."""
    pid, found = os.getpid(), []
    for uuid in contexts_here():
        if uuid != own:
            taken = _used_by(pid, uuid)
            size = f"of {taken / 1e6:.0f} MB" if taken else "(NVML does not say of what size)"
            found.append(f"a context {size} on GPU {uuid} by process {pid}")
    return found


def _used_by(pid: int, uuid: str) -> int:
    try:
        return processes(uuid).get(pid, 0)
    except TransferError:
        return 0


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


def used_bytes(uuid: str) -> int:
    """Bytes of GPU memory in use on that GPU by all processes together, contexts included."""
    memory = _Memory()
    _nvml("nvmlDeviceGetMemoryInfo", _nvml_device(uuid), ctypes.byref(memory))
    return memory.used


def processes(uuid: str) -> dict[int, int]:
    """Process id -> bytes used on that GPU (0 where the driver does not say, as in some containers and VMs)."""
    count = ctypes.c_uint(256)
    rows = (_Process * 256)()
    _nvml("nvmlDeviceGetComputeRunningProcesses_v3", _nvml_device(uuid), ctypes.byref(count), rows)
    unknown = ctypes.c_ulonglong(-1).value
    return {row.pid: 0 if row.used == unknown else row.used for row in rows[: count.value]}


@functools.cache
def _nvml_library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as e:
        raise TransferError(f"NVML is not there: {e}") from e
    _check(library, "nvmlInit_v2", library.nvmlInit_v2())
    return library


def _nvml_device(uuid: str) -> ctypes.c_void_p:
    device = ctypes.c_void_p()
    _nvml("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(device))
    return device


def _nvml(name: str, *arguments: object) -> None:
    library = _nvml_library()
    _check(library, name, getattr(library, name)(*arguments))


def _check(library: ctypes.CDLL, name: str, status: int) -> None:
    if status:
        library.nvmlErrorString.restype = ctypes.c_char_p
        raise TransferError(f"{name}: {library.nvmlErrorString(status).decode()}")

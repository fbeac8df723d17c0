"""Host memory shared between processes of one node: files in /dev/shm, mapped by any process that can open them.

A file carries its owner's identity in its name, so that whoever starts next can remove what a killed process left.
The owner allocates in training workers and in the actor; engines, and the actor too, map.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from weightsync.errors import TransferError
from weightsync.spec import Segment

__all__ = ["Memory", "Puller", "allocate", "export", "make_puller", "open_segment", "sweep"]

NAME = "shm"
FOLDER = Path("/dev/shm")
_PREFIX = "weightsync-"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Pair = tuple[torch.Tensor, torch.Tensor]


class Memory:
    """Mapped host memory: ``tensor`` is torch.uint8 of one dim, ``segment`` names it to other processes.

    ``close`` removes the file if this process owns it, and lets go of the mapping, which stays until the last view of
    ``tensor`` is gone. Idempotent; also done at exit.
    """

    def __init__(self, segment: Segment, mapping: mmap.mmap, owned: Path | None) -> None:
        self.segment = segment
        self.tensor = torch.frombuffer(mapping, dtype=torch.uint8)
        self._finalizer = weakref.finalize(self, _remove, owned, os.getpid())

    def close(self) -> None:
        self._finalizer()
        self.tensor = torch.empty(0, dtype=torch.uint8)


def _remove(path: Path | None, owner_pid: int) -> None:
    if path is not None and os.getpid() == owner_pid:  # a forked child owns nothing
        with suppress(OSError):
            path.unlink()


def allocate(nbytes: int, device: str = "") -> Memory:
    """New zeroed memory of ``nbytes``, reserved at once. Raises TransferError with sizes if there is not enough."""
    assert nbytes > 0 and not device, f"host memory of {nbytes} bytes on {device!r}"
    path = FOLDER / f"{_PREFIX}{_namespace()}-{os.getpid()}-{_start_time(os.getpid())}-{secrets.token_hex(6)}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise TransferError(f"cannot make {path}: {e.strerror}") from e
    try:
        os.posix_fallocate(descriptor, 0, nbytes)  # a file without room behind it would kill whoever writes to it
        mapping = mmap.mmap(descriptor, nbytes)
    except OSError as e:
        _remove(path, os.getpid())
        if e.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise TransferError(f"cannot reserve {nbytes} bytes of shared memory: {e.strerror}") from e
        raise TransferError(f"no room for {nbytes} bytes in {FOLDER}: {_free_bytes()} are free ({e.strerror})") from e
    finally:
        os.close(descriptor)
    return Memory(Segment(NAME, os.fsencode(path), nbytes), mapping, path)


def export(tensor: torch.Tensor) -> tuple[Segment, int]:
    """Never possible: raises TransferError. A trainer's host memory is private to it, so it is copied into an arena."""
    raise TransferError(f"memory of a tensor on {tensor.device} is private to its process: it goes through an arena")


def open_segment(segment: Segment) -> Memory:
    """Map an owner's memory. Raises TransferError if it is not there, too short or not readable here."""
    if segment.transport != NAME:
        raise TransferError(f"a segment of {segment.transport!r} opened as {NAME!r}")
    path = Path(os.fsdecode(segment.handle))
    if path.parent != FOLDER or not path.name.startswith(_PREFIX):
        raise TransferError(f"not a shared memory file of weightsync: {path}")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError as e:
        raise TransferError(f"{path} is gone: its owner closed it, has ended, or sees another {FOLDER}") from e
    except OSError as e:
        raise TransferError(f"cannot open {path}: {e.strerror}") from e
    try:
        size = os.fstat(descriptor).st_size
        if size < segment.nbytes:
            raise TransferError(f"{path} has {size} bytes, {segment.nbytes} were announced")
        mapping = mmap.mmap(descriptor, segment.nbytes)
    except OSError as e:
        raise TransferError(f"cannot map {segment.nbytes} bytes of {path}: {e.strerror}") from e
    finally:
        os.close(descriptor)
    return Memory(segment, mapping, None)


def sweep() -> list[str]:
    """Remove what processes left that were killed; the names removed. Files of other PID namespaces are not judged."""
    removed = []
    for path in FOLDER.glob(f"{_PREFIX}{_namespace()}-*"):
        parts = path.name.removeprefix(_PREFIX).split("-")
        if len(parts) == 4 and parts[1].isdigit() and _start_time(int(parts[1])) != parts[2]:
            with suppress(OSError):
                path.unlink()
                removed.append(path.name)
    return removed


def _namespace() -> str:
    return str(os.stat("/proc/self/ns/pid").st_ino)


def _start_time(pid: int) -> str:
    """When the process started, in clock ticks since boot; "" if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


def _free_bytes() -> int:
    stat = os.statvfs(FOLDER)
    return stat.f_bavail * stat.f_frsize


# ---------------------------------------------------------------------------------------------------- copying


def make_puller(pairs: Sequence[Pair]) -> Puller:
    """A Puller for (target view, source view) pairs of equal shapes in host memory; targets must not overlap."""
    return Puller(pairs)


class Puller:
    """A recorded set of copies, neighbours merged. ``num_bytes`` are bytes written, ``num_copies`` what merging left.

    Copies between equal dtypes move bits; others round as ``Tensor.to`` does.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        kept = _merged([_plain(target, source) for target, source in pairs if target.numel()])
        self._targets = [target for target, _ in kept]
        self._sources = [source for _, source in kept]
        self.num_bytes = sum(target.numel() * target.itemsize for target in self._targets)
        self.num_copies = len(kept)

    goes_on = False

    def start(self, *, alone: bool = True) -> Callable[[], float]:
        """Do the copies, and return what they took."""
        seconds = self.run()
        return lambda: seconds

    def run(self, *, alone: bool = True) -> float:
        """Do the copies; seconds. Nothing else is ever under way here."""
        start = time.perf_counter()
        for target, source in zip(self._targets, self._sources, strict=True):
            target.copy_(source)
        return time.perf_counter() - start


def _plain(target: torch.Tensor, source: torch.Tensor) -> Pair:
    """The same memory as tensors of their own: no autograd, no inference mode, and integers where no dtype changes."""
    assert target.shape == source.shape, f"{tuple(source.shape)} copied to {tuple(target.shape)}"
    same = target.dtype == source.dtype
    return _alias(target, same), _alias(source, same)


def _alias(tensor: torch.Tensor, as_bits: bool) -> torch.Tensor:
    dtype = _BITS.get(tensor.itemsize, tensor.dtype) if as_bits else tensor.dtype
    return torch.empty(0, dtype=dtype).set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def _merged(pairs: list[Pair]) -> list[Pair]:
    """Contiguous copies that follow each other in both memories become one copy of bytes."""
    flat = [p for p in pairs if p[0].dtype == p[1].dtype and p[0].is_contiguous() and p[1].is_contiguous()]
    others = [p for p in pairs if not (p[0].dtype == p[1].dtype and p[0].is_contiguous() and p[1].is_contiguous())]
    runs: list[list[Pair]] = []
    for pair in sorted(flat, key=lambda p: p[0].data_ptr()):
        if runs and all(_follows(last, this) for last, this in zip(runs[-1][-1], pair, strict=True)):
            runs[-1].append(pair)
        else:
            runs.append([pair])
    return [(_span([t for t, _ in run]), _span([s for _, s in run])) for run in runs] + others


def _follows(last: torch.Tensor, this: torch.Tensor) -> bool:
    same_storage = last.untyped_storage().data_ptr() == this.untyped_storage().data_ptr()
    return same_storage and last.data_ptr() + last.nbytes == this.data_ptr()


def _span(parts: list[torch.Tensor]) -> torch.Tensor:
    """All bytes from the first part's start to the last part's end, as torch.uint8 of one dim."""
    first = parts[0]
    offset, nbytes = first.storage_offset() * first.itemsize, sum(p.nbytes for p in parts)
    return torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage(), offset, (nbytes,), (1,))

"""Flattened buckets: whole tensors packed into one byte buffer, as SGLang's ``flattened_bucket`` reads them.

Runs in the weight-sync actor, next to the engine; imports no sglang. A payload is a base64 pickle of
``{"flattened_tensor": uint8 1-D, "metadata": [...]}`` that names only globals which the strictest unpickler allows.
How the buffer itself crosses is a seam (``Share``): host memory by a file in shared memory, or by value; CUDA memory by
whoever re-issues its handle.
"""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import rebuild_storage_filename, rebuild_tensor, rebuild_typed_storage

from weightsync.boxes import aligned
from weightsync.errors import ConfigError
from weightsync.spec import TensorSpec

LOAD_FORMAT = "flattened_bucket"

Share = Callable[[torch.Tensor], tuple[Callable[..., Any], tuple]]
"""Turns a uint8 1-D tensor into the call that rebuilds it in the engine. The engine makes that call once a payload."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MLA_MARK = "kv_a_proj_with_mqa"


class Entry(NamedTuple):
    """A tensor of a bucket: contiguous, in bytes ``start`` to ``end`` of the buffer, at a multiple of its itemsize."""

    tensor: TensorSpec
    start: int
    end: int


class Bucket(NamedTuple):
    """What one payload carries, ``nbytes`` of buffer. ``start``: at which byte of an arena that begins."""

    entries: tuple[Entry, ...]
    nbytes: int
    start: int = 0

    def overlaps(self, other: Bucket) -> bool:
        """Whether a byte of the arena is in both."""
        return self.start < other.start + other.nbytes and other.start < self.start + self.nbytes


# -------------------------------------------------------------------------------------------------- arithmetic


def plan_buckets(tensors: Iterable[TensorSpec], limit_bytes: int) -> list[Bucket]:
    """``tensors``, in order, in as few buckets as that order allows, none over ``limit_bytes``.

    What is larger than the limit travels alone. Tensors that SGLang fuses within one call (those of one multi-head
    latent attention) are kept together, at the place of the first. Raises ConfigError for a limit of 0 or less.
    """
    if limit_bytes <= 0:
        raise ConfigError(f"bucket_bytes must be positive, got {limit_bytes}")
    buckets: list[Bucket] = []
    packing: list[Entry] = []
    for unit in _units(list(tensors)):
        placed = _place(unit, packing[-1].end if packing else 0)
        if packing and placed[-1].end > limit_bytes:
            buckets.append(_sealed(packing))
            packing, placed = [], _place(unit, 0)
        packing += placed
    return [*buckets, _sealed(packing)] if packing else buckets


def without_gaps(
    tensors: Iterable[TensorSpec], limit_bytes: int, is_apart: Callable[[TensorSpec], bool] = lambda tensor: False
) -> list[Bucket]:
    """As ``plan_buckets``, for a reader that is told shapes and no offsets: every entry begins where the last ended.

    Tensors with wide elements come first, so that narrow ones cannot push them off their alignment. Those that are
    ``is_apart`` share no bucket with others, but where they must.
    """
    ordered = sorted(tensors, key=lambda t: -dtype_of(t.dtype).itemsize)
    kinds: dict[bool, list[TensorSpec]] = {True: [], False: []}
    for unit in _units(ordered):
        kinds[all(is_apart(tensor) for tensor in unit)] += unit
    planned = [whole for kind in kinds.values() for whole in plan_buckets(kind, limit_bytes)]
    return [part for whole in planned for part in _cut_at_gaps(whole)]


def at_both_ends(buckets: Sequence[Bucket], limit_bytes: int) -> tuple[list[Bucket], int]:
    """Place ``buckets`` in one arena, alternately at its start and at its end: they, and the arena's size in bytes.

    Two neighbours within the limit never overlap. Beside a larger one they may: the arena has two limits, or the
    largest bucket if that is more.
    """
    sizes = [aligned(b.nbytes) for b in buckets]
    both = max((one + other for one, other in itertools.pairwise(sizes)), default=0)
    nbytes = max([*sizes, min(both, 2 * aligned(limit_bytes))])
    ends = [nbytes - size if number % 2 else 0 for number, size in enumerate(sizes)]
    return [bucket._replace(start=start) for bucket, start in zip(buckets, ends, strict=True)], nbytes


def _cut_at_gaps(bucket: Bucket) -> list[Bucket]:
    runs: list[list[Entry]] = []
    end = 0
    for entry in bucket.entries:
        if not runs or entry.start != end:
            runs.append([])
        runs[-1].append(entry)
        end = entry.end
    return [_sealed(_place([e.tensor for e in run], 0)) for run in runs]


def _units(tensors: list[TensorSpec]) -> Iterable[list[TensorSpec]]:
    """Runs of tensors that must share a bucket: one each, or a whole attention module where SGLang fuses in a call."""
    fused = {t.name.split(_MLA_MARK)[0] for t in tensors if _MLA_MARK in t.name}
    units: dict[str, list[TensorSpec]] = {}
    for tensor in tensors:
        module = next((p for p in _prefixes(tensor.name) if p in fused), tensor.name)
        units.setdefault(module, []).append(tensor)
    return units.values()


def _prefixes(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[:i]) + "." for i in range(len(parts) - 1, 0, -1))


def _place(unit: list[TensorSpec], at: int) -> list[Entry]:
    placed = []
    for tensor in unit:
        itemsize = dtype_of(tensor.dtype).itemsize
        start = -(-at // itemsize) * itemsize
        at = start + itemsize * _numel(tensor.shape)
        placed.append(Entry(tensor, start, at))
    return placed


def _sealed(entries: list[Entry]) -> Bucket:
    return Bucket(tuple(entries), entries[-1].end)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def dtype_of(name: str) -> torch.dtype:
    """The dtype of that name; raises ConfigError if torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"torch {torch.__version__} has no dtype {name!r}")
    return dtype


# ------------------------------------------------------------------------------------------------------ memory


class Arena:
    """``nbytes`` of host memory that other processes can map: a file in shared memory, made by torch.

    ``tensor`` is uint8, 1-D. ``close`` removes the file; processes that map it, and views of ``tensor``, keep the
    memory until they let go. A payload that was not opened before that cannot be opened any more.
    """

    def __init__(self, nbytes: int) -> None:
        storage = torch.UntypedStorage._new_using_filename_cpu(max(nbytes, 1))
        # Torch counts the file's users, and the last one to go removes it; a process that finds it gone already aborts.
        # With one user too many it is never the last, so that removing the file is ours alone, at any time.
        storage._shared_incref()
        self._path = os.path.join("/dev/shm", storage._share_filename_cpu_()[1].decode().lstrip("/"))
        self.tensor: torch.Tensor = torch.empty(0, dtype=torch.uint8).set_(storage)[:nbytes]

    def close(self) -> None:
        """Remove the file and let go of the memory. Idempotent."""
        self.tensor = torch.empty(0, dtype=torch.uint8)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)


def views(flat: torch.Tensor, bucket: Bucket) -> list[torch.Tensor]:
    """The bucket's tensors, in order, as views of ``flat`` (uint8, 1-D, ``bucket.nbytes`` or longer) to write to."""
    return [flat[e.start : e.end].view(dtype_of(e.tensor.dtype)).view(e.tensor.shape) for e in bucket.entries]


def fill(flat: torch.Tensor, bucket: Bucket, tensors: Iterable[torch.Tensor]) -> None:
    """Copy ``tensors`` (any strides; shapes and dtypes as planned) into their places, bit for bit."""
    for target, source in zip(views(flat, bucket), tensors, strict=True):
        assert source.shape == target.shape and source.dtype == target.dtype, "the bucket was planned for other tensors"
        bits = _BITS.get(target.dtype.itemsize, target.dtype)  # integers, so that no float path can touch a NaN payload
        target.view(bits).copy_(source.detach().view(bits))


# -------------------------------------------------------------------------------------------------- on the wire


def share_by_file(flat: torch.Tensor) -> tuple[Callable[..., Any], tuple]:
    """Share a view of an Arena: the engine maps the same pages. Both must see the same /dev/shm and /tmp."""
    storage = flat.untyped_storage()
    manager, handle, nbytes = storage._share_filename_cpu_()
    storage._shared_incref()  # whoever opens the payload counts one down for it
    mapped = _Call(rebuild_storage_filename, (torch.UntypedStorage, manager, handle, nbytes))
    typed = _Call(rebuild_typed_storage, (mapped, torch.uint8))
    layout = (flat.storage_offset(), tuple(flat.shape), flat.stride(), False)
    return rebuild_tensor, (torch.Tensor, typed, layout)


def share_by_value(flat: torch.Tensor) -> tuple[Callable[..., Any], tuple]:
    """Put the bytes into the payload: slow, but it crosses containers and hosts."""
    return flat.detach().cpu().clone().__reduce_ex__(4)


def payloads(flat: torch.Tensor, bucket: Bucket, *, tp_size: int, share: Share) -> list[str]:
    """One payload a TP rank, for ``load_format=LOAD_FORMAT``. Each must be opened by one process, once."""
    buffer = flat[: bucket.nbytes]
    metadata = [
        SimpleNamespace(
            name=e.tensor.name,
            shape=tuple(e.tensor.shape),
            dtype=dtype_of(e.tensor.dtype),
            start_idx=e.start,
            end_idx=e.end,
            numel=e.end - e.start,
        )
        for e in bucket.entries
    ]
    content = {"flattened_tensor": buffer, "metadata": metadata}
    return [encode(content, share) for _ in range(tp_size)]


def encode(content: object, share: Share) -> str:
    """``content`` as a base64 pickle in which every tensor is rebuilt by what ``share`` says."""
    file = io.BytesIO()
    _Pickler(file, share).dump(content)
    return base64.b64encode(file.getvalue()).decode()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, share: Share) -> None:
        super().__init__(file, protocol=4)
        self._share = share

    def reducer_override(self, obj: object) -> Any:
        return self._share(obj) if isinstance(obj, torch.Tensor) else NotImplemented


class _Call:
    """Pickles as a call of ``function``, leaving no trace of itself."""

    def __init__(self, function: Callable[..., Any], args: tuple) -> None:
        self._reduced = (function, args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple]:
        return self._reduced

"""The tensors that an engine rank serves from: what they are called, where they lie, and whether they still do.

Runs in the engine. Nothing here is kept from one look to the next but names and addresses: every read goes through the
module that owns the tensor, so that a replaced parameter is noticed and never read through an old reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn

from weightsync.fingerprint import Fingerprinter, fingerprint
from weightsync.spec import View

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Place(NamedTuple):
    """Where a tensor lies and how."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Slot:
    """A name under which the model holds a tensor. ``kind``: parameter, buffer or plain (an attribute of a module)."""

    def __init__(self, name: str, kind: str, holder: dict, key: str) -> None:
        self.name = name
        self.kind = kind
        self.aliases: list[str] = []
        self._holder = holder
        self._key = key

    def tensor(self) -> torch.Tensor:
        """What the model holds under this name now; raises KeyError if it holds no tensor there any more."""
        return self._held().detach()

    def is_inference(self) -> bool:
        """Whether it was made in inference mode."""
        return self._held().is_inference()

    def _held(self) -> torch.Tensor:
        held = self._holder.get(self._key)
        if not isinstance(held, torch.Tensor):
            raise KeyError(self.name)
        return held

    def place(self) -> Place | None:
        """Where it lies now; None if it is gone."""
        try:
            t = self.tensor()
        except KeyError:
            return None
        return Place(t.data_ptr(), tuple(t.shape), t.stride(), t.dtype)


class Prints(NamedTuple):
    """Constants that are checked by fingerprints: what reads the live ones, and those of what was kept."""

    names: list[str]
    check: Fingerprinter
    kept: list[int]

    def first_other(self, found: list[int]) -> str:
        """The name of the first that is not as it was kept; "" if all are."""
        return next((name for name, then, now in zip(self.names, self.kept, found, strict=True) if now != then), "")


class LiveWeights:
    """Every tensor of one model object. Tied tensors are listed once, under their first name.

    Plain attributes of modules count too (multi-head latent attention serves from ``w_kc`` and ``w_vc``), unless they
    only look into a parameter or buffer.
    """

    def __init__(self, model: nn.Module) -> None:
        self.slots = list(_slots(model))
        self.places = [slot.place() for slot in self.slots]
        self.constants: dict[str, torch.Tensor] = {}
        self._on_gpu: Prints | None = None  # while the kept ones are the same
        self._index = {slot.name: i for i, slot in enumerate(self.slots)}

    def index(self, name: str) -> int:
        """The position of a slot by its name."""
        return self._index[name]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.slots[self._index[name]].tensor()

    def view(self, at: View, size: tuple[int, ...]) -> torch.Tensor:
        """The live memory of a region: ``at.storage`` is a slot's position, offset and strides count from its start."""
        tensor = self.slots[at.storage].tensor()
        return tensor.as_strided(size, at.strides, tensor.storage_offset() + at.offset)

    def writable(self) -> AbstractContextManager:
        """In which a loader may write these tensors in place: inference mode only where they were made in it."""
        made_in_inference = any(slot.is_inference() for slot in self.slots)
        return torch.inference_mode() if made_in_inference else torch.no_grad()

    def moved(self) -> str:
        """Which tensor no longer lies where it was listed, and how it changed; empty if all do."""
        held: list[Any] = [slot._holder.get(slot._key) for slot in self.slots]
        try:
            if [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in held] == self.places:
                return ""
        except AttributeError:  # not a tensor any more
            pass
        changed = ((slot, before) for slot, before in zip(self.slots, self.places) if slot.place() != before)
        return next((f"{s.name} was {_show(before)} and is {_show(s.place())}" for s, before in changed), "")

    def keep(self, names: Iterable[str], known: LiveWeights | None = None) -> None:
        """Copy the named constants to host memory; ``known``'s copies are taken over where they fit."""
        for name in names:
            kept = known.constants.get(name) if known is not None else None
            now = self[name]
            fits = kept is not None and (kept.shape, kept.dtype) == (now.shape, now.dtype)
            self._on_gpu = None
            self.constants[name] = kept if fits else now.to("cpu", copy=True)

    def restore(self) -> None:
        """Write the kept constants back."""
        for name, kept in self.constants.items():
            self[name].copy_(kept)

    def changed_constant(self) -> str:
        """The name of a constant whose bits are not those kept; empty if all are."""
        return self.start_constants()()

    def start_constants(self) -> Callable[[], str]:
        """Begin ``changed_constant``; what is returned waits for it. On a GPU by fingerprints, without a copy."""
        on_gpu = self.constants_on_gpu()
        here = (name for name in self.constants if name not in on_gpu.names)
        changed = next((n for n in here if not torch.equal(bits(self[n]), bits(self.constants[n]))), "")
        found = on_gpu.check.start()
        return lambda: changed or on_gpu.first_other(found())

    def has_constants_elsewhere(self) -> bool:
        """Whether any of the constants is in host memory."""
        return any(not self[name].is_cuda for name in self.constants)

    def constants_on_gpu(self) -> Prints:
        """Those of the constants that are there. The kept ones are read once, the live ones where they lie now."""
        self._on_gpu = self._on_gpu or self._prints([name for name in self.constants if self[name].is_cuda])
        return self._on_gpu

    def _prints(self, names: list[str]) -> Prints:
        live, kept = ([bits(tensors[name]) for name in names] for tensors in (self, self.constants))
        check = Fingerprinter([(own, (0,) * own.dim(), own.dtype) for own in live])
        return Prints(names, check, [fingerprint(own, (0,) * own.dim()) for own in kept])

    def poison(self, names: Iterable[str] | None = None) -> None:
        """Set every bit of every tensor (or of those named): NaN for floats, -1 or the largest value for integers."""
        for slot in self.slots if names is None else [self.slots[self._index[n]] for n in names]:
            own = bits(slot.tensor())
            for d, stride in enumerate(own.stride()):
                own = own.narrow(d, 0, min(own.shape[d], 1)) if stride == 0 else own
            own.fill_(255 if own.dtype == torch.uint8 else -1)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same size; complex numbers as pairs."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.view(_SAME_SIZE[tensor.dtype.itemsize])


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor touches, as a half-open range."""
    start = tensor.storage_offset() * tensor.itemsize
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) if tensor.numel() else -1
    return start, start + (last + 1) * tensor.itemsize


def _slots(model: nn.Module) -> Iterator[Slot]:
    seen: dict[tuple, Slot] = {}
    storages: set[int] = set()
    modules = list(model.named_modules())
    for kind in ("parameter", "buffer", "plain"):
        for path, module in modules:
            holder = {"parameter": module._parameters, "buffer": module._buffers}.get(kind, module.__dict__)
            for key, held in holder.items():
                if not isinstance(held, torch.Tensor) or held.is_meta or held.layout != torch.strided:
                    continue
                name, storage = f"{path}.{key}" if path else key, held.untyped_storage()._cdata
                same = (storage, held.storage_offset(), tuple(held.shape), held.stride(), held.dtype)
                if same in seen and held.numel():
                    seen[same].aliases.append(name)
                elif kind == "parameter" or storage not in storages:
                    seen[same] = slot = Slot(name, kind, holder, key)
                    yield slot
        storages |= {key[0] for key in seen}


def _show(place: Place | None) -> str:
    return f"{place.dtype} {list(place.shape)} at {place.address:#x}" if place else "gone"

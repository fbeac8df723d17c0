"""What an engine's own ``load_weights`` does with each tensor, learned by running it once without moving a byte.

The loader is given *meta* tensors that are all views of one address space. A dispatch mode sees every operator: a copy
from the address space into a parameter is written down, not made; a fill likewise; everything else runs. Slicing,
fusing, transposing and tensor parallelism are views to torch, so no model family is known here by name.

What cannot be followed makes its parameter *opaque*: a source that was computed (``cat``, ``clone``, arithmetic), a
view that is no box, overlapping copies. A loader that raises (``.item()`` has no answer here) makes the whole model
opaque. Casts are followed: floats are offered in the dtype in which the engine holds most of its own, and what is
needed is the dtype of the parameter that is written. Runs in the engine's event loop; leaves no mark on the model.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from weightsync.address_space import CASTABLE, AddressSpace
from weightsync.live import LiveWeights, span
from weightsync.overlaps import Overlap, Write, settle
from weightsync.spec import Fill, Need, TensorSpec, View
from weightsync.strides import Run, source_box
from weightsync.undisturbed import inline_thread_pools, unmarked

_aten = torch.ops.aten


@dataclass
class Trace:
    """What the loader does. ``opaque``: parameter -> why. ``derived``: tensors that it computes after loading.

    ``written``: names of all tensors that it writes in any way. ``ignored``: offered, and used for nothing.
    """

    needs: list[Need] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    opaque: dict[str, str] = field(default_factory=dict)
    derived: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    written: set[str] = field(default_factory=set)


def trace(model: nn.Module, live: LiveWeights, tensors: Sequence[TensorSpec]) -> Trace:
    """What ``model.load_weights`` would do with ``tensors``. What the loader raises becomes a reason in the result."""
    recorder = _Recorder(live, AddressSpace(_main_float(live)))
    offered = [(t.name, recorder.space.offer(t)) for t in tensors]
    failure = ""
    with unmarked(model), inline_thread_pools(), live.writable():
        try:
            with recorder:
                model.load_weights(iter(offered))
                recorder.loaded()
                finalise(model)
        except Exception as e:  # a loader may raise anything; the bucket route can still feed such a model
            failure = f"its loader cannot be traced: {type(e).__name__}: {e}"
        recorder.note_replaced()
    return recorder.result(failure)


def has_hook(model: nn.Module) -> bool:
    """Whether the model has something to recompute after loading."""
    return callable(getattr(model, "post_load_weights", None))


def finalise(model: nn.Module) -> None:
    """Recompute what the model derives from its weights, as its own loader would."""
    if has_hook(model):
        model.post_load_weights()


def _main_float(live: LiveWeights) -> torch.dtype:
    elements: dict[torch.dtype, int] = {}
    for slot in live.slots:
        if slot.kind == "parameter" and slot.tensor().dtype in CASTABLE:
            dtype = slot.tensor().dtype
            elements[dtype] = elements.get(dtype, 0) + slot.tensor().numel()
    return max(elements, key=elements.__getitem__, default=torch.float32)


class _Recorder(TorchDispatchMode):
    """Writes down what would be written into the model's tensors, in place of writing it."""

    def __init__(self, live: LiveWeights, space: AddressSpace) -> None:
        super().__init__()
        self.space = space
        self._live = live
        self._tensors = [slot.tensor() for slot in live.slots]
        self._owners: dict[int, list[tuple[int, int, int]]] = {}
        for i, tensor in enumerate(self._tensors):
            self._owners.setdefault(tensor.untyped_storage()._cdata, []).append((*span(tensor), i))
        self._writes: dict[int, list[Write]] = {}
        self._opaque: dict[int, str] = {}
        self._derived: set[int] = set()
        self._used: set[str] = set()
        self._computed: dict[int, tuple[str, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args, kwargs) if _write_positions(func) else ()
        targets = [(t, owners) for t in written if (owners := self._owners_of(t))]
        if targets:
            for target, owners in targets:
                self._record(func, target, owners, args)
            self._use(args)
            return targets[0][0] if func._schema.returns else None
        if func is _aten._to_copy.default and self.space.region(args[0]) is not None:
            return self.space.cast(args[0], kwargs.get("dtype") or args[0].dtype)
        result = func(*args, **kwargs)
        self._note_computed(func, (args, kwargs), result)
        return result

    def loaded(self) -> None:
        """Call between loading and finalising: what both compute is derived, what only loading computes is opaque."""
        for i in self._derived:
            self._opaque[i] = "its loader computes it, and post_load_weights does not"
        self._derived.clear()

    def note_replaced(self) -> None:
        """Find what the loader replaced in place of writing into it; call it while the model still holds that."""
        for i, (slot, before) in enumerate(zip(self._live.slots, self._live.places)):
            if slot.place() == before:
                continue
            if slot.kind == "plain":
                self._derived.add(i)
            else:
                self._opaque.setdefault(i, "its loader replaces it with another tensor")

    def result(self, failure: str) -> Trace:
        """All that was recorded, overlaps settled. With ``failure`` every parameter is opaque."""
        slots = self._live.slots
        done = Trace(derived=[slots[i].name for i in sorted(self._derived)])
        done.written = {slots[i].name for i in {*self._writes, *self._opaque, *self._derived}}
        if failure:
            done.opaque = {slot.name: failure for slot in slots if slot.kind == "parameter"}
            return done
        for i, writes in sorted(self._writes.items()):
            if i not in self._opaque:
                self._settle(i, writes, done)
        done.opaque = {slots[i].name: reason for i, reason in sorted(self._opaque.items())}
        done.ignored = [name for name in self.space.names() if name not in self._used]
        return done

    def _settle(self, owner: int, writes: list[Write], done: Trace) -> None:
        tensor = self._tensors[owner]
        try:
            settled = settle(writes, tuple(tensor.shape), tensor.stride())
        except Overlap as e:
            self._opaque[owner] = str(e)
            return
        done.needs += [w.need() for w in settled if not w.is_fill]
        done.fills += [w.fill() for w in settled if w.is_fill]

    def _owners_of(self, target: torch.Tensor) -> list[int]:
        """Positions of the model's tensors that a write into ``target`` touches: the one that holds it, or several."""
        candidates = self._owners.get(target.untyped_storage()._cdata, [])
        lo, hi = span(target)
        inside = [i for start, end, i in candidates if start <= lo and hi <= end]
        return inside[:1] or [i for start, end, i in candidates if start < hi and lo < end]

    def _record(self, func: Any, target: torch.Tensor, owners: list[int], args: tuple) -> None:
        for owner in owners if target.numel() else ():
            spans = "one write spans several tensors" if len(owners) > 1 else ""
            problem = spans or self._record_write(func, target, owner, args)
            from_engine = not any(t.is_meta for t in _tensors(args))
            if problem and from_engine and self._live.slots[owner].kind == "plain":
                self._opaque.pop(owner, None)
                self._derived.add(owner)
            elif problem:
                self._opaque.setdefault(owner, problem)

    def _record_write(self, func: Any, target: torch.Tensor, owner: int, args: tuple) -> str:
        """Write down one write into one tensor; returns why it cannot be followed, or ""."""
        tensor = self._tensors[owner]
        offset = target.storage_offset() - tensor.storage_offset()
        if target.dtype != tensor.dtype:
            return f"its memory is written as {target.dtype}"
        value = _filled_value(func, args)
        if value is not None:
            at = View(owner, offset, target.stride())
            self._writes.setdefault(owner, []).append(Write(at, tuple(target.shape), value=value))
            return ""
        if func is not _aten.copy_.default:
            return f"it is written by {func}"
        region = self.space.region(args[1])
        if region is None:
            return self._origin(args[1])
        if region.cast and torch.promote_types(region.dtype, tensor.dtype) != region.dtype:
            return f"{region.name} is cast to {region.dtype} on its way"
        source = args[1].expand(target.shape)
        runs = [Run(s, t, n) for s, t, n in zip(source.stride(), target.stride(), target.shape)]
        found = source_box(region.shape, self.space.offset(source, region), runs)
        if found is None:
            return f"it takes elements of {region.name} that are no box (strides {list(source.stride())})"
        at = View(owner, offset, found[1])
        self._writes.setdefault(owner, []).append(Write(at, found[0].size, tensor=region.name, box=found[0]))
        return ""

    def _origin(self, source: torch.Tensor) -> str:
        if self.space.holds(source):
            return f"it takes the bytes of {self.space.name(source)} as {source.dtype}"
        known = self._computed.get(source.untyped_storage()._cdata) if source.is_meta else None
        return f"its source is computed by {known[0]}" if known else "its source is no offered tensor"

    def _note_computed(self, func: Any, inputs: object, result: object) -> None:
        """Remember which results are not views of what went in, and that what went in is of use."""
        made = [t for t in _tensors(result) if t.is_meta and not self.space.holds(t)]
        if not made or not any(t.is_meta for t in _tensors(inputs)):
            return
        for t in made:
            self._computed.setdefault(t.untyped_storage()._cdata, (str(func), t))
        self._use(inputs)

    def _use(self, inputs: object) -> None:
        self._used.update(self.space.name(t) for t in _tensors(inputs) if self.space.holds(t))


@functools.cache
def _write_positions(func: Any) -> list[tuple[int, str]]:
    arguments = func._schema.arguments
    return [(i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]


def _written(func: Any, args: tuple, kwargs: dict) -> Iterator[torch.Tensor]:
    """The tensors that an operator writes into, by its schema."""
    for position, name in _write_positions(func):
        argument = args[position] if position < len(args) else kwargs.get(name)
        yield from (t for t in _tensors(argument) if not t.is_meta)


def _tensors(found: object) -> Iterator[torch.Tensor]:
    """All tensors in an operator's arguments or result. Torch's own way through a tree took a fifth of a trace."""
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, tuple | list):
        for one in found:
            yield from _tensors(one)
    elif isinstance(found, dict):
        for one in found.values():
            yield from _tensors(one)


def _filled_value(func: Any, args: tuple) -> float | None:
    """The value that a write gives to every element; None if it is not of that kind."""
    if func is _aten.zero_.default:
        return 0.0
    if func is _aten.fill_.Scalar:
        return float(args[1])
    if func in (_aten.fill_.Tensor, _aten.copy_.default) and args[1].numel() == 1 and not args[1].is_meta:
        return float(args[1].item())
    return None

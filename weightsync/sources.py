"""The trainer's side of a plan: shards and rules become Hugging Face tensors, each a list of boxes and their holders.

Many tensors are sharded alike (all layers of a model), so the geometry is worked out once a *layout* and shared.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from weightsync.boxes import intersect, piece_of, rule_problem, rule_target
from weightsync.config import RenameConfig
from weightsync.errors import PlanError
from weightsync.spec import Box, Description, Layout, Rule, Shard, TensorSpec


class Holder(NamedTuple):
    """A trainer rank and the index of a shard in its list."""

    rank: int
    shard: int


class Member(NamedTuple):
    """One of the replicas of a box: which holder of the tensor, and where the box starts in that holder's shard."""

    holder: int
    rank: int
    offset: int
    strides: tuple[int, ...]


class Group(NamedTuple):
    """A box of a Hugging Face tensor and everyone who holds exactly that box. ``members`` is never empty."""

    box: Box
    members: tuple[Member, ...]


@dataclass(slots=True, eq=False)
class SourceLayout:
    """How a Hugging Face tensor lies over the trainer's ranks. Shared by all tensors that lie alike.

    ``replicas`` are the ranks that hold the box with the most holders.
    """

    groups: list[Group]
    replicas: tuple[int, ...]


@dataclass(slots=True, eq=False)
class SourceTensor:
    """A Hugging Face tensor as the trainer gives it. ``inputs`` are the trainer tensors it is made of."""

    spec: TensorSpec
    inputs: tuple[str, ...]
    layout: SourceLayout
    holders: list[Holder]
    is_buffer: bool


@dataclass(slots=True)
class Sources:
    """All that the trainer gives. ``unmapped``: its tensors (not buffers) that no rule maps; ``left_out``: as asked."""

    tensors: dict[str, SourceTensor] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    unmapped: list[str] = field(default_factory=list)


class _Held(NamedTuple):
    """One trainer tensor over all ranks. ``layout`` is the same object for tensors that are sharded alike."""

    layout: tuple
    holders: list[Holder]
    first: Shard


def renamed(name: str, rename: Iterable[RenameConfig]) -> str:
    """``name`` after the rules, in order; each replaces its first match."""
    for rule in rename:
        name = re.sub(rule.pattern, rule.to, name, count=1)
    return name


def distinct_rules(descriptions: Iterable[Description]) -> list[Rule]:
    """The rules of all ranks, each once, in order."""
    return list(dict.fromkeys(rule for d in descriptions for rule in d.rules))


def offered(
    descriptions: Iterable[Description], rename: Iterable[RenameConfig] = (), leave_out: Iterable[str] = ()
) -> dict[str, TensorSpec]:
    """The Hugging Face tensors that the trainer can give, by name; what ``leave_out`` matches is not offered.

    Raises PlanError if ranks or rules contradict each other in shape or dtype.
    """
    descriptions = list(descriptions)
    exports = {d.rank: d.shards for d in descriptions}
    return {n: t.spec for n, t in map_sources(exports, distinct_rules(descriptions), rename, leave_out).tensors.items()}


def map_sources(
    exports: dict[int, list[Shard]],
    rules: list[Rule],
    rename: Iterable[RenameConfig],
    leave_out: Iterable[str],
    without: Collection[str] = (),
) -> Sources:
    """Shards (a list a trainer rank) and rules -> Sources. Raises PlanError naming the tensor where they do not fit.

    ``without``: names of Hugging Face tensors that are left out too. There may be thousands, so no patterns.
    """
    held = _held_tensors(exports)
    rename, unwanted = list(rename), [re.compile(p) for p in leave_out]
    by_target: dict[str, list[Rule]] = defaultdict(list)
    sources, mapped = Sources(), set()
    for rule in rules:
        mapped.add(rule.source)
        target = renamed(rule.target, rename)
        if target in without or any(p.search(target) or p.search(rule.source) for p in unwanted):
            sources.left_out.append(target)
        else:
            by_target[target].append(rule)
    for name, first in ((n, h.first) for n, h in held.items() if n not in mapped):
        if any(p.search(name) for p in unwanted):
            sources.left_out.append(name)
        elif not first.is_buffer:
            sources.unmapped.append(name)
    sources.left_out = list(dict.fromkeys(sources.left_out))
    layouts: dict[tuple, SourceLayout] = {}
    for target, target_rules in by_target.items():
        sources.tensors[target] = _source_tensor(target, target_rules, held, layouts)
    return sources


def needed_dtypes(
    layouts: dict[str, list[Layout]], rules: list[Rule], rename: Iterable[RenameConfig] = ()
) -> dict[str, str]:
    """The dtype that each trainer tensor must be published in: that of the engine parameters it lands in.

    ``layouts`` are lists of engine ranks by engine. Tensors that no engine needs are not in the answer. Raises
    PlanError if two parameters want one trainer tensor in different dtypes.
    """
    where: dict[tuple[str, str], str] = {}
    for engine, ranks in layouts.items():
        for layout in ranks:
            dtypes = [p.dtype for p in layout.params]
            for need in layout.needs:
                key = (need.tensor, dtypes[need.view.storage])
                if key not in where:
                    where[key] = f"{layout.params[need.view.storage].name} (engine {engine}, rank {layout.rank})"
    by_target: dict[str, list[str]] = defaultdict(list)
    for target, dtype in where:
        by_target[target].append(dtype)
    rename = list(rename)
    result: dict[str, str] = {}
    reason: dict[str, str] = {}
    for rule in rules:
        target = renamed(rule.target, rename)
        for dtype in by_target.get(target, ()):
            place = f"{dtype} by {where[target, dtype]}"
            if result.setdefault(rule.source, dtype) != dtype:
                raise PlanError(f"{rule.source} is wanted as {reason[rule.source]} and as {place}", tensor=rule.source)
            reason.setdefault(rule.source, place)
    return result


def _held_tensors(exports: dict[int, list[Shard]]) -> dict[str, _Held]:
    by_name: dict[str, list[tuple[int, int, Shard]]] = defaultdict(list)
    for rank in sorted(exports):
        for index, shard in enumerate(exports[rank]):
            by_name[shard.tensor].append((rank, index, shard))
    layouts: dict[tuple, tuple] = {}
    held = {}
    for name, entries in by_name.items():
        layout = tuple([(rank, s.shape, s.dtype, s.box, s.strides) for rank, _, s in entries])
        if layout not in layouts:
            _check_agreement(name, layout)
            layouts[layout] = layout
        held[name] = _Held(layouts[layout], [Holder(rank, i) for rank, i, _ in entries], entries[0][2])
    return held


def _check_agreement(name: str, layout: tuple) -> None:
    rank0, shape0, dtype0, *_ = layout[0]
    for rank, shape, dtype, box, strides in layout:
        if (shape, dtype) != (shape0, dtype0):
            raise PlanError(
                f"{name} is {dtype0} {list(shape0)} on trainer rank {rank0} and {dtype} {list(shape)} on rank {rank}",
                tensor=name,
            )
        fits = all(o >= 0 and o + n <= m for o, n, m in zip(box.offset, box.size, shape) if n)
        if not (len(box.size) == len(box.offset) == len(strides) == len(shape) and fits):
            raise PlanError(f"{name}: shard {box} of trainer rank {rank} does not fit {list(shape)}", tensor=name)


def _source_tensor(
    target: str, rules: list[Rule], held: dict[str, _Held], layouts: dict[tuple, SourceLayout]
) -> SourceTensor:
    for rule in rules:
        if rule.source not in held:
            raise PlanError(f"{target} is made of {rule.source}, which no trainer rank holds", tensor=target)
    inputs = [held[rule.source] for rule in rules]
    key = tuple((id(h.layout), r.box, r.target_shape, r.target_offset, r.dims) for h, r in zip(inputs, rules))
    if key not in layouts:
        layouts[key] = _source_layout(target, rules, inputs)
    first = inputs[0].first
    return SourceTensor(
        spec=TensorSpec(target, rules[0].target_shape, first.dtype),
        inputs=tuple(dict.fromkeys(rule.source for rule in rules)),
        layout=layouts[key],
        holders=inputs[0].holders if len(inputs) == 1 else [holder for h in inputs for holder in h.holders],
        is_buffer=all(h.first.is_buffer for h in inputs),
    )


def _source_layout(target: str, rules: list[Rule], inputs: list[_Held]) -> SourceLayout:
    _check_rules(target, rules, inputs)
    members: dict[Box, list[Member]] = defaultdict(list)
    holder = 0
    for rule, held in zip(rules, inputs):
        for rank, _, _, box, strides in held.layout:
            piece = piece_of(rule, box, strides)
            if piece is not None:
                members[piece.box].append(Member(holder, rank, piece.offset, piece.strides))
            holder += 1
    groups = [Group(box, tuple(members[box])) for box in sorted(members, key=lambda b: (b.offset, b.size))]
    widest = max((group.members for group in groups), key=len, default=())
    return SourceLayout(groups, tuple(member.rank for member in widest))


def _check_rules(target: str, rules: list[Rule], inputs: list[_Held]) -> None:
    shape, dtype = rules[0].target_shape, inputs[0].first.dtype
    for i, (rule, held) in enumerate(zip(rules, inputs)):
        problem = rule_problem(rule, held.first.shape)
        if problem:
            raise PlanError(f"{rule.source} -> {target}: {problem}", tensor=target)
        if (rule.target_shape, held.first.dtype) != (shape, dtype):
            raise PlanError(
                f"{target} is {dtype} {list(shape)} by {rules[0].source} and "
                f"{held.first.dtype} {list(rule.target_shape)} by {rule.source}",
                tensor=target,
            )
        for other in rules[:i]:
            if intersect(rule_target(rule), rule_target(other)) is not None:
                raise PlanError(f"{target} gets the same elements from {other.source} and {rule.source}", tensor=target)

"""Whether what the trainer gives and what the engines need fit together; if not, one PlanError that says all of it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

from weightsync.boxes import contains, show, whole
from weightsync.coverage import check_layout
from weightsync.errors import PlanError
from weightsync.sources import Sources, SourceTensor
from weightsync.spec import Layout
from weightsync.templates import Template, Wanted

MAX_NAMES = 50


class Reader(NamedTuple):
    """One engine rank. Its place in the plan's list of readers is its number."""

    engine: str
    layout: Layout


def dtype_kind(dtype: str) -> str:
    """What a dtype can hold: only dtypes of one kind are turned into each other by a plain cast."""
    if dtype.startswith(("float8", "float4")):
        return "quantised"  # needs scales: no plain cast
    return "float" if dtype.startswith(("float", "bfloat")) else re.sub(r"^u?int\d+$", "integer", dtype)


def dtype_bytes(dtype: str) -> int:
    """Bytes an element of torch's dtype of that name; packed sub-byte dtypes count 1."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits.group()) // 8) if bits else 1


def check_dtypes(sources: Iterable[SourceTensor], dtypes: dict[str, str], exported: bool) -> list[str]:
    """Notes on what the publisher must cast to reach ``dtypes`` (by trainer tensor). Raises PlanError where it cannot.

    ``exported``: the memory already exists, so its dtype is final.
    """
    casts: Counter[str] = Counter()
    for source in sources:
        name, has, wants = source.spec.name, source.spec.dtype, dtypes[source.inputs[0]]
        if has == wants:
            continue
        if dtype_kind(has) != dtype_kind(wants) or dtype_kind(wants) == "quantised":
            raise PlanError(
                f"{name} is {has} on the trainer and {wants} in the engine: that takes more than a cast", tensor=name
            )
        if exported:
            raise PlanError(
                f"{name} was exported as {has}, and the engine needs {wants}: export it as needed_dtypes says",
                tensor=name,
            )
        casts[f"{has} to {wants}"] += 1
    return [f"{count} tensors are cast by the publisher, {cast}" for cast, count in casts.items()]


def check_boxes(source: SourceTensor, wanted: Iterable[Wanted], readers: list[Reader]) -> None:
    """Raise PlanError if a needed box does not fit the trainer's shape."""
    shape = source.spec.shape
    for need in wanted:
        if not contains(whole(shape), need.box) or len(need.strides) != len(shape):
            reader = readers[need.reader]
            raise PlanError(
                f"{source.spec.name} is {list(shape)} on the trainer, but the engine needs its box {show(need.box)}",
                engine=reader.engine,
                rank=reader.layout.rank,
                tensor=source.spec.name,
            )


def check_fit(
    sources: Sources, templates: dict[str, Template], readers: list[Reader], constants: Iterable[str]
) -> list[str]:
    """The proof of coverage over all engine ranks. ``templates``: by Hugging Face tensor, those that someone needs.

    Returns the offered buffers that no engine reads. Raises PlanError with both lists: tensors without a home and
    parameters without a source.
    """
    homeless, unread_buffers = _homeless(sources, readers)
    sourceless = _missing_boxes(templates, readers)
    sourceless += _unknown_needs(sources, readers)
    sourceless += _holes(readers, constants)
    if homeless or sourceless:
        raise PlanError(_message(homeless, sourceless), tensor=(homeless or [sourceless[0].split(" ")[0]])[0])
    return unread_buffers


def _homeless(sources: Sources, readers: list[Reader]) -> tuple[list[str], list[str]]:
    by_engine: dict[str, list[Layout]] = defaultdict(list)
    for reader in readers:
        by_engine[reader.engine].append(reader.layout)
    homeless = list(sources.unmapped)
    unread_buffers: list[str] = []
    for layouts in by_engine.values():
        needed = {need.tensor for layout in layouts for need in layout.needs}
        ignored = set.intersection(*(set(layout.ignored) for layout in layouts))
        traced = not any(layout.opaque for layout in layouts)
        for name, source in sources.tensors.items():
            if name in needed or not (traced or name in ignored):
                continue  # with opaque parameters a tensor may be used where the trace could not see it
            (unread_buffers if source.is_buffer else homeless).append(name)
    return list(dict.fromkeys(homeless)), list(dict.fromkeys(unread_buffers))


def _missing_boxes(templates: dict[str, Template], readers: list[Reader]) -> list[str]:
    by_box: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for name, template in templates.items():
        for number, box in template.missing:
            by_box[name, show(box), readers[number].engine].append(readers[number].layout.rank)
    return [
        f"{name} {box} (held by no trainer rank; needed by {_who(engine, ranks)})"
        for (name, box, engine), ranks in by_box.items()
    ]


def _unknown_needs(sources: Sources, readers: list[Reader]) -> list[str]:
    by_need: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for engine, layout in readers:
        for need in layout.needs:
            if need.tensor not in sources.tensors:
                by_need[layout.params[need.view.storage].name, need.tensor, engine].append(layout.rank)
    return [
        f"{param} (needs {tensor}, which the trainer does not offer; {_who(engine, ranks)})"
        for (param, tensor, engine), ranks in by_need.items()
    ]


def _holes(readers: list[Reader], constants: Iterable[str]) -> list[str]:
    constants = list(constants)
    proved: dict = {}
    by_hole: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for engine, layout in readers:
        for hole in check_layout(layout, constants, proved):
            reason = "no tensor feeds it" if hole.unwritten else hole.reason
            by_hole[hole.param, reason, engine].append(layout.rank)
    return [f"{param} ({reason}; {_who(engine, ranks)})" for (param, reason, engine), ranks in by_hole.items()]


def _message(homeless: list[str], sourceless: list[str]) -> str:
    lines = ["the trainer's tensors and the engine's parameters do not fit; nothing was moved"]
    for title, names in (("tensors without a home", homeless), ("parameters without a source", sourceless)):
        lines.append(f"{title} ({len(names)}):" + ("" if names else " none"))
        lines += [f"  {name}" for name in names[:MAX_NAMES]]
        lines += [f"  ... and {len(names) - MAX_NAMES} more"] if len(names) > MAX_NAMES else []
    heads = [name for name in homeless if name.endswith("lm_head.weight")]
    if heads:
        lines.append(
            f"hint: an engine that ties its head to its embedding ignores {heads[0]}. If the trainer's head is the "
            f"same tensor as its embedding, add '{re.escape(heads[0])}' to leave_out; if not, the engine serves "
            "another model"
        )
    if homeless and not heads:
        lines.append("hint: rename: gives tensors the engine's names, leave_out: names those that no engine should get")
    if sourceless and not homeless:
        lines.append("hint: constants: names parameters that no trainer tensor feeds")
    return "\n".join(lines)


def _who(engine: str, ranks: list[int]) -> str:
    """``engine http://a ranks 0-3, 7``."""
    ordered = sorted(set(ranks))
    runs = [[r for _, r in run] for _, run in groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0])]
    shown = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"engine {engine} rank{'s' if len(ordered) > 1 else ''} {shown}"

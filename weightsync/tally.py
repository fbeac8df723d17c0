"""Sums over a plan: bytes and copies by pair of ranks, and what of the trainer's tensors engines do not read."""

from __future__ import annotations

from collections import Counter, defaultdict
from math import prod
from typing import NamedTuple

from weightsync.fit import Reader
from weightsync.sources import SourceTensor
from weightsync.spec import Traffic
from weightsync.templates import Template, unread


class PlannedTensor(NamedTuple):
    """One Hugging Face tensor that some engine needs. ``itemsize``: bytes an element where it lands."""

    source: SourceTensor
    template: Template
    itemsize: int


def count_traffic(
    tensors: dict[str, PlannedTensor], readers: list[Reader], tiers: list[dict[int, int]], route: str
) -> list[Traffic]:
    """One row for each engine rank and trainer rank that it reads. ``tiers`` as for ``build_template``."""
    uses = Counter((id(t.template), t.itemsize) for t in tensors.values())
    templates = {id(t.template): t.template for t in tensors.values()}
    num_bytes: Counter[tuple[int, int]] = Counter()
    num_copies: Counter[tuple[int, int]] = Counter()
    for (template, itemsize), count in uses.items():
        for pair, (elements, copies) in templates[template].traffic.items():
            num_bytes[pair] += elements * itemsize * count
            num_copies[pair] += copies * count
    rows = []
    for number, rank in sorted(num_bytes):
        engine, layout = readers[number]
        pair = (number, rank)
        same_device = tiers[number][rank] == 0
        rows.append(Traffic(engine, layout.rank, rank, route, num_bytes[pair], num_copies[pair], same_device))
    return rows


def unread_notes(tensors: dict[str, PlannedTensor], readers: list[Reader]) -> list[str]:
    """A line for each tensor of which an engine reads only a part, all its ranks together."""
    known: dict[int, dict[str, int]] = {}
    notes = []
    for name, tensor in tensors.items():
        shape, template = tensor.source.spec.shape, tensor.template
        if id(template) not in known:
            boxes = defaultdict(list)
            for need in template.wanted:
                boxes[readers[need.reader].engine].append(need.box)
            known[id(template)] = {engine: unread(shape, read) for engine, read in boxes.items()}
        for engine, elements in known[id(template)].items():
            if elements:
                notes.append(f"{name}: engine {engine} does not read {elements} of its {prod(shape)} elements")
    return notes

"""Intersection of a source layout with what engine ranks need: the copies of one tensor, without its name.

A template serves all tensors that lie alike on the trainer and are needed alike: the layers of a model share a dozen.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from weightsync.boxes import distance, intersect, subtract_all, volume, whole
from weightsync.sources import Member, SourceLayout
from weightsync.spec import Box


class Wanted(NamedTuple):
    """One need of a tensor: the engine rank's number in the plan, the box, the strides of the target view."""

    reader: int
    box: Box
    strides: tuple[int, ...]


class Part(NamedTuple):
    """One copy. ``holder`` indexes the tensor's holders; ``offset`` and ``strides`` are in the holder's shard.

    ``target_offset`` counts from the need's own view; ``region`` numbers the distinct boxes of this trainer rank.
    """

    box: Box
    rank: int
    holder: int
    offset: int
    strides: tuple[int, ...]
    target_offset: int
    region: int


@dataclass(slots=True, eq=False)
class Template:
    """The copies of all tensors that lie alike.

    ``wanted``: what was asked. ``parts``: by reader, one list a need in order. ``regions``: by trainer rank, distinct.
    ``traffic``: elements and copies by (reader, trainer rank). ``missing``: (reader, box) that no source has.
    """

    wanted: list[Wanted]
    parts: dict[int, list[list[Part]]] = field(default_factory=lambda: defaultdict(list))
    regions: dict[int, list[Part]] = field(default_factory=lambda: defaultdict(list))
    traffic: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    missing: list[tuple[int, Box]] = field(default_factory=list)


def build_template(layout: SourceLayout, wanted: list[Wanted], tiers: list[dict[int, int]], start: int) -> Template:
    """The copies that bring ``wanted`` from ``layout``: each needed element from exactly one holder.

    ``tiers[reader][rank]`` says how far a trainer rank is from an engine rank: the nearest replica is read, and among
    equally near ones the readers take turns, beginning with number ``start``.
    """
    template = Template(wanted)
    numbers: dict[tuple[int, Box], int] = {}
    for need in wanted:
        parts, missing = _parts(layout, need, tiers[need.reader], start + need.reader)
        for i, part in enumerate(parts):
            regions = template.regions[part.rank]
            number = numbers.setdefault((part.holder, part.box), len(regions))
            parts[i] = part = part._replace(region=number)
            if number == len(regions):
                regions.append(part)
            elements, copies = template.traffic.get((need.reader, part.rank), (0, 0))
            template.traffic[need.reader, part.rank] = (elements + volume(part.box), copies + 1)
        template.parts[need.reader].append(parts)
        template.missing += [(need.reader, box) for box in missing]
    return template


def unread(shape: tuple[int, ...], boxes: list[Box]) -> int:
    """How many elements of a tensor of ``shape`` are in none of ``boxes``."""
    rest = [whole(shape)]
    for box in dict.fromkeys(boxes):
        rest = subtract_all(rest, box)
    return sum(map(volume, rest))


def _parts(layout: SourceLayout, need: Wanted, tier: dict[int, int], turn: int) -> tuple[list[Part], list[Box]]:
    candidates = []
    for group in layout.groups:
        if intersect(group.box, need.box) is not None:
            member = _nearest(group.members, tier, turn)
            candidates.append((tier[member.rank], group.box, member))
    candidates.sort(key=lambda c: c[0])
    parts, missing = [], [need.box] if volume(need.box) else []
    for _, box, member in candidates:
        overlaps = [common for rest in missing if (common := intersect(rest, box)) is not None]
        parts += [_part(need, box, member, common) for common in overlaps]
        missing = subtract_all(missing, box) if overlaps else missing
    return parts, missing


def _nearest(members: tuple[Member, ...], tier: dict[int, int], turn: int) -> Member:
    if len(members) == 1:
        return members[0]
    nearest = min(tier[m.rank] for m in members)
    near = [m for m in members if tier[m.rank] == nearest]
    return near[turn % len(near)]


def _part(need: Wanted, held: Box, member: Member, common: Box) -> Part:
    return Part(
        box=common,
        rank=member.rank,
        holder=member.holder,
        offset=member.offset + distance(held.offset, common.offset, member.strides),
        strides=member.strides,
        target_offset=distance(need.box.offset, common.offset, need.strides),
        region=-1,
    )

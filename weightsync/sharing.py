"""What several ranks of an engine need alike is sent to one, which passes it on: no byte goes twice over a link.

Each such piece goes along a *chain* of the ranks that need it, those of one node next to each other: the first gets it
from the trainer, every other from the one before, out of the weights that were just written there. So a piece enters
and leaves each GPU once, and each node once. Hop ``n`` of all chains makes *pass* ``n``. Pure functions, no torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from weightsync.boxes import distance, intersect, volume
from weightsync.spec import Box, Copy, Struct, View


class Pass(Struct):
    """What one rank passes on and is passed at the same time: copies by the other's rank.

    The target of a copy is where it lies in *this* rank's parameters, on both sides.
    """

    sends: dict[int, list[Copy]] = {}
    receives: dict[int, list[Copy]] = {}


class Shared(NamedTuple):
    """``direct``: by engine rank, what the trainer sends to it. ``passes``: by engine rank, as many for every one."""

    direct: dict[int, list[Copy]]
    passes: dict[int, list[Pass]]


def share(copies: Mapping[int, Sequence[Copy]], hosts: Mapping[int, str], nbytes: Callable[[Copy], int]) -> Shared:
    """Divide what every engine rank needs (``copies``, by rank) into what it is sent and what it is passed.

    ``hosts``: by engine rank, its node; ``nbytes``: of a copy. Each chain begins at its rank with the least to receive.
    """
    load: Counter[int] = Counter()
    direct: dict[int, list[Copy]] = {rank: [] for rank in copies}
    hops: list[dict[tuple[int, int], list[tuple[Copy, Copy]]]] = []
    for wanted in _alike(copies):
        ranks = _chain(list(wanted), hosts, load)
        source = wanted[ranks[0]]
        direct[ranks[0]].append(source)
        load[ranks[0]] += nbytes(source)
        for number, pair in enumerate(pairwise(ranks)):
            if number == len(hops):
                hops.append(defaultdict(list))
            hops[number][pair].append((wanted[pair[0]], _of(source, wanted[pair[1]])))
    return Shared(direct, {rank: [_pass(rank, hop) for hop in hops] for rank in copies})


def part_of(copy: Copy, dim: int, start: int, count: int) -> Copy:
    """``count`` of the positions of ``copy`` along ``dim``, from its own ``start`` on."""
    offset, size = list(copy.box.offset), list(copy.box.size)
    offset[dim] += start
    size[dim] = count
    return _within(copy, Box(tuple(offset), tuple(size)))


def link_bytes(shared: Shared, nbytes: Callable[[Copy], int]) -> dict[tuple[int | str, int | str], int]:
    """Bytes over each link of a push: (``trainer N``, engine rank) and (engine rank, engine rank)."""
    links: Counter[tuple[int | str, int | str]] = Counter()
    for rank, copies in shared.direct.items():
        for copy in copies:
            links[f"trainer {copy.rank}", rank] += nbytes(copy)
    for rank, passes in shared.passes.items():
        for one in passes:
            for other, sent in one.sends.items():
                links[rank, other] += sum(map(nbytes, sent))
    return dict(links)


def _chain(ranks: list[int], hosts: Mapping[int, str], load: Counter[int]) -> list[int]:
    first = min(ranks, key=lambda rank: (load[rank], rank))
    return sorted(ranks, key=lambda rank: (rank != first, hosts[rank] != hosts[first], hosts[rank], rank))


def _pass(rank: int, hop: Mapping[tuple[int, int], list[tuple[Copy, Copy]]]) -> Pass:
    return Pass(
        sends={to: [here for here, _ in pairs] for (by, to), pairs in hop.items() if by == rank},
        receives={by: [there for _, there in pairs] for (by, to), pairs in hop.items() if to == rank},
    )


def _of(source: Copy, copy: Copy) -> Copy:
    """``copy`` as what ``source`` brings: of several replicas both ends must name the same one."""
    return Copy(copy.tensor, copy.box, source.rank, source.source, copy.target)


def _alike(copies: Mapping[int, Sequence[Copy]]) -> Iterator[dict[int, Copy]]:
    """Every piece that one rank or more need, as each needs it. Pieces are disjoint."""
    by_tensor: dict[str, list[tuple[int, Copy]]] = defaultdict(list)
    for rank, own in copies.items():
        for copy in own:
            by_tensor[copy.tensor].append((rank, copy))
    for wanted in by_tensor.values():
        boxes = list(dict.fromkeys(copy.box for _, copy in wanted))
        pieces = {box: [box] for box in boxes} if _disjoint(boxes) else _pieces(boxes)
        alike: dict[tuple[Box, int], dict[int, Copy]] = defaultdict(dict)
        again: Counter[tuple[Box, int]] = Counter()  # a rank may keep one piece in two places
        for rank, copy in wanted:
            for box in pieces[copy.box]:
                alike[box, again[box, rank]][rank] = _within(copy, box)
                again[box, rank] += 1
        yield from alike.values()


def _within(copy: Copy, box: Box) -> Copy:
    if box == copy.box:
        return copy

    def moved(view: View) -> View:
        return View(view.storage, view.offset + distance(copy.box.offset, box.offset, view.strides), view.strides)

    return Copy(copy.tensor, box, copy.rank, moved(copy.source), moved(copy.target))


def _disjoint(boxes: Iterable[Box]) -> bool:
    """Whether no two overlap. Only those that share positions of the first dim are compared."""
    ordered = sorted((box for box in boxes if volume(box)), key=lambda box: box.offset)
    active: list[Box] = []
    for box in ordered:
        if not box.size:
            if active:
                return False
        else:
            active = [a for a in active if a.offset[0] + a.size[0] > box.offset[0]]
            if any(intersect(a, box) for a in active):
                return False
        active.append(box)
    return True


def _pieces(boxes: Sequence[Box]) -> dict[Box, list[Box]]:
    """Each box cut where any other begins or ends, so that two pieces are equal or disjoint."""
    dims = range(len(boxes[0].size))
    edges = [sorted({e for b in boxes for e in (b.offset[d], b.offset[d] + b.size[d])}) for d in dims]
    return {box: list(_cells(box, edges)) for box in boxes}


def _cells(box: Box, edges: list[list[int]]) -> Iterator[Box]:
    cells = [Box((), ())]
    for low, count, lines in zip(box.offset, box.size, edges):
        cuts = [line for line in lines if low <= line <= low + count]
        cells = [Box((*c.offset, a), (*c.size, b - a)) for c in cells for a, b in pairwise(cuts)]
    yield from cells

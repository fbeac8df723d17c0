"""Who is sent what and who passes it on: every rank gets all that it needs, and no link carries a byte twice."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from weightsync.boxes import dense_strides, volume
from weightsync.sharing import Shared, link_bytes, share
from weightsync.spec import Box, Copy, View

SHAPE = (6, 6)


def copy_of(box: Box, *, tensor: str = "t", rank: int = 0, at: int = 0) -> Copy:
    """``box`` of a row-major source, to a dense target that begins at element ``at``."""
    strides = dense_strides(SHAPE)
    start = sum(o * s for o, s in zip(box.offset, strides))
    return Copy(tensor, box, rank, View(0, start, strides), View(0, at, dense_strides(box.size)))


def nbytes(copy: Copy) -> int:
    return 4 * volume(copy.box)


def cells(copy: Copy) -> list[tuple]:
    """Each element: its tensor and position, where the source has it and where the target."""
    found = []
    for at in itertools.product(*(range(n) for n in copy.box.size)):
        source, target = (v.offset + sum(a * s for a, s in zip(at, v.strides)) for v in (copy.source, copy.target))
        found.append((copy.tensor, tuple(a + o for a, o in zip(at, copy.box.offset)), source, target))
    return found


def arrived(shared: Shared, rank: int) -> list[tuple]:
    """(tensor, position, target) of all that comes to a rank, by whichever way."""
    received = [c for one in shared.passes[rank] for copies in one.receives.values() for c in copies]
    return [(t, p, target) for c in [*shared.direct[rank], *received] for t, p, _, target in cells(c)]


boxes = st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(1, 6), st.integers(1, 6)).map(
    lambda v: Box((v[0], v[1]), (min(v[2], 6 - v[0]), min(v[3], 6 - v[1])))
)


@st.composite
def needs(draw) -> tuple[dict[int, list[Copy]], dict[int, str]]:
    """What ranks of one engine need of two tensors: some boxes equal, some overlapping, some alone."""
    ranks = draw(st.integers(1, 5))
    pool = draw(st.lists(boxes, min_size=1, max_size=4))
    wanted: dict[int, list[Copy]] = {}
    for rank in range(ranks):
        chosen = draw(st.lists(st.tuples(st.sampled_from(["t", "u"]), st.sampled_from(pool)), max_size=3, unique=True))
        source = draw(st.integers(0, 2))
        wanted[rank] = [copy_of(box, tensor=t, rank=source, at=100 * n) for n, (t, box) in enumerate(chosen)]
    hosts = {rank: draw(st.sampled_from(["a", "b"])) for rank in range(ranks)}
    return wanted, hosts


@given(needs())
def test_every_rank_gets_each_element_that_it_needs_once(given_needs):
    wanted, hosts = given_needs
    shared = share(wanted, hosts, nbytes)
    for rank, copies in wanted.items():
        expected = Counter((t, p, target) for c in copies for t, p, _, target in cells(c))
        assert Counter(arrived(shared, rank)) == expected


@given(needs())
def test_both_ends_of_a_pass_agree_and_pass_on_only_what_has_come(given_needs):
    wanted, hosts = given_needs
    shared = share(wanted, hosts, nbytes)
    have = {rank: {(t, p, at) for c in shared.direct[rank] for t, p, _, at in cells(c)} for rank in wanted}
    rounds = {len(passes) for passes in shared.passes.values()}
    assert len(rounds) == 1
    for number in range(rounds.pop()):
        coming = []
        for rank in wanted:
            for peer, sent in shared.passes[rank][number].sends.items():
                received = shared.passes[peer][number].receives[rank]
                assert [(c.tensor, c.box) for c in sent] == [(c.tensor, c.box) for c in received]
                assert {(t, p, at) for c in sent for t, p, _, at in cells(c)} <= have[rank]
                coming += [(peer, (t, p, at)) for c in received for t, p, _, at in cells(c)]
        for rank, element in coming:
            have[rank].add(element)


@given(needs())
def test_no_element_goes_twice_over_a_link_between_nodes_or_out_of_the_trainer(given_needs):
    wanted, hosts = given_needs
    once = {rank: list({(c.tensor, c.box): c for c in copies}.values()) for rank, copies in wanted.items()}
    wanted = {rank: copies for rank, copies in once.items() if not overlapping(copies)}
    shared = share(wanted, hosts, nbytes)
    out_of_trainer = Counter((t, p) for copies in shared.direct.values() for c in copies for t, p, _, _ in cells(c))
    assert set(out_of_trainer.values()) <= {1}
    between, through = Counter(), Counter()
    for rank, peer, (t, p, _, _) in passed(shared):
        through["out of", rank, t, p] += 1
        through["into", peer, t, p] += 1
        if hosts[rank] != hosts[peer]:
            between[hosts[rank], hosts[peer], t, p] += 1
    assert set(between.values()) <= {1} and set(through.values()) <= {1}


def passed(shared: Shared) -> list[tuple[int, int, tuple]]:
    """Every element that a rank passes on: by whom, to whom, and which."""
    sends = [(rank, one.sends) for rank, passes in shared.passes.items() for one in passes]
    copies = [(rank, peer, c) for rank, by_peer in sends for peer, sent in by_peer.items() for c in sent]
    return [(rank, peer, cell) for rank, peer, c in copies for cell in cells(c)]


def overlapping(copies: list[Copy]) -> bool:
    seen = Counter((t, p) for c in copies for t, p, _, _ in cells(c))
    return any(n > 1 for n in seen.values())


def test_a_norm_for_eight_ranks_on_two_nodes_by_bytes_a_link():
    norm = Box((0, 0), (6, 6))
    wanted = {rank: [copy_of(norm, rank=rank % 4)] for rank in range(8)}
    hosts = {rank: "a" if rank < 4 else "b" for rank in range(8)}
    links = link_bytes(share(wanted, hosts, nbytes), nbytes)
    assert links == {("trainer 0", 0): 144, **{(rank, rank + 1): 144 for rank in range(7)}}


def test_what_each_rank_needs_alone_goes_straight_to_it():
    rows = {rank: [copy_of(Box((3 * rank, 0), (3, 6)), rank=rank)] for rank in range(2)}
    shared = share(rows, {0: "a", 1: "a"}, nbytes)
    assert shared.direct == rows and shared.passes == {0: [], 1: []}


def test_first_receivers_take_turns_by_load():
    wanted = {rank: [copy_of(Box((0, 0), (6, 6)), tensor=f"t{n}") for n in range(4)] for rank in range(4)}
    shared = share(wanted, dict.fromkeys(range(4), "a"), nbytes)
    assert [len(shared.direct[rank]) for rank in range(4)] == [1, 1, 1, 1]

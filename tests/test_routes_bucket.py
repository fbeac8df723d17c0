"""The bucket route's arenas: an engine that was late may still read the ones that it was given."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.fakes.engine import UPDATE
from tests.test_session import World, assert_serves, engine
from weightsync.deadline import Deadline
from weightsync.errors import EngineLost, EngineRejected, TransferTimeout

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(*engines, **config) -> World:
        made.append(World(*engines, route="bucket", verify="none", bucket_bytes=256, **config))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_after_a_timeout_the_next_push_takes_new_arenas_and_lets_go_of_the_old_ones(world):
    one = world(engine(receiver=False))
    one.push(1)
    route = one.session._groundwork.routes["bucket"]
    before = list(route._arenas)
    one.engines[0].misbehave(UPDATE, "slow", at=2, seconds=3.0)
    with pytest.raises((TransferTimeout, EngineLost)):
        one.push(2, timeout_s=1.5)
    one.push(3, timeout_s=30.0)
    assert not set(map(id, route._arenas)) & set(map(id, before)) and not route._stale
    assert_serves(one.engines[0], one.tensors, 3)


def test_a_refusal_costs_no_arenas(world):
    one = world(engine(receiver=False))
    one.push(1)
    route = one.session._groundwork.routes["bucket"]
    before = list(route._arenas)
    one.engines[0].misbehave(UPDATE, "400", at=2)
    with pytest.raises(EngineRejected):
        one.push(2)
    one.push(3)
    assert list(map(id, route._arenas)) == list(map(id, before))
    assert_serves(one.engines[0], one.tensors, 3)


def test_contexts_that_mapping_the_arenas_made_are_noted_once_they_are_mapped(world, monkeypatch):
    one = world(engine())
    one.push(1)
    (link,), route, asked = one.session._links, one.session._groundwork.routes["bucket"], []

    def contexts(deadline):
        asked.append(deadline)
        return ["TP rank 0: a context of 645 MB on GPU GPU-b by process 7"]

    monkeypatch.setattr(link.receivers, "contexts", contexts)
    monkeypatch.setattr("weightsync.routes.contexts_elsewhere", lambda own: ["a context of 645 MB on GPU GPU-a"])
    route._note_contexts([link], Deadline(5, "test"))
    assert not asked, "host memory makes none"
    route._gpu = "GPU-a"
    for _ in range(2):
        route._note_contexts([link], Deadline(5, "test"))
    assert len(asked) == 1
    noted = [note for note in one.session.plan().notes if "a context of 645 MB" in note]
    assert len(noted) == 2 and any(note.startswith("the actor, which copies: ") for note in noted)


def test_an_engine_that_does_not_say_which_contexts_it_has_costs_no_push(world, monkeypatch):
    one = world(engine(), engine(), timeout_s=30.0)
    one.push(1)
    links, route = one.session._links, one.session._groundwork.routes["bucket"]
    monkeypatch.setattr("weightsync.routes_bucket.PING_S", 0.3)
    monkeypatch.setattr("weightsync.routes.contexts_elsewhere", lambda own: ["a context of 645 MB on GPU GPU-a"])
    monkeypatch.setattr(links[0].receivers, "contexts", lambda deadline: time.sleep(deadline.remaining_s()) or [])
    monkeypatch.setattr(links[1].receivers, "contexts", lambda deadline: [])
    route._gpu = "GPU-a"
    route._note_contexts([], Deadline(30, "test"))
    assert not route._noted, "nobody has mapped anything"
    started = time.monotonic()
    route._note_contexts(links, Deadline(30, "test"))
    assert time.monotonic() - started < 5
    assert len([note for note in one.session.plan().notes if "the actor, which copies" in note]) == 1, "once"

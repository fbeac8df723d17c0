"""What pushes stand on: when it could not be laid, the next push lays it anew, and none passes for one that moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.senders import worlds
from tests.test_session import World, assert_serves, engine
from weightsync.config import EngineConfig
from weightsync.errors import TransferError, TransferTimeout, WeightSyncError
from weightsync.transports.sender import Nursery

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def world(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    yield from worlds(nursery, monkeypatch)


@pytest.mark.parametrize("failing", ["_make_plan", "_prepare"])
@pytest.mark.parametrize(("route", "receiver"), [("shm", True), ("bucket", True), ("bucket", False), ("nccl", False)])
def test_a_push_after_one_that_could_not_map_memory_anew_brings_its_weights(
    world, monkeypatch, route, receiver, failing
):
    one = world(engine(2, receiver=receiver), route=route, verify="fingerprint" if receiver else "none")
    one.push(1)
    one.publisher.withdraw()

    def fail(*args: object) -> None:
        raise TransferTimeout("too late")

    with monkeypatch.context() as broken:
        broken.setattr(one.session._groundwork, failing, fail)
        with pytest.raises(WeightSyncError, match="too late"):
            one.push(2)
    assert not one.session._groundwork.is_mapped()
    for step in (3, 4):
        one.push(step)
        assert_serves(one.engines[0], one.tensors, step)


def test_a_route_that_was_let_go_of_does_not_pass_for_one_that_moved(world, monkeypatch):
    """Were it ever asked: it has no buckets, and all of none would have arrived."""
    one = world(engine(receiver=False), route="bucket", verify="none")
    one.push(1)
    one.session._groundwork.routes["bucket"].close()
    with pytest.raises(TransferError, match="every bucket would count as moved"):
        one.push(2)
    assert one.engines[0].weight_version == "1"


def test_an_engine_that_could_not_be_taken_in_leaves_those_there_are_as_they_were(world, monkeypatch):
    one, late = world(engine(), route="shm"), engine()
    one.push(1)
    one.engines.append(late)

    def fail(*args: object) -> None:
        raise TransferTimeout("too late")

    with monkeypatch.context() as broken:
        broken.setattr(one.session._groundwork, "_prepare", fail)
        with pytest.raises(TransferTimeout):
            one.session.add_engine(EngineConfig(url=late.url))
    assert {row.engine for row in one.session.plan().traffic} == {one.engines[0].url}
    one.push(2)
    assert_serves(one.engines[0], one.tensors, 2)

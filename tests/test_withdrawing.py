"""A publisher that withdraws returns when nobody has its memory mapped any more: what is freed then is free."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest

from tests.fakes.engine import UPDATE
from tests.senders import children, stock, worlds
from tests.test_publisher import own_files
from tests.test_session import World, assert_serves, engine
from weightsync import receiver_wire as wire
from weightsync.config import EngineConfig
from weightsync.consumers import Consumers
from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.reports import PushRequest
from weightsync.transports.sender import Nursery

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def world(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    yield from worlds(nursery, monkeypatch, route="auto", bucket_bytes=None)


def mapped_by_receivers(one: World) -> int:
    """Segments that receivers have mapped, of all engines and ranks."""
    ranks = [rank for link in one.session._links for rank in link.receivers._ranks]
    statuses = [rank.call("status", deadline=Deadline(5, "test"), returns=wire.Status) for rank in ranks]
    return sum(status.num_segments for status in statuses)


def mapped_by(pid: int, names: set[str]) -> set[str]:
    with open(f"/proc/{pid}/maps") as file:
        text = file.read()
    return {name for name in names if name in text}


def test_receivers_have_unmapped_it_when_withdraw_returns_and_map_anew_at_the_next_push(world):
    one = world(engine(2), engine(1))
    one.push(1)
    assert mapped_by_receivers(one) == 3
    one.publisher.withdraw()
    assert mapped_by_receivers(one) == 0
    for fake in one.engines:
        assert_serves(fake, one.tensors, 1)
    one.publisher.withdraw()  # again: nobody is asked, and nothing happens
    for step in (2, 3):
        assert one.push(step).verified
        for fake in one.engines:
            assert_serves(fake, one.tensors, step)
    assert mapped_by_receivers(one) == 3


def test_the_actor_has_unmapped_what_it_fills_buckets_from(world):
    one = world(engine(2), route="bucket", bucket_bytes=256)
    one.push(1)
    route = one.session._groundwork.routes["bucket"]
    assert route._mapped
    one.publisher.withdraw()
    assert not route._mapped and not route._pullers
    assert one.push(2).verified
    assert_serves(one.engines[0], one.tensors, 2)


@pytest.mark.parametrize("kind", [stock, engine])
def test_senders_have_unmapped_it_and_stay_in_their_group(world, kind, nursery):
    one = world(kind(2), route="nccl", bucket_bytes=256, verify="none" if kind is stock else "fingerprint")
    one.push(1)
    (pid,) = children(nursery)
    names = own_files()
    assert mapped_by(pid, names)
    one.publisher.withdraw()
    assert not mapped_by(pid, names)
    one.push(2)
    assert_serves(one.engines[0], one.tensors, 2)
    assert children(nursery) == {pid}
    assert one.engines[0].paths().count("/init_weights_update_group") == 2 * (kind is stock)


def test_an_actor_that_is_gone_is_not_waited_for(world, caplog):
    one = world(engine())
    one.push(1)
    one.session._server.close()
    started = time.monotonic()
    with caplog.at_level(logging.WARNING):
        one.publisher.withdraw(timeout_s=20.0)
    assert time.monotonic() - started < 5
    assert "rank 0 withdraws memory that may still be mapped" in caplog.text
    caplog.clear()
    one.publisher.withdraw(timeout_s=20.0)
    assert caplog.text == "", "it is asked once"


def test_withdrawing_during_a_push_is_said_and_the_push_fails(world, caplog):
    one = world(engine())
    one.push(1)
    one.train(2)
    one.engines[0].misbehave(UPDATE, "slow", seconds=2.0)
    failures: list[WeightSyncError] = []

    def push() -> None:
        try:
            one.session.push(PushRequest(step=2))
        except WeightSyncError as e:
            failures.append(e)

    pushing = threading.Thread(target=push)
    pushing.start()
    time.sleep(0.5)
    with caplog.at_level(logging.WARNING):
        one.publisher.withdraw(timeout_s=0.5)
    assert "a push is under way" in caplog.text
    pushing.join(30)
    assert len(failures) == 1 and "withdrawn" in failures[0].message
    assert one.engines[0].weight_version == "1"
    assert one.push(3).verified


def test_an_engine_that_is_gone_keeps_no_other_from_unmapping(world, caplog):
    one = world(engine(2), engine(1))
    one.push(1)
    one.engines[0].close()
    for rank in one.session._links[0].receivers._ranks[:1]:
        rank.close()
    with caplog.at_level(logging.WARNING):
        one.publisher.withdraw(timeout_s=5.0)
    assert "may still be mapped" in caplog.text
    second = one.session._links[1].receivers._ranks[0]
    assert second.call("status", deadline=Deadline(5, "test"), returns=wire.Status).num_segments == 0
    other_rank = one.session._links[0].receivers._ranks[1]
    assert other_rank.call("status", deadline=Deadline(5, "test"), returns=wire.Status).num_segments == 0


@pytest.mark.parametrize(("route", "receiver"), [("bucket", False), ("shm", True), ("nccl", False), ("nccl", True)])
def test_a_late_word_that_unmaps_what_was_mapped_anew_makes_the_next_push_map_again(world, route, receiver):
    kind = engine() if receiver else stock()
    one = world(kind, route=route, bucket_bytes=256, verify="fingerprint" if receiver else "none")
    one.push(1)
    one.session._groundwork.let_go(5.0)  # though the publisher's memory is where it was
    one.push(2)
    assert_serves(kind, one.tensors, 2)


def test_a_push_that_waits_for_its_step_keeps_nobody_from_withdrawing(world):
    one = world(engine(2))
    one.push(1)
    pushing = threading.Thread(target=lambda: one.session.push(PushRequest(step=2)))
    pushing.start()
    time.sleep(0.3)
    started = time.monotonic()
    one.publisher.withdraw(timeout_s=20.0)
    assert time.monotonic() - started < 5 and mapped_by_receivers(one) == 0
    one.train(2)
    pushing.join(30)
    assert not pushing.is_alive()
    assert_serves(one.engines[0], one.tensors, 2)


def test_a_sender_that_fills_no_more_maps_the_arena_alone(world, nursery):
    one = world(stock(), route="nccl", bucket_bytes=256, verify="none")
    one.push(1)
    (first,) = children(nursery)
    names = own_files()
    assert mapped_by(first, names)
    with stock(2) as second:
        one.session.add_engine(EngineConfig(url=second.url))
        one.push(2)
        assert not mapped_by(first, names), "neither the trainer's memory nor the arena of before"
        for fake in (one.engines[0], second):
            assert_serves(fake, one.tensors, 2)
        one.session.remove_engine(second.url)


def test_many_ranks_that_withdraw_at_once_do_not_keep_an_engine_from_announcing_itself(world):
    one = world(engine())
    one.push(1)
    with engine(2) as late, one.session._groundwork._tenure.alone(Deadline(5, "test"), "test"):
        telling = [threading.Thread(target=consumers_of(one).withdrawn, args=(3.0,)) for _ in range(4)]
        for thread in telling:
            thread.start()
        time.sleep(0.3)
        started = time.monotonic()
        one.session.add_engine(EngineConfig(url=late.url))
        assert time.monotonic() - started < 2.5
        one.session.remove_engine(late.url)
    for thread in telling:
        thread.join(10)
    assert one.push(2).verified


def consumers_of(one: World) -> Consumers:
    """Another rank's, told of the same actor."""
    consumers = Consumers(7)
    consumers.add(one.session._server.address)
    return consumers

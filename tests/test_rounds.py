"""Moving in rounds: the gate, the order that a conductor keeps, and whole pushes through too small an arena."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.fakes.engine import FakeEngine
from tests.fakes.model import FakeModel
from tests.test_session import World, assert_serves, engine, world  # noqa: F401 (world is a fixture)
from weightsync.deadline import Deadline
from weightsync.errors import ConfigError, TransferError, VerifyMismatch
from weightsync.offer import Offer
from weightsync.rounds import Ask, Conductor, Gate, Release, in_rounds
from weightsync.spec import Box, Copy, View

# -------------------------------------------------------------------------------------------------------- the gate


def test_a_round_waits_for_its_release_and_is_then_passed():
    gate, pulled = Gate(), []
    gate.release(Release("p", 0))  # may come before the pull has begun
    gate.begin("p")
    gate.run(0, lambda: pulled.append(0) or 0.0, 1.0)
    assert gate.passed(Ask("p", 0))
    threading.Timer(0.1, gate.release, [Release("p", 1)]).start()
    gate.run(1, lambda: pulled.append(1) or 0.0, 5.0)
    assert pulled == [0, 1] and gate.passed(Ask("p", 1))


def test_a_pull_that_is_stopped_or_left_alone_ends_and_says_why():
    gate = Gate()
    gate.begin("p")
    with pytest.raises(TransferError, match=r"round 0 was not released within 0.05 s"):
        gate.run(0, lambda: 0.0, 0.05)
    gate.release(Release("p", -1, stop="rank 3 wrote"))
    with pytest.raises(TransferError, match="stopped before round 0: rank 3 wrote"):
        gate.run(0, lambda: 0.0, 5.0)
    gate.end("it failed")
    with pytest.raises(TransferError, match="has ended before round 0"):
        gate.passed(Ask("p", 0))


def test_what_arrives_late_of_an_earlier_pull_changes_nothing():
    gate = Gate()
    gate.begin("p")
    gate.end()
    gate.begin("q")
    gate.release(Release("p", 5, stop="late"))
    gate.release(Release("q", 0))
    assert gate.run(0, lambda: 0.5, 1.0) == 0.5
    with pytest.raises(TransferError, match="is over"):
        gate.passed(Ask("p", 0))


# --------------------------------------------------------------------------------------------------- the conductor


class Puller:
    """An engine that pulls each round 10 ms after its release. ``breaks_at``: the round in which its pull ends."""

    def __init__(self, events: list, breaks_at: int = -1) -> None:
        self.events, self.breaks_at, self.at = events, breaks_at, {}
        self.stopped = ""

    def release(self, release, deadline):
        self.stopped = self.stopped or release.stop
        self.events.append(("release", release.number))
        self.at[release.number] = time.monotonic() + 0.01

    def passed(self, ask, deadline):
        if self.breaks_at >= 0 and ask.number >= self.breaks_at:
            raise TransferError("the pull has ended")
        time.sleep(max(0.0, self.at[ask.number] - time.monotonic()))
        self.events.append(("passed", ask.number))
        return True


def conducted(engines: dict[str, Puller], events: list, *, parts: int, fails_at: int = -1) -> Conductor:
    def fill(number: int) -> None:
        events.append(("fill", number))
        if number == fails_at:
            raise TransferError("rank 3 wrote")

    conductor = Conductor(
        "p",
        engines,
        num_rounds=5,
        num_parts=parts,
        fill=fill,
        relay=lambda url, number: events.append(("relay", number)),
        deadline=Deadline(10, "test"),
    )
    conductor.run()
    return conductor


@pytest.mark.parametrize("parts", [1, 2])
def test_a_part_is_filled_again_only_after_every_engine_has_pulled_it(parts):
    events: list[tuple[str, int]] = []
    assert conducted({"a": Puller(events), "b": Puller(events)}, events, parts=parts).failure is None
    for number in range(parts, 5):
        before = events[: events.index(("fill", number))]
        assert before.count(("passed", number - parts)) == 2
        assert ("release", number) not in before
    assert [n for what, n in events if what == "fill"] == list(range(parts, 5))


def test_an_engine_whose_pull_ends_is_left_behind_and_a_failure_of_ours_stops_all():
    events: list[tuple[str, int]] = []
    broken, good = Puller(events, breaks_at=1), Puller(events)
    assert conducted({"a": broken, "b": good}, events, parts=2).failure is None
    assert set(good.at) == {0, 1, 2, 3, 4} and 4 not in broken.at
    events.clear()
    one = Puller(events)
    failure = conducted({"a": one}, events, parts=2, fails_at=3).failure
    assert "rank 3 wrote" in str(failure) and "rank 3 wrote" in one.stopped and 3 not in one.at


def test_copies_by_round_keep_their_order():
    copies = [Copy(name, Box((), ()), 0, View(0, 0, ()), View(0, 0, ())) for name in "abcd"]
    ordered, counts = in_rounds(copies, lambda copy: {"a": 2, "b": 0, "c": 2, "d": 0}[copy.tensor], 4)
    assert [c.tensor for c in ordered] == list("bdac")
    assert counts == [2, 0, 2, 0]


# -------------------------------------------------------------------------------------------------------- whole pushes


@pytest.mark.parametrize(("arena_bytes", "parts"), [(400, 1), (1100, 2)])
def test_an_arena_smaller_than_the_model_is_filled_in_rounds_and_verified(world, arena_bytes, parts):  # noqa: F811
    one = world(engine(2), engine(), arena_bytes=arena_bytes)
    for step in (1, 2, 3):
        report = one.push(step)
        assert report.verified
        for each in one.engines:
            assert_serves(each, one.tensors, step)
    (export,) = one.session._groundwork._exports.values()
    assert export.arena_bytes <= arena_bytes and max(export.rounds) >= 2 and export.num_parts == parts
    assert any("arena_bytes" in note and "rounds" in note for note in one.session.plan().notes)


class Rotary(FakeModel):
    """One with a constant, beside what is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rotary", torch.ones(4))


def test_a_changed_constant_is_named_at_once_by_an_engine_that_reads_back_in_its_pull(world):  # noqa: F811
    one = world(FakeEngine(version="0.5.12", models=[Rotary()], receiver=True), arena_bytes=400, timeout_s=8.0)
    assert one.push(1).verified
    one.engines[0].models[0].rotary[2] += 1
    started = time.monotonic()
    with pytest.raises(VerifyMismatch, match="rotary"):
        one.push(2)
    assert time.monotonic() - started < 6
    assert one.push(3).verified


def test_unverified_pushes_go_in_rounds_too(world):  # noqa: F811
    one = world(engine(), arena_bytes=400, verify="none")
    one.push(1)
    assert_serves(one.engines[0], one.tensors, 1)


def test_a_write_between_rounds_is_named_fences_the_engine_and_the_next_push_heals(world, monkeypatch):  # noqa: F811
    one = world(engine(), arena_bytes=800, verify="none")
    one.push(1)
    fill = Offer.fill

    def written_to(self, step, number):
        one.tensors["norm.weight"].add_(1)
        return fill(self, step, number)

    monkeypatch.setattr(Offer, "fill", written_to)
    started = time.monotonic()
    with pytest.raises(TransferError, match=r"written to after step 2.*norm.weight") as caught:
        one.push(2)
    assert time.monotonic() - started < 10, "the receivers were told, and did not wait for their deadline"
    assert caught.value.report[0]["state"] == "fenced" and one.engines[0].paused
    monkeypatch.undo()
    assert one.push(3).engines[0].state == "serving"
    assert_serves(one.engines[0], one.tensors, 3)


def test_buckets_cannot_be_read_from_an_arena_that_is_filled_in_rounds(world):  # noqa: F811
    with pytest.raises(ConfigError, match=r"route bucket cannot be read from an arena .* 384|rounds"):
        _ = world(engine(receiver=False), verify="none", arena_bytes=400).session


def test_an_engine_that_dies_between_rounds_does_not_hold_the_others(world):  # noqa: F811
    one = world(engine(), engine(), arena_bytes=400, on_engine_failure="exclude")
    one.push(1)
    one.engines[0].misbehave("/update_weights_from_tensor", "500")
    report = one.push(2)
    assert [e.state for e in report.engines][1] == "serving"
    assert_serves(one.engines[1], one.tensors, 2)
    assert torch.equal(one.engines[1].models[0].norm.data, one.tensors["norm.weight"])
    assert isinstance(one, World)

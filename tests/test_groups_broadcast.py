"""The groups of a stock engine: in which order its sender and its server are asked, and what a failure ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest

from weightsync import groups_broadcast
from weightsync.deadline import Deadline
from weightsync.errors import ConfigError, EngineLost, EngineRejected, TransferError, WeightSyncError
from weightsync.fanout import Fanout
from weightsync.spec import Segment
from weightsync.transports.nccl_wire import Broadcast

SEGMENT = Segment("shm", b"", 1)

pytestmark = pytest.mark.timeout(60)


class FakeSender:
    """``begin`` does ``fill``, ``finish`` waits until ``over`` is set; ``said`` is what happened, in order."""

    def __init__(self, fill: Callable[[int], None] = lambda number: None) -> None:
        self.over, self.said, self.alive = threading.Event(), [], True
        self._fill = fill
        self._begun = 0

    def call(self, method, argument=None, *, deadline, returns=None):
        if method == "begin":
            self._fill(argument.fills)
        if method == "finish" and not self.over.wait(deadline.remaining_s()):
            raise deadline.error("broadcast")
        self.said.append(f"{method} {argument.number if method == 'finish' else self._begun}")
        self._begun += method == "begin"
        return self._begun - 1

    def kill(self) -> None:
        self.said.append("kill")
        self.alive = False


class Sending:
    """A group whose engine answers by ``make``, given a bucket's name. ``asked``: the buckets that it was asked for."""

    def __init__(self, sender: FakeSender, make: Callable[[str], None] = lambda what: None, there: bool = True) -> None:
        self.asked: list[str] = []
        self.nbytes = 1
        self.allowed: Callable[[str, Deadline], None] = lambda what, deadline: None
        self._make, self._there = make, there
        info = SimpleNamespace(nccl_variables={}, tp_size=1, device="cpu")
        progress = SimpleNamespace(applied=False)
        link = SimpleNamespace(info=info, url="http://127.0.0.1:1", client=self, progress=progress)
        nodes = SimpleNamespace(meeting_host=lambda *_: "127.0.0.1")
        self._fanout = Fanout("test")
        self._group = groups_broadcast.BroadcastGroup(link, self._fanout, nodes, "")
        self._group._senders, self._group._joined = [sender], True
        self._group._names = ["weightsync-0", "weightsync-1"]

    def weight_version(self, deadline: Deadline) -> str:
        if not self._there:
            raise EngineLost("no connection")
        return "1"

    def __call__(self, count: int, overlap: bool = False, **hooks: Callable[[], None]) -> list[WeightSyncError | None]:
        """How that many buckets end; ``hooks``: of the first, what is called when it is granted, or filled."""
        self._hooks, self._overlap = hooks, overlap
        turns = [self._group.turn(f"bucket {number + 1}") for number in range(count)]
        futures = [self._fanout.submit(partial(self._send, turn, number)) for number, turn in enumerate(turns)]
        return [future.exception(10) for future in futures]

    def _send(self, turn, number: int) -> None:
        what = f"bucket {number + 1}"

        def make(deadline: Deadline, sent: Callable[[], None]) -> None:
            self.asked.append(what)
            self.allowed(what, deadline)
            sent()
            self._make(what)

        update = SimpleNamespace(make=make, drop=lambda: None)
        hooks = self._hooks if number == 0 else {}
        sending = groups_broadcast.Sending(
            Broadcast("", SEGMENT, self.nbytes, 5.0, fills=number), lambda group: update, not self._overlap, **hooks
        )
        self._group.send(turn, sending, Deadline(5, "test"))


@pytest.mark.parametrize(
    "error",
    [EngineRejected("told to refuse"), EngineLost("the connection broke"), ConfigError("it does not accept this key")],
)
def test_an_engine_that_fails_a_bucket_may_finish_those_beside_it_first(error):
    """Its answer comes when it takes part; killed meanwhile, the sender would leave it in that broadcast."""
    sender, third_is_asked = FakeSender(), threading.Event()

    def make(what: str) -> None:
        if what == "bucket 2":
            assert third_is_asked.wait(5)
            threading.Timer(0.3, sender.over.set).start()
            raise error
        if what == "bucket 3":
            third_is_asked.set()

    group = Sending(sender, make)
    first, second, third, fourth = group(4)
    assert first is None and second is error and third is None, "the third went by the other group"
    assert "another one failed" in str(fourth) and group.asked == ["bucket 1", "bucket 2", "bucket 3"]
    kill = sender.said.index("kill")
    assert {"finish 0", "finish 1", "finish 2"} <= set(sender.said[:kill])


def test_a_sender_that_cannot_begin_is_ended_when_the_engine_has_all_that_it_was_asked_for():
    first_is_in, cannot = threading.Event(), TransferError("no memory")

    def fill(number: int) -> None:
        if number == 3:
            assert first_is_in.wait(5)
            raise cannot

    sender = FakeSender(fill)

    def make(what: str) -> None:
        if what == "bucket 1":
            first_is_in.set()
            time.sleep(0.2)
            threading.Timer(0.4, sender.over.set).start()

    group = Sending(sender, make)
    outcomes = group(4)
    assert outcomes[:2] == [None, None] and "another one failed: no memory" in str(outcomes[2])
    assert outcomes[3] is cannot and group.asked == ["bucket 1", "bucket 2"]
    assert {"finish 0", "finish 1"} <= set(sender.said[: sender.said.index("kill")])


def test_two_requests_whose_connections_break_at_once_are_both_let_finish():
    sender = FakeSender()
    threading.Timer(0.6, sender.over.set).start()

    def make(what: str) -> None:
        if what != "bucket 1":
            time.sleep(0.2)
            raise EngineLost("the connection broke")

    group = Sending(sender, make)
    first, second, third = group(3)
    assert first is None and isinstance(second, EngineLost) and isinstance(third, EngineLost)
    assert {"finish 1", "finish 2"} <= set(sender.said[: sender.said.index("kill")])


def test_an_engine_that_died_is_lost_though_its_sender_knew_before():
    first_is_asked = threading.Event()

    def fill(number: int) -> None:
        if number == 2:
            assert first_is_asked.wait(5)
            raise TransferError("group weightsync-0: broadcast: connection closed by peer")

    def make(what: str) -> None:
        first_is_asked.set()
        time.sleep(0.2)
        raise EngineLost("the connection broke")

    sender = FakeSender(fill)
    sender.over.set()
    first, *_ = Sending(sender, make, there=False)(3)
    assert isinstance(first, EngineLost)


@pytest.mark.parametrize("hook", ["granted", "filled"])
def test_a_fault_of_our_own_after_the_engine_takes_part_lets_it_finish(hook):
    sender = FakeSender()
    threading.Timer(0.4, sender.over.set).start()

    def fails() -> None:
        raise TransferError("bug")

    (error,) = Sending(sender)(1, **{hook: fails})
    assert error.message == "bug"
    assert "finish 0" in sender.said[: sender.said.index("kill")]


def test_an_engine_that_answers_before_its_gpu_is_done_has_the_time_that_its_bytes_may_take():
    """It says that it cannot load what it still receives."""
    sender = FakeSender()
    threading.Timer(3.0, sender.over.set).start()

    def make(what: str) -> None:
        raise EngineRejected("no such parameter")

    group = Sending(sender, make)
    group.nbytes = 1 << 30
    (error,) = group(1)
    assert isinstance(error, EngineRejected)
    assert "finish 0" in sender.said[: sender.said.index("kill")]


def test_all_that_the_engine_was_asked_for_later_is_let_finish():
    sender, third_is_asked = FakeSender(), threading.Event()
    call = sender.call

    def calling(method, argument=None, *, deadline, returns=None):
        if method == "finish" and argument.number == 0:
            assert third_is_asked.wait(5)
            raise TransferError("cannot finish")
        return call(method, argument, deadline=deadline, returns=returns)

    sender.call = calling
    group = Sending(sender, lambda what: third_is_asked.set() if what == "bucket 3" else None)
    threading.Timer(0.6, sender.over.set).start()
    first, *_ = group(3)
    assert "cannot finish" in str(first) and group.asked == ["bucket 1", "bucket 2", "bucket 3"]
    assert {"finish 1", "finish 2"} <= set(sender.said[: sender.said.index("kill")])


def test_a_turn_that_nobody_takes_is_waited_for_no_longer_than_the_push(monkeypatch):
    monkeypatch.setattr(groups_broadcast, "_BEYOND_S", 0.2)
    group = Sending(FakeSender())
    group._group.turn("never sent")
    started = time.monotonic()
    (error,) = group(1)
    assert "its turn did not come" in str(error) and time.monotonic() - started < 8


def test_what_waits_behind_a_bucket_may_take_the_time_of_both(monkeypatch):
    monkeypatch.setattr(groups_broadcast, "MIN_STALL_S", 0.5)
    sender, allowed = FakeSender(), {}
    sender.over.set()
    group, second_is_asked = Sending(sender), threading.Event()

    def make(what: str) -> None:
        if what == "bucket 1":
            assert second_is_asked.wait(5)
        second_is_asked.set()

    def said(what: str, deadline: Deadline) -> None:
        allowed[what] = deadline.timeout_s

    group._make, group.allowed = make, said
    assert group(2) == [None, None]
    assert allowed["bucket 2"] == pytest.approx(2 * allowed["bucket 1"], rel=0.1)


def test_an_engine_that_is_gone_is_waited_for_by_nobody():
    sender = FakeSender()

    def make(what: str) -> None:
        if what == "bucket 2":
            raise EngineLost("the connection broke")

    started = time.monotonic()
    kill, sender.kill = sender.kill, lambda: (kill(), sender.over.set())
    assert isinstance(Sending(sender, make, there=False)(2)[1], EngineLost)
    assert time.monotonic() - started < 2
    assert "kill" in sender.said and "finish 0" not in sender.said[: sender.said.index("kill")]


def test_a_sender_begins_with_several_buckets_while_the_engine_is_with_the_first():
    sender, begun = FakeSender(), threading.Event()
    sender._fill = lambda number: begun.set() if number == 3 else None
    sender.over.set()
    group = Sending(sender, lambda what: None if begun.wait(5) else pytest.fail("the others wait for this one"))
    assert group(4) == [None] * 4
    assert group.asked == [f"bucket {number}" for number in range(1, 5)]
    assert [said for said in sender.said if said.startswith("finish")] == [f"finish {number}" for number in range(4)]


class Unable(FakeSender):
    """Cannot begin with its second bucket; the first one's bytes are under way then."""

    def call(self, method, argument=None, *, deadline, returns=None):
        if method == "begin" and self._begun == 1:
            threading.Timer(0.4, self.over.set).start()
            raise TransferError("CUDA out of memory")
        return super().call(method, argument, deadline=deadline, returns=returns)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_is_asked_early_for_what_its_sender_need_not_wait_to_fill(overlap):
    """A GPU's sender has begun at once. Were an engine to enter what waits for the bucket before, it would not come to
    that one: requests on two connections may overtake each other.
    """
    sender, entered, second_is_in = FakeSender(), [], threading.Event()

    def make(what: str) -> None:
        if what == "bucket 1":
            second_is_in.wait(0.3 if overlap else 5)
        entered.append(what)
        if what == "bucket 2":
            second_is_in.set()

    sending = Sending(sender, make)
    sender.over.set()
    assert sending(3, overlap=overlap) == [None] * 3
    assert entered[0] == ("bucket 1" if overlap else "bucket 2")


def test_what_overlaps_a_bucket_that_is_refused_is_not_asked_for():
    def make(what: str) -> None:
        if what == "bucket 2":
            time.sleep(0.2)
            raise EngineRejected("out of memory")

    sender = FakeSender()
    sender.over.set()
    sending = Sending(sender, make)
    ended = sending(4, overlap=True)
    assert ended[0] is None and isinstance(ended[1], EngineRejected) and sending.asked == ["bucket 1", "bucket 2"]
    assert all("since another one failed" in str(error) for error in ended[2:])


def test_an_engine_is_asked_for_nothing_that_its_sender_cannot_begin_with():
    sender = Unable()
    group = Sending(sender)
    first, second, third = group(3)
    assert first is None and "CUDA out of memory" in str(second) and "another one failed" in str(third)
    assert group.asked == ["bucket 1"]
    assert sender.said.index("finish 0") < sender.said.index("kill")


def test_a_bucket_that_cannot_be_filled_leaves_the_one_before_alone():
    filling = threading.Event()

    def make(what: str) -> None:
        assert filling.wait(5)
        threading.Timer(0.4, sender.over.set).start()

    def fill(number: int) -> None:
        if number == 1:
            filling.set()
            raise TransferError("not mapped")

    sender = FakeSender(fill)
    group = Sending(sender, make)
    first, second = group(2)
    assert first is None and "not mapped" in str(second) and group.asked == ["bucket 1"]
    assert sender.said.index("finish 0") < sender.said.index("kill")


def test_a_fault_of_our_own_asks_for_nothing_more():
    def fill(number: int) -> None:
        if number == 0:
            raise KeyError("bug")

    sender = FakeSender(fill)
    group = Sending(sender)
    first, second = group(2)
    assert isinstance(first, KeyError) and "another one failed: 'bug'" in str(second)
    assert group.asked == [] and "kill" in sender.said
    (late,) = group(1)
    assert "another one failed: 'bug'" in str(late) and group.asked == []

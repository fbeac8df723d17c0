"""Pausing beside the publish: who may be, what a failure leaves of it, and who tells the actor that it may."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace

import pytest

from tests.test_push import FakeWorkers, push, three
from weightsync.consumers import Consumers, Marked
from weightsync.errors import EngineLost, EngineRejected, TransferError, TransferTimeout
from weightsync.groundwork import SourcesMoved
from weightsync.push import EnginesGone
from weightsync.readiness import Readiness
from weightsync.rpc import Server


class Publishing(FakeWorkers):
    """``paused``: which of ``links`` were, when the trainer had published."""

    def __init__(self, links, **faults) -> None:
        super().__init__(**faults)
        self.links, self.paused = links, []

    def publish(self, step, regions, deadline):
        time.sleep(0.1)
        self.paused = [link.client.paused for link in self.links]
        return super().publish(step, regions, deadline)


@pytest.mark.parametrize(("pause", "early"), [("abort", True), ("retract", True), ("in_place", True), ("none", False)])
def test_engines_that_may_be_are_paused_beside_the_publish(pause, early):
    links = three()
    links[2].had_requests = True
    workers = Publishing(links)
    push(links, workers=workers, pause=pause, early=lambda link: link is not links[0]).run()
    assert workers.paused == [False, early, False], "not where the last pause had requests to end"
    assert [link.client.calls.count("pause") for link in links] == [int(pause != "none")] * 3
    assert all((link.client.paused, link.client.version) == (False, "5") for link in links)


def test_a_trainer_that_fails_leaves_no_engine_paused():
    links = three()
    workers = Publishing(links, publish=TransferTimeout("rank 1 is at step 4, not 5"))
    with pytest.raises(TransferTimeout):
        push(links, workers=workers, early=lambda link: True).run()
    assert workers.paused == [True] * 3
    assert all(not link.client.paused and link.client.version == "old" and link.state == "serving" for link in links)


def test_a_pause_that_is_slow_does_not_overtake_its_own_undoing():
    links = three()
    pause = links[1].client.pause
    links[1].client.pause = lambda mode, deadline, sent: (time.sleep(0.3), pause(mode, deadline))
    with pytest.raises(TransferError, match="closed"):
        push(links, workers=FakeWorkers(publish=TransferError("it was closed")), early=lambda link: True).run()
    assert not any(link.client.paused for link in links)


def test_an_engine_that_is_paused_beside_is_flushed_only_when_all_is_published():
    links = three()
    flushed = threading.Event()
    links[1].client.flush = lambda deadline, wait=False: flushed.set()
    with pytest.raises(TransferError, match="closed"):
        push(
            links,
            workers=Publishing(links, publish=TransferError("it was closed")),
            early=lambda link: True,
            pause="retract",
        ).run()
    assert not flushed.is_set()
    assert [(link.state, link.held, link.client.paused) for link in links] == [("serving", False, False)] * 3


@pytest.mark.parametrize("mode", ["raise", "exclude"])
def test_a_pause_beside_that_fails_is_a_pause_that_failed(mode):
    links = three(pause=EngineRejected("no", engine="http://b"))
    one = push(links, early=lambda link: True, on_engine_failure=mode)
    if mode == "raise":
        with pytest.raises(EngineRejected) as caught:
            one.run()
        assert caught.value.phase == "pause"
    else:
        one.run()
        assert [link.client.version for link in links] == ["5", "old", "5"]
    assert not any(link.client.paused for link in links) and [link.state for link in links] == ["serving"] * 3


def test_memory_that_moved_leaves_nobody_paused_but_those_who_must_be():
    links = three()
    links[2].held = links[2].client.paused = True
    one = push(links, early=lambda link: True)
    one._generations = {0: 1}
    with pytest.raises(SourcesMoved):
        one.run()
    assert [link.client.paused for link in links] == [False, False, True]
    assert [link.client.calls.count("resume") for link in links] == [1, 1, 0]


def test_memory_that_is_withdrawn_between_publish_and_pause_leaves_nobody_paused():
    def withdrawn():
        raise SourcesMoved("it was withdrawn")

    links = three()
    one = push(links, early=lambda link: True)
    one._alone = withdrawn
    with pytest.raises(SourcesMoved):
        one.run()
    assert not any(link.client.paused for link in links)


@pytest.mark.parametrize("answers", [True, False])
def test_engines_that_are_gone_are_asked_to_go_on_in_case_they_are_there(answers):
    links = three() if answers else three(resume=EngineLost("no connection"))
    links[1].attached = False
    with pytest.raises(EnginesGone):
        push(links, early=lambda link: True).run()
    assert [link.client.paused for link in links] == [False, not answers, False]


def test_a_pause_that_does_not_end_keeps_nobody_else_paused_and_its_engine_is_fenced():
    links, go_on = three(), threading.Event()
    pause = links[1].client.pause
    links[1].client.pause = lambda mode, deadline, sent: (go_on.wait(10), pause(mode, deadline))
    one = push(links, workers=FakeWorkers(publish=TransferError("it was closed")), early=lambda link: True)
    one._settling.within_s = 0.3
    started = time.monotonic()
    with pytest.raises(TransferError, match="closed"):
        one.run()
    assert time.monotonic() - started < 5
    assert [link.client.paused for link in links] == [False] * 3
    assert [(link.state, link.held) for link in links] == [("serving", False), ("fenced", True), ("serving", False)]
    go_on.set()


def test_an_engine_that_cannot_go_on_is_an_error_and_not_forgotten():
    links = three(resume=EngineRejected("no", engine="http://b"))
    one = push(links, early=lambda link: True)
    one._generations = {0: 1}
    with pytest.raises(EngineRejected) as caught:
        one.run()
    assert [e["state"] for e in caught.value.report] == ["serving", "fenced", "serving"]
    assert links[1].held


def test_more_engines_than_threads_are_paused_beside():
    links = [link for _ in range(4) for link in three()]
    for number, link in enumerate(links):
        link.url = link.client.url = f"http://{number}"
    push(links, threads=3, early=lambda link: True).run()
    assert [link.client.version for link in links] == ["5"] * 12


# ----------------------------------------------------------------------------------------- who says that it may be


def described(rank: int, host: str, *devices: str) -> SimpleNamespace:
    return SimpleNamespace(rank=rank, host=host, devices=list(devices))


def at(*places: tuple[str, str]) -> SimpleNamespace:
    """A link whose TP ranks are on these GPUs."""
    return SimpleNamespace(layouts=[SimpleNamespace(host=host, device=device) for host, device in places])


def test_ready_are_engines_on_a_gpu_of_the_trainer_once_every_rank_has_marked_the_step():
    readiness = Readiness([described(0, "n1", "GPU-a"), described(1, "n2")])
    beside = at(("n1", "GPU-b"), ("n1", "GPU-a"))
    readiness.on_marked(Marked(0, 5))
    assert not readiness.is_ready_beside(beside, 5)
    readiness.on_marked(Marked(1, 5))
    assert readiness.is_ready_beside(beside, 5) and not readiness.is_ready_beside(beside, 6)
    assert readiness.is_ready_beside(at(("n2", "")), 5), "host memory is one place"
    for elsewhere in (at(("n1", "GPU-b")), at(("n1", "")), at(("n2", "GPU-a")), at()):
        assert not readiness.is_ready_beside(elsewhere, 5)
    readiness.on_marked(Marked(0, 6))
    assert not readiness.is_ready_beside(beside, 5) and not readiness.is_ready_beside(beside, 6)


class Actor:
    """What a publisher calls. ``marks``: what it was told."""

    def __init__(self) -> None:
        self.marks: list[Marked] = []
        self.enough = threading.Event()

    def marked(self, marked: Marked) -> None:
        self.marks.append(marked)
        if len(self.marks) >= 2000:
            self.enough.set()


def test_actors_are_told_of_marks_in_order_by_a_trainer_that_waits_for_nobody():
    actor = Actor()
    server, gone = Server(actor, workers=1), Server(Actor())
    consumers = Consumers(3)
    for address in (server.address, gone.address):
        consumers.add(address)
    gone.close()
    started = time.monotonic()
    for step in range(2000):
        consumers.marked(step)
        if step % 500 == 0:
            time.sleep(0.01)  # more than a thousand answers are not kept for it
    assert time.monotonic() - started < 10
    assert actor.enough.wait(20)
    assert actor.marks == [Marked(3, step) for step in range(2000)]
    assert list(consumers._lines) == [server.address], "who is gone is not told again"
    consumers.close()
    consumers.marked(1)
    server.close()


def test_a_trainer_keeps_nothing_of_actors_that_have_ended():
    consumers, before = Consumers(0), len(os.listdir("/proc/self/fd"))
    for step in range(20):
        server = Server(Actor())
        consumers.add(server.address)
        consumers.marked(step)
        server.close()
    until = time.monotonic() + 10
    while consumers._lines and time.monotonic() < until:
        consumers.marked(99)
        time.sleep(0.05)
    assert not consumers._lines
    assert len(os.listdir("/proc/self/fd")) <= before + 4
    consumers.close()


def test_marks_are_told_after_a_withdrawal_too():
    actor, consumers = Actor(), Consumers(0)
    server = Server(actor)
    consumers.add(server.address)
    consumers.withdrawn(1.0)
    consumers.marked(7)
    until = time.monotonic() + 5
    while not actor.marks and time.monotonic() < until:
        time.sleep(0.01)
    assert actor.marks == [Marked(0, 7)]
    consumers.close()
    server.close()

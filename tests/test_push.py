"""The transaction alone: a failure injected at every phase, and what it leaves of each engine."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from weightsync.config import load_config
from weightsync.deadline import Deadline
from weightsync.errors import (
    EngineLost,
    EngineRejected,
    TransferError,
    TransferTimeout,
    VerifyMismatch,
    WeightSyncError,
)
from weightsync.fanout import Fanout
from weightsync.fleet import Progress
from weightsync.groundwork import SourcesMoved
from weightsync.push import EnginesGone, Push
from weightsync.reports import EngineReport
from weightsync.spec import Box, Need, Published, Sealed, View

FINGERPRINT = 77


@dataclass
class FakeClient:
    """An engine that obeys, except where told to fail: ``faults`` maps a call to the error it raises."""

    url: str
    faults: dict[str, WeightSyncError] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    paused: bool = False
    version: str = "old"
    session_open: bool = False
    requests: int = 0

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.faults:
            raise self.faults[name]

    def pause(self, mode, deadline, *, sent=lambda: None):
        self._call("pause")
        sent()
        self.paused = True

    def num_requests(self, deadline):
        return self.requests

    def drain(self, num_requests, deadline):
        self._call("drain")
        self.requests = 0

    def flush(self, deadline, wait=False):
        self._call("flush_wait" if wait else "flush")

    def begin(self, deadline):
        self._call("begin")
        self.session_open = True
        return ""

    def end(self, deadline):
        self._call("end")
        if not self.session_open:
            raise EngineRejected("no weight-update session is open")
        self.session_open = False

    def stamp(self, version, deadline):
        self._call("stamp")
        self.version = version

    def confirm(self, version, deadline):
        if "confirm" in self.faults:
            raise self.faults["confirm"]

    def resume(self, deadline):
        self._call("resume")
        self.paused = False


class FakeLink:
    """An engine link whose memory is one number, the fingerprint that it reads back."""

    has_receiver, fully_verifiable, route, attached = True, True, "shm", True
    layouts = (SimpleNamespace(needs=[Need("model.norm.weight", Box((0,), (1,)), View(0, 0, (1,)))]),)

    def __init__(self, url: str, **faults: WeightSyncError) -> None:
        self.url = url
        self.client = FakeClient(url, faults)
        self.state, self.version, self.error, self.held = "serving", "old", "", False
        self.memory, self.notes, self.had_requests = 1, [], False
        self.start_push()

    pulls, pulls_beside = True, False

    def start_push(self, push_id="", *, landed=lambda: None, sent=lambda: None, answered=lambda: None):
        self.progress = Progress(push_id=push_id, landed=landed, sent=sent, answered=answered)

    def prepare_pull(self, push_id, step, deadline):
        pass

    def prepare_to_serve(self, version, deadline):
        pass

    def end_push(self):
        pass

    def stamp(self, version, deadline):
        self.client.stamp(version, deadline)
        self.version = version

    def resume(self, deadline):
        self.client.resume(deadline)

    def is_attached(self):
        return self.attached

    def fingerprints(self, deadline):
        if "fingerprints" in self.client.faults:
            raise self.client.faults["fingerprints"]
        return [[self.memory]]

    def report(self):
        return EngineReport(self.url, self.state, self.version, self.progress.verified, 4, error=self.error)


class FakeRoute:
    def __init__(self, corrupt: str = "", applied: bool = True, tells: bool = False) -> None:
        self.corrupt, self.applied, self.tells = corrupt, applied, tells
        self.begun: list[str] = []
        self.ends = 0

    def begin(self, link, deadline):
        self.begun.append(link.url)

    def end_push(self):
        self.ends += 1

    def move(self, links, step, deadline):
        outcomes = []
        for link in links:
            fault = link.client.faults.get("move")
            link.progress.applied = fault is None or self.applied
            if fault is None:
                link.memory = FINGERPRINT + (link.url == self.corrupt)
                if self.tells:
                    link.progress.landed()
            outcomes.append(fault)
        return outcomes


class FakeWorkers:
    ranks = (0,)

    def __init__(self, publish=None, seal=None, sealed=FINGERPRINT) -> None:
        self.faults, self.sealed = {"publish": publish, "seal": seal}, sealed
        self.sealings = 0

    def publish(self, step, regions, deadline):
        if self.faults["publish"]:
            raise self.faults["publish"]
        return {0: Published(step, 0, 0.0)}

    def seal(self, step, regions, deadline):
        self.sealings += 1
        if self.faults["seal"]:
            raise self.faults["seal"]
        return {0: Sealed([self.sealed], [FINGERPRINT], [], 0.0)}


class FakePlan:
    def regions(self, rank):
        return []

    def expected(self, engine, rank, fingerprints):
        return [fingerprints[0][0]]

    def summary(self):
        return type("Summary", (), {"num_tensors": 1})()


def push(links, *, route=None, workers=None, threads=64, early=lambda link: False, **config) -> Push:
    fanout = Fanout("test", workers=threads)
    return Push(
        5,
        config=load_config({"pair": "sgl_dtensor_v2", **config}),
        workers=workers or FakeWorkers(),
        links=links,
        routes={"shm": route or FakeRoute()},
        plan=FakePlan(),
        generations={0: 0},
        fanout=fanout,
        deadline=Deadline(10, "test"),
        may_pause_early=early,
    )


def three(**faults: WeightSyncError) -> list[FakeLink]:
    """Three engines; the second has the faults."""
    return [FakeLink("http://a"), FakeLink("http://b", **faults), FakeLink("http://c")]


@pytest.mark.parametrize("tells", [False, True], ids=["when all have answered", "as soon as bytes have landed"])
def test_a_push_stamps_once_and_everyone_serves(tells):
    links = three()
    report = push(links, route=FakeRoute(tells=tells)).run()
    assert report.verified and report.weight_version == "5" and report.num_bytes == 12
    assert list(report.seconds) == ["publish", "pause", "begin", "move", "verify", "commit", "continue", "total"]
    for link in links:
        assert [c for c in link.client.calls if c != "flush"] == ["pause", "begin", "end", "stamp", "resume"]
        assert "flush" in link.client.calls[1:3], "after the pause, beside begin and move"
        assert (link.client.paused, link.client.version, link.state) == (False, "5", "serving")


NOTHING_APPLIED = ["pause", "flush", "begin"]


@pytest.mark.parametrize("phase", NOTHING_APPLIED)
def test_before_the_move_every_engine_goes_back_to_work_with_its_old_version(phase):
    links = three(**{phase: EngineRejected("no", engine="http://b")})
    with pytest.raises(EngineRejected) as caught:
        push(links, pause="retract").run()  # with abort the cache is flushed beside the move
    assert caught.value.engine == "http://b"
    assert [e["state"] for e in caught.value.report] == ["serving"] * 3
    for link in links:
        assert (link.client.paused, link.client.version, link.client.session_open) == (False, "old", False)
        assert "stamp" not in link.client.calls


def test_when_the_trainer_fails_before_the_move_no_engine_was_even_paused():
    links = three()
    with pytest.raises(TransferTimeout):
        push(links, workers=FakeWorkers(publish=TransferTimeout("rank 1 is at step 4, not 5"))).run()
    assert all(link.client.calls == [] and link.state == "serving" for link in links)


def test_a_failed_move_fences_those_that_were_written_and_names_them():
    links = three(move=EngineLost("dropped"))
    with pytest.raises(EngineLost) as caught:
        push(links).run()
    assert caught.value.phase == "move" and caught.value.engine == "http://b"
    assert [e["state"] for e in caught.value.report] == ["fenced"] * 3
    assert all(link.client.paused and link.held and link.client.version == "old" for link in links)
    assert all("resume" not in link.client.calls and "stamp" not in link.client.calls for link in links)


def test_an_engine_that_says_nothing_was_applied_goes_back_to_work():
    links = three(move=TransferError("its layout moved"))
    with pytest.raises(TransferError):
        push(links, route=FakeRoute(applied=False)).run()
    assert [link.state for link in links] == ["fenced", "serving", "fenced"]
    assert links[1].client.paused is False and links[1].client.session_open is False


@pytest.mark.parametrize("phase", ["end", "fingerprints", "stamp"])
def test_after_the_move_an_unstamped_engine_is_fenced(phase):
    links = three(**{phase: TransferTimeout("silence", engine="http://b")})
    with pytest.raises(TransferTimeout):
        push(links).run()
    assert links[1].state == "fenced" and links[1].client.paused and links[1].client.version == "old"


def test_engines_that_were_stamped_before_the_failure_serve_the_new_version():
    links = three(stamp=TransferTimeout("silence"))
    with pytest.raises(TransferTimeout) as caught:
        push(links).run()
    assert [(e["state"], e["weight_version"]) for e in caught.value.report] == [
        ("serving", "5"),
        ("fenced", "old"),
        ("serving", "5"),
    ]
    assert [link.client.paused for link in links] == [False, True, False]


def test_an_engine_that_reports_another_version_is_an_error_though_it_serves_the_weights():
    links = three(confirm=EngineRejected("stamped '5', but /model_info reports 'old'"))
    with pytest.raises(EngineRejected, match="reports 'old'") as caught:
        push(links).run()
    assert caught.value.engine == "http://b"
    assert [(link.state, link.client.paused) for link in links] == [("serving", False)] * 3


def test_the_sources_are_sealed_once_and_only_when_the_last_engine_has_landed():
    links, workers = three(move=TransferError("half of it")), FakeWorkers()
    with pytest.raises(TransferError, match="half of it"):
        push(links, route=FakeRoute(tells=True), workers=workers).run()
    assert workers.sealings == 0
    push(three(), route=FakeRoute(tells=True), workers=workers).run()
    assert workers.sealings == 1


@pytest.mark.parametrize("tells", [False, True])
def test_a_wrong_byte_is_found_and_named_and_nobody_is_stamped(tells):
    links = three()
    with pytest.raises(VerifyMismatch) as caught:
        push(links, route=FakeRoute(corrupt="http://c", tells=tells)).run()
    error = caught.value
    assert (error.engine, error.rank, error.tensor) == ("http://c", 0, "model.norm.weight")
    assert all(link.client.version == "old" and link.state == "fenced" for link in links)


@pytest.mark.parametrize(
    "workers", [FakeWorkers(sealed=FINGERPRINT + 1), FakeWorkers(seal=TransferError("rank 1 changed 3 tensors"))]
)
def test_a_source_that_changed_during_the_move_fails_the_push(workers):
    links = three()
    with pytest.raises(TransferError):
        push(links, workers=workers).run()
    assert [link.state for link in links] == ["fenced"] * 3


def test_exclude_goes_on_with_the_others():
    links = three(move=EngineLost("dropped"))
    report = push(links, on_engine_failure="exclude").run()
    assert [(e.state, e.weight_version) for e in report.engines] == [
        ("serving", "5"),
        ("fenced", "old"),
        ("serving", "5"),
    ]
    assert "dropped" in report.engines[1].error and report.num_bytes == 8


def test_exclude_raises_when_nobody_is_left():
    links = [FakeLink("http://a", move=EngineLost("dropped"))]
    with pytest.raises(EngineLost):
        push(links, on_engine_failure="exclude").run()
    assert links[0].state == "fenced"


def test_a_fenced_engine_is_healed_by_the_next_push_and_not_resumed_by_a_failed_one():
    link = FakeLink("http://a", move=EngineLost("dropped"))
    with pytest.raises(EngineLost):
        push([link]).run()
    link.client.faults = {"flush": EngineRejected("requests wait")}
    with pytest.raises(EngineRejected):
        push([link]).run()
    assert link.client.paused and link.state == "fenced", "a failed push must not wake a fenced engine"
    link.client.faults = {}
    assert push([link]).run().engines[0].state == "serving"
    assert not link.client.paused and not link.held


def test_a_healed_engine_whose_last_resume_fails_is_resumed_and_not_left_held():
    link = FakeLink("http://a", move=EngineLost("dropped"))
    with pytest.raises(EngineLost):
        push([link]).run()
    link.client.faults = {}
    resume, answers = link.client.resume, iter([TransferTimeout("silence")])

    def slow_once(deadline):
        for error in answers:
            raise error
        resume(deadline)

    link.client.resume = slow_once
    with pytest.raises(TransferTimeout):
        push([link]).run()
    assert (link.state, link.version) == ("serving", "5")
    assert not link.client.paused and not link.held


@pytest.mark.parametrize("threads", [2, 3])
def test_there_may_be_more_engines_than_threads(threads):
    links = three()
    done = threading.Thread(target=push(links, threads=threads).run, daemon=True)
    done.start()
    done.join(10)
    assert not done.is_alive()
    assert [(link.version, link.client.paused) for link in links] == [("5", False)] * 3


def test_an_engine_that_cannot_be_released_is_lost_or_fenced_never_forgotten():
    links = three(begin=EngineRejected("no"), resume=EngineLost("gone"))
    with pytest.raises(EngineRejected) as caught:
        push(links).run()
    assert [e["state"] for e in caught.value.report] == ["serving", "lost", "serving"]


def test_without_pausing_a_half_written_engine_is_paused_to_fence_it():
    links = three(move=EngineLost("dropped"))
    with pytest.raises(EngineLost):
        push(links, pause="none").run()
    assert all(link.client.paused and link.state == "fenced" for link in links)


@pytest.mark.parametrize(("pause", "drained"), [("abort", ["drain"]), ("retract", []), ("in_place", [])])
def test_engines_whose_last_pause_waited_for_requests_are_drained_before_an_abort(pause, drained):
    links = three()
    links[1].had_requests = links[2].had_requests = True
    links[0].client.requests = links[1].client.requests = 5
    push(links, pause=pause).run()
    before_pause = [link.client.calls[: link.client.calls.index("pause")] for link in links]
    assert before_pause == [[], drained, []]
    assert [link.had_requests for link in links] == [False, bool(drained), False]


def test_a_pause_that_took_long_is_remembered(monkeypatch):
    links = three()
    monkeypatch.setattr("weightsync.pausing.SLOW_PAUSE_S", -1.0)
    push(links).run()
    assert all(link.had_requests for link in links)


@pytest.mark.parametrize(
    ("pause", "when"), [("retract", "before"), ("abort", "beside the move"), ("in_place", "never")]
)
def test_the_cache_is_flushed_beside_the_move_where_that_is_safe(pause, when):
    moment, flushed = ["before"], []

    class Route(FakeRoute):
        def move(self, links, step, deadline):
            moment.append("beside the move")
            time.sleep(0.1)
            outcomes = super().move(links, step, deadline)
            moment.append("after")
            return outcomes

    link = FakeLink("http://a")
    link.client.flush = lambda deadline, wait=False: (time.sleep(0.02), flushed.append(moment[-1]))
    push([link], route=Route(), pause=pause).run()
    assert (flushed or ["never"]) == [when]


@pytest.mark.parametrize(
    ("pulls", "early", "had_requests", "begun"),
    [(False, False, False, ["http://a"]), (True, False, False, []), (False, True, False, []), (False, False, True, [])],
    ids=["while it pauses", "receivers pull", "not all is published", "a pause that may take a second"],
)
def test_a_route_may_begin_while_an_engine_pauses_once_all_is_published(pulls, early, had_requests, begun):
    link, route = FakeLink("http://a"), FakeRoute()
    link.pulls, link.had_requests = pulls, had_requests
    push([link], route=route, early=lambda link: early).run()
    assert route.begun == begun and route.ends == 1


def test_what_a_route_has_begun_is_ended_when_the_pause_fails():
    link, route = FakeLink("http://a", pause=EngineLost("gone")), FakeRoute()
    link.pulls = False
    with pytest.raises(EngineLost):
        push([link], route=route).run()
    assert route.ends == 1


@pytest.mark.parametrize(
    ("beside", "tells", "when"),
    [(False, True, "before the call"), (True, True, "behind the call"), (True, False, "after the move")],
)
def test_the_cache_is_flushed_behind_the_call_of_a_pull_that_goes_on_beside(beside, tells, when):
    moment, flushed, done = ["before the call"], [], threading.Event()

    class Moving(FakeRoute):
        def move(self, links, step, deadline):
            if not beside:
                assert done.wait(5)
            moment.append("behind the call")
            if tells:
                links[0].progress.sent()
                assert done.wait(5), "the flush waits for the move"
            moment.append("after the move")
            return super().move(links, step, deadline)

    def flush(deadline, wait=False):
        flushed.append(moment[-1])
        done.set()

    link = FakeLink("http://a")
    link.pulls_beside, link.client.flush = beside, flush
    push([link], route=Moving()).run()
    assert flushed == [when] and link.version == "5"


def test_a_pause_of_a_dead_push_that_ends_now_takes_nothing_from_the_flush_of_this_one():
    link = FakeLink("http://a")

    class Moving(FakeRoute):
        def move(self, links, step, deadline):
            link.had_requests = True  # the late one says so
            return super().move(links, step, deadline)

    push([link], route=Moving()).run()
    assert link.client.calls.count("flush") == 1 and link.version == "5"


def test_who_pauses_engines_by_himself_goes_on_by_himself():
    links = three(begin=EngineRejected("no"))
    with pytest.raises(EngineRejected):
        push(links, pause="none").run()
    assert not any("resume" in link.client.calls or "pause" in link.client.calls for link in links)


@pytest.mark.parametrize("fault", ["", "pause", "begin", "move", "stamp", "resume"])
def test_what_was_written_ahead_and_never_made_is_taken_back(fault):
    class Link(FakeLink):
        events: list[str]

        def prepare_pull(self, push_id, step, deadline):
            self.events.append(f"pull {step} held, {'paused' if self.client.paused else 'not paused'}")

        def end_push(self):
            self.events.append("taken back")

    link = Link("http://a", **({fault: EngineRejected("no")} if fault else {}))
    link.events = []
    with contextlib.suppress(EngineRejected):
        push([link]).run()
    assert link.events == (["taken back"] if fault == "pause" else ["pull 5 held, not paused", "taken back"])


def test_an_engine_that_refuses_to_flush_beside_the_move_is_fenced_and_never_stamped():
    links = three(flush=EngineRejected("requests wait", engine="http://b", phase="flush"))
    report = push(links, on_engine_failure="exclude").run()
    assert [e.state for e in report.engines] == ["serving", "fenced", "serving"]
    assert links[1].client.paused and "stamp" not in links[1].client.calls
    assert "requests wait" in links[1].error


def test_an_engine_that_was_given_up_and_never_answers_its_flush_costs_no_other():
    links = three(move=TransferTimeout("stalled"))
    released = threading.Event()
    links[1].client.flush = lambda deadline, wait=False: released.wait(30)
    started = time.monotonic()
    report = push(links, on_engine_failure="exclude").run()
    assert [e.state for e in report.engines] == ["serving", "fenced", "serving"]
    started_again = time.monotonic()
    with pytest.raises(TransferTimeout):
        push([links[1]]).run()
    assert started_again - started < 5 and time.monotonic() - started_again < 5
    released.set()


def test_a_move_that_fails_is_what_a_push_raises_though_the_flush_beside_it_was_refused_too():
    link = FakeLink("http://a", move=EngineLost("dropped"), flush=EngineRejected("requests wait"))
    with pytest.raises(EngineLost, match="dropped"):
        push([link]).run()
    assert link.state == "fenced" and "stamp" not in link.client.calls


def test_refused_flush_waits_only_when_configured_to():
    links = three()
    push(links, on_flush_refused="wait").run()
    assert all("flush_wait" in link.client.calls for link in links)


def test_unverified_pushes_say_so():
    report = push(three(), verify="none").run()
    assert not report.verified and not any(e.verified for e in report.engines)


def test_a_fault_of_our_own_leaves_no_engine_paused():
    links = three(begin=ZeroDivisionError("bug"))  # type: ignore[arg-type]
    with pytest.raises(TransferError, match="ZeroDivisionError"):
        push(links).run()
    assert all(not link.client.paused for link in links)


def test_memory_that_moved_is_noticed_before_anyone_is_paused():
    links = three()
    one = push(links)
    one._generations = {0: 1}
    with pytest.raises(SourcesMoved):
        one.run()
    assert all(link.client.calls == [] for link in links)


def test_engines_that_are_not_those_attached_are_named_before_anyone_is_paused():
    links = three()
    links[1].attached = False
    with pytest.raises(EnginesGone) as gone:
        push(links).run()
    assert [link.url for link in gone.value.links] == ["http://b"]
    assert all(link.client.calls == [] for link in links)


def test_what_publishing_raises_comes_before_engines_that_are_gone():
    links = three()
    links[1].attached = False
    with pytest.raises(TransferError, match="closed"):
        push(links, workers=FakeWorkers(publish=TransferError("it was closed"))).run()


def test_a_fault_of_our_own_between_the_engines_calls_is_typed_and_settles_them():
    class Broken(FakeRoute):
        def move(self, links, step, deadline):
            raise KeyError("bug")

    links = three()
    with pytest.raises(TransferError, match="KeyError"):
        push(links, route=Broken()).run()
    assert all(not link.client.paused and link.client.version == "old" for link in links)

"""The order in which buckets are filled and sent: no arena is filled before the engine has let go of it."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from weightsync.config import Config
from weightsync.deadline import Deadline
from weightsync.errors import ConfigError, EngineRejected
from weightsync.fanout import Fanout
from weightsync.fleet import Progress
from weightsync.routes_bucket import BucketRoute, _check_visible


class Recorded(BucketRoute):
    """Buckets that are only noted down: "fill", "send" and "loaded", each with the bucket's number."""

    def __init__(self, count: int, *, gpu: str, fails_at: int = -1) -> None:
        super().__init__(Fanout("test"), Config(pair="sgl_dtensor_v2"), [], lambda name: True)
        self.events: list[tuple[str, int]] = []
        self._gpu, self._fails_at = gpu, fails_at
        self._buckets = [None] * count
        self._pullers = [SimpleNamespace(run=lambda n=n: self.events.append(("fill", n))) for n in range(count)]
        self._loop = threading.Lock()

    def _sender(self, link, number, deadline):
        def send() -> int:
            self.events.append(("send", number))
            with self._loop:
                time.sleep(0.02)
                self.events.append(("loaded", number))
                if number == self._fails_at:
                    raise EngineRejected(f"bucket {number} is refused", engine=link.url)
            return 10

        return send

    def when(self, what: str, number: int) -> int:
        return self.events.index((what, number))


def moved(route: Recorded):
    link = SimpleNamespace(url="http://e", progress=Progress())
    outcomes = route.move([link], 1, Deadline(10, "test"))
    return link, outcomes


@pytest.mark.parametrize("gpu", ["", "GPU-a"])
def test_an_arena_is_filled_only_after_its_last_bucket_was_loaded(gpu):
    route = Recorded(7, gpu=gpu)
    link, outcomes = moved(route)
    assert outcomes == [None] and link.progress.num_bytes == 70
    assert [n for what, n in route.events if what == "fill"] == list(range(7))
    for number in range(2, 7):
        assert route.when("loaded", number - 2) < route.when("fill", number)


def test_in_gpu_memory_a_bucket_is_on_its_way_while_the_one_before_is_loaded():
    route = Recorded(5, gpu="GPU-a")
    moved(route)
    assert all(route.when("send", n + 1) < route.when("loaded", n) for n in range(4))
    alone = Recorded(5, gpu="")
    moved(alone)
    assert all(alone.when("loaded", n) < alone.when("send", n + 1) for n in range(4))


def test_the_first_failure_is_kept_and_ends_the_sending():
    route = Recorded(7, gpu="GPU-a", fails_at=2)
    link, (outcome,) = moved(route)
    assert "bucket 2 is refused" in str(outcome)
    assert [n for what, n in route.events if what == "send"] == [0, 1, 2, 3], "one more was on its way"
    assert link.progress.num_bytes == 30
    alone = Recorded(7, gpu="", fails_at=2)
    moved(alone)
    assert [n for what, n in alone.events if what == "send"] == [0, 1, 2]


def test_a_rank_that_does_not_see_the_gpu_of_the_arenas_is_refused_by_name():
    link = SimpleNamespace(url="http://e", layouts=[SimpleNamespace(rank=1, visible=["GPU-b"])])
    _check_visible("GPU-b", [link])
    _check_visible("", [link])
    with pytest.raises(ConfigError, match=r"TP rank 1 sees GPU-b.*GPU-a, which is masked"):
        _check_visible("GPU-a", [link])

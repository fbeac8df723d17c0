"""Threads of a receiver beside an event loop: that they ask for the interpreter, and that their timers are not late.

What that is worth beside a real engine, `python -m benchmarks.beside_loop` measures.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator

import pytest

from weightsync import gil
from weightsync.deadline import Deadline
from weightsync.rpc import Client, Server


@pytest.fixture
def interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def timer_slack_ns() -> int:
    """By how much timers of the thread that calls it may be late."""
    return ctypes.CDLL(None).prctl(30, 0, 0, 0, 0)  # PR_GET_TIMERSLACK


class Timers:
    def slack_ns(self) -> int:
        return timer_slack_ns()


def test_every_thread_of_a_server_prepares_itself():
    own = timer_slack_ns()
    with_it, without = Server(Timers(), prepare=gil.be_punctual), Server(Timers())
    try:
        for server, expected in ((with_it, 1), (without, own)):
            client = Client(server.address)
            for _ in range(8):  # workers take turns
                assert client.call("slack_ns", deadline=Deadline(5, "test"), returns=int) == expected
            client.close()
    finally:
        with_it.close()
        without.close()
    assert timer_slack_ns() == own > 1


def test_a_shorter_interval_stays_as_it_is(interval):
    sys.setswitchinterval(5e-3)
    gil.share_the_interpreter()
    assert sys.getswitchinterval() == gil.SWITCH_INTERVAL_S
    gil.share_the_interpreter()
    assert sys.getswitchinterval() == gil.SWITCH_INTERVAL_S

"""Deadlines share one budget down a call chain."""

from __future__ import annotations

import time

import pytest

from weightsync.deadline import Deadline
from weightsync.errors import TransferTimeout


def test_time_runs_down_to_zero_and_not_below():
    deadline = Deadline(0.05, "a push")
    assert 0 < deadline.remaining_s() <= 0.05
    assert not deadline.passed()
    deadline.check("pause")
    time.sleep(0.06)
    assert deadline.remaining_s() == 0.0
    assert deadline.passed()


def test_the_error_names_operation_limit_and_place():
    with pytest.raises(TransferTimeout) as caught:
        Deadline(0.0, "push of step 3").check("pause", engine="http://e", phase="pause")
    assert str(caught.value) == "[engine http://e, phase pause] pause: no answer within 0 s (push of step 3)"
    assert (caught.value.engine, caught.value.phase) == ("http://e", "pause")


def test_one_that_never_comes():
    deadline = Deadline(float("inf"), "anything")
    deadline.check("waiting")
    assert deadline.remaining_s() == float("inf")

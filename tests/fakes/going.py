"""Copies between host memory that go on by themselves, as a GPU's do, and what is queued behind them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from weightsync.board import Board
from weightsync.transports import shm


class Going(shm.Puller):
    """Copies as a GPU does: begun by ``start`` and done some time after it, here when a test says so."""

    goes_on = True
    may_end = threading.Event()
    error = ""
    begun = threading.local()

    def start(self, *, alone: bool = True) -> Callable[[], float]:
        failed = list[Exception]()

        def copy() -> None:
            assert self.may_end.wait(10), "the test never let it end"
            if self.error:
                failed.append(RuntimeError(self.error))
            else:
                self.run()

        def finish() -> float:
            thread.join()
            if failed:
                raise failed[0]
            return 0.25

        thread = threading.Thread(target=copy, daemon=True)
        thread.start()
        self.begun.last = thread, failed
        return finish

    @classmethod
    def queue(cls, step: Callable[[], object]) -> Callable[[], None]:
        """``step`` comes behind the copies that this thread began last, if they come to their end; waits for it."""
        copies, failed = cls.begun.last

        def follow() -> None:
            copies.join()
            if not failed:
                step()

        following = threading.Thread(target=follow, daemon=True)
        following.start()
        return following.join


def going_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on all copies are such, and boards say that they have landed when they have."""
    land = Board.land
    monkeypatch.setattr(shm, "make_puller", Going)
    monkeypatch.setattr(Going, "may_end", threading.Event())
    monkeypatch.setattr(Board, "land", lambda board, push_id: Going.queue(lambda: land(board, push_id)))

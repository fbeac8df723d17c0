"""What one push tells of itself: its phase, how long each took, what is worth a note. Runs in the actor."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from weightsync.deadline import Deadline
from weightsync.fleet import EngineLink
from weightsync.reports import SyncReport


class Record:
    """``phase`` is the last one begun; ``seconds`` by phase, of all of it as ``total``. ``trainer_seconds``: of some
    phases, what the slowest training rank took.
    """

    def __init__(self, step: int, deadline: Deadline) -> None:
        self.phase = ""
        self.seconds: dict[str, float] = {}
        self.trainer_seconds: dict[str, float] = {}
        self.notes: list[str] = []
        self._step = step
        self._deadline = deadline

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Inside, the push is in that phase. Raises TransferTimeout if its deadline has passed before."""
        self.phase = phase
        self._deadline.check(f"phase {phase}", phase=phase)
        started = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - started

    def report(
        self, involved: Sequence[EngineLink], links: Sequence[EngineLink], *, num_tensors: int, notes: Sequence[str]
    ) -> SyncReport:
        """The push has ended. ``involved`` are all its engines, ``links`` those that it reached."""
        engines = [link.report() for link in involved]
        return SyncReport(
            step=self._step,
            weight_version=str(self._step),
            route="+".join(sorted({link.route for link in links})),
            num_tensors=num_tensors,
            num_bytes=sum(e.num_bytes for e in engines if e.state == "serving"),
            seconds=self.seconds,
            trainer_seconds=self.trainer_seconds,
            verified=all(link.progress.verified for link in links),
            engines=engines,
            notes=[*(note for link in involved for note in link.notes), *notes, *self.notes],
        )

"""Waiting for a pull that goes on beside an engine's event loop, by the boards of its ranks. Runs in the actor."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from weightsync.board import Reader
from weightsync.deadline import Deadline
from weightsync.errors import TransferError
from weightsync.receiver_wire import Installed, PullResult

POLL_S = 5e-5
LOOK_S = 1.0
"""How long boards are looked at before a receiver is asked whether its pull has failed."""


class Landing:
    """What the ranks of one engine say on their boards. False if one has none that can be read here.

    ``installed``: by rank, the answer to what was installed last.
    """

    def __init__(self, installed: Sequence[Installed]) -> None:
        self._installed = list(installed)
        self._boards: list[Reader] = []
        try:
            for one in self._installed:
                if one.goes_on and one.board is not None:
                    self._boards.append(Reader(one.board))
        except TransferError:  # where memory is not shared, pulls keep the event loop
            self.close()

    def __bool__(self) -> bool:
        return len(self._boards) == len(self._installed) > 0

    def close(self) -> None:
        """Unmap the boards. Idempotent."""
        boards, self._boards = self._boards, []
        for board in boards:
            board.close()

    def results(self, push_id: str, ask: Callable[[int], PullResult]) -> list[PullResult]:
        """By rank, how a pull went that the engine has taken, when all have ended.

        ``ask`` is for a rank whose pull does not go on, or does not seem to land: it waits for what the receiver says,
        by the deadline of the push.
        """
        boards, results = list(self._boards), dict[int, PullResult]()
        if len(boards) != len(self._installed):
            raise TransferError("the boards of this engine's ranks were taken down")
        patience = Deadline(LOOK_S, "waiting for pulls to land")
        while True:
            for rank, board in enumerate(boards):
                if rank in results:
                    continue
                if not board.goes_on(push_id):
                    results[rank] = ask(rank)
                elif board.has_landed(push_id):
                    results[rank] = self._landed(board, self._installed[rank], push_id)
                elif patience.passed():
                    results[rank] = ask(rank)
            if len(results) == len(boards):
                return [results[rank] for rank in range(len(boards))]
            time.sleep(POLL_S)

    @staticmethod
    def _landed(board: Reader, installed: Installed, push_id: str) -> PullResult:
        """As the board says. Without fingerprints where a constant is not as it was: whoever asks for them hears."""
        seconds, prints, count = board.seconds(), board.prints(push_id), len(installed.order)
        fingerprints: list[int] | None = None
        if prints and prints[count:] == installed.constants:
            by_need = dict(zip(installed.order, prints, strict=False))
            fingerprints = [by_need[need] for need in range(count)]
        return PullResult(
            push_id=push_id,
            started=True,
            applied=True,
            ok=True,
            num_bytes=board.num_bytes(),
            seconds=seconds,
            fingerprints=fingerprints,
        )

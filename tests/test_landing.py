"""What the actor makes of boards: who has landed, who must be asked, and which number belongs to which need."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from weightsync import landing
from weightsync.board import Board, Reader
from weightsync.errors import TransferError
from weightsync.landing import Landing
from weightsync.receiver_wire import Installed, PullResult
from weightsync.spec import Segment

HIGH = 0xFFFF_FFFF_FFFF_FFF0


@pytest.fixture
def boards() -> Iterator[list[Board]]:
    made = [Board(num_words=5, device=torch.device("cpu")) for _ in range(2)]
    yield made
    for board in made:
        board.close()
        board.close()


def installed(board: Board, **fields) -> Installed:
    return Installed(goes_on=True, board=board.segment, **fields)


def go(board: Board, push_id: str, *, lands: bool = True, printed: bool = False) -> None:
    board.accept(push_id, num_bytes=100, launched_ns=time.monotonic_ns(), printed=printed)
    if lands:
        board.land(push_id)


def nobody(rank: int) -> PullResult:
    raise AssertionError(f"rank {rank} was asked")


def test_boards_tell_of_every_rank_and_nobody_is_asked(boards):
    ranks = Landing([installed(b) for b in boards])
    assert ranks
    for push_id in ("one", "two"):
        go(boards[0], push_id)
        go(boards[1], push_id, lands=False)
        later = threading.Timer(0.1, boards[1].land, [push_id])
        later.start()
        results = ranks.results(push_id, nobody)
        assert [(r.push_id, r.ok, r.applied, r.num_bytes, r.fingerprints) for r in results] == [
            (push_id, True, True, 100, None)
        ] * 2
        assert results[1].seconds >= 0.1 > results[0].seconds
    ranks.close()
    assert not ranks


@pytest.mark.parametrize(("constants", "found"), [([8, HIGH], [30, 10, 20]), ([8, 9], None)])
def test_fingerprints_are_those_of_the_needs_unless_a_constant_has_changed(boards, constants, found):
    ranks = Landing([installed(boards[0], order=[1, 2, 0], constants=constants)])
    boards[0].prints.copy_(torch.tensor([10, 20, 30, 8, -16]))
    go(boards[0], "one", printed=True)
    (result,) = ranks.results("one", nobody)
    assert result.ok and result.fingerprints == found
    go(boards[0], "two")
    assert ranks.results("two", nobody)[0].fingerprints is None, "nobody asked for any: those are of another pull"


def test_no_constants_are_no_reason_to_believe_fingerprints_that_nobody_asked_for(boards):
    board = Board(num_words=3, device=torch.device("cpu"))
    ranks = Landing([installed(board, order=[0, 1, 2])])
    go(board, "one")
    assert ranks.results("one", nobody)[0].fingerprints is None
    board.close()


def test_boards_that_were_taken_down_tell_nothing(boards):
    ranks = Landing([installed(b) for b in boards])
    ranks.close()
    with pytest.raises(TransferError, match="taken down"):
        ranks.results("one", nobody)


def test_boards_that_are_taken_down_meanwhile_keep_nobody_waiting(boards):
    ranks = Landing([installed(b) for b in boards])
    go(boards[0], "one")
    go(boards[1], "one", lands=False)
    threading.Timer(0.1, ranks.close).start()
    gone = PullResult("one", kind="failed", error="this client was closed")
    assert ranks.results("one", {1: gone}.__getitem__)[1] is gone


@pytest.mark.parametrize("why", ["it keeps the event loop", "it does not land", "it is another one that has landed"])
def test_a_rank_whose_board_does_not_tell_is_asked(boards, why, monkeypatch):
    monkeypatch.setattr(landing, "LOOK_S", 0.05)
    ranks = Landing([installed(b) for b in boards])
    go(boards[0], "one")
    if why != "it keeps the event loop":
        go(boards[1], "one", lands=False)
    if why == "it is another one that has landed":
        boards[1].land("two")
    failed = PullResult("one", started=True, applied=True, kind="failed", error="a bad address")
    assert ranks.results("one", {1: failed}.__getitem__)[1] is failed


def test_without_a_board_that_can_be_read_here_there_is_no_landing(boards):
    assert not Landing([]) and not Landing([installed(boards[0]), Installed()])
    gone = Installed(goes_on=True, board=Segment("shm", b"/dev/shm/weightsync-gone", 4096))
    assert not Landing([installed(boards[0]), gone])
    with pytest.raises(TransferError):
        Reader(gone.board)


def test_any_id_is_a_number_of_its_own(boards):
    board, reader = boards[0], Reader(boards[0].segment)
    assert not reader.goes_on("") and not reader.has_landed("")
    for push_id in ("", "0" * 16, "f" * 16, "p1"):
        assert not reader.has_landed(push_id)
        go(board, push_id)
        assert reader.goes_on(push_id) and reader.has_landed(push_id)
    reader.close()
    reader.close()

"""A board that the GPU writes: after the copies, with the fingerprints, and never once it was taken down."""

from __future__ import annotations

import time

import pytest
import torch

from weightsync.board import Board, Reader
from weightsync.fingerprint import Fingerprinter
from weightsync.transports.cuda_copy import make_puller

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


def test_what_the_gpu_writes_comes_behind_the_copies_and_is_what_reading_back_gives() -> None:
    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    puller, check = make_puller([(target, source)]), Fingerprinter([(target[:1000], (0,), target.dtype)])
    check.run()
    board = Board(num_words=1, device=source.device)
    reader = Reader(board.segment)
    for push_id in ("one", "two"):
        target.zero_()
        torch.cuda.synchronize()
        launched_ns = time.monotonic_ns()
        finish = puller.start()
        check.write(board.prints)
        said = board.land(push_id)
        board.accept(push_id, num_bytes=source.numel(), launched_ns=launched_ns, printed=True)
        assert reader.goes_on(push_id) and not reader.has_landed(push_id), "4 GiB were copied by then"
        until = time.monotonic() + 10
        while not reader.has_landed(push_id):
            assert time.monotonic() < until
        assert reader.prints(push_id) == check.run()
        finish()
        said()
        assert torch.equal(target, source)
    board.close()
    reader.close()


def test_one_that_is_taken_down_at_once_leaves_nothing_behind() -> None:
    for number in range(50):
        board = Board(num_words=100, device=torch.device("cuda:0"))
        board.land(str(number))()
        board.close()
        board.close()
    torch.cuda.synchronize()
    assert torch.ones(3, device="cuda").sum().item() == 3

"""Route ``nccl`` and ``source: nccl`` between two GPUs: trainer on the first, engine (a fake with a real receiver) on
the second, actor apart, each a process. Bytes, and what all of it takes of both GPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.gpu import owner
from tests.gpu.world import Actor, Engine, Size, TrainingRank, fuller_by, used_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus, pytest.mark.timeout(280)]

SIZE = Size()
BUCKET_BYTES = (64 << 20, 192 << 20)
SLACK_BYTES = 32 << 20
WAYS = {
    "slices": {"route": "nccl"},
    "received, then pulled": {"source": "nccl"},
}


@contextmanager
def apart(size: Size, places: tuple[str, str]) -> Iterator[tuple[owner.Remote, owner.Remote, owner.Remote]]:
    """Trainer, engine and actor."""
    with ExitStack() as stack:
        rank = functools.partial(TrainingRank, size.shapes(0, 1), places[0])
        trainer = stack.enter_context(owner.started(rank))
        engine = stack.enter_context(owner.started(functools.partial(Engine, size, places[1])))
        yield trainer, engine, stack.enter_context(owner.started(Actor))


def push_and_compare(size: Size, places: tuple[str, str], **config) -> dict[str, int]:
    """Three pushes, each compared byte for byte; bytes that all processes take of each GPU more than before."""
    with apart(size, places) as (trainer, engine, actor):
        trainer.call("change", 0)
        trainer.call("sums")  # what these take is not the push's
        engine.call("sums")
        before = used_bytes()
        url, address = engine.call("url"), trainer.call("address")
        actor.call("connect", engines=[{"url": url}], publishers=[address], **config)
        for step in (1, 2, 3):
            trainer.call("change", step)
            report = actor.call("push", step)
            assert report["verified"], report
            assert engine.call("version") == str(step)
            assert engine.call("sums") == trainer.call("sums")
        return fuller_by(before)


@pytest.mark.parametrize("way", WAYS)
def test_every_byte_arrives_and_memory_grows_with_two_buckets(way: str, record) -> None:
    """Contexts, and what NCCL takes for itself, are the same for both sizes."""
    small, large = BUCKET_BYTES
    taken = {
        nbytes: push_and_compare(SIZE, ("cuda:0", "cuda:1"), bucket_bytes=nbytes, **WAYS[way])
        for nbytes in (small, large)
    }
    for nbytes, more in taken.items():
        print(f"{way}, buckets of {nbytes}: more in use, by GPU: {more}")
        record("memory", {"way": way, "bucket_bytes": nbytes, "bytes_more": more})
    assert all(taken[large][gpu] - taken[small][gpu] <= 2 * (large - small) + SLACK_BYTES for gpu in taken[small])

"""Route ``nccl`` and ``source: nccl`` between two GPUs: trainer on the first, engine (a fake with a real receiver) on
the second, actor apart, each a process. Bytes, and what the actor and the trainer take of a GPU beside contexts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.gpu import owner
from tests.gpu.world import Actor, Engine, Size, TrainingRank

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus, pytest.mark.timeout(280)]

SIZE = Size()
BUCKET_BYTES = 128 << 20
WAYS = {
    "slices": {"route": "nccl"},
    "received, then pulled": {"source": "nccl"},
}


@contextmanager
def apart(size: Size, devices: tuple[str, str]) -> Iterator[tuple[owner.Remote, owner.Remote, owner.Remote]]:
    """Trainer, engine and actor."""
    with ExitStack() as stack:
        rank = functools.partial(TrainingRank, size.shapes(0, 1), devices[0])
        trainer = stack.enter_context(owner.started(rank))
        engine = stack.enter_context(owner.started(functools.partial(Engine, size, devices[1])))
        yield trainer, engine, stack.enter_context(owner.started(Actor))


def push_and_compare(size: Size, devices: tuple[str, str], **config) -> dict[str, int]:
    """Three pushes, each compared byte for byte; what torch reserves in trainer and actor more than before."""
    with apart(size, devices) as (trainer, engine, actor):
        trainer.call("change", 0)
        trainer.call("sums")  # what these take is not the push's
        before = {name: one.call("memory")["reserved"] for name, one in (("trainer", trainer), ("actor", actor))}
        url, address = engine.call("url"), trainer.call("address")
        actor.call("connect", engines=[{"url": url}], publishers=[address], **config)
        for step in (1, 2, 3):
            trainer.call("change", step)
            report = actor.call("push", step)
            assert report["verified"], report
            assert engine.call("version") == str(step)
            assert engine.call("sums") == trainer.call("sums")
        after = {"trainer": trainer.call("memory")["reserved"], "actor": actor.call("memory")["reserved"]}
        return {name: after[name] - before[name] for name in after}


@pytest.mark.parametrize("way", WAYS)
def test_every_byte_arrives_and_memory_is_bounded(way: str, record) -> None:
    grown = push_and_compare(SIZE, ("cuda:0", "cuda:1"), bucket_bytes=BUCKET_BYTES, **WAYS[way])
    print(f"{way}: torch reserves more, by process: {grown}")
    record("memory", {"way": way, "bucket_bytes": BUCKET_BYTES, "reserved_bytes_more": grown})
    assert all(more <= 2 * BUCKET_BYTES + (32 << 20) for more in grown.values())

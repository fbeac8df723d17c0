"""``source: nccl`` over gloo: ranks on a host without an actor send their shards into memory of the actor."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import distributed_c10d

from tests.fakes.engine import FakeEngine
from tests.row_world import SHAPES, RowWorld
from tests.senders import Shared, stock
from tests.test_session import engine
from weightsync import mirror, routes_nccl, supply
from weightsync.boxes import dense_strides, volume
from weightsync.deadline import Deadline
from weightsync.errors import ConfigError, TransferError
from weightsync.mirror_group import lay_out
from weightsync.spec import Box, Shard
from weightsync.transports.sender import Nursery

pytestmark = pytest.mark.timeout(180)
MODEL_BYTES = 4 * sum(torch.Size(shape).numel() for shape in SHAPES.values())


@pytest.fixture
def far(nursery, monkeypatch) -> Iterator[Callable[..., RowWorld]]:
    made: list[RowWorld] = []
    for module in (mirror, routes_nccl):
        monkeypatch.setattr(module, "Nursery", lambda: Shared(nursery))

    def make(*engines: FakeEngine, hosts: tuple[str, ...] = ("far-1", "far-1", "far-2"), **config) -> RowWorld:
        made.append(RowWorld(list(engines), list(hosts), **({"source": "nccl"} | config)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def senders(nursery: Nursery) -> list[int]:
    with open(f"/proc/{nursery._process.pid}/task/{nursery._process.pid}/children") as file:
        return [int(pid) for pid in file.read().split()]


@pytest.mark.parametrize(("route", "kind"), [("shm", engine), ("bucket", stock), ("nccl", stock), ("nccl", engine)])
def test_ordinary_routes_go_on_from_what_arrived(far, route, kind):
    one = far(kind(2), kind(1), route=route)
    for step in (1, 2):
        report = one.push(step)
        assert report.route == route and report.verified == (kind is engine)
        one.assert_all_serve(step)
    assert any(f"{MODEL_BYTES}" in note or "arrive over a group" in note for note in one.session.plan().notes)


def test_what_ranks_hold_alike_arrives_once(far):
    one = far(engine(1))
    one.push(1)
    group = one.session._workers._group
    received = group.fetch(Deadline(30.0, "test"))
    padding = 16 * 3 * len(SHAPES)
    assert MODEL_BYTES <= received <= MODEL_BYTES + padding
    norms = [c for copies in (e.parts[0] for e in group._expects) for own in copies.values() for c in own]
    assert sum(c.tensor == "norm.weight" for c in norms) == 1


def test_the_trainers_own_groups_are_not_touched(far):
    before = dict(distributed_c10d._world.pg_map)
    one = far(engine(1))
    one.push(1)
    assert dict(distributed_c10d._world.pg_map) == before
    assert not torch.distributed.is_initialized()


def test_memory_that_moved_is_mirrored_anew(far):
    one = far(engine(2))
    one.push(1)
    for offer in one.trainer.offers:
        offer.withdraw()
    assert one.push(2).verified
    one.assert_all_serve(2)


def test_nothing_is_left_after_a_session(far, nursery):
    one = far(engine(1))
    one.push(1)
    assert len(senders(nursery)) == 1
    one.close()
    assert not senders(nursery)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("weightsync-mirror")]


def test_another_version_is_refused_by_name_before_anything_is_opened(far, monkeypatch):
    monkeypatch.setattr(supply, "group_version", lambda device: "NCCL 2.28.9")
    joined = []
    monkeypatch.setattr(supply, "join", lambda *args, **kwargs: joined.append(args))
    with pytest.raises(ConfigError, match=r"training rank 0 would use NCCL 2\.28\.9 and the actor's environment gloo"):
        _ = far(engine(1)).session
    assert not joined


def test_a_receiver_that_was_killed_is_replaced(far, nursery):
    one = far(engine(2))
    one.push(1)
    (pid,) = senders(nursery)
    os.kill(pid, signal.SIGKILL)
    while senders(nursery):
        time.sleep(0.01)
    assert one.push(2).verified
    one.assert_all_serve(2)


def test_a_receiver_that_stalls_ends_by_the_deadline_and_engines_serve_on(far, nursery):
    one = far(engine(2), timeout_s=6.0)
    one.push(1)
    (pid,) = senders(nursery)
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(TransferError, match="receiving shards from the training workers") as caught:
        one.push(2)
    assert time.monotonic() - started < 12
    assert caught.value.safe_to_retry and caught.value.phase == "publish"
    assert one.engines[0].weight_version == "1" and not one.engines[0].paused
    assert one.push(3, timeout_s=60.0).verified
    one.assert_all_serve(3)


def test_a_publisher_that_is_gone_ends_the_push_and_engines_serve_on(far):
    one = far(engine(1), timeout_s=10.0)
    one.push(1)
    one.trainer.servers[2].close()
    with pytest.raises(TransferError, match="publisher"):
        one.push(2)
    assert one.engines[0].weight_version == "1" and not one.engines[0].paused


# ---------------------------------------------------------------------------------------------------- the layout

shards = st.builds(
    lambda name, rows, columns, padded, dtype: Shard(
        name, (rows, columns), dtype, Box((0, 0), (rows, columns)), (columns + padded, 1), 0, 0
    ),
    st.sampled_from("abc"),
    st.integers(0, 4),
    st.integers(1, 4),
    st.integers(0, 2),
    st.sampled_from(["float32", "bfloat16", "uint8"]),
)


@given(st.dictionaries(st.integers(0, 3), st.lists(shards, max_size=5), min_size=1), st.integers(1, 3))
def test_every_shard_has_room_of_its_own_or_that_of_its_equal(by_rank, receivers):
    made = lay_out(by_rank, {rank: rank % receivers for rank in by_rank}, receivers)
    spans: dict[tuple, tuple] = {}
    for rank, own in by_rank.items():
        for before, after in zip(own, made.shards[rank], strict=True):
            assert (after.tensor, after.box, after.strides, after.dtype) == (
                before.tensor, before.box, before.strides, before.dtype)  # fmt: skip
            if volume(before.box):
                itemsize = getattr(torch, before.dtype).itemsize
                reach = sum((n - 1) * s for n, s in zip(before.box.size, before.strides)) + 1
                end = after.byte_offset + reach * itemsize
                assert after.byte_offset % itemsize == 0 and end <= made.sizes[after.segment]
                key = (before.tensor, before.box, before.strides, before.dtype)
                assert spans.setdefault(key, (after.segment, after.byte_offset, end)) == (
                    after.segment, after.byte_offset, end)  # fmt: skip
    placed = sorted(spans.values())
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(placed))
    sent = [copy for copies in made.copies for own in copies.values() for copy in own]
    assert len(sent) == len(spans), "each once"


def test_strides_at_home_are_kept():
    shard = Shard("t", (2, 3), "float32", Box((0, 0), (2, 3)), (1, 2), 0, 0)
    made = lay_out({0: [shard]}, {0: 0}, 1)
    assert made.shards[0][0].strides == (1, 2) and made.sizes == [24]
    assert dense_strides((2, 3)) != (1, 2)

"""Relaying, on host memory that claims to be GPUs: the rank reads the same bytes, and no more than it needs moves."""

from __future__ import annotations

import msgspec
import pytest
import torch

from tests.test_session import assert_serves, engine
from tests.test_session import world as session_world  # noqa: F401 (a fixture)
from weightsync import relay as relay_module
from weightsync import routes, transports
from weightsync.boxes import dense_strides
from weightsync.relay import RELAY_RANK, Relay, masked
from weightsync.spec import Box, Copy, Export, RankPlan, Shard, View
from weightsync.views import source_view

SHAPE = (6, 4)


@pytest.fixture
def world():
    """Two ranks with three rows each, on GPUs A and B, and an engine rank that needs columns 1 and 2 of all rows."""
    memories, exports, copies = [], {}, []
    for rank, gpu in enumerate(("GPU-a", "GPU-b")):
        memory = transports.get("shm").allocate(48)
        memory.tensor.view(torch.float32).copy_(torch.arange(12.0) + 100 * rank)
        box = Box((3 * rank, 0), (3, 4))
        segment = msgspec.structs.replace(memory.segment, device=gpu)
        exports[rank] = Export([segment], [Shard("w", SHAPE, "float32", box, (4, 1), 0, 0)], 0, 0)
        source = View(0, 1, (4, 1))
        copies.append(Copy("w", Box((3 * rank, 1), (3, 2)), rank, source, View(0, 6 * rank, (2, 1))))
        memories.append(memory)
    yield exports, RankPlan("http://e", 0, copies, [], [])
    for memory in memories:
        memory.close()


def test_only_what_is_masked_is_relayed(world):
    exports, plan = world
    assert masked(plan, exports, {"GPU-a", "GPU-b"}) == []
    assert masked(plan, exports, {"GPU-a"}) == plan.copies[1:]
    assert masked(plan, exports, set()) == plan.copies


def test_the_arena_holds_the_slices_and_follows_the_source(world):
    exports, plan = world
    relay = Relay(plan, exports, device="", visible={"GPU-a"})
    try:
        assert relay.num_bytes == 3 * 2 * 4, "a slice, not the tensor"
        assert relay.plan.copies[0] == plan.copies[0], "what can be opened is read where it lies"
        moved = relay.plan.copies[1]
        assert (moved.rank, moved.box, moved.target) == (RELAY_RANK, plan.copies[1].box, plan.copies[1].target)
        assert moved.source == View(0, 0, dense_strides((3, 2)))
        for value in (0.0, 7.0):
            theirs = transports.get("shm").open_segment(exports[1].segments[0])
            theirs.tensor.view(torch.float32).add_(value)
            expected = source_view({1: [theirs]}, exports[1].shards, plan.copies[1]).clone()
            relay.run()
            opened = transports.get("shm").open_segment(relay.segments[RELAY_RANK][0])
            assert torch.equal(source_view({RELAY_RANK: [opened]}, relay.shards[RELAY_RANK], moved), expected)
            opened.close()
            theirs.close()
    finally:
        relay.close()


def test_a_relay_arrives_chunk_by_chunk_and_says_from_where(world, monkeypatch):
    exports, plan = world
    monkeypatch.setattr(relay_module, "_LEAST_CHUNK_BYTES", 256)  # as the alignment: a copy a chunk
    relay = Relay(plan, exports, device="", visible=())
    try:
        assert relay.num_rounds == 2 and [relay.round_of(copy) for copy in relay.plan.copies] == [0, 1]
        assert relay.num_bytes_on == {"GPU-a": 24, "GPU-b": 24}
        arena = transports.get("shm").open_segment(relay.segments[RELAY_RANK][0])
        views = [source_view({RELAY_RANK: [arena]}, relay.shards[RELAY_RANK], copy) for copy in relay.plan.copies]
        relay.run(0)
        assert views[0].flatten().tolist() == [1.0, 2.0, 5.0, 6.0, 9.0, 10.0] and not views[1].any()
        relay.run(1)
        assert views[1].flatten().tolist() == [101.0, 102.0, 105.0, 106.0, 109.0, 110.0]
        arena.close()
    finally:
        relay.close()


def test_a_relay_follows_the_rounds_in_which_an_arena_is_filled(world):
    exports, plan = world
    exports[1] = msgspec.structs.replace(exports[1], rounds=[2], num_parts=2)
    relay = Relay(plan, exports, device="", visible=())
    try:
        assert relay.num_rounds == 3 and [relay.round_of(copy) for copy in relay.plan.copies] == [0, 2]
        assert relay.run(1) == 0.0
    finally:
        relay.close()


def test_a_push_through_relays_is_verified(session_world, monkeypatch):  # noqa: F811
    """On host memory: every segment counts as masked, and ranks as if they had a GPU."""
    monkeypatch.setattr(relay_module, "_is_masked", lambda segment, visible: True)
    monkeypatch.setattr(relay_module, "_LEAST_CHUNK_BYTES", 512)

    def relays(links, plan, exports):
        return {
            (link.url, layout.rank): Relay(plan.rank_plan(link.url, layout.rank), exports, device="", visible=())
            for link in links
            for layout in link.layouts
        }

    monkeypatch.setattr(routes, "_relays", relays)
    one = session_world(engine(2), engine())
    for step in (1, 2, 3):
        report = one.push(step)
        assert report.verified
        for each in one.engines:
            assert_serves(each, one.tensors, step)
    assert one.session._groundwork.routes["shm"]._num_rounds[one.engines[1].url] > 1
    assert report.engines[0].seconds["relay"] > 0

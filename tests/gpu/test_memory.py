"""Fifty pushes leave every process as the second left it, and what ``direct`` takes of a GPU beside contexts is small.

Two training ranks, two engines and the actor, each a process; with two GPUs each engine also reads from the other's.
"""

from __future__ import annotations

import pytest

from tests.gpu.world import Size, World, used_bytes, world

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(280)]

SIZE = Size()
PUSHES = 50
BUCKET_BYTES = 128 << 20
GPU_SLACK_BYTES = 16 << 20
DIRECT_MB = 100
DESCRIPTORS = 4

ROUTES = {
    "direct": {"route": "direct", "verify": "fingerprint"},
    "bucket": {"route": "bucket", "verify": "fingerprint", "bucket_bytes": BUCKET_BYTES},
}


@pytest.mark.parametrize("route", ROUTES)
def test_fifty_pushes_grow_nothing_and_direct_takes_little_beside_contexts(route: str, record) -> None:
    empty = used_bytes()
    with world(SIZE) as one:
        idle = _warm(one)
        one.connect(**ROUTES[route])
        second = _after_pushes(one, range(1, 3))
        last = _after_pushes(one, range(3, PUSHES))
        notes = one.push(PUSHES)["notes"]
        one.assert_served(PUSHES)
    assert_nothing_grew(second, last)
    taken, context_mb, contexts = _beside_contexts(empty, idle, last)
    noted = [note for note in notes if ": a context " in note]
    seen = {"route": route, "mb_beside_contexts": taken, "contexts_made": contexts, "context_mb": context_mb}
    print(seen, "contexts noted:", noted)
    record("memory", seen | {"pushes": PUSHES, "bucket_bytes": BUCKET_BYTES if route == "bucket" else 0})
    made = [f"engine {i}" for i in range(2) if last[f"engine {i}"]["contexts"] > idle[f"engine {i}"]["contexts"]]
    assert len([note for note in noted if "TP rank" in note]) >= len(made)
    pairs = len(one.ranks) / len(taken)  # a training rank and an engine; both pairs are on one GPU if there is but one
    assert route != "direct" or max(taken.values()) < DIRECT_MB * pairs


def _beside_contexts(empty: dict, idle: dict, last: dict) -> tuple[dict[str, float], float, dict[str, int]]:
    """MB by which each GPU is fuller after the pushes than before connecting, contexts made meanwhile left out; how
    many MB a context takes; how many were made, by GPU.
    """
    processes = [name for name in idle if name != "GPU"]
    contexts = sum(idle[name]["contexts"] for name in processes)
    reserved = sum(idle[name]["reserved"] for name in processes)
    context_mb = (sum(idle["GPU"].values()) - sum(empty.values()) - reserved) / contexts / 1e6

    def made_on(uuid: str) -> int:
        key = f"context on {uuid}"
        return sum(last[name].get(key, 0) - idle[name].get(key, 0) for name in processes)

    made = {uuid: made_on(uuid) for uuid in idle["GPU"]}
    taken = {uuid: (last["GPU"][uuid] - used) / 1e6 - made[uuid] * context_mb for uuid, used in idle["GPU"].items()}
    return taken, context_mb, made


def test_a_stock_engine_is_fed_by_handles_of_the_actor_and_grows_nothing() -> None:
    with world(SIZE, receiver=False) as one:
        _warm(one)
        one.connect(route="bucket", verify="none", bucket_bytes=BUCKET_BYTES)
        before = _after_pushes(one, range(1, 3))
        one.assert_served(2)
        after = _after_pushes(one, range(3, PUSHES + 1))
        one.assert_served(PUSHES)
    assert_nothing_grew(before, after)


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_withdrawn_and_freed_is_free_while_engines_go_on(route: str) -> None:
    with world(SIZE) as one:
        _warm(one)
        one.connect(**ROUTES[route])
        for step in (1, 2):
            one.push(step)
            full = used_bytes()
            freed = sum(rank.call("offload") for rank in one.ranks)
            left = used_bytes()
            one.assert_served(step)
            for rank in one.ranks:
                rank.call("onload")
        assert sum(full.values()) - sum(left.values()) > freed - GPU_SLACK_BYTES, (full, left, freed)
        one.push(3)
        one.assert_served(3)


def _warm(one: World) -> dict[str, dict[str, int]]:
    """The state once torch has loaded and reserved what it takes to change weights and to sum them up."""
    one.change(0)
    for process in (*one.ranks, *one.engines):
        process.call("sums")
    return _state(one)


def _after_pushes(one: World, steps: range) -> dict[str, dict[str, int]]:
    for step in steps:
        assert one.push(step)["engines"][1]["state"] == "serving"
    return _state(one)


def _state(one: World) -> dict[str, dict[str, int]]:
    return {name: process.call("memory") for name, process in one.processes.items()} | {"GPU": used_bytes()}


def assert_nothing_grew(before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]) -> None:
    for process, then in before.items():
        for what, value in then.items():
            limit = {"resident": BUCKET_BYTES, "descriptors": DESCRIPTORS, "contexts": 0}
            grown = after[process][what] - value
            assert grown <= limit.get(what, GPU_SLACK_BYTES), f"{process}: {what} grew by {grown} from {value}"

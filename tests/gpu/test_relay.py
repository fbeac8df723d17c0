"""Slices of a GPU that an engine does not see come by way of the actor, in rounds; GPUs are told apart by UUID alone.

On one GPU the actor is made to think that every engine's GPU is masked; with two, the driver masks it.
"""

from __future__ import annotations

import pytest

from tests.gpu.world import Actor, Size, World, world
from weightsync import devices, relay

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(280)]

SIZE = Size(blocks=6)
PUSHES = 3


class Blindfolded(Actor):
    """Relays everything."""

    def __init__(self) -> None:
        relay._is_masked = lambda segment, visible: True


def pushed(one: World, **config: object) -> list[str]:
    """The plan's notes, after a few pushes that were verified and left in the engines what was trained."""
    notes = one.connect(verify="fingerprint", **config)
    for step in range(1, PUSHES + 1):
        report = one.push(step)
        assert report["verified"], report
        print([engine["seconds"] for engine in report["engines"]])
        one.assert_served(step)
    return notes


def test_all_slices_through_an_arena_of_the_actor_in_rounds() -> None:
    with world(SIZE, actor=Blindfolded) as one:
        notes = pushed(one, route="direct")
    relayed = [note for note in notes if "are relayed through an arena on its GPU, in " in note]
    assert len(relayed) == 2 and all("in 1 rounds" not in note for note in relayed), notes


def test_all_slices_through_two_small_arenas_filled_in_turn() -> None:
    """Cast from float32, so through the publishers' arenas, of a quarter of what is needed, and then relayed."""
    with world(SIZE, actor=Blindfolded, dtype="float32") as one:
        notes = pushed(one, route="direct", arena_bytes=128 << 20)
    assert any("rounds during the move" in note for note in notes), notes


def test_an_arena_filled_in_rounds_is_pulled_directly() -> None:
    with world(SIZE, dtype="float32") as one:
        notes = pushed(one, route="direct", arena_bytes=128 << 20)
    assert any("rounds during the move, 2 of them at a time" in note for note in notes), notes


@pytest.mark.two_gpus
def test_engines_that_see_only_the_other_gpu_are_relayed_to() -> None:
    places = {"ranks_on": ["cuda:0"], "engines_on": ["cuda:0"], "sees": {"engines": "1", "actor": "1,0"}}
    with world(SIZE, **places) as one:
        notes = pushed(one, route="direct")
    trainer, engine = devices.uuid_of(0), devices.uuid_of(1)
    (note,) = [note for note in notes if "are relayed" in note]
    assert f"sees only {engine}" in note and f"bytes on {trainer}" in note


@pytest.mark.two_gpus
@pytest.mark.parametrize("sees", [{"ranks": "1,0"}, {"engines": "1,0"}, {"actor": "1,0"}])
@pytest.mark.parametrize("route", ["direct", "bucket"])
def test_gpus_in_another_order_on_either_side(route: str, sees: dict[str, str]) -> None:
    with world(SIZE, ranks_on=["cuda:0", "cuda:1"], engines_on=["cuda:0", "cuda:1"], sees=sees) as one:
        notes = pushed(one, route=route)
    assert not any("are relayed" in note for note in notes), notes

"""What an arena holds and what can be read in place, with a transport that shares host memory."""

from __future__ import annotations

import pytest
import torch

from tests.fakes import in_place
from tests.trainers.reading import Reading
from weightsync import transports
from weightsync.arena import lay_out
from weightsync.boxes import ALIGNMENT
from weightsync.errors import TransferError
from weightsync.fingerprint import fingerprint
from weightsync.publisher import Publisher


@pytest.fixture(autouse=True)
def transport(monkeypatch):
    monkeypatch.setitem(transports._MODULES, "in_place", in_place.__name__)
    yield
    in_place.close()


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """One in shared memory, one a transposed part of such, one in memory of its own."""
    return {
        "plain": in_place.shared(torch.arange(12.0).view(3, 4), before=5),
        "part": in_place.shared(torch.arange(30.0).view(5, 6))[1:4, ::2].t(),
        "private": torch.arange(7.0),
    }


@pytest.fixture
def publisher(tensors):
    with Publisher(tensors, rank=0, world_size=1) as publisher:
        publisher.step_done(1)
        yield publisher


@pytest.fixture
def reading(publisher):
    reading = Reading([publisher.address], transport="in_place")
    yield reading
    reading.close()


def test_tensors_follow_each_other_aligned_and_the_arena_ends_with_the_last():
    layout = lay_out("shm", "", [(0, (3,), torch.uint8), (2, (5, 7), torch.float32), (3, (), torch.bfloat16)])
    assert [s.byte_offset for s in layout.slots] == [0, ALIGNMENT, 2 * ALIGNMENT]
    assert layout.nbytes == 2 * ALIGNMENT + 2
    assert lay_out("shm", "", []).nbytes == 0


def test_what_can_be_shared_is_read_where_it_is_and_the_rest_from_the_arena(tensors, reading):
    export = reading.export(in_place=True)[0]
    shards = {s.tensor: s for s in export.shards}
    assert len(export.segments) == 3
    assert shards["plain"].byte_offset == 5 * 4
    assert shards["part"].strides == tensors["part"].stride()
    assert export.arena_bytes == 7 * 4
    assert len(export.notes) == 1
    assert "no handle" in export.notes[0]
    assert "private" in export.notes[0]
    reading.publish(1)
    for name, parts in reading.parts().items():
        assert torch.equal(parts[0][1], tensors[name]), name
    sealed = reading.seal(1)[0]
    assert sealed.published == [fingerprint(t, (0,) * t.dim()) for t in tensors.values()]
    assert sealed.fingerprints == sealed.published


def test_another_dtype_needs_the_arena(tensors, reading):
    export = reading.export({"plain": "bfloat16"}, in_place=True)[0]
    shards = {s.tensor: s for s in export.shards}
    assert shards["plain"].segment == shards["private"].segment != shards["part"].segment
    assert any("published as bfloat16" in note and "plain" in note for note in export.notes)
    reading.publish(1)
    assert torch.equal(reading.parts()["plain"][0][1], tensors["plain"].bfloat16())


def test_a_write_in_place_shows_in_what_others_read_and_in_the_seal(tensors, publisher, reading):
    reading.export(in_place=True)
    reading.publish(1)
    tensors["plain"][0, 0] = 99
    assert float(reading.parts()["plain"][0][1][0, 0]) == 99
    sealed = reading.seal(1)[0]
    assert sealed.changed == ["plain"]
    assert sealed.fingerprints != sealed.published


def test_memory_that_moved_voids_the_export_until_it_is_made_anew(tensors, publisher, reading):
    export = reading.export(in_place=True)[0]
    tensors["plain"] = in_place.shared(torch.full((3, 4), 8.0))
    publisher.step_done(2)
    answer = reading.publish(2)[0]
    assert answer.generation == export.generation + 1
    with pytest.raises(TransferError, match="nothing is published as step 2"):
        reading.seal(2)
    again = reading.export(in_place=True)[0]
    assert again.generation == answer.generation
    assert [s for s in again.segments if s in export.segments], "what stayed keeps its segment"
    assert reading.publish(2)[0].generation == again.generation
    assert torch.equal(reading.parts()["plain"][0][1], tensors["plain"])


def test_a_private_tensor_may_move_because_it_is_copied(tensors, publisher, reading):
    export = reading.export(in_place=True)[0]
    tensors["private"] = torch.arange(7.0) * 2
    publisher.step_done(2)
    assert reading.publish(2)[0].generation == export.generation
    assert torch.equal(reading.parts()["private"][0][1], tensors["private"])


def test_memory_that_moves_during_the_move_is_named(tensors, publisher, reading):
    reading.export(in_place=True)
    reading.publish(1)
    tensors["plain"] = in_place.shared(tensors["plain"])
    assert reading.seal(1)[0].changed == ["plain"]

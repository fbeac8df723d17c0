"""A push that copies and fingerprints nothing here glances at the tensors: it sees all that a reading would."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from tests.fakes import in_place
from tests.trainers.reading import Reading
from weightsync import transports
from weightsync.deadline import Deadline
from weightsync.errors import TransferError
from weightsync.publisher import Publisher, PublishRequest, SealRequest
from weightsync.spec import Published, Sealed
from weightsync.trainers import Seen
from weightsync.trainers.dtensor_v2 import DTensorReader, reader


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def share(m: nn.Module) -> None:
    for parameter in m.parameters():
        parameter.data = in_place.shared(parameter.data)


class Rig:
    """A publisher whose memory is exported in place, and a count of the readings that it makes."""

    def __init__(self, monkeypatch) -> None:
        monkeypatch.setitem(transports._MODULES, "in_place", in_place.__name__)
        self.readings = 0
        self.model = model()
        share(self.model)
        self.publisher = Publisher(self.model, rank=0, world_size=1)
        self.reading = Reading([self.publisher.address])
        self.reading.transport = "in_place"
        self.generation = self.reading.export(in_place=True)[0].generation
        self._count(monkeypatch)

    def _count(self, monkeypatch) -> None:
        read = DTensorReader.read

        def counted(own: DTensorReader):
            self.readings += 1
            return read(own)

        monkeypatch.setattr(DTensorReader, "read", counted)

    def publish(self, step: int) -> Published:
        request = PublishRequest(step=step, regions=[], timeout_s=5)
        return self.reading.clients[0].call("publish", request, deadline=Deadline(10, "test"), returns=Published)

    def seal(self, step: int) -> Sealed:
        request = SealRequest(step=step, regions=[])
        return self.reading.clients[0].call("seal", request, deadline=Deadline(10, "test"), returns=Sealed)

    def push(self, step: int) -> tuple[Published, Sealed]:
        self.publisher.step_done(step)
        return self.publish(step), self.seal(step)

    def close(self) -> None:
        self.reading.close()
        self.publisher.close()
        in_place.close()


@pytest.fixture
def rig(monkeypatch):
    rig = Rig(monkeypatch)
    yield rig
    rig.close()


def test_from_the_second_push_on_nothing_is_read_after_the_mark(rig):
    rig.push(1)
    for step in (2, 3):
        rig.publisher.step_done(step)
        rig.readings = 0
        assert rig.publish(step).generation == rig.generation
        assert rig.seal(step).changed == []
        assert rig.readings == 0


def test_writes_are_noticed_at_a_glance(rig):
    rig.push(1)
    rig.publisher.step_done(2)
    rig.publish(2)
    with torch.no_grad():
        rig.model[0].bias.add_(1)
    assert rig.seal(2).changed == ["0.bias"]
    with pytest.raises(TransferError, match=r"0\.bias"):
        rig.publish(2)
    rig.push(3)
    rig.publisher.step_done(4)
    rig.publish(4)
    rig.model(torch.ones(4)).sum().backward()
    torch.optim.SGD(rig.model.parameters(), lr=0.1, foreach=True).step()
    assert len(rig.seal(4).changed) == 4


@pytest.mark.parametrize("marked", [True, False], ids=["before the mark", "after the mark"])
def test_memory_that_moved_is_noticed(rig, marked):
    rig.push(1)
    rig.push(2)
    if not marked:
        rig.publisher.step_done(3)
    rig.model[1].weight.data = in_place.shared(rig.model[1].weight.data)
    if marked:
        rig.publisher.step_done(3)
    assert rig.publish(3).generation == rig.generation + 1


def test_memory_that_moves_between_publish_and_seal_is_noticed(rig):
    rig.push(1)
    rig.publisher.step_done(2)
    rig.publish(2)
    rig.model[1].weight.data = in_place.shared(rig.model[1].weight.data)
    assert rig.seal(2).changed == ["1.weight"]


def test_a_tensor_that_came_is_noticed(rig):
    rig.push(1)
    rig.model.append(nn.Linear(2, 2))
    rig.publisher.step_done(2)
    with pytest.raises(TransferError, match="connect again"):
        rig.publish(2)


def test_a_tensor_that_came_after_the_mark_belongs_to_the_next_step(rig):
    rig.push(1)
    rig.publisher.step_done(2)
    rig.model.append(nn.Linear(2, 2))
    assert rig.publish(2).generation == rig.generation
    assert rig.seal(2).changed == []
    rig.publisher.step_done(3)
    with pytest.raises(TransferError, match="connect again"):
        rig.publish(3)


def test_tensors_are_kept_from_the_mark_until_the_seal_and_no_longer(rig):
    rig.push(1)
    rig.publisher.step_done(2)
    kept = weakref.ref(rig.model[0].weight)
    rig.model[0].weight = nn.Parameter(torch.zeros(3, 4))
    rig.publish(2)
    assert kept() is not None
    rig.seal(2)
    gc.collect()
    assert kept() is None


def test_withdrawing_lets_go_of_marked_tensors(rig):
    rig.push(1)
    rig.publisher.step_done(2)
    kept = weakref.ref(rig.model[0].weight)
    rig.model[0].weight = nn.Parameter(torch.zeros(3, 4))
    rig.publisher.withdraw()
    gc.collect()
    assert kept() is None


CHANGES = {
    "a parameter": lambda m: setattr(m[0], "weight", nn.Parameter(torch.zeros(3, 4))),
    "its memory": lambda m: setattr(m[0].weight, "data", m[0].weight.data.clone()),
    "its strides": lambda m: setattr(m[0].weight, "data", m[0].weight.data.as_strided((3, 4), (1, 3))),
    "a module": lambda m: m.__setitem__(0, nn.Linear(4, 3)),
    "one more": lambda m: m.append(nn.Linear(2, 2)),
    "one less": lambda m: m.__delitem__(1),
    "a buffer": lambda m: m[0].register_buffer("scale", torch.ones(1)),
    "no bias": lambda m: setattr(m[0], "bias", None),
    "names": lambda m: setattr(m, "_modules", {"a": m[0], "b": m[1]}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_whatever_changes_in_a_model_needs_a_reading(what):
    m = model()
    source = reader(m)
    names = [h.name for h in source.read()]
    number = source.reading
    seen = source.glance()
    assert seen is not None and seen.names == names
    assert [h.name for h in source.read()] == names
    assert source.reading == number
    CHANGES[what](m)
    assert source.glance() is None
    source.read()
    assert source.reading == number + 1
    assert source.glance() is not None


def test_a_mapping_is_glanced_at_too():
    tensors = {"a": torch.zeros(2), "b": torch.ones(2)}
    source = reader(tensors)
    source.read()
    seen = source.glance()
    assert seen is not None and [t.data_ptr() for t in seen.tensors] == [t.data_ptr() for t in tensors.values()]
    tensors["a"] = torch.zeros(2)
    assert source.glance() is None


class ReadMeanwhile(dict):
    """A mapping that is read by another thread, in another order, while it is looked into."""

    def __iter__(self):
        yield from list(super().__iter__())
        if then := self.__dict__.pop("then", None):
            then()


@pytest.mark.parametrize("way", ["read", "glance"])
def test_a_reading_by_another_thread_meanwhile_mixes_nothing_up(way):
    a, b = torch.zeros(2), torch.ones(2)
    tensors = ReadMeanwhile(a=a, b=b)
    source = reader(tensors)
    source.read()

    def swap():
        tensors["a"] = tensors.pop("a")
        source.read()

    tensors.then = swap
    found = getattr(source, way)()
    seen = Seen.of(found) if way == "read" else found
    assert {n: t.data_ptr() for n, t in zip(seen.names, seen.tensors, strict=True)} == {
        "a": a.data_ptr(),
        "b": b.data_ptr(),
    }

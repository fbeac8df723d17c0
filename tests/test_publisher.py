"""A publisher alone, in this process: steps, deadlines, what was written to, and what is left after close."""

from __future__ import annotations

import os
import threading

import msgspec
import pytest
import torch
from torch import nn

from tests.trainers.reading import Reading
from weightsync.consumers import Consumers
from weightsync.deadline import Deadline
from weightsync.errors import ConfigError, PlanError, TransferError, TransferTimeout
from weightsync.fingerprint import fingerprint
from weightsync.publisher import ExportRequest, Publisher, PublishRequest, Wire
from weightsync.rpc import Client
from weightsync.spec import Box, Description, Published, SourceRegion, View
from weightsync.transports import shm


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3))


@pytest.fixture
def source():
    return model()


@pytest.fixture
def publisher(source):
    with Publisher(source, rank=0, world_size=1) as publisher:
        yield publisher


@pytest.fixture
def reading(publisher):
    reading = Reading([publisher.address])
    yield reading
    reading.close()


def own_files() -> set[str]:
    return {n for n in os.listdir("/dev/shm") if n.startswith("weightsync-") and f"-{os.getpid()}-" in n}


# ----------------------------------------------------------------------------------------------------- bytes


RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def awkward(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every kind of strides, with random bits: NaN payloads, infinities and negative zeros among them."""
    generator = torch.Generator().manual_seed(int(dtype.itemsize))
    raw = RAW[dtype.itemsize]
    high = 2 ** (8 * dtype.itemsize - 1) - 1

    def bits(*shape: int) -> torch.Tensor:
        low = 0 if raw == torch.uint8 else -high
        values = torch.randint(low, high, shape, dtype=torch.int64, generator=generator).to(raw)
        return values.view(dtype) if dtype != torch.bool else values % 2 == 0

    return {
        "plain": bits(6, 5),
        "transposed": bits(5, 6).t(),
        "every_other_row": bits(8, 3)[::2],
        "expanded": bits(1, 4).expand(3, 4),
        "scalar": bits(1)[0],
        "empty": bits(0, 3),
        "permuted": bits(2, 3, 4).permute(2, 0, 1),
        "one": bits(1, 1),
    }


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8, torch.int64, torch.bool]


def test_bytes_survive_whatever_the_dtype_and_strides_and_sources_stay_as_they_were():
    tensors = {f"{str(d)[6:]}.{n}": t for d in DTYPES for n, t in awkward(d).items()}
    before = {n: t.clone() for n, t in tensors.items()}
    with Publisher(tensors, rank=0, world_size=1) as publisher:
        reading = Reading([publisher.address])
        reading.export()
        publisher.step_done(0)
        reading.publish(0)
        parts = reading.parts()
        for name, tensor in before.items():
            raw = RAW[tensor.itemsize]
            assert torch.equal(tensors[name].view(raw), tensor.view(raw)), name
            if tensor.numel():
                assert torch.equal(parts[name][0][1].view(raw), tensor.contiguous().view(raw)), name
        own = [s.tensor for s in reading.exports[0].shards if s.segment >= 0]
        expected = [fingerprint(before[n], (0,) * before[n].dim()) for n in own]
        sealed = reading.seal(0)[0]
        assert sealed.published == expected
        assert sealed.fingerprints == expected
        assert parts["uint8.empty"] == []
        reading.close()


def test_a_cast_goes_through_the_arena_and_seals_to_the_same_fingerprints(source, publisher, reading):
    source[0].weight.data = source[0].weight.data.t().contiguous().t()  # strides unlike the arena's
    export = reading.export({"0.weight": "bfloat16", "1.bias": "float16"})[0]
    assert {s.tensor: s.dtype for s in export.shards} == {
        "0.weight": "bfloat16", "0.bias": "float32", "1.weight": "float32", "1.bias": "float16"
    }  # fmt: skip
    publisher.step_done(1)
    reading.publish(1)
    parts = reading.parts()
    assert torch.equal(parts["0.weight"][0][1], source[0].weight.bfloat16())
    assert torch.equal(parts["1.bias"][0][1], source[1].bias.half())
    sealed = reading.seal(1)[0]
    assert sealed.fingerprints == sealed.published
    number = next(i for i, s in enumerate(export.shards) if s.tensor == "0.weight")
    assert sealed.published[number] == fingerprint(source[0].weight.detach().bfloat16(), (0, 0))


def test_regions_are_fingerprinted_in_hugging_face_coordinates(source, publisher, reading):
    export = reading.export()[0]
    shard = next(i for i, s in enumerate(export.shards) if s.tensor == "0.weight")
    region = SourceRegion(Box((100, 7), (3, 2)), View(shard, 1 * 8 + 2, (1, 8)))  # transposed, from row 1, column 2
    reading.regions = lambda rank: [region]
    publisher.step_done(1)
    expected = fingerprint(source[0].weight.detach()[1:3, 2:5].t(), (100, 7))
    reading.publish(1)
    sealed = reading.seal(1)[0]
    assert (sealed.published, sealed.fingerprints) == ([expected], [expected])


def test_an_arena_stays_while_its_layout_does_and_changes_with_it(publisher, reading):
    first = reading.export()[0]
    again = reading.export()[0]
    assert again.segments == first.segments
    other = reading.export({"0.weight": "bfloat16"})[0]
    assert other.segments != first.segments
    assert len(own_files()) == 1
    assert other.arena_bytes == other.segments[0].nbytes
    assert "arena" in other.notes[0]


def test_another_layout_voids_what_was_exported_before(publisher, reading):
    first = reading.export()[0]
    assert reading.export()[0].generation == first.generation, "the same memory: nobody has to map it anew"
    assert reading.export({"0.weight": "bfloat16"})[0].generation > first.generation
    last = reading.export()[0]
    publisher.step_done(1)
    assert reading.publish(1)[0].generation == last.generation


def test_what_could_not_be_exported_anew_is_void(publisher, reading):
    first = reading.export()[0]
    with pytest.raises(ConfigError):
        reading.export({"0.weight": "float3"})
    publisher.step_done(1)
    assert reading.publish(1)[0].generation != first.generation


def test_a_step_that_was_published_for_others_is_not_sealed(publisher, reading):
    reading.export()
    publisher.step_done(1)
    reading.publish(1)
    fewer = PublishRequest(step=1, regions=reading.regions(0)[:1], timeout_s=1.0)
    reading.clients[0].call("publish", fewer, deadline=Deadline(5, "test"), returns=Published)
    with pytest.raises(TransferError, match="for other engines"):
        reading.seal(1)


def test_regions_of_equal_bytes_are_decoded_once(publisher, reading):
    """They are the same at every push; others in between are not taken for them."""
    reading.export()
    wire = Wire(publisher._offer, Consumers(0))
    some, fewer = (msgspec.Raw(msgspec.msgpack.encode(r)) for r in (reading.regions(0), reading.regions(0)[:1]))
    first = wire._decoded(some)
    assert first == reading.regions(0) and wire._decoded(some) is first
    assert wire._decoded(fewer) == reading.regions(0)[:1]
    assert wire._decoded(some) == first


def test_in_place_of_host_memory_becomes_an_arena_and_says_why(publisher, reading):
    export = reading.export(in_place=True)[0]
    assert len(export.segments) == 1
    assert "private" in export.notes[0]


def test_a_dtype_that_torch_does_not_have_is_refused(publisher, reading):
    with pytest.raises(ConfigError, match="float7"):
        reading.export({"0.weight": "float7"})


# ----------------------------------------------------------------------------------------------------- steps


def test_publish_waits_for_the_step(publisher, reading):
    reading.export()
    publisher.step_done(4)
    timer = threading.Timer(0.2, publisher.step_done, [5])
    timer.start()
    assert reading.publish(5)[0].step == 5
    timer.join()


def test_a_rank_that_is_behind_is_named_with_both_steps_at_the_deadline(publisher, reading):
    reading.export()
    publisher.step_done(6)
    with pytest.raises(TransferTimeout) as behind:
        reading.publish_one(0, 7, timeout_s=0.2)
    assert all(word in str(behind.value) for word in ("rank 0", "step 6", "step 7", "0.2 s"))
    assert behind.value.rank == 0
    assert behind.value.safe_to_retry


def test_a_rank_that_never_marked_a_step_says_so(publisher, reading):
    reading.export()
    with pytest.raises(TransferTimeout, match="step_done"):
        reading.publish_one(0, 7, timeout_s=0.1)


def test_a_rank_that_is_ahead_is_refused_at_once(publisher, reading):
    reading.export()
    publisher.step_done(8)
    deadline = Deadline(5, "at once")
    with pytest.raises(TransferError) as ahead:
        reading.publish_one(0, 7, timeout_s=60)
    assert not isinstance(ahead.value, TransferTimeout)
    assert all(word in str(ahead.value) for word in ("rank 0", "step 8", "step 7"))
    assert not deadline.passed()


def test_writes_after_the_mark_are_refused_at_publish(source, publisher, reading):
    reading.export()
    publisher.step_done(1)
    with torch.no_grad():
        source[1].bias.add_(1)
    with pytest.raises(TransferError, match=r"1\.bias"):
        reading.publish(1)
    publisher.step_done(1)
    reading.publish(1)


@pytest.mark.parametrize("foreach", [True, False])
def test_an_optimizer_step_between_publish_and_seal_is_named(source, publisher, reading, foreach):
    reading.export()
    publisher.step_done(1)
    reading.publish(1)
    source(torch.ones(8)).sum().backward()
    torch.optim.SGD(source.parameters(), lr=0.1, foreach=foreach).step()
    sealed = reading.seal(1)[0]
    assert set(sealed.changed) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert sealed.fingerprints != sealed.published


def test_another_storage_between_publish_and_seal_is_named(source, publisher, reading):
    reading.export()
    publisher.step_done(1)
    reading.publish(1)
    source[0].bias.data = source[0].bias.data.clone()
    sealed = reading.seal(1)[0]
    assert sealed.changed == ["0.bias"]
    assert sealed.fingerprints == sealed.published


def test_a_forward_and_backward_pass_changes_nothing(source, publisher, reading):
    reading.export()
    publisher.step_done(1)
    reading.publish(1)
    source(torch.ones(8)).sum().backward()
    sealed = reading.seal(1)[0]
    assert sealed.changed == []
    assert sealed.fingerprints == sealed.published


def test_seal_of_another_step_is_refused(publisher, reading):
    reading.export()
    publisher.step_done(1)
    reading.publish(1)
    with pytest.raises(TransferError, match="step 2"):
        reading.seal(2)


def test_what_is_published_is_the_arena_and_not_what_the_trainer_does_next(source, publisher, reading):
    reading.export()
    publisher.step_done(1)
    reading.publish(1)
    old = source[0].bias.detach().clone()
    with torch.no_grad():
        source[0].bias.zero_()
    assert torch.equal(reading.parts()["0.bias"][0][1], old)


def test_a_model_that_gained_a_tensor_must_connect_again(source, publisher, reading):
    reading.export()
    source.append(nn.Linear(3, 1))
    publisher.step_done(1)
    with pytest.raises(TransferError, match=r"2\.weight.*connect again"):
        reading.publish(1)


# ------------------------------------------------------------------------------------------------- withdrawing


def test_withdrawn_memory_is_gone_and_the_next_publish_asks_for_an_export(publisher, reading):
    export = reading.export()[0]
    publisher.step_done(1)
    reading.publish(1)
    publisher.withdraw()
    assert own_files() == set()
    answer = reading.publish(1)[0]
    assert answer.generation == export.generation + 1
    with pytest.raises(TransferError, match="withdrawn"):
        reading.seal(1)
    assert reading.export()[0].generation == answer.generation
    reading.publish(1)
    assert reading.seal(1)[0].published != []


def test_close_leaves_no_thread_socket_or_file_and_may_be_repeated(source):
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    publisher = Publisher(source, rank=0, world_size=1)
    reading = Reading([publisher.address])
    reading.export()
    publisher.step_done(1)
    reading.publish(1)
    assert len(own_files()) == 1
    publisher.close()
    publisher.close()
    reading.close()
    assert own_files() == set()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_close_ends_a_publish_that_waits(publisher, reading):
    reading.export()
    threading.Timer(0.2, publisher.close).start()
    with pytest.raises(TransferError) as ended:
        reading.publish_one(0, 1, timeout_s=30)
    assert not isinstance(ended.value, TransferTimeout)


# ------------------------------------------------------------------------------------------------------ bad use


def test_a_wrong_token_is_refused(publisher):
    endpoint = publisher.address.split("#")[0]
    client = Client(f"{endpoint}#wrong")
    with pytest.raises(ConfigError, match="token"):
        client.call("describe", deadline=Deadline(5, "test"))
    client.close()


def test_only_the_wire_can_be_called(publisher, reading):
    for method in ("close", "step_done", "mark", "withdraw"):
        with pytest.raises(ConfigError, match=f"no method '{method}'"):
            reading.clients[0].call(method, 1, deadline=Deadline(5, "test"))


@pytest.mark.parametrize(("rank", "world_size"), [(1, 1), (-1, 2), (0, 0)])
def test_ranks_outside_the_world_are_refused(source, rank, world_size):
    with pytest.raises(ConfigError, match=f"rank {rank}"):
        Publisher(source, rank=rank, world_size=world_size)


def test_an_unknown_trainer_is_refused_with_those_there_are(source):
    with pytest.raises(ConfigError, match="dtensor_v2"):
        Publisher(source, rank=0, world_size=1, trainer="other")


def test_a_transport_that_is_not_there_is_refused(publisher, reading):
    request = ExportRequest(transport="carrier", dtypes={}, in_place=False)
    with pytest.raises(ConfigError, match="carrier"):
        reading.clients[0].call("export", request, deadline=Deadline(5, "test"))


def test_dtypes_without_a_fingerprint_are_refused():
    with Publisher({"w": torch.zeros(2, dtype=torch.complex128)}, rank=0, world_size=1) as publisher:
        reading = Reading([publisher.address])
        reading.export()
        publisher.step_done(1)
        with pytest.raises(PlanError, match="complex128"):
            reading.publish(1)
        reading.close()


def test_a_description_says_who_and_what(source, publisher, reading):
    description: Description = reading.describe()[0]
    assert (description.rank, description.world_size, description.trainer) == (0, 1, "dtensor_v2")
    assert description.pid == os.getpid()
    assert torch.__version__.startswith(description.versions["torch"].partition("+")[0])
    assert [s.tensor for s in description.shards] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert [r.target for r in description.rules] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert description.devices == []
    assert description.step is None
    publisher.step_done(3)
    assert reading.describe()[0].step == 3


def test_a_publisher_sweeps_what_killed_processes_left(source):
    left = shm.FOLDER / f"weightsync-{os.stat('/proc/self/ns/pid').st_ino}-{os.getpid()}-1-abc"  # this pid, earlier
    left.write_bytes(b"x")
    Publisher(source, rank=0, world_size=1).close()
    assert not left.exists()

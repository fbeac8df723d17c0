"""Groups alone: the rendezvous, what ends a wait, how slices are packed, and what senders leave behind."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.senders import broadcast, receive
from weightsync.boxes import dense_strides, volume
from weightsync.config import EngineConfig
from weightsync.deadline import Deadline
from weightsync.engines import EngineInfo
from weightsync.engines.sglang_nccl import nccl_of, nccl_variables
from weightsync.errors import ConfigError, TransferError, TransferTimeout
from weightsync.spec import Box, Copy, Shard, TensorSpec, View
from weightsync.transports import bucket, nccl, nccl_versions, nccl_wire, rendezvous, shm
from weightsync.transports.exchange import streams
from weightsync.transports.rendezvous import connect, listen
from weightsync.transports.sender import Nursery, SenderProcess

CPU = torch.device("cpu")


def soon(seconds: float = 60.0) -> Deadline:
    return Deadline(seconds, "test")


@pytest.fixture
def sender(nursery: Nursery) -> Iterator[SenderProcess]:
    one = nursery.start("", {}, soon())
    yield one
    one.kill()


def pair(sender: SenderProcess, name: str, *, timeout_s: float = 20.0) -> nccl.Group:
    """``sender`` as rank 0 and this process as rank 1, made as an engine's receiver makes it."""
    port = sender.call("listen", nccl_wire.Listen("127.0.0.1", timeout_s), deadline=soon(), returns=int)
    joins = [nccl_wire.Join(name, "127.0.0.1", port, rank, 2, "gloo", timeout_s) for rank in range(2)]
    other = threading.Thread(target=lambda: sender.call("join", joins[0], deadline=soon()))
    other.start()
    group = nccl.join(joins[1], CPU, in_engine=True)
    other.join()
    return group


# ------------------------------------------------------------------------------------------------- the rendezvous


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "::", "::1", "[::1]"])
def test_the_port_is_bound_before_anybody_is_told_of_it(host):
    store, port = listen(host, 5.0)
    family, reached = (socket.AF_INET6, "::1") if ":" in host else (socket.AF_INET, "127.0.0.1")
    with pytest.raises(OSError, match="in use"), socket.socket(family) as other:
        other.bind((reached, port))
    theirs = connect(reached, port, 5.0)
    theirs.set("key", "value")
    assert store.get("key") == b"value"


def test_two_at_once_have_ports_of_their_own():
    (one, first), (other, second) = listen("127.0.0.1", 5.0), listen("127.0.0.1", 5.0)
    assert first != second
    one.set("key", "one")
    assert not other.check(["key"])


def test_a_host_that_is_not_ours_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"cannot listen on host '192\.0\.2\.1'"):
        listen("192.0.2.1", 5.0)


def test_nobody_there_says_what_was_tried():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(TransferError, match=f"no rendezvous at 127.0.0.1:{port} within 1 s"):
        connect("127.0.0.1", port, 1.0)


def test_a_member_that_never_comes_is_waited_for_until_the_deadline(sender):
    port = sender.call("listen", nccl_wire.Listen("127.0.0.1", 1.0), deadline=soon(), returns=int)
    started = time.monotonic()
    with pytest.raises(TransferError, match="group lonely"):
        sender.call("join", nccl_wire.Join("lonely", "127.0.0.1", port, 0, 2, "gloo", 1.0), deadline=soon())
    assert time.monotonic() - started < 10


# ---------------------------------------------------------------------------------------------------- collectives


def test_a_broadcast_and_a_greeting_arrive(sender):
    group = pair(sender, "arrive")
    memory = shm.allocate(1000)
    memory.tensor.copy_(torch.arange(1000) % 251)
    sent = threading.Thread(
        target=lambda: broadcast(sender, nccl_wire.Broadcast("", memory.segment, 700, 20.0), soon())
    )
    sent.start()
    got = torch.zeros(700, dtype=torch.uint8)
    receive(group, got, soon(20))
    sent.join()
    assert torch.equal(got, memory.tensor[:700])
    greeting = threading.Thread(target=lambda: sender.call("greet", nccl_wire.Greet([1], 20.0), deadline=soon()))
    greeting.start()
    byte = torch.zeros(1, dtype=torch.uint8)
    group.finish(group.start([], [(0, byte)]), soon(20))
    greeting.join()
    assert byte.item() == 1
    memory.close()


def test_a_sender_that_sends_nothing_is_given_up_at_the_deadline(sender):
    group = pair(sender, "silent")
    started = time.monotonic()
    with pytest.raises(TransferTimeout, match="group silent: broadcast: no answer within 1 s"):
        receive(group, torch.zeros(8, dtype=torch.uint8), soon(1.0))
    assert time.monotonic() - started < 5
    group.abort()
    with pytest.raises(TransferError, match="was given up"):
        receive(group, torch.zeros(8, dtype=torch.uint8), soon(1.0))


def test_a_killed_sender_is_noticed_at_once(sender):
    group = pair(sender, "killed")
    threading.Timer(0.5, sender.kill).start()
    started = time.monotonic()
    with pytest.raises(TransferError, match="group killed: exchange"):
        group.finish(group.start([], [(0, torch.zeros(8, dtype=torch.uint8))]), soon(30.0))
    assert time.monotonic() - started < 10


def test_a_name_can_be_used_again_after_an_abort(nursery):
    for _ in range(2):
        sender = nursery.start("", {}, soon())
        pair(sender, "again").abort()
        sender.kill()


# -------------------------------------------------------------------------------------------------------- senders


def test_killing_one_ends_its_call_and_no_other_sender(nursery, sender):
    other = nursery.start("", {}, soon())
    port = sender.call("listen", nccl_wire.Listen("127.0.0.1", 30.0), deadline=soon(), returns=int)
    threading.Timer(0.5, sender.kill).start()
    with pytest.raises(TransferError, match="sender process"):
        sender.call("join", nccl_wire.Join("x", "127.0.0.1", port, 0, 2, "gloo", 30.0), deadline=soon())
    assert not sender.alive and other.alive
    assert other.call("versions", deadline=soon())["host"] == socket.gethostname()
    other.kill()
    other.kill()


def test_senders_end_with_their_nursery():
    own = Nursery()
    sender = own.start("", {}, soon())
    own.close()
    for _ in range(100):
        if not sender.alive:
            break
        time.sleep(0.05)
    assert not sender.alive and not own.alive
    with pytest.raises(TransferError):
        own.start("", {}, soon())
    sender.kill()


def test_a_sender_has_the_engines_settings_whatever_those_of_its_actor_are(monkeypatch):
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    nursery = Nursery()
    try:
        sender = nursery.start("", {"NCCL_CUMEM_ENABLE": "0"}, soon())
        settings = sender.call("settings", deadline=soon())
        assert settings["NCCL_CUMEM_ENABLE"] == "0" and "PATH" not in settings
        assert settings["NCCL_SOCKET_IFNAME"] == "lo"
        sender.kill()
    finally:
        nursery.close()


def test_an_unknown_gpu_is_an_error_and_not_a_wait(nursery):
    with pytest.raises(TransferError, match="no sender could be started"):
        nursery.start("GPU-none", {}, soon())


def test_versions_must_be_equal_and_both_are_named():
    nccl_versions.check_same_nccl("2.30.7", "2.30.7", url="http://e")
    nccl_versions.check_same_nccl("", "2.30.7", url="http://e")
    with pytest.raises(ConfigError, match=r"NCCL 2\.28\.9 .* NCCL 2\.30\.7") as caught:
        nccl_versions.check_same_nccl("2.28.9", "2.30.7", url="http://e")
    assert caught.value.engine == "http://e"


@pytest.mark.parametrize(
    ("version", "expected"),
    [((0, 5, 8), ""), ((0, 5, 9), "2.27.5"), ((0, 5, 17), "2.28.9"), ((0, 5, 23), "2.30.7"), ((0, 6, 0), "")],
)
def test_what_an_sglang_is_installed_with(version, expected):
    assert nccl_of(version) == expected


def test_what_receivers_say_of_an_engine_goes_before_what_is_known_of_its_sglang_and_the_configuration_before_both():
    url = {"url": "http://e"}
    said_by_server = {"nccl": nccl_of((0, 5, 12)), "nccl_variables": nccl_variables({})}
    rest = {"model_path": "", "architecture": "", "weight_version": "", "has_receiver": True}
    info = EngineInfo(**url, version="0.5.12", generation="plain", tp_size=1, device="cuda", **rest, **said_by_server)
    assert info.corrected({}, EngineConfig(**url)) == info
    told = info.corrected({"nccl": "2.28.3", "NCCL_CUMEM_ENABLE": "1", "torch": "2.9"}, EngineConfig(**url))
    assert told.nccl == "2.28.3"
    assert told.nccl_variables == {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
    configured = EngineConfig(**url, nccl="2.30.7", nccl_variables={"NCCL_CUMEM_ENABLE": "0", "NCCL_ALGO": "Ring"})
    said = told.corrected({"nccl": "2.28.3", "NCCL_CUMEM_ENABLE": "1"}, configured)
    assert said.nccl == "2.30.7"
    assert said.nccl_variables == {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "NCCL_ALGO": "Ring"}


def test_variables_follow_what_the_engine_sets():
    assert nccl_variables({}) == {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    assert nccl_variables({"enable_symm_mem": True}) == {"NCCL_CUMEM_ENABLE": "1"}
    assert nccl_variables({"enable_nccl_nvls": True}) == {"NCCL_CUMEM_ENABLE": "0"}
    sharded = {"enable_kv_cache_sharding": True, "nnodes": 1}
    assert nccl_variables(sharded)["NCCL_CUMEM_ENABLE"] == "1"
    assert nccl_variables(sharded | {"nnodes": 2})["NCCL_CUMEM_ENABLE"] == "0"


# -------------------------------------------------------------------------------------------------------- packing

DTYPES = ["float32", "bfloat16", "uint8"]


@st.composite
def copies(draw) -> tuple[list[Copy], dict[int, list[Shard]]]:
    ranks = draw(st.integers(1, 4))
    shards: dict[int, list[Shard]] = {rank: [] for rank in range(ranks)}
    made = []
    for number in range(draw(st.integers(0, 20))):
        rank, size = draw(st.integers(0, ranks - 1)), tuple(draw(st.lists(st.integers(1, 6), max_size=2)))
        box = Box((0,) * len(size), size)
        shards[rank].append(Shard(f"t{number}", size, draw(st.sampled_from(DTYPES)), box, dense_strides(size)))
        view = View(len(shards[rank]) - 1, 0, dense_strides(size))
        made.append(Copy(f"t{number}", box, rank, view, view))
    return made, shards


def cells(copy: Copy) -> list[tuple]:
    """Every element of a copy: its position in the tensor, and where both views have it."""
    found = []
    for at in itertools.product(*(range(n) for n in copy.box.size)):
        places = [view.offset + sum(a * s for a, s in zip(at, view.strides)) for view in (copy.source, copy.target)]
        found.append((copy.tensor, tuple(a + o for a, o in zip(at, copy.box.offset)), *places))
    return found


@given(copies(), st.integers(1, 200), st.integers(1, 3))
def test_every_copy_travels_once_in_order_aligned_and_within_the_limit(given_copies, limit, num_senders):
    made, shards = given_copies
    senders = {rank: rank % num_senders for rank in shards}
    planned = streams(made, shards, senders, limit)
    assert set(planned) == set(senders.values())
    for number, chunks in planned.items():
        sent = [copy for chunk in chunks for copy, _ in chunk.parts]
        wanted = [copy for copy in made if senders[copy.rank] == number]
        assert list(dict.fromkeys(c.tensor for c in sent)) == [c.tensor for c in wanted]
        assert [cell for c in sent for cell in cells(c)] == [cell for c in wanted for cell in cells(c)]
        for chunk in chunks:
            assert chunk.nbytes <= limit or [volume(copy.box) for copy, _ in chunk.parts] == [1]
            end = 0
            for copy, start in chunk.parts:
                itemsize = getattr(torch, shards[copy.rank][copy.source.storage].dtype).itemsize
                assert start % 16 == 0 and start >= end
                end = start + volume(copy.box) * itemsize
            assert end == chunk.nbytes


@given(copies(), st.integers(1, 200))
def test_a_sender_that_knows_only_its_own_copies_packs_the_same(given_copies, limit):
    made, shards = given_copies
    senders = {rank: rank % 2 for rank in shards}
    planned = streams(made, shards, senders, limit)
    for number, chunks in planned.items():
        own = {rank: parts for rank, parts in shards.items() if senders[rank] == number}
        mine = [copy for copy in made if copy.rank in own]
        assert streams(mine, own, dict.fromkeys(own, 0), limit)[0] == chunks


any_tensors = st.lists(
    st.tuples(st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from(["float32", "bfloat16", "uint8"])),
    max_size=30,
).map(lambda items: [TensorSpec(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(items)])


@given(any_tensors, st.integers(1, 300))
def test_buckets_for_a_reader_without_offsets_have_no_gaps(tensors, limit):
    buckets = bucket.without_gaps(tensors, limit)
    assert sorted(e.tensor.name for b in buckets for e in b.entries) == sorted(t.name for t in tensors)
    for one in buckets:
        end = 0
        for entry in one.entries:
            assert entry.start == end and entry.start % getattr(torch, entry.tensor.dtype).itemsize == 0
            end = entry.end
        assert end == one.nbytes and (one.nbytes <= limit or len(one.entries) == 1)


def test_groups_made_at_once_leave_the_environment_as_it_was(monkeypatch):
    monkeypatch.setenv(rendezvous._WATCHES[0], "3")
    monkeypatch.delenv(rendezvous._WATCHES[1], raising=False)
    inside, leave = threading.Barrier(3), [threading.Event(), threading.Event()]

    def make(number: int) -> None:
        with rendezvous._errors_left_to_us():
            inside.wait(5)
            leave[number].wait(5)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    inside.wait(5)
    assert {os.environ[name] for name in rendezvous._WATCHES} == {"0"}
    for thread, event in zip(threads, leave, strict=True):
        assert os.environ[rendezvous._WATCHES[0]] == "0", "another is still being made"
        event.set()
        thread.join(5)
    assert os.environ[rendezvous._WATCHES[0]] == "3" and rendezvous._WATCHES[1] not in os.environ

"""Route ``nccl`` over gloo: real sender processes and groups; engines that are fakes, but join, receive and load."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from tests.fakes import serving
from tests.fakes.engine import DISTRIBUTED, UPDATE, FakeEngine
from tests.fakes.model import FakeModel
from tests.senders import children, stock, worlds
from tests.test_session import Concatenating, World, assert_serves, engine, served
from weightsync import groups_broadcast, groups_stock, nodes, routes_broadcast, routes_nccl
from weightsync.boxes import aligned
from weightsync.deadline import Deadline
from weightsync.engines.lane import Lane
from weightsync.errors import ConfigError, EngineLost, EngineRejected, TransferError, WeightSyncError
from weightsync.fleet import EngineLink
from weightsync.groups import together
from weightsync.groups_exchange import ExchangeGroup
from weightsync.publisher import Publisher
from weightsync.reports import PushRequest
from weightsync.spec import Segment, TensorSpec
from weightsync.transports.bucket import without_gaps
from weightsync.transports.nccl_wire import Part
from weightsync.transports.sender import Nursery, SenderProcess
from weightsync.workers import Workers

SEGMENT = Segment("shm", b"", 1)
INIT, DESTROY = "/init_weights_update_group", "/destroy_weights_update_group"

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def world(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    yield from worlds(nursery, monkeypatch)


@pytest.mark.parametrize("version", ["0.5.12", "0.5.23"])
def test_stock_engines_of_different_tp_get_the_same_buckets(world, version):
    one = world(stock(1, version), stock(2, version))
    for step in (1, 2):
        report = one.push(step)
        assert report.route == "nccl" and not report.verified
        for fake in one.engines:
            assert_serves(fake, one.tensors, step)
    assert [fake.paths().count(INIT) for fake in one.engines] == [2, 2], "the groups are made once"
    buckets = [
        c.body for c in one.engines[0].calls if c.path == DISTRIBUTED and c.body["names"] != groups_stock.PROBE.names
    ]
    assert len(buckets) >= 6 and all(b["flush_cache"] is False and "weight_version" not in b for b in buckets)


def test_a_bucket_waits_in_the_server_and_in_each_group_for_the_one_before(world, monkeypatch):
    one = world(stock(2))
    one.push(1)
    fake, answered, ahead = one.engines[0], dict[str, list[float]](), []
    update, make = fake.groups.update, Lane.make

    def load(body):
        answer = update(body)
        time.sleep(0.05)
        answered.setdefault(body["group_name"], []).append(time.monotonic())
        return answer

    def making(self, held, **rest):
        ahead.extend([held.stream is not None] * (DISTRIBUTED in held.doing))
        return make(self, held, **rest)

    monkeypatch.setattr(Lane, "make", making)
    fake.groups.update = load
    before = len(fake.calls)
    one.push(2)
    assert_serves(fake, one.tensors, 2)
    calls = [call for call in fake.calls[before:] if call.path == DISTRIBUTED]
    names = [call.body["group_name"] for call in calls]
    assert len(names) >= 5 and all(a != b for a, b in itertools.pairwise(names)) and len(set(names)) == 2
    for name, ends in answered.items():
        asked = [call.at for call in calls if call.body["group_name"] == name]
        assert all(later > earlier for later, earlier in zip(asked[1:], ends[:-1], strict=True))
    ends = sorted(itertools.chain(*answered.values()))
    early = sum(later.at < earlier for later, earlier in zip(calls[1:], ends[:-1], strict=True))
    assert early >= len(calls) // 2, "the next one is there before the one before is answered"
    assert sum(ahead) >= len(calls) - 3, ahead


@pytest.mark.parametrize("at", [2, 4])
def test_an_engine_that_refuses_a_bucket_without_taking_part_gets_no_other_in_its_place(world, at):
    """As one that has no memory for it. The next one goes by the other group."""
    one = world(stock(), timeout_s=20.0)
    one.push(1)
    fake, asked = one.engines[0], []
    update = fake.groups.update
    before = {name: tensor.clone() for name, tensor in served(fake).items()}

    def load(body):
        asked.append(body)
        if len(asked) == at:
            time.sleep(0.3)
            return 400, {"success": False, "message": "CUDA out of memory"}
        return update(body)

    fake.groups.update = load
    with pytest.raises(EngineRejected, match="CUDA out of memory") as caught:
        one.push(2)
    buckets = [
        [entry.tensor.name for entry in b.entries] for b in one.session._groundwork.routes["nccl"]._whole._buckets
    ]
    assert f"bucket {buckets.index(asked[at - 1]['names']) + 1} of {len(buckets)}: " in str(caught.value)
    by = [body["group_name"] for body in asked]
    assert len(asked) in (at, at + 1) and by[at - 1] not in by[at:], "by the other group, if it was there already"
    held = served(fake)
    for name, tensor in one.tensors.items():
        assert torch.equal(held[name], tensor) or torch.equal(held[name], before[name]), name
    fake.groups.update = update
    one.push(3)
    assert_serves(fake, one.tensors, 3)


@pytest.mark.parametrize("how", ["every third answer closes the connection", "HTTP/1.0"])
def test_a_server_that_closes_connections_now_and_then(world, monkeypatch, how):
    one = world(stock(), timeout_s=20.0)
    one.push(1)
    count = itertools.count(1)
    if how == "HTTP/1.0":
        monkeypatch.setattr(serving.Handler, "protocol_version", "HTTP/1.0")
    else:

        def end_headers(self):
            if self.path.startswith(DISTRIBUTED) and next(count) % 3 == 0:
                self.send_header("Connection", "close")
            super(serving.Handler, self).end_headers()

        monkeypatch.setattr(serving.Handler, "end_headers", end_headers)
    one.push(2)
    assert_serves(one.engines[0], one.tensors, 2)


def test_buckets_that_each_take_less_than_one_may_are_no_stall(world, monkeypatch):
    monkeypatch.setattr(groups_broadcast, "MIN_STALL_S", 1.0)
    one = world(stock(), timeout_s=8.0)  # one may take 2 s
    one.push(1, timeout_s=60)
    fake, update, busy = one.engines[0], one.engines[0].groups.update, threading.Lock()

    def load(body):
        with busy:  # one after the other, as in a scheduler
            time.sleep(1.2)
            return update(body)

    fake.groups.update = load
    one.push(2)
    assert_serves(fake, one.tensors, 2)


@pytest.mark.parametrize("engines", [1, 2], ids=["filled by the sender", "filled by the actor"])
def test_large_tensors_are_broadcast_each_by_itself(world, monkeypatch, engines):
    monkeypatch.setattr(routes_broadcast, "PART_BYTES", 1)
    one = world(*[stock(1 + number) for number in range(engines)])
    for step in (1, 2):
        one.push(step)
        for fake in one.engines:
            assert_serves(fake, one.tensors, step)
    groups = one.session._groundwork.routes["nccl"]._whole._groups.values()
    assert [group.fills for group in groups] == [engines == 1] * engines
    sent = [c.body for c in one.engines[0].calls if c.path == DISTRIBUTED]
    assert {body["load_format"] for body in sent if body["names"] != groups_stock.PROBE.names} == {None}


@pytest.mark.parametrize("engines", [1, 2], ids=["filled by the sender", "filled by the actor"])
@pytest.mark.parametrize("bucket_bytes", [64, 700, 1 << 20])
def test_the_arena_has_two_buckets_or_the_largest_tensor_and_is_overwritten_only_when_it_was_sent(
    world, engines, bucket_bytes
):
    one = world(*[stock() for _ in range(engines)], bucket_bytes=bucket_bytes)
    one.push(1)
    for fake in one.engines:
        fake.groups.update = _late(fake.groups.update, lambda: 0.1)
    one.push(2)
    for fake in one.engines:
        assert_serves(fake, one.tensors, 2)
    whole = one.session._groundwork.routes["nccl"]._whole
    sizes = [aligned(tensor.nbytes) for tensor in one.tensors.values()]
    (arena,), two = whole._arenas, 2 * aligned(bucket_bytes)
    assert arena.segment.nbytes <= min(max(two, *sizes), sum(sizes))


@pytest.mark.parametrize("engines", [1, 2], ids=["filled by the sender", "filled by the actor"])
@pytest.mark.parametrize(("seed", "bucket_bytes"), [(0, 300), (1, 1500), (3, 3500)])  # neighbours overlap in part
def test_tensors_of_all_sizes_and_dtypes_arrive_though_buckets_overlap(world, monkeypatch, seed, bucket_bytes, engines):
    chosen = random.Random(seed)
    one = world(*[stock() for _ in range(engines)], bucket_bytes=bucket_bytes)
    monkeypatch.setattr(routes_broadcast, "PART_BYTES", chosen.choice([1, 2000, 1 << 26]))
    dtypes = [torch.float32, torch.bfloat16, torch.uint8, torch.int64]
    sizes = [0, 1, *[chosen.randint(2, 2500) for _ in range(8)]]
    one.publisher.close()
    one.tensors = {f"t{i}": torch.zeros(n, dtype=chosen.choice(dtypes)) for i, n in enumerate(sizes)}
    one.publisher = Publisher(one.tensors, rank=0, world_size=1)
    held: list[dict[str, torch.Tensor]] = [{} for _ in one.engines]
    for fake, own in zip(one.engines, held, strict=True):
        fake.models[0].load_weights = lambda weights, own=own: own.update({n: w.clone() for n, w in weights})
        fake.groups.update = _late(fake.groups.update, lambda: chosen.uniform(0, 0.03))
    for step in (1, 2, 3):
        for tensor in one.tensors.values():
            tensor.copy_(torch.randint(0, 200, tensor.shape).to(tensor.dtype))
        one.publisher.step_done(step)
        one.session.push(PushRequest(step=step))
        assert all(torch.equal(own[name], tensor) for own in held for name, tensor in one.tensors.items())
    whole = one.session._groundwork.routes["nccl"]._whole
    assert any(a.start != b.start and a.overlaps(b) for a, b in itertools.pairwise(whole._buckets)), "in part"


def test_tensors_without_elements_alone_are_no_fault(world):
    one = world(stock(), stock())
    one.publisher.close()
    one.tensors = {"nothing": torch.zeros(0, 8)}
    one.publisher = Publisher(one.tensors, rank=0, world_size=1)
    for fake in one.engines:
        fake.models[0].load_weights = lambda weights: [tensor for _, tensor in weights]
    assert one.push(1).weight_version == "1"


def _late(update: Callable, wait_s: Callable[[], float]) -> Callable:
    def late(body: dict) -> Any:
        time.sleep(wait_s())
        return update(body)

    return late


def test_the_first_bucket_is_no_larger_than_what_an_engine_has_to_wait_for(world, monkeypatch):
    monkeypatch.setattr(routes_broadcast, "BROADCAST_BYTES", 512)
    one = world(stock(), bucket_bytes=4096)
    one.push(1)
    one.push(2)
    assert_serves(one.engines[0], one.tensors, 2)
    first, *rest = one.session._groundwork.routes["nccl"]._whole._buckets
    assert first.nbytes <= 512 < max(b.nbytes for b in rest)
    names = [entry.tensor.name for b in (first, *rest) for entry in b.entries]
    assert sorted(names) == sorted(one.tensors)


def test_small_tensors_and_those_that_nccl_may_not_know_are_flattened_and_apart_from_large_ones():
    least = routes_broadcast.PART_BYTES

    def spec(name: str, nbytes: int, dtype: str = "bfloat16") -> TensorSpec:
        return TensorSpec(name, (nbytes // getattr(torch, dtype).itemsize,), dtype)

    def sent(limit_bytes: int, *specs: TensorSpec) -> list[tuple[list[str], bool]]:
        buckets = without_gaps(specs, limit_bytes, routes_broadcast._goes_by_itself)
        return [([e.tensor.name for e in b.entries], bool(routes_broadcast.parts_of(b))) for b in buckets]

    large, small, float8 = spec("large", least), spec("small", least - 2), spec("float8", least, "float8_e4m3fn")
    other = spec("other", least + 2)
    assert sent(8 * least, small, large, other, float8) == [
        (["large", "other"], True),
        (["small", "float8"], False),
    ]
    assert sent(least, small, large, other) == [(["large"], True), (["other"], True), (["small"], False)]
    (planned,) = without_gaps([other, large], 8 * least, routes_broadcast._goes_by_itself)
    assert routes_broadcast.parts_of(planned) == [
        Part(0, least + 2, "bfloat16"),
        Part(least + 2, 2 * least + 2, "bfloat16"),
    ]
    latent = [spec("l.attn.kv_a_proj_with_mqa.weight", 8), spec("l.attn.q_a_proj.weight", least)]
    assert sent(8 * least, *latent, large) == [
        (["large"], True),
        ([tensor.name for tensor in latent], False),
    ], "what SGLang fuses in a call stays together"


def test_an_engine_that_was_asked_for_nothing_is_not_fenced(world, monkeypatch):
    one = world(stock())
    one.push(1)
    failing = failing_to_fill(monkeypatch, times=2)  # while the engine pauses, and again by a new sender in the move
    one.engines[0].misbehave("/pause_generation", "slow", seconds=0.3)
    before = len(one.engines[0].paths())
    with pytest.raises(TransferError, match="not mapped") as caught:
        one.push(2)
    assert caught.value.report[0]["state"] == "serving" and not one.engines[0].paused
    assert one.engines[0].paths()[before:].count(DISTRIBUTED) == 2, "no more than the first messages of new groups"
    assert not failing
    one.push(3)
    assert_serves(one.engines[0], one.tensors, 3)


def failing_to_fill(monkeypatch, times: int) -> list[None]:
    """So often senders cannot begin with a bucket that they fill; the list holds what is still to come."""
    left, call = [None] * times, SenderProcess.call

    def unable(self, method, argument=None, **options):
        if method == "begin" and argument.fills is not None and left:
            left.pop()
            raise TransferError("not mapped")
        return call(self, method, argument, **options)

    monkeypatch.setattr(SenderProcess, "call", unable)
    return left


def test_a_sender_that_cannot_begin_while_its_engine_pauses_is_replaced_in_the_move(world, monkeypatch):
    one = world(stock())
    one.push(1)
    failing = failing_to_fill(monkeypatch, times=1)
    one.engines[0].misbehave("/pause_generation", "slow", seconds=0.3)
    one.push(2)
    assert not failing
    assert_serves(one.engines[0], one.tensors, 2)


def test_a_sender_begins_while_its_engine_pauses_which_is_asked_for_nothing_meanwhile(world, monkeypatch):
    one = world(stock())
    one.push(1)
    fake, begun, call = one.engines[0], [], SenderProcess.call

    def beginning(self, method, argument=None, **options):
        answer = call(self, method, argument, **options)
        begun.extend([time.monotonic()] * (method == "begin"))
        return answer

    monkeypatch.setattr(SenderProcess, "call", beginning)
    fake.misbehave("/pause_generation", "slow", seconds=0.4)
    before = len(fake.calls)
    one.push(2)
    (paused,) = [call.at for call in fake.calls[before:] if call.path == "/pause_generation"]
    asked = [call.at for call in fake.calls[before:] if call.path == DISTRIBUTED]
    assert begun[0] < paused + 0.4 < asked[0] and len(begun) == len(asked)
    assert_serves(fake, one.tensors, 2)


def test_a_sender_that_fails_to_begin_as_its_groups_are_looked_at_has_nothing_applied(world, monkeypatch):
    """Between the pause and the move: what it failed with is not taken for the first bucket of new groups."""
    one = world(stock())
    one.push(1)
    looked, call, start = threading.Event(), SenderProcess.call, groups_broadcast.BroadcastGroup.started

    def unable(self, method, argument=None, **options):
        if method == "begin" and argument.fills is not None and not looked.is_set():
            assert looked.wait(10)
            raise TransferError("not mapped")
        return call(self, method, argument, **options)

    def starting(self, deadline):
        looked.set()
        return start(self, deadline)

    monkeypatch.setattr(SenderProcess, "call", unable)
    monkeypatch.setattr(groups_broadcast.BroadcastGroup, "started", starting)
    threading.Timer(0.5, looked.set).start()
    with pytest.raises(TransferError, match="not mapped") as caught:
        one.push(2)
    assert caught.value.report[0]["state"] == "serving"
    one.push(3)
    assert_serves(one.engines[0], one.tensors, 3)


def test_sources_are_sealed_after_what_follows_a_broadcast(world, monkeypatch):
    """An engine with opaque parameters: what was traced is exchanged after they were broadcast."""
    one = world(FakeEngine(models=[Concatenating()], receiver=True), verify="none")
    one.push(1)
    done, seal, ahead, move = [], Workers.seal, EngineLink.prepare_to_serve, ExchangeGroup.move

    def telling(what, function):
        return lambda self, *rest: (done.append(what), function(self, *rest))[1]

    def moving(self, *rest):
        time.sleep(0.3)
        done.append("exchange")
        return move(self, *rest)

    monkeypatch.setattr(Workers, "seal", telling("seal", seal))
    monkeypatch.setattr(EngineLink, "prepare_to_serve", telling("written ahead", ahead))
    monkeypatch.setattr(ExchangeGroup, "move", moving)
    one.push(2)
    assert done[0] == "exchange" and "seal" in done


def test_a_pause_that_fails_calls_off_what_its_sender_has_begun_with(world):
    one = world(stock())
    one.push(1)
    fake, group = one.engines[0], one.session._groundwork.routes["nccl"]._whole._groups[one.engines[0].url]
    fake.misbehave("/pause_generation", "500")
    before, old = len(fake.paths()), group._senders[0]
    with pytest.raises(WeightSyncError) as caught:
        one.push(2)
    assert caught.value.phase == "pause" and caught.value.report[0]["state"] == "serving"
    assert DISTRIBUTED not in fake.paths()[before:] and not old.alive and not fake.paused
    one.push(3)
    assert_serves(fake, one.tensors, 3)


@pytest.mark.parametrize("side", ["engine", "sender"])
def test_a_fault_of_our_own_on_either_side_of_a_group_is_an_error_of_it(side):
    gone, given_up = threading.Event(), []

    def fails():
        raise ZeroDivisionError("bug")

    def give_up():
        given_up.append(side)
        gone.set()

    ask, act = (fails, gone.wait) if side == "engine" else (gone.wait, fails)
    with pytest.raises(TransferError, match="ZeroDivisionError: bug"):
        together(ask, act, give_up)
    assert given_up == [side]


def test_receivers_get_only_their_slices_and_are_verified(world):
    one = world(engine(1), engine(2), bucket_bytes=200)
    for step in (1, 2):
        report = one.push(step)
        assert report.verified
        for fake in one.engines:
            assert_serves(fake, one.tensors, step)
    total = sum(t.nbytes for t in one.tensors.values())
    by_engine = [e.num_bytes for e in report.engines]
    norm = one.tensors["norm.weight"].nbytes
    assert by_engine == [total, total + norm], "TP 2 gets each slice once, and the norm in both ranks"
    assert all(DISTRIBUTED not in fake.paths() for fake in one.engines)


def test_stock_and_receiver_side_by_side(world):
    one = world(stock(2), engine(2))
    one.push(1)
    for fake in one.engines:
        assert_serves(fake, one.tensors, 1)


def test_nothing_is_left_after_a_session(world, nursery):
    before = {t.name for t in threading.enumerate()}
    one = world(stock(), engine(2))
    one.push(1)
    assert len(children(nursery)) == 2
    one.close()
    assert children(nursery) == set()
    assert one.engines[0].paths()[-1] == DESTROY
    left = {t.name for t in threading.enumerate()} - before
    assert not [name for name in left if "-act" in name], left


def test_a_group_of_a_dead_run_is_taken_down_first(world, nursery):
    one = world(stock())
    one.push(1)
    for pid in children(nursery):
        os.kill(pid, signal.SIGKILL)
    fake = one.engines[0]
    assert fake.groups.knows("weightsync-0")
    again = World(fake, route="nccl", verify="none", bucket_bytes=256, timeout_s=60.0, connect_timeout_s=60.0)
    try:
        again.push(2)
        assert_serves(fake, again.tensors, 2)
        assert fake.groups.knows("weightsync-0")
    finally:
        again.close()


def test_a_name_that_the_engine_cannot_free_is_passed_over(world):
    one = world(stock())
    one.engines[0].groups._names.add("weightsync-0")
    one.push(1)
    assert_serves(one.engines[0], one.tensors, 1)
    assert one.engines[0].groups.knows("weightsync-1") and one.engines[0].groups.knows("weightsync-2")


def test_groups_made_before_a_name_that_is_taken_are_made_again_and_not_forgotten(world):
    one = world(stock())
    one.engines[0].groups._names.add("weightsync-1")
    one.push(1)
    assert_serves(one.engines[0], one.tensors, 1)
    assert sorted(one.engines[0].groups._members) == ["weightsync-0", "weightsync-2"]


# ------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("path", "how", "times"),
    [
        (INIT, "silent", 1),
        (INIT, "drop", 1),
        (INIT, "500", 1),
        (DISTRIBUTED, "silent", 5),  # a call that is dropped may be made again
        (DISTRIBUTED, "drop", 5),
        (DISTRIBUTED, "400", 1),
    ],
)
def test_an_engine_that_fails_at_the_first_message_ends_the_push_in_time_with_nothing_applied(world, path, how, times):
    one = world(stock(), timeout_s=20.0)
    fake = one.engines[0]
    fake.misbehave(path, how, times=times)
    before, _, started = served(fake), one.session, time.monotonic()
    with pytest.raises(WeightSyncError) as caught:
        one.push(1)
    assert time.monotonic() - started < 15, "a step is a quarter of the push's 20 s"
    (said,) = caught.value.report
    assert said["url"] == fake.url and said["state"] == "serving" and not fake.paused
    assert all(torch.equal(tensor, before[name]) for name, tensor in served(fake).items())
    fake._faults.clear()
    one.push(2)
    assert_serves(fake, one.tensors, 2)


def test_several_engines_take_a_bucket_at_the_same_time(world):
    one = world(stock(), stock(2), stock())
    one.push(1)
    all_are_in = threading.Barrier(3)

    def enter(update: Callable, body: dict) -> Any:
        all_are_in.wait(20)
        return update(body)

    for fake in one.engines:
        fake.groups.update = partial(enter, fake.groups.update)
    one.push(2)
    for fake in one.engines:
        assert_serves(fake, one.tensors, 2)


def test_an_engine_that_refuses_its_group_is_untouched_and_serves_on(world):
    one = world(stock(), stock(2))
    one.push(1)
    one.session._groundwork.routes["nccl"]._whole._groups[one.engines[1].url].give_up()
    one.engines[1].misbehave(INIT, "400")
    with pytest.raises(
        EngineRejected, match=r"joining group weightsync-0 at 127\.0\.0\.1:\d+: .*told to refuse"
    ) as caught:
        one.push(2)
    assert caught.value.engine == one.engines[1].url
    states = {e["url"]: e["state"] for e in caught.value.report}
    assert states[one.engines[1].url] == "serving" and not one.engines[1].paused
    one.push(3)
    for fake in one.engines:
        assert_serves(fake, one.tensors, 3)


@pytest.mark.parametrize("how", ["die", "drop"])
def test_a_dead_engine_wedges_no_other(world, how):
    one = world(stock(), stock(2), stock(), on_engine_failure="exclude")
    one.push(1)
    one.engines[1].misbehave(DISTRIBUTED, how, at=3)
    started = time.monotonic()
    report = one.push(2)
    assert time.monotonic() - started < 15
    assert [e.state for e in report.engines] == ["serving", "fenced", "serving"]
    assert "bucket 3 of" in report.engines[1].error or "bucket" in report.engines[1].error
    for fake in (one.engines[0], one.engines[2]):
        assert_serves(fake, one.tensors, 2)


def test_a_stalled_engine_is_given_up_in_time_fenced_and_healed_by_the_next_push(world, monkeypatch):
    monkeypatch.setattr(groups_broadcast, "MIN_STALL_S", 1.0)
    monkeypatch.setattr(groups_broadcast, "STALL_SHARE", 0.1)
    one = world(stock(), stock(), on_engine_failure="exclude", timeout_s=20.0)
    one.push(1)
    one.engines[1].misbehave(DISTRIBUTED, "slow", at=3, seconds=8.0)
    started = time.monotonic()
    report = one.push(2)
    assert time.monotonic() - started < 7.5, "two steps at most: its own, and one that was under way when it was asked"
    assert [e.state for e in report.engines] == ["serving", "fenced"]
    assert_serves(one.engines[0], one.tensors, 2)
    assert one.engines[1].paused
    time.sleep(max(0.0, 9.0 - (time.monotonic() - started)))
    one.push(3)
    for fake in one.engines:
        assert_serves(fake, one.tensors, 3)


@pytest.mark.parametrize("kind", [stock, engine])
def test_a_sender_killed_between_pushes_is_replaced(world, kind, nursery):
    one = world(kind(2))
    one.push(1)
    before = children(nursery)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    while children(nursery):
        time.sleep(0.01)
    one.push(2)
    assert_serves(one.engines[0], one.tensors, 2)
    assert children(nursery) and not children(nursery) & before


@pytest.mark.parametrize(("kind", "path"), [(stock, DISTRIBUTED), (engine, UPDATE)])
def test_a_sender_killed_in_the_middle_fences_the_engine_and_the_next_push_heals_it(world, kind, path, nursery):
    one = world(kind(2))
    one.push(1)
    one.engines[0].misbehave(path, "slow", at=2 if kind is stock else 1, seconds=2.0)
    killing = threading.Timer(1.0, lambda: [os.kill(pid, signal.SIGKILL) for pid in children(nursery)])
    killing.start()
    with pytest.raises(TransferError, match="sender process") as caught:
        one.push(2)
    killing.join()
    assert caught.value.report[0]["state"] == "fenced" and one.engines[0].paused
    one.push(3)
    assert_serves(one.engines[0], one.tensors, 3)


def test_a_receiver_whose_senders_stall_ends_by_the_deadline_and_is_healed(world, nursery):
    one = world(engine(2), timeout_s=8.0)
    one.push(1)
    (pid,) = children(nursery)
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises((TransferError, EngineLost)):
        one.push(2)
    assert time.monotonic() - started < 12
    time.sleep(1)
    report = one.push(3, timeout_s=60.0)
    assert report.verified and children(nursery) and pid not in children(nursery)
    assert_serves(one.engines[0], one.tensors, 3)


def test_engine_2s_pause_fails_and_everybody_serves_the_old_weights(world):
    one = world(stock(), stock(), stock())
    one.push(1)
    before = [{n: t.clone() for n, t in served(fake).items()} for fake in one.engines]
    one.engines[1].misbehave("/pause_generation", "500")
    with pytest.raises(EngineRejected) as caught:
        one.push(2)
    assert [e["state"] for e in caught.value.report] == ["serving"] * 3
    for fake, held in zip(one.engines, before, strict=True):
        assert fake.weight_version == "1" and not fake.paused
        assert all(torch.equal(held[n], t) for n, t in served(fake).items())


def test_a_move_that_fails_on_engine_2_of_3_fences_those_that_were_written(world):
    one = world(stock(), stock(), stock())
    one.push(1)
    one.engines[1].misbehave(DISTRIBUTED, "400", at=2)
    with pytest.raises(EngineRejected, match=r"bucket \d of \d+: .*told to refuse") as caught:  # they may overtake
        one.push(2)
    assert caught.value.engine == one.engines[1].url and caught.value.phase == "move"
    assert [e["state"] for e in caught.value.report] == ["fenced"] * 3
    assert all(fake.paused and fake.weight_version == "1" for fake in one.engines)
    one.push(3)
    for fake in one.engines:
        assert_serves(fake, one.tensors, 3)


# ------------------------------------------------------------------------------------------------ what does not fit


def test_another_nccl_is_refused_by_name_before_anything_is_opened(world, monkeypatch, nursery):
    monkeypatch.setattr(routes_nccl, "nccl_version", lambda: "2.30.7")
    fake = FakeEngine(version="0.5.12", models=[FakeModel()], info={"device": "cuda"})
    one = world(fake)
    with pytest.raises(ConfigError, match=r"engine has NCCL 2\.28\.9 and the actor's environment NCCL 2\.30\.7"):
        one.push(1)
    assert INIT not in fake.paths() and children(nursery) == set()


def test_meeting_hosts():
    assert nodes.meeting_host("127.0.0.1", "http://127.0.0.1:30000") == "127.0.0.1"
    assert nodes.meeting_host("localhost", "http://localhost:30000") == "127.0.0.1"
    assert nodes.meeting_host("0.0.0.0", "http://127.0.0.1:30000") == "127.0.0.1"
    assert nodes.meeting_host("127.0.0.2", "http://127.0.0.1:30000") == "127.0.0.2"
    assert nodes.meeting_host("::1", "http://[::1]:30000") == "::1"
    assert nodes.meeting_host("127.0.0.1", "http://[::1]:30000") == "::1"
    other = nodes.meeting_host("127.0.0.1", "http://192.0.2.7:30000")
    assert other not in ("127.0.0.1", "0.0.0.0", "", "::")


@pytest.mark.parametrize("bind_host", ["0.0.0.0", "::", "localhost", "::1"])
def test_every_way_to_name_a_host_can_be_reached(world, bind_host):
    one = world(stock(2), engine(2), bind_host=bind_host)
    one.push(1)
    for fake in one.engines:
        assert_serves(fake, one.tensors, 1)


def test_an_address_that_is_not_ours_is_named(world):
    with pytest.raises(ConfigError, match=r"cannot listen on host '192\.0\.2\.1'"):
        world(stock(), bind_host="192.0.2.1").push(1)


@pytest.mark.parametrize("kind", [stock, engine])
def test_a_trainer_that_raises_leaves_every_engine_with_the_old_weights(world, kind, monkeypatch):
    def out_of_memory(*_) -> None:
        raise RuntimeError("out of memory")

    one = world(kind(), kind(2))
    one.push(1)
    one.train(3)
    with pytest.raises(TransferError, match="step 3"):
        one.session.push(PushRequest(step=2))
    assert all(fake.weight_version == "1" and not fake.paused for fake in one.engines)
    with monkeypatch.context() as patch:
        patch.setattr(one.publisher._offer, "publish", out_of_memory)
        with pytest.raises(WeightSyncError, match="out of memory"):
            one.session.push(PushRequest(step=3))
    assert all(fake.weight_version == "1" and not fake.paused for fake in one.engines)
    one.push(4)
    for fake in one.engines:
        assert_serves(fake, one.tensors, 4)


def test_two_runs_on_one_host_at_once(world, monkeypatch):
    monkeypatch.setattr(routes_nccl, "Nursery", Nursery)  # each starts senders of its own
    runs = [world(stock(2)), world(engine(2))]
    threads = [threading.Thread(target=run.push, args=(1,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for run in runs:
        assert_serves(run.engines[0], run.tensors, 1)


def test_an_engine_that_is_gone_is_said_at_once_and_not_at_the_deadline(world):
    one = world(stock(), timeout_s=30.0)
    one.push(1)
    link = one.session._links[0]
    one.engines[0].close()
    started = time.monotonic()
    with pytest.raises(EngineLost):
        raise one.session._groundwork.routes["nccl"].move([link], 2, Deadline(30, "test"))[0]
    assert time.monotonic() - started < 5

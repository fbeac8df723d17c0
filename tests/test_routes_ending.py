"""What goes on in one engine when a push ends because of something else: nothing, once the push has said so."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import torch

from tests.fakes.engine import DISTRIBUTED, FakeEngine
from tests.senders import stock, worlds
from tests.test_session import Concatenating, World, assert_serves, served
from weightsync import groups_broadcast, routes_broadcast, routes_bucket
from weightsync.errors import TransferError, TransferTimeout, WeightSyncError
from weightsync.transports.sender import Nursery, SenderProcess

DESTROY, RESUME = "/destroy_weights_update_group", "/continue_generation"

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def world(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    yield from worlds(nursery, monkeypatch, timeout_s=30.0, verify="none")


def late(monkeypatch, seconds: float) -> None:
    """Senders begin with buckets so late."""
    call = SenderProcess.call

    def calling(self, method, argument=None, **options):
        if method == "begin" and argument.nbytes > 1:
            time.sleep(seconds)
        return call(self, method, argument, **options)

    monkeypatch.setattr(SenderProcess, "call", calling)


def assert_left_alone(fake: FakeEngine, before: dict[str, torch.Tensor], since: int, state: str) -> None:
    """An engine that goes back to work has its old weights, and nobody asks it for others; a fenced one is paused."""
    time.sleep(1.5)
    if state == "fenced":
        assert fake.paused
        return
    now, paths = served(fake), [call.path for call in fake.calls[since:]]
    assert state == "serving" and not fake.paused
    assert all(torch.equal(now[name], before[name]) for name in before)
    assert DISTRIBUTED not in paths[paths.index(RESUME) :]


def assert_failing_leaves_alone(one: World, numbers: Sequence[int], kind: type[WeightSyncError], match: str) -> None:
    """The second push fails; those engines go back to work as they were, or are fenced, and nobody asks them again."""
    fakes = [one.engines[number] for number in numbers]
    held, since = [served(fake) for fake in fakes], [len(fake.calls) for fake in fakes]
    with pytest.raises(kind, match=match) as caught:
        one.push(2)
    states = [caught.value.report[number]["state"] for number in numbers]
    for fake, before, first, state in zip(fakes, held, since, states, strict=True):
        assert_left_alone(fake, before, first, state)


def assert_heals(one: World, numbers: Sequence[int]) -> None:
    one.push(3)
    for number in numbers:
        assert_serves(one.engines[number], one.tensors, 3)


def test_stock_engines_are_waited_for_when_another_ones_opaque_parameters_fail(world, monkeypatch):
    one = world(stock(1, "0.5.12"), FakeEngine(models=[Concatenating()], receiver=True))
    one.push(1)
    fill = routes_broadcast.BroadcastRoute._fill

    def failing(self, number, deadline):
        if not self._is_all:
            raise TransferTimeout("gathering: no answer")
        return fill(self, number, deadline)

    with monkeypatch.context() as patch:
        late(patch, 0.4)
        patch.setattr(routes_broadcast.BroadcastRoute, "_fill", failing)
        assert_failing_leaves_alone(one, [0], TransferTimeout, "gathering")
    assert_heals(one, [0])


@pytest.mark.parametrize("version", ["0.5.12", "0.5.23"])
def test_a_fault_of_our_own_while_a_bucket_is_filled_leaves_no_other_bucket_on_its_way(world, monkeypatch, version):
    one = world(stock(1, version), stock(1, version))
    one.push(1)
    fill = routes_bucket.BucketRoute._fill

    def failing(self, number, deadline):
        if number == 1:
            raise RuntimeError("CUDA error")
        return fill(self, number, deadline)

    with monkeypatch.context() as patch:
        late(patch, 0.4)
        patch.setattr(routes_bucket.BucketRoute, "_fill", failing)
        assert_failing_leaves_alone(one, [0, 1], TransferError, "CUDA error")
    assert_heals(one, [0, 1])


def test_a_fault_of_our_own_with_one_engine_leaves_no_bucket_on_its_way_to_another(world, monkeypatch):
    one = world(stock(1, "0.5.12"), stock(1, "0.5.12"))
    one.push(1)
    send = groups_broadcast.BroadcastGroup.send

    def sending(self, turn, bucket, deadline):
        if self.link.url == one.engines[0].url:
            turn.end()
            raise KeyError("bug")
        time.sleep(0.4)
        return send(self, turn, bucket, deadline)

    with monkeypatch.context() as patch:
        patch.setattr(groups_broadcast.BroadcastGroup, "send", sending)
        assert_failing_leaves_alone(one, [1], TransferError, "KeyError")
    assert_heals(one, [1])


def test_an_interrupt_fences_what_is_half_written(world, monkeypatch):
    one = world(stock(1, "0.5.12"))
    one.push(1)

    def interrupted(sending, outcomes):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(routes_bucket.BucketRoute, "_collect", staticmethod(interrupted))
        with pytest.raises(KeyboardInterrupt):
            one.push(2)
    fake = one.engines[0]
    assert one.session.status().engines[0].state == "fenced" and fake.paused
    one.push(3)
    assert_serves(fake, one.tensors, 3)


def test_groups_are_taken_down_only_when_nothing_goes_by_them(world, monkeypatch):
    """SGLang's scheduler ends when it is asked for a bucket of a group that it has left."""
    from weightsync import session

    monkeypatch.setattr(session, "CLOSE_S", 0.1)
    one = world(stock(1, "0.5.12"))
    one.push(1)
    fake, ended, update = one.engines[0], [], one.engines[0].groups.update

    def load(body):
        time.sleep(0.3)
        return update(body)

    def push() -> None:
        try:
            one.push(2)
        except WeightSyncError as e:
            ended.append(e)

    fake.groups.update = load
    since = len(fake.calls)
    pushing = threading.Thread(target=push)
    pushing.start()
    while DISTRIBUTED not in [call.path for call in fake.calls[since:]]:
        time.sleep(0.01)
    one.session.close()
    pushing.join(30)
    assert not pushing.is_alive() and ended
    paths = [call.path for call in fake.calls[since:]]
    assert DISTRIBUTED not in paths[paths.index(DESTROY) if DESTROY in paths else len(paths) :]

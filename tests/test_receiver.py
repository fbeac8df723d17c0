"""A receiver driven as SGLang and the actor drive it, over real shared memory and its real server, on a small model."""

from __future__ import annotations

import base64
import pickle
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.fakes.going import Going, going_on
from weightsync import receiver, receiver_session
from weightsync import receiver_wire as wire
from weightsync.board import Reader
from weightsync.boxes import dense_strides, whole
from weightsync.deadline import Deadline
from weightsync.errors import EngineLost, PlanError, TransferError, VerifyMismatch
from weightsync.fingerprint import fingerprint
from weightsync.rpc import Client, Server
from weightsync.spec import Copy, Layout, RankPlan, Shard, TensorSpec, View
from weightsync.transports import shm

ROWS = {"q": 4, "k": 2, "v": 2}
SPECS = [*(TensorSpec(n, (r, 3), "float32") for n, r in ROWS.items()), TensorSpec("norm", (3,), "float32")]


class Served(nn.Module):
    """A fused parameter with a padded row, a norm, a rotary table, and a tensor computed after loading."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(9, 3), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("rotary", torch.arange(6.0).view(2, 3), persistent=False)
        self.absorbed = torch.zeros(3, 2)

    def load_weights(self, weights) -> None:
        start = {"q": 0, "k": 4, "v": 6}
        for name, tensor in weights:
            if name == "norm":
                self.norm.data.copy_(tensor)
            else:
                self.qkv.data.narrow(0, start[name], ROWS[name]).copy_(tensor)
        self.qkv.data[8:].fill_(0)
        self.post_load_weights()

    def post_load_weights(self) -> None:
        self.absorbed.copy_(self.qkv[4:6].t() * self.norm[:, None])


class Actor:
    """The actor's inbox: what receivers told it."""

    def __init__(self) -> None:
        self._told = threading.Condition()
        self.announced: list[wire.Announcement] = []
        self.unknowns: list[wire.Announcement] = []

    def announce(self, announcement: wire.Announcement) -> None:
        self._keep(self.announced, announcement)

    def unknown(self, announcement: wire.Announcement) -> None:
        self._keep(self.unknowns, announcement)

    def _keep(self, where: list, announcement: wire.Announcement) -> None:
        with self._told:
            where.append(announcement)
            self._told.notify_all()

    def _wait(self, where: list, count: int) -> wire.Announcement:
        with self._told:
            assert self._told.wait_for(lambda: len(where) >= count, timeout=5)
            return where[-1]


def deadline() -> Deadline:
    return Deadline(10.0, "test")


def send(model: nn.Module, command: wire.Attach | wire.Pull) -> None:
    """What SGLang does with a payload: unpickle it and call the loader. Its answer is dropped."""
    named_tensors = pickle.loads(base64.b64decode(wire.payload(command)))
    assert receiver.load(model, named_tensors) is None


class Trainer:
    """One trainer rank: every tensor whole, in one arena of shared memory."""

    def __init__(self) -> None:
        self.shards, offset = [], 0
        for spec in SPECS:
            strides = dense_strides(spec.shape)
            self.shards.append(Shard(spec.name, spec.shape, "float32", whole(spec.shape), strides, 0, offset))
            offset += -(-torch.Size(spec.shape).numel() * 4 // 256) * 256
        self.memory = shm.allocate(offset)
        self.weights = {s.tensor: self._tensor(s) for s in self.shards}

    def _tensor(self, shard: Shard) -> torch.Tensor:
        return (
            self.memory.tensor[shard.byte_offset :]
            .view(torch.float32)
            .as_strided(shard.shape, shard.strides, shard.byte_offset // 4)
        )

    def step(self, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.weights.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        return {n: t.clone() for n, t in self.weights.items()}

    def install(self, layout: Layout, plan_id: str = "plan", **changes) -> wire.Install:
        index = {s.tensor: i for i, s in enumerate(self.shards)}
        copies = [
            Copy(n.tensor, n.box, 0, View(index[n.tensor], 0, self.shards[index[n.tensor]].strides), n.view)
            for n in layout.needs
        ]
        plan = RankPlan("engine", layout.rank, copies, layout.needs, layout.fills)
        fields = {"plan_id": plan_id, "segments": {0: [self.memory.segment]}, "shards": {0: self.shards}, "plan": plan}
        return wire.Install(**{**fields, **changes})


class Rig:
    def __init__(self, model: Served | None = None) -> None:
        self.model, self.trainer, self.actor = model or Served(), Trainer(), Actor()
        self.trainer.step(0)
        self.model.load_weights(iter(self.trainer.weights.items()))
        self.server = Server(self.actor)
        self.clients: list[Client] = []
        self.client = self.attach("s1")
        self.layout = self.call("needs", returns=Layout)

    def attach(self, session: str) -> Client:
        before = len(self.actor.announced)
        send(self.model, wire.Attach(reply=self.server.address, session=session, tp_rank=0, tensors=SPECS))
        told = self.actor._wait(self.actor.announced, before + 1)
        assert (told.session, told.tp_rank, told.boot_id, told.error) == (session, 0, wire.BOOT_ID, "")
        self.clients.append(Client(told.address))
        return self.clients[-1]

    def call(self, method: str, argument=None, returns=None, client: Client | None = None):
        return (client or self.client).call(method, argument, deadline=deadline(), returns=returns)

    def install(self, **changes) -> None:
        self.call("install", self.trainer.install(self.layout, **changes))

    def pull(self, push_id: str, *, session: str = "s1", plan_id: str = "plan", full: bool = False) -> wire.PullResult:
        reply = self.server.address
        send(
            self.model,
            wire.Pull(session=session, push_id=push_id, plan_id=plan_id, step=7, full=full, reply=reply, tp_rank=0),
        )
        return self.result(push_id)

    def result(self, push_id: str) -> wire.PullResult:
        return self.call("result", wire.ResultRequest(push_id=push_id, timeout_s=0.1), returns=wire.PullResult)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.close()
        self.trainer.memory.close()


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.close()


def loaded(weights: dict[str, torch.Tensor]) -> Served:
    model = Served()
    model.load_weights(iter(weights.items()))
    return model


def assert_same(model: Served, expected: Served) -> None:
    for name in ("qkv", "norm", "rotary", "absorbed"):
        assert torch.equal(getattr(model, name), getattr(expected, name)), name


def test_layout_says_what_is_served(rig):
    layout = rig.layout
    assert [(p.name, p.kind) for p in layout.params] == [
        ("qkv", "parameter"),
        ("norm", "parameter"),
        ("rotary", "buffer"),
        ("absorbed", "derived"),
    ]
    assert layout.constants == ["rotary"] and layout.derived == ["absorbed"] and layout.opaque == {}
    assert sorted(n.tensor for n in layout.needs) == ["k", "norm", "q", "v"]
    assert layout.device == "" and layout.versions["torch"] and layout.params[0].shape == (9, 3)


def test_pull_gives_what_loading_gives(rig):
    rig.install()
    for step in (1, 2):
        weights = rig.trainer.step(step)
        result = rig.pull(f"push{step}")
        assert (
            result.ok
            and result.applied
            and result.step == 7
            and result.num_bytes == sum(t.nbytes for t in weights.values())
        )
        assert_same(rig.model, loaded(weights))


def test_verify_reads_live_memory_and_not_the_sources(rig):
    rig.install()
    weights = rig.trainer.step(1)
    rig.pull("p1")
    needs = rig.layout.needs
    expected = [fingerprint(weights[n.tensor], n.box.offset) for n in needs]
    assert rig.call("verify", returns=list[int]) == expected
    rig.trainer.step(2)
    assert rig.call("verify", returns=list[int]) == expected
    rig.model.qkv.data.view(torch.int32)[4, 1] ^= 1
    found = rig.call("verify", returns=list[int])
    assert [n.tensor for n, a, b in zip(needs, found, expected) if a != b] == ["k"]


def test_poison_then_full_pull_leaves_nothing_of_it(rig):
    rig.install()
    weights = rig.trainer.step(1)
    rig.call("poison")
    assert all(getattr(rig.model, n).isnan().all() for n in ("qkv", "norm", "rotary", "absorbed"))
    assert rig.pull("p1", full=True).ok
    assert_same(rig.model, loaded(weights))


def test_a_changed_constant_is_named_and_a_full_pull_heals_it(rig):
    rig.install()
    rig.pull("p1")
    rig.model.rotary[1, 1] += 1
    with pytest.raises(VerifyMismatch) as caught:
        rig.call("verify")
    assert caught.value.tensor == "constant:rotary"
    rig.pull("p2", full=True)
    rig.call("verify")


def test_constants_survive_a_new_session_of_a_poisoned_engine(rig):
    rig.call("poison")
    rig.client = rig.attach("s2")
    rig.install()
    weights = rig.trainer.step(1)
    assert rig.pull("p1", session="s2", full=True).ok
    assert_same(rig.model, loaded(weights))


def test_a_pull_happens_once(rig):
    rig.install()
    first = rig.trainer.step(1)
    result = rig.pull("p1")
    rig.trainer.step(2)
    assert rig.pull("p1") == result
    assert_same(rig.model, loaded(first))


def test_a_revoked_pull_never_begins_and_one_that_began_is_not_revoked(rig):
    rig.install()
    before = rig.model.qkv.clone()
    assert rig.call("revoke", wire.ResultRequest(push_id="p1")) is True
    rig.trainer.step(1)
    result = rig.pull("p1")
    assert not result.started and not result.applied and torch.equal(rig.model.qkv, before)
    assert rig.pull("p2").ok
    assert rig.call("revoke", wire.ResultRequest(push_id="p2")) is False


@pytest.mark.parametrize(
    ("break_it", "kind"),
    [
        (lambda rig: setattr(rig.model.qkv, "data", rig.model.qkv.data.clone()), "layout_moved"),
        (lambda rig: setattr(rig.model, "norm", nn.Parameter(torch.zeros(3), requires_grad=False)), "layout_moved"),
        (lambda rig: delattr(rig.model, "absorbed"), "layout_moved"),
    ],
)
def test_moved_tensors_are_refused_and_the_session_ends(rig, break_it, kind):
    rig.install()
    rig.trainer.step(1)
    break_it(rig)
    before = rig.model.qkv.clone()
    result = rig.pull("p1")
    assert result.kind == kind and not result.applied and torch.equal(rig.model.qkv, before)
    error = wire.pull_error(result, engine="http://e", rank=0)
    assert isinstance(error, TransferError) and error.safe_to_retry
    assert rig.call("status", returns=wire.Status).session == ""


def test_unknown_plan(rig):
    assert rig.pull("p1").kind == "unknown_plan"
    rig.install()
    result = rig.pull("p2", plan_id="older")
    assert result.kind == "unknown_plan" and not result.applied
    assert isinstance(wire.pull_error(result, engine="e", rank=0), EngineLost)


def test_unknown_session_says_so_to_who_asked(rig):
    rig.install()
    before = rig.model.qkv.clone()
    rig.trainer.step(1)
    result = rig.pull("p1", session="before the restart")
    told = rig.actor._wait(rig.actor.unknowns, 1)
    assert (told.session, told.tp_rank, told.boot_id) == ("before the restart", 0, wire.BOOT_ID)
    assert result.kind == "not_started" and torch.equal(rig.model.qkv, before)
    other = Served()
    send(other, wire.Pull(session="s1", push_id="x", plan_id="plan", step=1, reply=rig.server.address, tp_rank=3))
    assert rig.actor._wait(rig.actor.unknowns, 2).tp_rank == 3


def test_a_new_session_ends_the_old_one(rig):
    rig.install()
    old = rig.client
    rig.attach("s2")
    status = rig.call("status", returns=wire.Status, client=old)
    assert (status.session, status.plan_id, status.num_segments, status.boot_id) == ("", "", 0, wire.BOOT_ID)
    with pytest.raises(PlanError, match="no plan"):
        rig.call("verify", client=old)


def test_the_actor_of_an_ended_session_knows_without_asking(rig, monkeypatch):
    monkeypatch.setattr(receiver_session, "_RETIRED_S", 0.2)
    rig.install()
    old = rig.client
    assert old.is_connected()
    rig.attach("s2")
    until = time.monotonic() + 10
    while old.is_connected() and time.monotonic() < until:
        time.sleep(0.02)
    assert not old.is_connected()


def test_detach_unmaps_and_keeps_the_weights(rig):
    rig.install()
    weights = rig.trainer.step(1)
    rig.pull("p1")
    rig.call("detach")
    assert rig.call("status", returns=wire.Status).num_segments == 0
    rig.trainer.step(2)
    assert rig.pull("p2").kind == "not_started"
    assert_same(rig.model, loaded(weights))


def test_reinstalling_maps_nothing_twice_and_drops_what_is_unused(rig):
    rig.install()
    assert rig.call("status", returns=wire.Status).num_segments == 1
    rig.install(plan_id="again")
    assert rig.call("status", returns=wire.Status).num_segments == 1
    rig.install(plan_id="verify only", pulls=False, segments={}, shards={})
    assert rig.call("status", returns=wire.Status).num_segments == 0
    assert len(rig.call("verify", returns=list[int])) == len(rig.layout.needs)


def test_a_plan_that_cannot_be_installed_leaves_the_old_one(rig):
    rig.install()
    halves = [Shard(s.tensor, s.shape, "int32", s.box, s.strides, 0, s.byte_offset) for s in rig.trainer.shards]
    with pytest.raises(PlanError, match=r"published as torch\.int32"):
        rig.install(plan_id="wrong dtype", shards={0: halves})
    gone = shm.allocate(64)
    segment = gone.segment
    gone.close()
    with pytest.raises(TransferError):
        rig.install(plan_id="gone", segments={0: [segment]})
    assert rig.pull("p1").ok
    assert rig.call("status", returns=wire.Status).plan_id == "plan"


def test_a_derived_tensor_that_is_not_recomputed_fails_the_pull(rig):
    rig.install()
    rig.model.post_load_weights = lambda: None
    result = rig.pull("p1")
    assert result.applied and not result.ok and result.kind == "derived_stale" and "absorbed" in result.error
    assert not wire.pull_error(result, engine="e", rank=0).safe_to_retry


def test_an_error_while_finalising_is_told_and_never_raised(rig):
    rig.install()

    def fail():
        raise RuntimeError("out of memory")

    rig.model.post_load_weights = fail
    result = rig.pull("p1")
    assert result.applied and not result.ok and "out of memory" in result.error


@pytest.mark.parametrize(
    "named_tensors", [[], [("a", torch.zeros(3))], [("weightsync", torch.zeros(4, dtype=torch.uint8))]]
)
def test_nonsense_is_swallowed(named_tensors):
    assert receiver.load(Served(), named_tensors) is None


def test_an_actor_that_is_gone_does_not_hold_the_engine_up():
    gone = Server(Actor())
    gone.close()
    model = Served()
    started = Deadline(2.0, "attaching")
    send(model, wire.Attach(reply=gone.address, session="s", tp_rank=0, tensors=SPECS))
    assert not started.passed()


def test_a_reply_address_that_is_none_is_swallowed():
    send(Served(), wire.Attach(reply="http://not-ours", session="s", tp_rank=0, tensors=SPECS))


def test_a_model_without_load_weights_is_opaque(rig):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2), requires_grad=False)

    rig.model = Odd()
    client = rig.attach("odd")
    layout = rig.call("needs", returns=Layout, client=client)
    assert "load_weights" in layout.opaque["w"] and layout.needs == []


def test_two_model_objects_have_two_states(rig):
    rig.install()
    draft = Served()
    send(draft, wire.Attach(reply=rig.server.address, session="draft", tp_rank=0, tensors=SPECS))
    rig.actor._wait(rig.actor.announced, 2)
    weights = rig.trainer.step(1)
    assert rig.pull("p1").ok
    assert_same(rig.model, loaded(weights))
    assert not draft.qkv.any()


def test_nothing_cuda_is_touched(rig, monkeypatch):
    def touched(*args, **kwargs):
        raise AssertionError("torch.cuda was touched")

    for name in ("synchronize", "device", "current_device", "current_stream", "is_available", "device_count"):
        monkeypatch.setattr(torch.cuda, name, touched)
    rig.install()
    assert rig.pull("p1").ok
    rig.call("verify")
    rig.call("poison")


def asked_early(rig: Rig, push_id: str) -> tuple[threading.Thread, list[wire.PullResult]]:
    """Ask for a result before the pull has come, as the actor does."""
    answers: list[wire.PullResult] = []

    def ask() -> None:
        answers.append(rig.call("result", wire.ResultRequest(push_id=push_id), returns=wire.PullResult))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(0.1)
    assert answers == []
    return thread, answers


# ------------------------------------------------------------------------------------ pulls that go on by themselves


class Plain(Served):
    """Nothing is computed after loading, so a pull can go on by itself."""

    post_load_weights = None  # type: ignore[assignment]

    def load_weights(self, weights) -> None:
        start = {"q": 0, "k": 4, "v": 6}
        for name, tensor in weights:
            into = self.norm.data if name == "norm" else self.qkv.data.narrow(0, start[name], ROWS[name])
            into.copy_(tensor)
        self.qkv.data[8:].fill_(0)


@pytest.fixture
def going(monkeypatch):
    """A rig whose copies go on beside the event loop until ``Going.may_end``."""
    going_on(monkeypatch)
    rig = Rig(Plain())
    yield rig
    Going.may_end.set()
    rig.close()


def installed(rig: Rig) -> wire.Installed:
    return rig.call("install", rig.trainer.install(rig.layout), returns=wire.Installed)


def hung_up(rig: Rig) -> Reader:
    """The board of a plan that is installed now."""
    answer = installed(rig)
    assert answer.goes_on and answer.board is not None
    return Reader(answer.board)


def pull_beside(rig: Rig, push_id: str, *, beside: bool = True) -> None:
    """As the event loop does it: what comes after this comes after the loader has returned."""
    send(rig.model, wire.Pull("s1", push_id, "plan", step=7, beside=beside))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def test_a_pull_that_goes_on_leaves_the_event_loop_and_its_board_says_when_it_has_landed(going):
    board, weights = hung_up(going), going.trainer.step(1)
    pull_beside(going, "p1")
    assert (board.goes_on("p1"), board.has_landed("p1"), board.goes_on("p2")) == (True, False, False)
    assert not torch.equal(going.model.norm, weights["norm"])
    Going.may_end.set()
    until(lambda: board.has_landed("p1"))
    expected = Plain()
    expected.load_weights(iter(weights.items()))
    assert torch.equal(going.model.qkv, expected.qkv) and torch.equal(going.model.norm, expected.norm)
    assert board.num_bytes() == 27 * 4 and 0 < board.seconds() < 5
    result = going.result("p1")
    assert (result.ok, result.applied, result.num_bytes, result.seconds) == (True, True, 27 * 4, 0.25)
    pull_beside(going, "p2")
    until(lambda: board.has_landed("p2"))
    assert going.call("verify", returns=list[int])


def test_asking_for_the_result_of_a_pull_that_goes_on_waits_for_its_end(going):
    hung_up(going)
    early, answers = asked_early(going, "p1")
    pull_beside(going, "p1")
    early.join(0.1)
    assert answers == []
    Going.may_end.set()
    early.join(5)
    assert [(a.ok, a.ended) for a in answers] == [(True, True)]


def test_what_a_pull_reads_stays_mapped_until_it_has_ended(going):
    hung_up(going)
    pull_beside(going, "p1")
    letting_go = threading.Thread(target=going.call, args=("let_go",))
    letting_go.start()
    letting_go.join(0.2)
    assert letting_go.is_alive() and going.call("status", returns=wire.Status).num_segments == 1
    Going.may_end.set()
    letting_go.join(5)
    assert going.call("status", returns=wire.Status).num_segments == 0
    assert going.result("p1").ok


def test_a_session_is_replaced_only_when_its_pull_has_ended(going):
    hung_up(going)
    pull_beside(going, "p1")
    attaching = threading.Thread(target=going.attach, args=("s2",))
    attaching.start()
    attaching.join(0.2)
    assert attaching.is_alive()
    Going.may_end.set()
    attaching.join(5)
    assert not attaching.is_alive()


def test_copies_that_fail_on_their_way_never_land_and_are_told_as_applied(going, monkeypatch):
    monkeypatch.setattr(Going, "error", "an illegal memory access was encountered")
    board = hung_up(going)
    pull_beside(going, "p1")
    Going.may_end.set()
    result = going.result("p1")
    assert (result.ok, result.applied, result.kind) == (False, True, "failed") and "illegal" in result.error
    assert board.goes_on("p1") and not board.has_landed("p1")
    assert going.call("verify", returns=list[int])  # and the next call is not kept waiting


def test_a_pull_into_an_engine_that_is_not_paused_keeps_the_event_loop(going):
    Going.may_end.set()
    board = hung_up(going)
    pull_beside(going, "p1", beside=False)
    assert going.result("p1").ok and not board.goes_on("p1")


@pytest.mark.parametrize("why", ["something is computed from it", "no room for a board"])
def test_a_plan_whose_pulls_cannot_go_on_says_so(why, going, monkeypatch):
    Going.may_end.set()
    if why == "something is computed from it":
        going.close()
        going = Rig(Served())
    else:
        monkeypatch.setattr(shm, "allocate", lambda nbytes: (_ for _ in ()).throw(TransferError("no room")))
    assert installed(going) == wire.Installed()
    pull_beside(going, "p1")
    assert going.result("p1").ok


def test_a_board_belongs_to_its_plan(going):
    before, answer = hung_up(going), installed(going)
    assert answer.board is not None
    after = Reader(answer.board)
    Going.may_end.set()
    pull_beside(going, "p1")
    until(lambda: after.has_landed("p1"))
    assert not before.goes_on("p1")
    going.call("detach")
    with pytest.raises(TransferError, match="is gone"):
        Reader(answer.board)


def test_a_result_asked_for_early_comes_when_the_pull_ends(rig):
    rig.install()
    thread, answers = asked_early(rig, "p1")
    result = rig.pull("p1")
    thread.join(5)
    assert answers == [result] and result.ended and result.ok


def test_a_revoked_pull_keeps_nobody_waiting(rig):
    thread, answers = asked_early(rig, "p1")
    assert rig.call("revoke", wire.ResultRequest(push_id="p1")) is True
    thread.join(5)
    assert [(a.started, a.ended) for a in answers] == [(False, False)]


def test_preparing_to_verify_changes_nothing_that_verifying_says(rig):
    rig.install(verified=True)
    before = rig.call("verify", returns=list[int])
    receiver._sessions[rig.model]._served._prepare_to_verify()
    assert rig.call("verify", returns=list[int]) == before

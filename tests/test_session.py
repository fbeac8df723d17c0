"""A session over the wire: real publishers, receivers and HTTP; the engines are fakes that really load."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.fakes.engine import UPDATE, FakeEngine
from tests.fakes.going import Going, going_on
from tests.fakes.model import FakeModel
from weightsync.board import Board
from weightsync.config import Config, EngineConfig, load_config
from weightsync.deadline import Deadline
from weightsync.errors import (
    ConfigError,
    EngineLost,
    EngineRejected,
    PlanError,
    StaleVersion,
    TransferError,
    TransferTimeout,
    VerifyMismatch,
    WeightSyncError,
)
from weightsync.publisher import Publisher
from weightsync.receivers import Receivers
from weightsync.reports import PushRequest, SyncReport
from weightsync.session import Session

SHAPES = FakeModel().shapes


class World:
    """One training rank, some fake engines, and the session between them."""

    def __init__(self, *engines: FakeEngine, **config) -> None:
        self.tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.publisher = Publisher(self.tensors, rank=0, world_size=1)
        self.engines = list(engines)
        self.config = config
        self._session: Session | None = None

    @property
    def session(self) -> Session:
        if self._session is None:
            peers = {"engines": [{"url": e.url} for e in self.engines], "publishers": [self.publisher.address]}
            self._session = Session(settings(**peers, **self.config), trainer="dtensor_v2")
        return self._session

    def train(self, step: int) -> None:
        """New weights, marked as those of ``step``."""
        generator = torch.Generator().manual_seed(step)
        for tensor in self.tensors.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        self.publisher.step_done(step)

    def push(self, step: int, **request) -> SyncReport:
        self.train(step)
        return self.session.push(PushRequest(step=step, **request))

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self.publisher.close()
        for engine in self.engines:
            engine.close()


def settings(**config) -> Config:
    return load_config({"pair": "sgl_dtensor_v2", "timeout_s": 20.0, "connect_timeout_s": 20.0, **config})


def served(engine: FakeEngine) -> dict[str, torch.Tensor]:
    """What the engine's ranks hold, put together again to the trainer's tensors."""
    models = engine.models
    half = models[0]._inner
    return {
        "embed.weight": torch.cat([m.embed for m in models])[: SHAPES["embed.weight"][0]],
        "mlp.gate.weight": torch.cat([m.gate_up[:half] for m in models]),
        "mlp.up.weight": torch.cat([m.gate_up[half:] for m in models]),
        "mlp.down.weight": torch.cat([m.down for m in models], dim=1),
        "norm.weight": models[0].norm.data,
    }


def engine(tp_size: int = 1, *, receiver: bool = True, version: str = "0.5.23") -> FakeEngine:
    models = [FakeModel(tp_rank=r, tp_size=tp_size) for r in range(tp_size)]
    return FakeEngine(version=version, models=models, receiver=receiver)


def assert_serves(engine: FakeEngine, tensors: dict[str, torch.Tensor], step: int) -> None:
    held = served(engine)
    assert engine.weight_version == str(step) and not engine.paused and not engine.session_open
    for name, tensor in tensors.items():
        assert torch.equal(held[name], tensor), name


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(*engines: FakeEngine, **config) -> World:
        made.append(World(*engines, **config))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("version", ["0.5.12", "0.5.23"])
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("route", ["shm", "bucket"])
def test_every_route_brings_the_same_bytes(world, version, tp_size, route):
    one = world(engine(tp_size, version=version), route=route, bucket_bytes=256)
    for step in (1, 2):
        report = one.push(step)
        assert report.verified and report.route == route and report.weight_version == str(step)
        assert_serves(one.engines[0], one.tensors, step)


def test_a_stock_engine_takes_buckets_and_is_reported_as_unverified(world):
    one = world(engine(receiver=False), verify="none")
    report = one.push(1)
    assert (report.route, report.verified) == ("bucket", False)
    assert_serves(one.engines[0], one.tensors, 1)


def test_verification_of_a_stock_engine_is_refused_and_says_what_to_do(world):
    with pytest.raises(ConfigError, match=r"custom-weight-loader"):
        _ = world(engine(receiver=False)).session


def test_a_fleet_of_different_tp_and_version_holds_one_version(world):
    one = world(engine(1), engine(2, version="0.5.12"), engine(2, receiver=True))
    report = one.push(7)
    assert [e.weight_version for e in report.engines] == ["7"] * 3
    for each in one.engines:
        assert_serves(each, one.tensors, 7)


def test_the_plan_says_what_moves(world):
    one = world(engine(2))
    summary = one.session.plan()
    assert summary.num_tensors == len(SHAPES)
    text = summary.explain()
    assert "rank" in text and one.engines[0].url in text


def test_steps_go_forward_unless_forced(world):
    one = world(engine())
    one.push(4)
    for step in (3, 4):
        with pytest.raises(StaleVersion, match="4"):
            one.push(step)
    assert one.push(3, force=True).weight_version == "3"


def test_a_step_that_was_not_marked_times_out_and_pauses_nobody(world):
    one = world(engine())
    one.push(1)
    before = len(one.engines[0].paths())
    with pytest.raises(TransferTimeout, match="rank 0"):
        one.session.push(PushRequest(step=2, timeout_s=0.5))
    assert one.engines[0].paths()[before:] == []
    assert_serves(one.engines[0], one.tensors, 1)


def test_an_engine_beside_the_trainer_is_paused_while_a_marked_step_is_published(world, monkeypatch):
    one = world(engine(2), engine(receiver=False), verify="none")
    one.push(1)
    publish, seen = one.session._workers.publish, []

    def slow(*args):
        time.sleep(0.5)
        seen.append([fake.paused for fake in one.engines])
        return publish(*args)

    monkeypatch.setattr(one.session._workers, "publish", slow)
    one.train(2)
    eventually(lambda: one.session._readiness._marked == {0: 2})
    one.session.push(PushRequest(step=2))
    assert seen == [[True, False]], "of an engine without our receiver nobody knows where it is"
    for fake in one.engines:
        assert_serves(fake, one.tensors, 2)


def test_a_trainer_whose_memory_moved_finds_no_engine_paused_while_it_is_mapped_anew(world, monkeypatch):
    one = world(engine())
    one.push(1)
    lay, paused = one.session._groundwork.lay, []
    monkeypatch.setattr(
        one.session._groundwork, "lay", lambda *args: (paused.append(one.engines[0].paused), lay(*args))[1]
    )
    one.publisher._offer.void()  # as memory that was freed without a word
    one.train(2)
    eventually(lambda: one.session._readiness._marked == {0: 2})
    before = len(one.engines[0].paths())
    report = one.session.push(PushRequest(step=2))
    assert 0 < report.seconds["remap"] < report.seconds["total"]
    assert abs(sum(s for phase, s in report.seconds.items() if phase != "total") - report.seconds["total"]) < 0.05
    assert [note.split(":")[0] for note in report.notes if "to map" in note] == ["mapped anew"]
    paths = one.engines[0].paths()[before:]
    assert paused == [False] and paths.count("/pause_generation") == 2, paths
    assert_serves(one.engines[0], one.tensors, 2)


def test_an_engine_is_not_paused_before_memory_that_was_withdrawn_is_mapped_anew(world):
    one = world(engine())
    one.push(1)
    one.publisher.withdraw()
    one.train(2)
    eventually(lambda: one.session._readiness._marked == {0: 2})
    before = len(one.engines[0].paths())
    one.session.push(PushRequest(step=2))
    paths = one.engines[0].paths()[before:]
    assert paths.count("/pause_generation") == paths.count("/continue_generation") == 1, paths
    assert_serves(one.engines[0], one.tensors, 2)


def test_an_engine_that_seems_gone_and_cannot_be_attached_anew_goes_on(world, monkeypatch):
    one = world(engine(2))
    one.push(1)
    fake, link = one.engines[0], one.session._links[0]
    one.train(2)
    eventually(lambda: one.session._readiness._marked == {0: 2})
    monkeypatch.setattr(link, "is_attached", lambda: False)
    fake.misbehave("/server_info", "500")
    with pytest.raises(WeightSyncError):
        one.session.push(PushRequest(step=2))
    assert not fake.paused


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.005)


def test_a_rank_that_is_ahead_is_refused_at_once(world):
    one = world(engine())
    one.push(1)
    one.train(3)
    started = time.monotonic()
    with pytest.raises(TransferError, match="3"):
        one.session.push(PushRequest(step=2))
    assert time.monotonic() - started < 5


def test_weights_that_change_during_the_move_fail_the_push(world):
    one = world(engine())
    one.push(1)
    one.engines[0].misbehave(UPDATE, "slow", seconds=1.0)
    one.train(2)
    meddler = threading.Timer(0.5, lambda: one.tensors["norm.weight"].add_(1))
    meddler.start()
    with pytest.raises(TransferError, match=r"norm\.weight"):
        one.session.push(PushRequest(step=2))
    meddler.join()
    assert one.session.status().engines[0].state == "fenced" and one.engines[0].paused
    assert one.push(3).verified
    assert_serves(one.engines[0], one.tensors, 3)


def test_weights_may_change_once_every_byte_has_landed_though_the_engine_still_answers(world):
    one = world(engine())
    one.push(1)
    one.engines[0].misbehave(UPDATE, "slow", seconds=2.0, applies=True)
    one.train(2)
    pushed = {name: tensor.clone() for name, tensor in one.tensors.items()}
    trainer = threading.Timer(1.0, lambda: one.tensors["norm.weight"].add_(1))
    trainer.start()
    assert one.session.push(PushRequest(step=2)).verified
    trainer.join()
    assert_serves(one.engines[0], pushed, 2)


def test_a_name_without_a_home_is_refused_before_a_byte_moves(world):
    one = world(engine())
    one.tensors["stray.weight"] = torch.zeros(3)
    with pytest.raises(PlanError, match=r"stray\.weight"):
        _ = one.session
    assert one.engines[0].models[0].norm.eq(-1).all()


def test_a_parameter_without_a_source_is_refused(world):
    one = world(engine())
    del one.tensors["mlp.up.weight"]
    with pytest.raises(PlanError, match="gate_up"):
        _ = one.session


def test_an_engine_that_is_not_there_is_lost_within_the_deadline(world):
    one = world(engine(), connect_timeout_s=5.0)
    one.engines[0].close()
    started = time.monotonic()
    with pytest.raises(EngineLost, match=one.engines[0].url):
        _ = one.session
    assert time.monotonic() - started < 6


def test_a_wrong_publisher_token_is_a_configuration_error(world):
    one = world(engine())
    address = one.publisher.address.split("#")[0] + "#wrong"
    with pytest.raises(ConfigError, match="token"):
        Session(settings(engines=[{"url": one.engines[0].url}], publishers=[address]), trainer="dtensor_v2")


def test_one_flipped_bit_in_the_engine_is_found(world):
    one = world(engine(2))
    one.push(1)
    rank = one.engines[0].models[1]
    original = one.session._links[0].client.end

    def end_and_flip(deadline):
        original(deadline)
        rank.down.view(torch.int32)[3, 2] ^= 1

    one.session._links[0].client.end = end_and_flip
    with pytest.raises(VerifyMismatch, match=r"mlp\.down\.weight") as caught:
        one.push(2)
    assert (caught.value.rank, caught.value.tensor) == (1, "mlp.down.weight")
    assert one.engines[0].weight_version == "1"


def test_memory_that_was_withdrawn_is_mapped_anew(world):
    one = world(engine())
    one.push(1)
    one.publisher.withdraw()
    assert one.push(2).verified
    assert_serves(one.engines[0], one.tensors, 2)
    one.tensors["norm.weight"] = torch.zeros(SHAPES["norm.weight"])  # a new allocation under the old name
    assert one.push(3).verified
    assert_serves(one.engines[0], one.tensors, 3)


def test_an_arena_beyond_its_limit_is_refused_with_both_sizes(world):
    with pytest.raises(TransferError, match=r"mlp.gate.weight takes 384 bytes .* arena_bytes allows 100"):
        _ = world(engine(), arena_bytes=100).session


class VisionLanguage(FakeModel):
    """Serves the text model as a part of itself: its names have a prefix, and it has a tower that nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = torch.nn.Parameter(torch.ones(4), requires_grad=False)

    def load_weights(self, weights):
        prefix = "language_model."
        super().load_weights((n.removeprefix(prefix), w) for n, w in weights if n.startswith(prefix))


def test_a_text_model_lands_in_a_vision_language_model_by_a_prefix_rule(world):
    fake = FakeEngine(models=[VisionLanguage()], receiver=True)
    rule = {"rename": [{"pattern": "^", "to": "language_model."}]}
    with pytest.raises(PlanError, match="tower"):
        _ = world(fake, **rule).session
    one = world(fake, **rule, constants=["^tower$"])
    assert one.push(1).verified
    assert_serves(fake, one.tensors, 1)
    assert fake.models[0].tower.eq(1).all()


class Concatenating(FakeModel):
    """Loads gate and up by a concatenation, which no trace can follow: the fused parameter is opaque."""

    def load_weights(self, weights):
        weights = dict(weights)
        if "mlp.gate.weight" in weights and "mlp.up.weight" in weights:
            pair = torch.cat([weights.pop("mlp.gate.weight"), weights.pop("mlp.up.weight")])
            self.gate_up.data.copy_(pair)
        super().load_weights(weights.items())


def test_what_a_trace_cannot_follow_goes_by_buckets_beside_the_pull(world):
    one = world(FakeEngine(models=[Concatenating()], receiver=True))
    for step in (1, 2):
        report = one.push(step)
        assert_serves(one.engines[0], one.tensors, step)
    assert report.route == "shm"
    assert not report.verified, "no fingerprint speaks for an opaque parameter"


BAD_REPLIES = ["500", "400", "200 false", "not json", "drop"]


@pytest.mark.parametrize("how", BAD_REPLIES)
def test_a_bad_reply_on_bucket_three_of_five_names_engine_bucket_and_fences(world, how):
    one = world(engine(receiver=False), verify="none", bucket_bytes=64)
    total = len(one.session._groundwork.routes["bucket"]._buckets)
    assert total >= 4
    one.engines[0].misbehave(UPDATE, how, at=3)
    with pytest.raises(WeightSyncError) as caught:
        one.push(1)
    error = caught.value
    assert isinstance(error, EngineRejected | EngineLost)
    assert error.engine == one.engines[0].url and f"bucket 3 of {total}" in str(error)
    assert error.report[0]["state"] == "fenced" and one.engines[0].paused
    report = one.push(2)
    assert report.engines[0].state == "serving"
    assert_serves(one.engines[0], one.tensors, 2)


@pytest.mark.parametrize("path", ["/pause_generation", UPDATE, "/continue_generation"])
def test_an_engine_that_never_answers_ends_the_push_by_its_deadline(world, path):
    one = world(engine(), on_engine_failure="raise")
    one.push(1)
    one.engines[0].misbehave(path, "silent", times=5)
    started = time.monotonic()
    with pytest.raises(TransferTimeout) as caught:
        one.push(2, timeout_s=3.0)
    assert time.monotonic() - started < 6
    assert caught.value.engine == one.engines[0].url


def test_after_a_failed_pause_everyone_works_again_with_the_old_version(world):
    one = world(engine(), engine(), engine())
    one.push(1)
    old = {name: tensor.clone() for name, tensor in one.tensors.items()}
    one.engines[1].misbehave("/pause_generation", "500")
    with pytest.raises(EngineRejected) as caught:
        one.push(2)
    assert caught.value.engine == one.engines[1].url
    for each in one.engines:
        assert_serves(each, old, 1)


def test_a_killed_engine_is_lost_and_the_others_go_on_when_told_to(world):
    one = world(engine(), engine(), on_engine_failure="exclude")
    one.push(1)
    one.engines[0].close()
    report = one.push(2)
    assert [e.state for e in report.engines][-1] == "serving"
    assert one.session.status().engines[0].state == "lost"
    assert_serves(one.engines[1], one.tensors, 2)


def test_engines_come_and_go(world):
    one = world(engine())
    one.push(1)
    late = engine(2)
    one.engines.append(late)
    one.session.add_engine(EngineConfig(url=late.url))
    assert late.paused, "it must not serve what it booted with"
    one.push(2)
    assert_serves(late, one.tensors, 2)
    one.session.remove_engine(one.engines[0].url)
    one.push(3)
    assert_serves(late, one.tensors, 3)
    assert one.engines[0].weight_version == "2"


def test_nothing_is_left_after_close(world):
    before = {t.name for t in threading.enumerate()}
    one = world(engine(2))
    one.push(1)
    one.close()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        left = {t.name for t in threading.enumerate()} - before
        if not left:
            break
        time.sleep(0.05)
    assert not {name for name in left if "retire" not in name and not name.startswith("Thread")}


# ------------------------------------------------------------------------------------ pulls that go on by themselves


def refused(*args, **kwargs):
    raise AssertionError("it went the other way")


@pytest.mark.parametrize("pause", ["abort", "in_place", "none"])
@pytest.mark.parametrize(("version", "tp_size"), [("0.5.12", 1), ("0.5.23", 2)])
def test_an_engine_answers_and_is_flushed_while_its_ranks_pull(world, monkeypatch, version, tp_size, pause):
    going_on(monkeypatch)
    monkeypatch.setattr(Receivers, "pull_beside" if pause == "none" else "pull", refused)
    one = world(engine(tp_size, version=version), pause=pause, verify="none")
    fake, flush, before = one.engines[0], one.engines[0]._flush, list[bool]()

    def flushed(body):
        before.append(torch.equal(fake.models[0].norm, one.tensors["norm.weight"]))
        Going.may_end.set()
        return flush(body)

    fake._flush = flushed
    if pause != "abort":  # flushed before, or not at all
        Going.may_end.set()
    for step in (1, 2):
        if pause == "abort":
            Going.may_end.clear()
        report = one.push(step)
        assert_serves(fake, one.tensors, step)
        assert report.num_bytes == one.session.plan().num_bytes and report.engines[0].seconds["pull"] > 0
    assert before == ([] if pause == "in_place" else [False, False])


@pytest.mark.parametrize("version", ["0.5.12", "0.5.23"])
def test_what_went_beside_is_verified_by_reading_back(world, monkeypatch, version):
    going_on(monkeypatch)
    Going.may_end.set()
    one, beside = world(engine(1, version=version)), list[bool]()
    accept = Board.accept
    monkeypatch.setattr(Board, "accept", lambda board, *a, **k: (beside.append(True), accept(board, *a, **k)))
    for step in (1, 2):
        assert one.push(step).verified
        assert_serves(one.engines[0], one.tensors, step)
    assert len(beside) == (2 if version == "0.5.23" else 0), "here only a thread can read back, and only after the end"


def test_calls_that_were_written_ahead_for_a_push_that_fails_are_never_made(world, monkeypatch):
    going_on(monkeypatch)
    Going.may_end.set()
    one = world(engine(version="0.5.12"), verify="none")
    one.push(1)
    before = len(one.engines[0].paths())

    def seal(*args):
        raise TransferError("something wrote to them")

    with monkeypatch.context() as broken:
        broken.setattr(one.session._workers, "seal", seal)
        with pytest.raises(TransferError, match="something wrote"):
            one.push(2)
    called = one.engines[0].paths()[before:]
    assert UPDATE in called and not {"/update_weight_version", "/continue_generation"} & set(called)
    assert one.engines[0].paused and one.engines[0].weight_version == "1"
    lanes = one.session._links[0].client._calls.lanes
    assert [lane._unmade for lane in lanes.values()] == [[]] * len(lanes)
    one.push(3)
    assert_serves(one.engines[0], one.tensors, 3)


def test_what_a_pause_that_ends_late_has_prepared_is_no_part_of_the_next_push(world, monkeypatch):
    going_on(monkeypatch)
    Going.may_end.set()
    one = world(engine(version="0.5.12"), verify="none")
    one.push(1)
    (link,) = one.session._links
    link.prepare_pull("a push that has ended", 1, Deadline(5, "test"))
    assert link._ahead == {}
    one.push(2)
    assert_serves(one.engines[0], one.tensors, 2)


def test_an_engine_that_must_not_serve_is_paused_before_it_is_pulled_into_beside_whatever_else_is(world, monkeypatch):
    going_on(monkeypatch)
    Going.may_end.set()
    one = world(engine(version="0.5.12"), verify="none", pause="none")
    one.push(1)
    fake, (link,) = one.engines[0], one.session._links
    link.held, link.state, fake.paused = True, "fenced", False  # as where it could not be paused when a push failed
    fake.misbehave("/pause_generation", "500")
    with pytest.raises(EngineRejected, match="HTTP 500"):
        one.push(2)
    assert fake.weight_version == "1"
    one.push(3)
    assert_serves(fake, one.tensors, 3)
    assert fake.paths().count("/pause_generation") == 2


def test_a_pull_that_fails_on_its_way_fences_the_engine_and_the_next_push_heals_it(world, monkeypatch):
    going_on(monkeypatch)
    one = world(engine(version="0.5.12"), verify="none")
    Going.may_end.set()
    one.push(1)
    monkeypatch.setattr(Going, "error", "an illegal memory access was encountered")
    with pytest.raises(TransferError, match="illegal memory access") as caught:
        one.push(2)
    assert (caught.value.phase, caught.value.safe_to_retry) == ("move", False)
    assert [link.state for link in one.session._links] == ["fenced"] and one.engines[0].paused
    monkeypatch.setattr(Going, "error", "")
    one.push(3)
    assert_serves(one.engines[0], one.tensors, 3)


def test_a_pull_that_does_not_end_is_given_up_by_the_deadline(world, monkeypatch):
    going_on(monkeypatch)
    one, started = world(engine(version="0.5.12"), verify="none"), time.monotonic()
    with pytest.raises(TransferTimeout):
        one.push(1, timeout_s=2.0)
    assert time.monotonic() - started < 8
    assert [link.state for link in one.session._links] == ["fenced"] and one.engines[0].weight_version == "default"
    Going.may_end.set()
    one.push(2)
    assert_serves(one.engines[0], one.tensors, 2)

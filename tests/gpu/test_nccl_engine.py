"""Route ``nccl`` to a real SGLang: bytes, what its groups take of memory, and a sender killed in the middle of a
broadcast: when does the engine answer again?

The trainer is on GPU 0, the engine on GPU 1. What was seen is printed as one line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest
import torch

from benchmarks import models
from benchmarks.gpu_engine import GpuEngine
from tests import senders
from tests.gpu import real
from tests.gpu.world import fuller_by, used_bytes
from weightsync import devices, groups_stock, routes_broadcast
from weightsync.config import load_config
from weightsync.deadline import Deadline
from weightsync.demo_model import shapes
from weightsync.engines import Tensors
from weightsync.engines import sglang as client_module
from weightsync.errors import TransferError, WeightSyncError
from weightsync.groups_broadcast import BroadcastGroup
from weightsync.publisher import Publisher
from weightsync.reports import PushRequest
from weightsync.session import Session
from weightsync.transports import cuda_ipc, nccl_wire

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus, pytest.mark.timeout(500)]

GIB = 1 << 30
MIDDLE_S = 0.03
"""After so long of a broadcast of 24 GiB, which takes twice that and more."""
WATCHED_S = 30.0
BUCKET_BYTES = (8 << 20, 32 << 20)
"""The largest tensor has 4 MiB, the model 76."""
LESS_THAN_A_TENSOR = 3 << 20
SECOND_GROUP_BYTES = 650_000_000
SLACK_BYTES = 8 << 20
TOKENS = list(range(4, 40))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuEngine]:
    """On the second GPU: NCCL takes one member a GPU."""
    folder = tmp_path_factory.mktemp("nccl")
    written = models.write_config(folder / "model", real.MODEL)
    options = {"interpreter": real.interpreter("ENGINE_PYTHONPATH"), "log": folder / "engine.log"}
    with GpuEngine(written, first_gpu=1, **options) as started:
        started.wait(real.START_S)
        real.log_probabilities(started.url, TOKENS)  # what it compiles for its first request must not look like silence
        yield started


class Trainer:
    """One rank that holds the whole model on GPU 0."""

    def __init__(self) -> None:
        self.tensors = {
            name: torch.zeros(shape, dtype=torch.bfloat16, device="cuda:0")
            for name, shape in shapes(real.MODEL).items()
        }
        self.publisher = Publisher(self.tensors, rank=0, world_size=1)

    def train(self, step: int, seed: int) -> None:
        torch.manual_seed(seed)
        for tensor in self.tensors.values():
            tensor.normal_(std=0.02)
        self.publisher.step_done(step)


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    one = Trainer()
    yield one
    one.publisher.close()


def session(trainer: Trainer, url: str, **config) -> Session:
    settings = {"pair": "sgl_dtensor_v2", "route": "nccl", "timeout_s": 60.0, "connect_timeout_s": 120.0}
    peers = {"engines": [{"url": url}], "publishers": [trainer.publisher.address]}
    return Session(load_config(settings | peers | config), trainer="dtensor_v2")


def push(sync: Session, trainer: Trainer, step: int, seed: int = 1) -> None:
    trainer.train(step, seed)
    started = time.monotonic()
    report = sync.push(PushRequest(step=step))
    assert report.weight_version == str(step)
    print(f"push {step}: {time.monotonic() - started:.2f} s, verified {report.verified}")


def test_slices_and_broadcasts_bring_the_same_weights(engine, trainer, monkeypatch) -> None:
    said = {}
    for first, kind in ((1, "receiver"), (11, "stock")):
        if kind == "stock":
            monkeypatch.setattr(client_module, "RECEIVER_LOADER", "nobody's")
            monkeypatch.setattr(routes_broadcast, "PART_BYTES", 4 << 20)  # some by themselves, some in buckets
        verify, bucket_bytes = ("fingerprint", 8 << 20) if kind == "receiver" else ("none", LESS_THAN_A_TENSOR)
        sync = session(trainer, engine.url, verify=verify, bucket_bytes=bucket_bytes)
        try:
            for number, seed in enumerate((5, 6, 7)):
                push(sync, trainer, first + number, seed)
                said[kind, seed] = real.log_probabilities(engine.url, TOKENS)
        finally:
            sync.close()
    assert all(said["stock", seed] == said["receiver", seed] for seed in (5, 6, 7))
    assert said["stock", 5] != said["stock", 6]


def test_what_groups_with_a_stock_engine_take_of_both_gpus(engine, trainer, record, monkeypatch) -> None:
    """By one group and by the two that there are, with small buckets and with large ones, sender's context included."""
    monkeypatch.setattr(client_module, "RECEIVER_LOADER", "nobody's")
    small, large = BUCKET_BYTES
    cases = [(1, small), (1, small), (2, small), (2, large)]
    taken: dict[tuple[int, int], dict[str, int]] = {}
    for number, (wires, bucket_bytes) in enumerate(cases):
        monkeypatch.setattr(groups_stock, "WIRES", wires)
        before = used_bytes()
        sync = session(trainer, engine.url, verify="none", bucket_bytes=bucket_bytes)
        try:
            push(sync, trainer, 31 + number)
            taken[wires, bucket_bytes] = fuller_by(before)
        finally:
            sync.close()
        if number:  # the first time is not counted: what NCCL makes once an engine
            seen = {"way": "stock engine over NCCL", "groups": wires, "bucket_bytes": bucket_bytes}
            seen |= {"bytes_more": taken[wires, bucket_bytes], "bytes_left_when_closed": fuller_by(before)}
            print(seen)
            record("memory", seen)
    one, two = taken[1, small], taken[2, small]
    assert all(0 < two[gpu] - one[gpu] < SECOND_GROUP_BYTES for gpu in one), taken
    assert taken[2, large]["GPU 0"] - two["GPU 0"] <= 2 * (large - small) + SLACK_BYTES, taken


def test_an_engine_with_our_receiver_answers_again_within_the_deadline(engine, trainer, record) -> None:
    sync = session(trainer, engine.url)
    try:
        push(sync, trainer, 101)
        group = sync._groundwork.routes["nccl"]._exchanges[engine.url]
        trainer.train(102, 2)
        _stop_when_sending(group._senders[0].pid)
        started = time.monotonic()
        with pytest.raises(TransferError):
            sync.push(PushRequest(step=102, timeout_s=15.0))
        failed_s = time.monotonic() - started
        answers_s = _answers_again(engine.url, started)
        seen = {"engine": "receiver", "push_timeout_s": 15.0, "push_failed_s": failed_s, "answers_again_s": answers_s}
        print(json.dumps(seen))
        record("sender_killed", seen | {"gpu": torch.cuda.get_device_name()})
        assert failed_s < 25 and answers_s is not None
        push(sync, trainer, 103)
    finally:
        sync.close()


def test_a_stock_engine_whose_sender_is_killed_in_the_middle(engine, trainer, record, monkeypatch) -> None:
    """Last, since it may leave the engine to be restarted: this says which."""
    monkeypatch.setattr(client_module, "RECEIVER_LOADER", "nobody's")
    sync = session(trainer, engine.url, verify="none")
    try:
        push(sync, trainer, 201)
        group = sync._groundwork.routes["nccl"]._whole._groups[engine.url]
        seen = _kill_in_the_middle(group)
        seen["answers_again_s"] = _answers_again(engine.url, time.monotonic())
        if seen["answers_again_s"] is not None:
            group.link.state, group.link.held = "fenced", True
            push(sync, trainer, 202)
            seen["healed"] = True
        else:
            seen["healed"] = f"the engine must be restarted: no answer within {WATCHED_S:g} s"
        print(json.dumps(seen))
        record("sender_killed", seen | {"gpu": torch.cuda.get_device_name()})
        assert seen["sender_call"] != "done", "it was over before the sender was killed"
        assert seen["failed_s"] < 40
    finally:
        sync.close()


def _kill_in_the_middle(group: BroadcastGroup) -> dict:
    """SIGKILL the sender while both ends are in one large broadcast; when and how both calls ended."""
    client, deadline = group.link.client, Deadline(30.0, "test")
    memory = cuda_ipc.allocate(24 * GIB, devices.uuid_of(0))
    seen: dict = {"engine": "stock", "killed_after_s": MIDDLE_S}
    client.pause("abort", deadline)
    client.begin(deadline)
    what = Tensors(["weightsync.probe"], ["uint8"], [(24 * GIB,)])

    def call(name: str, function) -> None:
        started = time.monotonic()
        try:
            function()
            seen[name] = "done"
        except WeightSyncError as e:
            seen[name] = f"{time.monotonic() - started:.2f} s: {type(e).__name__}: {e.message[:200]}"

    name = group._names[0]
    broadcast = nccl_wire.Broadcast(name, memory.segment, 24 * GIB, 20.0)
    sender = group._senders[0]
    engine_side = threading.Thread(
        target=call,
        args=("engine_call", lambda: client.update_from_distributed(what, name, deadline).make(deadline)),
    )
    sender_side = threading.Thread(
        target=call, args=("sender_call", lambda: senders.broadcast(sender, broadcast, deadline))
    )
    started = time.monotonic()
    engine_side.start()
    time.sleep(0.5)
    sender_side.start()
    time.sleep(MIDDLE_S)
    group.give_up()
    sender_side.join()
    engine_side.join()
    assert {"engine_call", "sender_call"} <= set(seen), seen
    seen["failed_s"] = time.monotonic() - started
    memory.close()
    return seen


def _stop_when_sending(pid: int) -> None:
    """Kill a sender a moment from now."""
    os.kill(pid, signal.SIGSTOP)  # so that it is in the exchange, and does not get on
    threading.Timer(2.0, lambda: os.kill(pid, signal.SIGKILL)).start()


def _answers_again(url: str, since: float) -> float | None:
    """Seconds until the engine's scheduler answers; None if it does not."""
    while time.monotonic() - since < WATCHED_S:
        try:
            for path, body in (
                ("/continue_generation", {}),
                ("/generate", {"input_ids": TOKENS, "sampling_params": {"max_new_tokens": 1}}),
            ):
                request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode())
                request.add_header("content-type", "application/json")
                with urllib.request.urlopen(request, timeout=5) as answer:
                    answer.read()
            return time.monotonic() - since
        except OSError:
            time.sleep(0.2)
    return None

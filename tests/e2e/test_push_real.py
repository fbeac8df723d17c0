"""Pushes from two FSDP2-like ranks into real servers, all routes, both API generations, one and two TP ranks."""

from __future__ import annotations

import threading
import time

import httpx
import pytest

from tests.e2e.training import Training
from tests.servers import BOOT_SEED, PADDED, Kind, Servers, ask, log_probabilities
from weightsync.engines import sglang as client_module
from weightsync.errors import EngineRejected, PlanError

PROMPT = "The quick brown fox jumps over"
OTHER_SEED = 2
ROUTES = ("shm", "bucket", "nccl")
KINDS = [Kind("0.5.23"), PADDED]

pytestmark = [pytest.mark.timeout(900), pytest.mark.parametrize("kind", KINDS, ids=str)]


def version_of(url: str) -> str:
    return httpx.get(f"{url}/model_info", timeout=30).json()["weight_version"]


def test_all_routes_bring_the_same_bytes(servers: Servers, training: Training, kind: Kind) -> None:
    """Fingerprints verified, log-probabilities equal to the last bit: to each other and to a load from disk."""
    url, said = servers.get(kind).url, {}
    for route in ROUTES:
        with training.into(url, kind.model, route=route, bucket_bytes=300_000) as one:
            for seed in (OTHER_SEED, BOOT_SEED):
                report = one.push(seed)
                assert report.route == route and report.num_bytes > 0
                assert version_of(url) == str(one.step)
                said[route, seed] = log_probabilities(url, kind.model.vocab_size), ask(url, PROMPT).tokens
    for seed in (OTHER_SEED, BOOT_SEED):
        assert all(said[route, seed] == said["shm", seed] for route in ROUTES), f"routes differ on seed {seed}"
    assert said["shm", BOOT_SEED][0] == servers.fresh(kind)
    assert said["shm", OTHER_SEED][1] != said["shm", BOOT_SEED][1]


def test_a_broadcast_brings_what_is_loaded_from_disk(
    servers: Servers, training: Training, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "RECEIVER_LOADER", "nobody's")
    url, said = servers.get(kind).url, {}
    with training.into(url, kind.model, route="nccl", bucket_bytes=300_000, verify="none") as one:
        for seed in (OTHER_SEED, BOOT_SEED):
            one.train(seed)
            report = one.push_again()
            assert report.route == "nccl" and version_of(url) == str(one.step)
            assert any("buckets:" in note for note in report.notes), report.notes
            said[seed] = log_probabilities(url, kind.model.vocab_size)
    assert said[BOOT_SEED] == servers.fresh(kind) != said[OTHER_SEED]


def test_ask_push_ask_again_gives_the_new_weights_answer_from_no_cache(
    servers: Servers, training: Training, kind: Kind
) -> None:
    url = servers.get(kind).url
    with training.into(url, kind.model) as one:
        one.push(BOOT_SEED)
        first = ask(url, PROMPT)
        assert ask(url, PROMPT).cached > 0, "a repeated prompt is normally answered from the cache"
        one.push(OTHER_SEED)
        other = ask(url, PROMPT)
        assert other.cached == 0 and other.tokens != first.tokens
        one.push(BOOT_SEED)
        assert ask(url, PROMPT) == first._replace(cached=0)


@pytest.mark.parametrize("refused", ["fail", "wait"])
def test_a_flush_that_is_refused_fails_the_push_or_is_waited_for(
    servers: Servers, training: Training, kind: Kind, refused: str
) -> None:
    """Without a pause requests go on: the cache cannot be flushed, and that never passes unseen."""
    url = servers.get(kind).url
    with training.into(url, kind.model, pause="none", on_flush_refused=refused) as one:
        one.push(BOOT_SEED)
        before = ask(url, PROMPT)
        one.train(OTHER_SEED)
        asking = threading.Thread(target=ask, args=(url, PROMPT), kwargs={"max_tokens": 900})
        asking.start()
        try:
            time.sleep(0.5)
            if refused == "fail":
                with pytest.raises(EngineRejected, match="requests are waiting") as caught:
                    one.push_again()
                assert (caught.value.engine, caught.value.phase) == (url, "flush")
                assert [e["state"] for e in caught.value.report] == ["serving"]
                assert asking.is_alive(), "the request in flight was not touched"
                assert version_of(url) == "1"
                assert ask(url, PROMPT).tokens == before.tokens
            else:
                threading.Timer(0.5, httpx.post, (f"{url}/abort_request",), {"json": {"abort_all": True}}).start()
                assert one.push_again().verified and version_of(url) == "2"
                after = ask(url, PROMPT)
                assert after.cached == 0 and after.tokens != before.tokens
        finally:
            httpx.post(f"{url}/abort_request", json={"abort_all": True}, timeout=30)
            asking.join(timeout=120)
        assert not asking.is_alive()


def test_names_that_do_not_fit_are_refused_with_both_lists_before_a_byte_moves(
    servers: Servers, training: Training, kind: Kind
) -> None:
    url = servers.get(kind).url
    with training.into(url, kind.model) as one:
        one.push(BOOT_SEED)
    missing, stray = "model.layers.1.mlp.up_proj.weight", "model.layers.7.stray.weight"
    with (
        pytest.raises(PlanError) as caught,
        training.into(url, kind.model, without=[missing], extra={stray: [3, 2]}),
    ):
        pass
    text = str(caught.value)
    assert "tensors without a home" in text and stray in text, text
    assert "parameters without a source" in text and "model.layers.1.mlp.gate_up_proj.weight" in text, text
    assert "layers.0." not in text, f"names what is in order: {text}"
    assert version_of(url) == "1"
    assert log_probabilities(url, kind.model.vocab_size) == servers.fresh(kind), "something moved"
    with training.into(url, kind.model) as one:
        one.push(OTHER_SEED)

"""One suite for the SGLang client and the bucket wire on real servers: both API generations, one and two TP ranks.

The ids say which server ran. The test marked so kills its server: it is the last of those that share it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import torch

from tests.servers import BOOT_SEED, PADDED, Kind, Servers, ask
from weightsync.config import Config
from weightsync.deadline import Deadline
from weightsync.demo_model import weights
from weightsync.engines.sglang import SglangEngine
from weightsync.engines.sglang_calls import TEXT_LIMIT
from weightsync.errors import EngineLost, EngineRejected, TransferTimeout
from weightsync.spec import TensorSpec
from weightsync.transports import bucket

KINDS = [Kind("0.5.23"), Kind("0.5.12"), PADDED]
PROMPT = "The quick brown fox jumps over"
OTHER_SEED = 2

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module", params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture
def client(kind: Kind, servers: Servers) -> Iterator[SglangEngine]:
    client = SglangEngine(servers.get(kind).url, config=Config(pair="sgl_dtensor_v2"))
    client.connect(soon())
    yield client
    client.close()


def soon(seconds: float = 60.0) -> Deadline:
    return Deadline(seconds, "test")


def put(
    client: SglangEngine, kind: Kind, seed: int, *, flush: bool = True, share: bucket.Share = bucket.share_by_file
) -> int:
    """Bring the model of ``seed`` into the engine in buckets; the number of buckets."""
    values = {n: torch.from_numpy(v) for n, v in weights(kind.model, seed=seed).items()}
    specs = [TensorSpec(n, tuple(v.shape), "float32") for n, v in values.items()]
    buckets = bucket.plan_buckets(specs, 300_000)
    arenas = [bucket.Arena(max(b.nbytes for b in buckets)) for _ in range(2)]
    client.pause("abort", soon())
    if flush:
        client.flush(soon())
    client.begin(soon())
    for i, one in enumerate(buckets):
        flat = arenas[i % 2].tensor
        bucket.fill(flat, one, [values[e.tensor.name] for e in one.entries])
        payloads = bucket.payloads(flat, one, tp_size=kind.tp_size, share=share)
        client.update(payloads, bucket.LOAD_FORMAT, soon(), what=f"bucket {i + 1} of {len(buckets)}")
    client.end(soon())
    client.resume(soon())
    for arena in arenas:
        arena.close()
    return len(buckets)


def test_says_what_it_is(client: SglangEngine, kind: Kind) -> None:
    info = client.connect(soon())
    assert info.version == kind.version
    assert info.generation == {"0.5.23": "session", "0.5.12": "plain"}[kind.version]
    assert (info.tp_size, info.device, info.nnodes) == (kind.tp_size, "cpu", 1)
    assert info.architecture == "Qwen3ForCausalLM"
    assert info.has_receiver


def test_ask_push_ask_again_gives_the_new_weights_answer_from_no_cache(client: SglangEngine, kind: Kind) -> None:
    put(client, kind, BOOT_SEED)
    first = ask(client.url, PROMPT)
    assert ask(client.url, PROMPT).cached > 0, "a repeated prompt is normally answered from the cache"
    assert put(client, kind, OTHER_SEED) >= 5
    other = ask(client.url, PROMPT)
    assert other.cached == 0
    assert other.tokens != first.tokens
    put(client, kind, BOOT_SEED)
    assert ask(client.url, PROMPT) == first._replace(cached=0)


def test_without_a_flush_the_old_cache_would_be_used(client: SglangEngine, kind: Kind) -> None:
    ask(client.url, PROMPT)
    put(client, kind, OTHER_SEED, flush=False)
    assert ask(client.url, PROMPT).cached > 0


def test_payloads_by_value_do_the_same(client: SglangEngine, kind: Kind) -> None:
    put(client, kind, OTHER_SEED)
    expected = ask(client.url, PROMPT)
    put(client, kind, BOOT_SEED)
    put(client, kind, OTHER_SEED, share=bucket.share_by_value)
    assert ask(client.url, PROMPT) == expected


def test_a_flush_is_refused_while_requests_wait_and_can_be_waited_for(client: SglangEngine, kind: Kind) -> None:
    asking = threading.Thread(target=ask, args=(client.url, PROMPT), kwargs={"max_tokens": 900})
    asking.start()
    try:
        time.sleep(0.5)
        client.pause("in_place", soon())
        with pytest.raises(EngineRejected, match=r"requests are waiting; the engine says: .*[Ff]lush"):
            client.flush(soon())
        with pytest.raises(TransferTimeout, match="requests are waiting"):
            client.flush(soon(1.0), wait=True)
        client.resume(soon())
        threading.Timer(0.5, httpx.post, (f"{client.url}/abort_request",), {"json": {"abort_all": True}}).start()
        client.flush(soon(), wait=True)
    finally:
        asking.join(timeout=120)
    assert not asking.is_alive()


def test_pausing_by_abort_ends_running_requests(client: SglangEngine) -> None:
    asking = threading.Thread(target=ask, args=(client.url, PROMPT), kwargs={"max_tokens": 900})
    asking.start()
    time.sleep(0.5)
    client.pause("abort", soon())
    asking.join(timeout=30)
    client.flush(soon())
    client.resume(soon())
    assert not asking.is_alive()


def test_the_version_is_stamped_by_stamp_alone(client: SglangEngine, kind: Kind) -> None:
    client.stamp("41", soon())
    put(client, kind, BOOT_SEED)
    assert client.weight_version(soon()) == "41"
    client.stamp("42", soon())
    assert client.weight_version(soon()) == "42"


def test_a_session_left_open_is_closed_first(client: SglangEngine, kind: Kind) -> None:
    client.begin(soon())
    note = client.begin(soon())
    assert ("left open" in note) == (kind.version == "0.5.23")
    client.end(soon())


def test_updates_want_a_session_where_there_are_sessions(client: SglangEngine, kind: Kind) -> None:
    one = bucket.plan_buckets([TensorSpec("model.norm.weight", (kind.model.hidden_size,), "float32")], 1 << 20)[0]
    arena = bucket.Arena(one.nbytes)
    value = weights(kind.model, seed=BOOT_SEED)["model.norm.weight"]
    bucket.fill(arena.tensor, one, [torch.from_numpy(value)])
    payloads = bucket.payloads(arena.tensor, one, tp_size=kind.tp_size, share=bucket.share_by_file)
    if kind.version == "0.5.12":
        client.update(payloads, bucket.LOAD_FORMAT, soon())
    else:
        with pytest.raises(EngineRejected, match="between begin_weight_update"):
            client.update(payloads, bucket.LOAD_FORMAT, soon())
    arena.close()


def test_an_answer_that_echoes_the_payload_is_cut(client: SglangEngine) -> None:
    with pytest.raises(EngineRejected, match="HTTP 4") as caught:
        client.update(["x" * 200_000, 5], None, soon())  # type: ignore[list-item]
    assert len(str(caught.value)) < TEXT_LIMIT + 300


def test_a_version_that_is_no_string_is_refused_by_the_engine_itself(client: SglangEngine) -> None:
    body = {"new_version": 7, "abort_all_requests": False}
    assert httpx.post(f"{client.url}/update_weight_version", json=body, timeout=30).status_code == 400


def test_it_still_answers_with_the_right_weights(client: SglangEngine, kind: Kind) -> None:
    put(client, kind, BOOT_SEED)
    first = ask(client.url, PROMPT)
    assert len(first.tokens) == 8
    assert ask(client.url, PROMPT).tokens == first.tokens


@pytest.mark.ends_server
def test_a_dying_engine_is_not_waited_for(client: SglangEngine, kind: Kind, servers: Servers) -> None:
    client.begin(soon())
    deadly = bucket.encode(ctypes.CDLL, bucket.share_by_value)  # no unpickler of SGLang allows it: its scheduler dies
    started = time.monotonic()
    try:
        with pytest.raises((EngineLost, TransferTimeout)) as caught:
            client.update([deadly] * kind.tp_size, None, soon(4.0))
        assert time.monotonic() - started < 5
        assert (caught.value.engine, caught.value.phase) == (client.url, "move")
        assert not caught.value.safe_to_retry
    finally:
        servers.close()

"""The SGLang client against the fake engine: what it sends, what it makes of answers, that it always ends in time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.fakes.engine import UPDATE, FakeEngine
from weightsync.config import Config, load_config
from weightsync.deadline import Deadline
from weightsync.engines import Engine
from weightsync.engines.refusals import RULES, Asked, refusals
from weightsync.engines.sglang import SglangEngine
from weightsync.engines.sglang_calls import TEXT_LIMIT
from weightsync.errors import ConfigError, EngineLost, EngineRejected, TransferTimeout, WeightSyncError

VERSIONS = {"plain": "0.5.12", "session": "0.5.23"}
CONFIG = Config(pair="sgl_dtensor_v2")


def soon(seconds: float = 5.0) -> Deadline:
    return Deadline(seconds, "test")


@pytest.fixture(params=list(VERSIONS))
def fake(request: pytest.FixtureRequest) -> Iterator[FakeEngine]:
    with FakeEngine(version=VERSIONS[request.param], tp_size=2) as engine:
        yield engine


@pytest.fixture
def client(fake: FakeEngine) -> Iterator[SglangEngine]:
    client = SglangEngine(fake.url, config=CONFIG)
    client.connect(soon())
    yield client
    client.close()


def push(client: Engine, deadline: Deadline, *, buckets: int = 5) -> None:
    client.pause("abort", deadline)
    client.flush(deadline)
    client.begin(deadline)
    for i in range(buckets):
        client.update(["a", "b"], "flattened_bucket", deadline, what=f"bucket {i + 1} of {buckets}")
    client.end(deadline)
    client.stamp("7", deadline)
    client.confirm("7", deadline)
    client.resume(deadline)


# --------------------------------------------------------------------------------------------------- the calls


def test_says_what_the_engine_is(fake: FakeEngine, client: SglangEngine) -> None:
    fake.loaders = ["other.loader", "weightsync.receiver.load"]
    info = client.connect(soon())
    assert info.url == fake.url
    assert info.version == fake.version
    assert info.generation == ("session" if fake.version == "0.5.23" else "plain")
    assert (info.tp_size, info.device, info.weight_version, info.has_receiver) == (2, "cpu", "default", True)


def test_a_whole_update_makes_the_calls_of_its_generation(fake: FakeEngine, client: SglangEngine) -> None:
    push(client, soon(), buckets=2)
    update = ["/begin_weight_update", UPDATE, UPDATE, "/end_weight_update"]
    update = update if fake.sessions else [UPDATE, UPDATE]
    expected = ["/pause_generation", "/flush_cache", *update, "/update_weight_version", "/continue_generation"]
    assert fake.paths() == expected
    assert fake.weight_version == "7" and not fake.paused and not fake.session_open


def test_an_update_neither_flushes_nor_stamps_nor_aborts(fake: FakeEngine, client: SglangEngine) -> None:
    client.begin(soon())
    client.update(["a", "b"], None, soon())
    body = fake.calls[-1].body
    draft = {"selector": "target"} if fake.sessions else {"disable_draft_model": True}
    assert body == {
        "serialized_named_tensors": ["a", "b"],
        "load_format": None,
        "flush_cache": False,
        "abort_all_requests": False,
        **draft,
    }


def test_stamping_leaves_requests_alone_and_wants_a_string(fake: FakeEngine, client: SglangEngine) -> None:
    client.stamp("12", soon())
    stamped = next(c for c in fake.calls if c.path == "/update_weight_version")
    assert stamped.body == {"new_version": "12", "abort_all_requests": False}
    assert client.weight_version(soon()) == "12"
    with pytest.raises(ConfigError, match="non-empty string, got 12"):
        client.stamp(12, soon())  # type: ignore[arg-type]


def test_what_is_written_ahead_happens_when_it_is_made_or_never(fake: FakeEngine, client: SglangEngine) -> None:
    client.pause("abort", soon())
    client.begin(soon())
    made = [
        client.update_ahead(["a", "b"], None, soon()),
        client.stamp_ahead("12", soon()),
        client.resume_ahead(soon()),
    ]
    dropped = client.stamp_ahead("13", soon())
    before, sent = fake.paths(), list[str]()
    time.sleep(0.1)
    assert fake.paths() == before and fake.paused and fake.weight_version == "default"
    dropped.drop()
    for call in made:
        call.make(soon(), sent=lambda: sent.append(fake.calls[-1].path))
        call.drop()
    assert fake.paths()[len(before) :] == [UPDATE, "/update_weight_version", "/continue_generation"]
    assert fake.weight_version == "12" and not fake.paused and len(sent) == 3
    ahead = fake.calls[-3].body
    client.begin(soon()) if not fake.session_open else None
    client.update(["a", "b"], None, soon())
    assert ahead == fake.calls[-1].body and ahead["serialized_named_tensors"] == ["a", "b"]


def test_what_was_written_ahead_fails_as_other_calls_do(fake: FakeEngine, client: SglangEngine) -> None:
    for path, call in {
        "/update_weight_version": client.stamp_ahead("12", soon()),
        "/continue_generation": client.resume_ahead(soon()),
    }.items():
        fake.misbehave(path, "500")
        with pytest.raises(EngineRejected, match=f"POST {path}: HTTP 500") as caught:
            call.make(soon())
        assert caught.value.safe_to_retry and caught.value.engine == fake.url
    client.stamp("12", soon())
    assert fake.weight_version == "12"


def test_a_stamp_that_does_not_stick_is_noticed(fake: FakeEngine, client: SglangEngine) -> None:
    fake._stamp = lambda body: (200, {"success": True})  # type: ignore[method-assign]
    client.stamp("3", soon())
    with pytest.raises(EngineRejected, match="stamped '3', but /model_info reports 'default'"):
        client.confirm("3", soon())


def test_a_session_left_open_by_a_dead_run_is_closed_first() -> None:
    with FakeEngine(version="0.5.23") as fake:
        client = SglangEngine(fake.url, config=CONFIG)
        client.connect(soon())
        fake.session_open = True
        assert "left open" in client.begin(soon())
        assert fake.paths() == ["/begin_weight_update", "/end_weight_update", "/begin_weight_update"]
        client.end(soon())
        assert client.begin(soon()) == ""
        client.close()


def test_an_update_outside_a_session_is_rejected_in_the_engines_words() -> None:
    with FakeEngine(version="0.5.21") as fake:
        client = SglangEngine(fake.url, config=CONFIG)
        client.connect(soon())
        with pytest.raises(EngineRejected, match="must run between begin_weight_update"):
            client.update(["a"], None, soon())
        client.close()


def test_a_refused_flush_fails_or_waits(fake: FakeEngine, client: SglangEngine) -> None:
    fake.waiting = 1
    with pytest.raises(EngineRejected, match="requests are waiting; the engine says: Flush cache failed"):
        client.flush(soon())
    with pytest.raises(TransferTimeout, match="Flush cache failed"):
        client.flush(soon(1.5), wait=True)
    threading.Timer(0.3, lambda: setattr(fake, "waiting", 0)).start()
    client.flush(soon(), wait=True)


def test_waiting_does_not_excuse_other_failures_of_a_flush(fake: FakeEngine, client: SglangEngine) -> None:
    fake.misbehave("/flush_cache", "500")
    with pytest.raises(EngineRejected, match="HTTP 500"):
        client.flush(soon(), wait=True)


def test_draining_aborts_and_waits_until_nothing_runs(fake: FakeEngine, client: SglangEngine) -> None:
    fake.waiting = 3
    assert client.num_requests(soon()) == 3
    client.drain(3, soon())
    assert client.num_requests(soon()) == 0
    assert fake.paths() == ["/abort_request"]


@pytest.mark.parametrize("how", ["500", "400", "not json"])
def test_an_engine_that_does_not_say_what_runs_is_paused_as_ever(
    client: SglangEngine, fake: FakeEngine, how: str
) -> None:
    fake.misbehave("/v1/loads", how)
    assert client.num_requests(soon()) == 0


def test_calls_from_several_threads(fake: FakeEngine, client: SglangEngine) -> None:
    client.begin(soon())
    threads = [threading.Thread(target=client.update, args=(["a", "b"], None, soon())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fake.paths().count(UPDATE) == 8


# ---------------------------------------------------------------------------------------------------- refusals

REFUSED = {
    "pipeline parallelism": {"pp_size": 2},
    "data-parallel replicas": {"dp_size": 2},
    "quantised weights": {"quantization": "fp8"},
    "expert placement that moves": {"ep_num_redundant_experts": 4},
    "a draft model": {"speculative_algorithm": "EAGLE"},
    "weight cache": {"weight_cache_mode": "daemon"},
    "an MoE backend that rewrites expert weights": {"moe_runner_backend": "flashinfer_trtllm"},
    "weights offloaded to the host": {"cpu_offload_gb": 8},
    "LoRA": {"enable_lora": True},
    "a KV cache that a flush does not reach": {"hicache_storage_backend": "file"},
    "several HTTP workers": {"tokenizer_worker_num": 4},
    "several nodes": {"nnodes": 2},
}
ALSO_REFUSED = [
    {"torchao_config": "int4wo-128"},
    {"enable_eplb": True},
    {"init_expert_location": "/tmp/placement.json"},
    {"speculative_draft_model_path": "/models/draft"},
    {"offload_group_size": 4},
    {"lora_paths": ["a=/b"]},
    {"enable_lmcache": True},
]
ACCEPTED = [
    {"dp_size": 2, "enable_dp_attention": True},
    {"attn_dp_size": 2, "dp_size": 1},
    {"moe_runner_backend": "triton", "ep_size": 4},
    {"enable_memory_saver": True},
    {"weight_cache_mode": "off", "quantization": None, "torchao_config": "", "offload_group_size": -1},
    {"init_expert_location": "trivial", "ep_num_redundant_experts": 0, "lora_paths": []},
]


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_by_name_at_connect(name: str) -> None:
    with FakeEngine(info=REFUSED[name]) as fake:
        client = SglangEngine(fake.url, config=CONFIG)
        field, value = next(iter(REFUSED[name].items()))
        with pytest.raises(ConfigError) as caught:
            client.connect(soon())
        assert f"{name} ({field}={value!r})" in caught.value.message
        assert caught.value.engine == fake.url
        assert fake.paths() == [], "nothing but questions was asked"
        client.close()


@pytest.mark.parametrize("info", ALSO_REFUSED, ids=str)
def test_refuses_the_other_spellings_too(info: dict) -> None:
    assert len(refusals(info, Asked((0, 5, 23), "abort", True))) == 1


@pytest.mark.parametrize("info", ACCEPTED, ids=str)
def test_accepts_what_works(info: dict) -> None:
    assert refusals(info, Asked((0, 5, 23), "abort", True)) == []


@pytest.mark.parametrize(("version", "refused"), [("0.5.12", True), ("0.5.20", True), ("0.5.21", False)])
def test_retract_needs_a_flush_that_works_after_it(version: str, refused: bool) -> None:
    with FakeEngine(version=version) as fake:
        client = SglangEngine(fake.url, config=load_config({"pair": "sgl_dtensor_v2", "pause": "retract"}))
        if refused:
            with pytest.raises(ConfigError, match=r"pause: retract: before 0\.5\.21"):
                client.connect(soon())
        else:
            client.connect(soon())
        client.close()


def test_nodes_matter_only_to_routes_of_one_node() -> None:
    assert refusals({"nnodes": 2}, Asked((0, 5, 23), "abort", same_node=False)) == []


def test_every_rule_has_a_test_and_all_reasons_are_given_at_once() -> None:
    tested = {*REFUSED, "pause: retract"}
    assert tested == {rule.name for rule in RULES}
    everything = {k: v for info in REFUSED.values() for k, v in info.items()}
    assert len(refusals(everything, Asked((0, 5, 12), "retract", True))) == len(RULES)


def test_an_unknown_version_is_refused() -> None:
    with FakeEngine(info={"version": "main"}) as fake:
        client = SglangEngine(fake.url, config=CONFIG)
        with pytest.raises(ConfigError, match="'main'"):
            client.connect(soon())
        client.close()


# ---------------------------------------------------------------------------------------- keys, URLs, absence


def test_a_wrong_key_is_a_configuration_error_and_keys_are_never_shown() -> None:
    with FakeEngine(api_key="right-secret") as fake:
        for key, hint in (("", "none is configured"), ("wrong-secret", "does not accept")):
            client = SglangEngine(fake.url, api_key=key, config=CONFIG)
            with pytest.raises(ConfigError, match=f"401: .*{hint}") as caught:
                client.connect(soon())
            assert "secret" not in str(caught.value)
            client.close()
        client = SglangEngine(fake.url, api_key="right-secret", config=CONFIG)
        assert "secret" not in repr(client.connect(soon()))
        client.pause("abort", soon())
        fake._pause = lambda body: (400, "bad header Bearer right-secret")  # type: ignore[method-assign]
        with pytest.raises(EngineRejected, match=r"bad header Bearer \*\*\*"):
            client.pause("abort", soon())
        client.close()


@pytest.mark.parametrize(
    ("engine", "given", "works"),
    [
        ({"api_key": "plain", "admin_api_key": "admin"}, {"api_key": "plain", "admin_api_key": "admin"}, True),
        ({"api_key": "plain", "admin_api_key": "admin"}, {"api_key": "plain"}, False),
        ({"admin_api_key": "admin"}, {"admin_api_key": "admin"}, True),
        ({"admin_api_key": "admin"}, {"api_key": "admin"}, True),
        ({"admin_api_key": "admin"}, {}, False),
    ],
)
def test_an_engine_with_two_keys_wants_each_in_its_place(engine: dict, given: dict, works: bool) -> None:
    with FakeEngine(**engine) as fake:
        client = SglangEngine(fake.url, **given, config=CONFIG)
        client.connect(soon())
        if works:
            client.pause("abort", soon())
            assert fake.paused
        else:
            with pytest.raises(ConfigError, match=r"POST /pause_generation: HTTP 401: .*admin_api_key"):
                client.pause("abort", soon())
        client.close()


def test_an_engine_that_is_not_there_is_lost_at_once() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    client = SglangEngine(url, config=CONFIG)
    started = time.monotonic()
    with pytest.raises(EngineLost, match=r"GET /server_info at http://127\.0\.0\.1:.*refused") as caught:
        client.connect(soon(20))
    assert time.monotonic() - started < 2
    assert caught.value.safe_to_retry and caught.value.engine == url
    client.close()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:30000",
        "ftp://host",
        "http://",
        "http://host:99999",
        "http://host:x",
        "http://hôte",
        "http://[::1",
    ],
)
def test_a_bad_url_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigError, match="engine URL"):
        SglangEngine(url, config=CONFIG)


def test_a_name_that_no_host_can_have_is_an_engine_that_is_not_there() -> None:
    client = SglangEngine("http://a..b:30000", config=CONFIG)
    with pytest.raises(EngineLost, match="no connection"):
        client.connect(soon())
    client.close()


@pytest.mark.parametrize("key", ["secret\n", " secret", "sécret", "sec\x00ret"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="admin_api_key is not plain text") as caught:
        SglangEngine("http://host", admin_api_key=key, config=CONFIG)
    assert "cret" not in str(caught.value)


def test_an_engine_by_an_ipv6_address_is_called_by_its_name_in_brackets() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
        client = SglangEngine(f"http://[::1]:{port}", config=CONFIG)

        def asked() -> None:
            with pytest.raises(EngineLost):
                client.flush(soon())

        asking = threading.Thread(target=asked)
        asking.start()
        connection, _ = server.accept()
        with connection:
            head = connection.recv(4096)
        asking.join()
        client.close()
    assert f"Host: [::1]:{port}\r\n".encode() in head


def test_a_proxy_in_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with FakeEngine() as fake:
        client = SglangEngine(fake.url + "/", config=CONFIG)
        assert client.connect(soon()).url == fake.url
        client.close()


# --------------------------------------------------------------------------------- bad replies, drops, silence

SLACK_S = 2.0  # for a busy machine

BAD_REPLIES = {
    "500": (EngineRejected, "HTTP 500.*Internal Server Error"),
    "400": (EngineRejected, "HTTP 400.*told to refuse"),
    "200 false": (EngineRejected, "HTTP 200.*told to fail"),
    "not json": (EngineRejected, "not JSON.*a proxy's page"),
    "drop": (EngineLost, "the connection broke"),
    "die": (EngineLost, "the connection broke"),
    "silent": (TransferTimeout, "no answer within"),
    "drip": (TransferTimeout, "no answer within"),
}


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("version", VERSIONS.values(), ids=list(VERSIONS))
@pytest.mark.parametrize("how", BAD_REPLIES)
def test_bucket_3_of_5_goes_wrong(how: str, version: str) -> None:
    error, text = BAD_REPLIES[how]
    threads, files = threading.active_count(), open_files()
    with FakeEngine(version=version, tp_size=2) as fake:
        client = SglangEngine(fake.url, config=CONFIG)
        client.connect(soon())
        fake.misbehave(UPDATE, how, at=3, seconds=0.05)
        timeout_s = 2.0 if error is TransferTimeout else 20.0
        started = time.monotonic()
        with pytest.raises(error, match=f"(?s)bucket 3 of 5: .*{text}") as caught:
            push(client, soon(timeout_s))
        assert time.monotonic() - started < timeout_s + SLACK_S
        assert caught.value.engine == fake.url
        assert caught.value.phase == "move"
        assert not caught.value.safe_to_retry
        assert fake.paths().count(UPDATE) == 3
        assert fake.weight_version == "default"
        client.close()
    assert (threading.active_count(), open_files()) == (threads, files)


CALLS: dict[str, tuple[str, str, Callable[[Engine, Deadline], object]]] = {
    "connect": ("/server_info", "connect", lambda c, d: c.connect(d)),
    "pause": ("/pause_generation", "pause", lambda c, d: c.pause("abort", d)),
    "flush": ("/flush_cache", "flush", lambda c, d: c.flush(d)),
    "begin": ("/begin_weight_update", "begin", lambda c, d: c.begin(d)),
    "update": (UPDATE, "move", lambda c, d: c.update(["a", "b"], None, d)),
    "end": ("/end_weight_update", "end", lambda c, d: c.end(d)),
    "stamp": ("/update_weight_version", "commit", lambda c, d: c.stamp("1", d)),
    "resume": ("/continue_generation", "continue", lambda c, d: c.resume(d)),
    "weight_version": ("/model_info", "version", lambda c, d: c.weight_version(d)),
}
REPEATABLE = {"connect", "pause", "flush", "stamp", "resume", "weight_version"}


@pytest.mark.parametrize("how", ["silent", "drip", "drop", "500"])
@pytest.mark.parametrize("call", CALLS)
def test_every_call_ends_by_its_deadline_in_a_typed_error(call: str, how: str) -> None:
    path, phase, make = CALLS[call]
    expected = {"silent": TransferTimeout, "drip": TransferTimeout, "drop": EngineLost, "500": EngineRejected}[how]
    with FakeEngine(tp_size=2) as fake:
        client = SglangEngine(fake.url, config=CONFIG)
        client.connect(soon())
        fake.misbehave(path, how, seconds=0.05)
        timeout_s = 0.4 if expected is TransferTimeout else 20.0
        started = time.monotonic()
        with pytest.raises(expected) as caught:
            make(client, soon(timeout_s))
        assert time.monotonic() - started < timeout_s + SLACK_S
        assert (caught.value.engine, caught.value.phase) == (fake.url, phase)
        assert caught.value.safe_to_retry == (call in REPEATABLE)
        assert path in str(caught.value)
        client.close()


def test_an_answer_whose_body_does_not_follow_its_head_ends_by_the_same_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = SglangEngine(f"http://127.0.0.1:{server.getsockname()[1]}", config=CONFIG)
        done = threading.Event()

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                time.sleep(3)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")
                done.wait(20)

        answering = threading.Thread(target=answer)
        answering.start()
        started = time.monotonic()
        with pytest.raises(TransferTimeout):
            client.resume(soon(4))
        took = time.monotonic() - started
        done.set()
        answering.join()
        client.close()
    assert took < 4 + SLACK_S


def test_a_passed_deadline_makes_no_call(fake: FakeEngine, client: SglangEngine) -> None:
    with pytest.raises(TransferTimeout):
        client.pause("abort", soon(0))
    assert fake.paths() == []


def test_an_answer_that_echoes_the_payload_is_cut(fake: FakeEngine, client: SglangEngine) -> None:
    fake.misbehave(UPDATE, "echo")
    client.begin(soon())
    with pytest.raises(EngineRejected) as caught:
        client.update(["x" * 1_000_000, "y"], None, soon())
    assert len(str(caught.value)) < TEXT_LIMIT + 300
    assert "bad schema" in str(caught.value) and "characters)" in str(caught.value)


def test_too_few_payloads_kill_an_engine_and_that_is_reported(fake: FakeEngine, client: SglangEngine) -> None:
    client.begin(soon())
    with pytest.raises(EngineLost, match="the connection broke"):
        client.update(["only one"], "flattened_bucket", soon())
    with pytest.raises(EngineLost):
        client.weight_version(soon())


def test_errors_survive_the_wire_between_processes(fake: FakeEngine, client: SglangEngine) -> None:
    from weightsync.errors import error_from_wire

    fake.misbehave("/pause_generation", "400")
    with pytest.raises(WeightSyncError) as caught:
        client.pause("abort", soon())
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(caught.value.to_wire()))
    assert str(error_from_wire(wire)) == str(caught.value)

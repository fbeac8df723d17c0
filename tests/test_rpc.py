"""The call wire: types there and back, refusals, deadlines, and nothing left when it is closed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import zmq

from weightsync import addresses
from weightsync.deadline import Deadline
from weightsync.errors import (
    ConfigError,
    EngineLost,
    EngineRejected,
    TransferError,
    TransferTimeout,
    VerifyMismatch,
    WeightSyncError,
)
from weightsync.rpc import Client, Server
from weightsync.spec import Box


class Target:
    def __init__(self) -> None:
        self.calls = 0
        self.gate = threading.Event()

    @property
    def broken_property(self) -> int:
        raise RuntimeError("must not be read to find the methods")

    def nothing(self) -> None:
        self.calls += 1

    def echo(self, value: bytes) -> bytes:
        return value

    def grow(self, box: Box) -> Box:
        return Box(offset=box.offset, size=tuple(2 * s for s in box.size))

    def hold(self, value: int) -> int:
        self.gate.wait(30)
        return value

    def fail(self, kind: str) -> None:
        where = {"engine": "http://e", "rank": 3, "tensor": "w", "phase": "move", "safe_to_retry": True}
        kinds = {c.__name__: c for c in (EngineRejected, VerifyMismatch, ConfigError)}
        raise kinds[kind]("no", **where, report=[{"url": "http://e", "state": "fenced"}])

    def crash(self) -> None:
        raise KeyError("inner")

    def unencodable(self) -> object:
        return object()

    def _hidden(self) -> str:
        return "secret"


@pytest.fixture
def target() -> Target:
    return Target()


@pytest.fixture
def server(target):
    server = Server(target)
    yield server
    target.gate.set()
    server.close()


@pytest.fixture
def client(server):
    client = Client(server.address, what="the target")
    yield client
    client.close()


def soon(timeout_s: float = 10.0) -> Deadline:
    return Deadline(timeout_s, "test")


def until(condition, timeout_s: float = 5.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "did not come true"
        time.sleep(0.01)


# --------------------------------------------------------------------------------------------------- there and back


def test_values_and_structs_arrive_as_what_they_are(client, target):
    assert client.call("nothing", deadline=soon()) is None
    assert target.calls == 1
    assert client.call("echo", b"\x00\xff", deadline=soon(), returns=bytes) == b"\x00\xff"
    box = client.call("grow", Box(offset=(1, 2), size=(3, 0)), deadline=soon(), returns=Box)
    assert box == Box(offset=(1, 2), size=(6, 0))


def test_large_messages(client):
    payload = os.urandom(1 << 20) * 64
    assert client.call("echo", payload, deadline=soon(60), returns=bytes) == payload


@pytest.mark.parametrize("kind", [EngineRejected, VerifyMismatch, ConfigError])
def test_errors_keep_type_and_fields(client, kind):
    with pytest.raises(kind) as caught:
        client.call("fail", kind.__name__, deadline=soon())
    error = caught.value
    assert type(error) is kind
    assert (error.engine, error.rank, error.tensor, error.phase) == ("http://e", 3, "w", "move")
    assert error.safe_to_retry is True
    assert error.report == [{"url": "http://e", "state": "fenced"}]


@pytest.mark.parametrize(
    ("method", "argument", "kind", "words"),
    [
        ("crash", None, TransferError, r"crash: KeyError: 'inner'"),
        ("unencodable", None, TransferError, "unencodable: TypeError"),
        ("grow", "not a box", TransferError, "grow: ValidationError"),
        ("absent", None, ConfigError, "no method 'absent'"),
        ("_hidden", None, ConfigError, "no method '_hidden'"),
        ("broken_property", None, ConfigError, "no method 'broken_property'"),
        ("__init__", None, ConfigError, "no method '__init__'"),
    ],
)
def test_what_goes_wrong_at_the_server_is_a_typed_error_and_the_server_lives_on(client, method, argument, kind, words):
    with pytest.raises(kind, match=words):
        client.call(method, argument, deadline=soon())
    client.call("nothing", deadline=soon())


def test_an_answer_of_another_type_is_a_typed_error(client):
    with pytest.raises(TransferError, match="the target: echo: an answer that is not as expected"):
        client.call("echo", b"x", deadline=soon(), returns=Box)


# ------------------------------------------------------------------------------------------------------------ refusals


def test_a_wrong_token_is_refused_and_nothing_is_called(server, target):
    where = server.address.partition("#")[0]
    stranger = Client(f"{where}#guess")
    with contextlib.closing(stranger), pytest.raises(ConfigError, match="wrong token"):
        stranger.call("nothing", deadline=soon())
    assert target.calls == 0


@pytest.mark.parametrize("address", ["", "http://h:1#t", "tcp://h:1", "tcp://h:1#", "tcp://h#t", "tcp://h:x#t"])
def test_what_is_not_an_address_is_refused_without_showing_a_token(address):
    with pytest.raises(ConfigError, match="not an address of weightsync"):
        Client(address)
    with pytest.raises(ConfigError) as caught:
        Client("http://h:1#hush")
    assert "hush" not in str(caught.value)


def test_frames_of_strangers_are_ignored(server, client):
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.connect(server.address.partition("#")[0])
    dealer.send(b"hello")
    dealer.send_multipart([b"a"] * 9)
    with socket.create_connection(("127.0.0.1", int(server.address.partition("#")[0].rpartition(":")[2]))) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
        client.call("nothing", deadline=soon())
    dealer.close()
    context.term()


# ----------------------------------------------------------------------------------------------------------- deadlines


def test_a_call_that_is_not_answered_ends_at_its_deadline(client, target):
    start = time.monotonic()
    with pytest.raises(TransferTimeout, match=r"the target: hold: no answer within 0\.3 s \(test\)"):
        client.call("hold", 1, deadline=soon(0.3))
    assert 0.25 < time.monotonic() - start < 3
    target.gate.set()
    assert client.call("hold", 2, deadline=soon()) == 2, "and its late answer is not taken for another's"


def test_a_deadline_that_has_passed_or_never_comes(client):
    assert client.call("echo", b"x", deadline=Deadline(float("inf"), "test")) == b"x"
    with pytest.raises(TransferTimeout):
        client.call("hold", 1, deadline=Deadline(0.0, "test"))


def test_nobody_there(server):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        client = Client(f"tcp://127.0.0.1:{unused.getsockname()[1]}#t", what="nobody")
    with contextlib.closing(client), pytest.raises(TransferError, match="nobody: nothing"):
        client.call("nothing", deadline=soon(1.0))


# --------------------------------------------------------------------------------------------------------- concurrency


def test_concurrent_calls_each_get_their_own_answer(server):
    with contextlib.closing(Client(server.address)) as client, ThreadPoolExecutor(16) as pool:
        payloads = [os.urandom(1000) for _ in range(400)]
        answers = list(pool.map(lambda p: client.call("echo", p, deadline=soon(30), returns=bytes), payloads))
    assert answers == payloads


def test_calls_run_side_by_side_up_to_the_number_of_workers(target):
    server = Server(target, workers=2)
    with (
        contextlib.closing(server),
        contextlib.closing(Client(server.address)) as client,
        ThreadPoolExecutor(3) as pool,
    ):
        holding = [pool.submit(client.call, "hold", i, deadline=soon(20)) for i in range(3)]
        with pytest.raises(TransferTimeout):
            client.call("nothing", deadline=soon(0.3))
        target.gate.set()
        assert [h.result() for h in holding] == [0, 1, 2]
        client.call("nothing", deadline=soon())


def test_two_servers_of_one_host_do_not_meet(target):
    with contextlib.closing(Server(target)) as one, contextlib.closing(Server(Target())) as two:
        assert one.address != two.address
        with contextlib.closing(Client(one.address)) as client:
            client.call("nothing", deadline=soon())
    assert target.calls == 1


# ------------------------------------------------------------------------------------------------------------- endings


def test_a_server_closed_during_a_call_ends_it_at_once(target):
    server = Server(target)
    with contextlib.closing(Client(server.address, what="trainer")) as client, ThreadPoolExecutor(1) as pool:
        held = pool.submit(client.call, "hold", 1, deadline=soon(30))
        until(lambda: server._calls.empty() and not held.done())
        time.sleep(0.2)
        start = time.monotonic()
        server.close()
        with pytest.raises(TransferError, match="hold: the other side closed before it was done"):
            held.result(timeout=5)
        assert time.monotonic() - start < 3
    target.gate.set()


SERVE = """
import os, sys, time
from weightsync.rpc import Server
class Target:
    def wait(self) -> None:
        time.sleep(60)
    def pid(self) -> int:
        return os.getpid()
server = Server(Target())
print(server.address, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def process():
    started = subprocess.Popen([sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with started:
        yield started
        started.kill()


def test_a_killed_process_ends_the_call_at_once_with_the_error_asked_for(process):
    address = process.stdout.readline().strip()
    with contextlib.closing(Client(address, what="rank 1", lost=EngineLost)) as client:
        assert client.call("pid", deadline=soon(30)) == process.pid
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.call, "wait", deadline=soon(30))
            time.sleep(0.3)
            os.kill(process.pid, signal.SIGKILL)
            start = time.monotonic()
            with pytest.raises(EngineLost, match="rank 1: wait: the connection dropped"):
                waiting.result(timeout=10)
        assert time.monotonic() - start < 3
        with pytest.raises(WeightSyncError):
            client.call("pid", deadline=soon(1.0))


def test_a_process_that_was_killed_between_two_calls_is_missed_at_once(process):
    address = process.stdout.readline().strip()
    with contextlib.closing(Client(address, what="rank 1", lost=EngineLost)) as client:
        assert client.call("pid", deadline=soon(30)) == process.pid
        process.kill()
        process.wait()
        for _ in range(2):
            start = time.monotonic()
            with pytest.raises(EngineLost, match="rank 1: pid: the connection dropped"):
                client.call("pid", deadline=soon(30))
            assert time.monotonic() - start < 5


def test_a_process_that_forgets_to_close_still_ends(process):
    address = process.stdout.readline().strip()
    with contextlib.closing(Client(address)) as client, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.call, "wait", deadline=soon(30))
        time.sleep(0.3)
        process.stdin.close()
        assert process.wait(timeout=10) == 0
        assert isinstance(waiting.exception(timeout=10), TransferError)


def test_a_client_closed_during_a_call_ends_it(server, target):
    client = Client(server.address)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(client.call, "hold", 1, deadline=soon(30))
        time.sleep(0.2)
        client.close()
        with pytest.raises(TransferError, match="this client was closed"):
            held.result(timeout=5)
    with pytest.raises(TransferError, match="this client was closed"):
        client.call("nothing", deadline=soon())
    client.close()
    target.gate.set()


def own_sockets() -> int:
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    count = 0
    for link in links:
        with contextlib.suppress(OSError):
            count += os.readlink(link).startswith(("socket:", "anon_inode:"))
    return count


def kernel_threads() -> int:
    """Threads of the process, ZeroMQ's own included."""
    return len(os.listdir("/proc/self/task"))


def test_a_client_knows_without_asking_whether_the_server_is_there(target):
    server = Server(target)
    client = Client(server.address)
    assert not client.is_connected(), "nobody has called yet"
    client.call("nothing", deadline=soon())
    assert client.is_connected()
    server.close()
    until(lambda: not client.is_connected())
    client.close()


def test_nothing_is_left_after_close(target):
    before = set(threading.enumerate())

    def round_trip() -> None:
        server = Server(target)
        client = Client(server.address)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: client.call("nothing", deadline=soon()), range(20)))
        with pytest.raises(TransferTimeout):
            client.call("hold", 1, deadline=soon(0.05))
        target.gate.set()
        client.close()
        server.close()
        server.close()
        until(lambda: not [t for t in set(threading.enumerate()) - before if t.name.startswith("weightsync-rpc")])
        target.gate.clear()  # only now: a worker that comes to ``hold`` late would wait for ever

    round_trip()
    sockets, threads = own_sockets(), kernel_threads()
    for _ in range(5):
        round_trip()
    until(lambda: own_sockets() <= sockets and kernel_threads() <= threads)  # fewer: what other tests left has ended


def test_short_lived_threads_do_not_pile_up_connections(client):
    def one_call() -> None:
        client.call("nothing", deadline=soon())

    one_call()
    before = own_sockets()
    for _ in range(30):
        thread = threading.Thread(target=one_call)
        thread.start()
        thread.join()
    assert own_sockets() <= before


# ----------------------------------------------------------------------------------------------------------- addresses


def reach(host: str) -> str:
    """Serve on ``host``, call through what is advertised, and return the advertised host."""
    with (
        contextlib.closing(Server(Target(), host=host)) as server,
        contextlib.closing(Client(server.address)) as client,
    ):
        assert client.call("echo", b"x", deadline=soon(), returns=bytes) == b"x"
        return server.address.partition("#")[0].removeprefix("tcp://").rpartition(":")[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "", "*", "::", socket.gethostname()])
def test_what_is_advertised_can_be_reached(host):
    advertised = reach(host)
    assert advertised not in ("0.0.0.0", "[::]", "*", "", "localhost")


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_ipv6(host):
    assert reach(host) == "[::1]"


@pytest.mark.parametrize("host", ["no-such-host.invalid", "203.0.113.7"])
def test_a_host_that_is_not_ours_is_named(host):
    with pytest.raises(ConfigError, match=f"cannot listen on host '{host}'"):
        Server(Target(), host=host)


def test_a_wildcards_address_depends_on_who_asks():
    assert addresses.reachable_host("0.0.0.0", "127.0.0.1") == "127.0.0.1"
    assert addresses.reachable_host("::", "::1") == "::1"
    assert ":" not in addresses.reachable_host("0.0.0.0")


def test_an_unreachable_machine_says_what_was_tried(monkeypatch):
    def nowhere(*_):
        raise OSError("no route")

    monkeypatch.setattr(addresses.socket, "getaddrinfo", nowhere)
    with pytest.raises(ConfigError, match=r"no address of this machine.*tried routes to 10\.0\.0\.9, .*localhost"):
        addresses.reachable_host("0.0.0.0", "10.0.0.9")


def test_tokens_differ_from_run_to_run(target):
    tokens = set()
    for _ in range(3):
        server = Server(target)
        tokens.add(server.address.partition("#")[2])
        server.close()
    assert len(tokens) == 3
    assert all(len(token) >= 16 for token in tokens)


def test_an_argument_with_a_field_missing_is_refused(client):
    class Older(msgspec.Struct, array_like=True):
        offset: tuple[int, ...]

    with pytest.raises(TransferError, match="grow: ValidationError"):
        client.call("grow", Older((1,)), deadline=soon())

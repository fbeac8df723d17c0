"""A lane against a server that is a bare socket: order, answers that come together, and everything that can break."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from weightsync.deadline import Deadline
from weightsync.engines import lane as lanes
from weightsync.engines.lane import Lane
from weightsync.errors import EngineLost, TransferTimeout


def answer(text: str, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(text)}", *headers, "", text]
    return "\r\n".join(lines).encode()


class BareServer:
    """Accepts connections and leaves all else to the test. ``came``: what was read, by connection."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections: list[socket.socket] = []
        self.came: list[bytes] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.came.append(b"")
            self.connections.append(connection)
            threading.Thread(target=self._read, args=(len(self.came) - 1, connection), daemon=True).start()

    def _read(self, number: int, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := connection.recv(65536):
                self.came[number] += data

    def bodies(self, number: int = -1) -> list[bytes]:
        """Of the requests that came on a connection."""
        return [part.split(b"\r\n\r\n")[1] for part in self.came[number].split(b"POST ")[1:] if self.came]

    def close(self) -> None:
        self._listener.close()
        for number in range(len(self.connections)):
            self.drop(number)

    def drop(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self.connections[number].shutdown(socket.SHUT_RDWR)
        self.connections[number].close()


@pytest.fixture
def server() -> Iterator[BareServer]:
    one = BareServer()
    yield one
    one.close()


@pytest.fixture
def lane(server: BareServer) -> Iterator[Lane]:
    one = Lane(server.url)
    yield one
    one.close()


@pytest.fixture
def ask(lane: Lane) -> Iterator[Callable[..., Future]]:
    """Makes a call in a thread of its own; returns when it was written, or has ended."""
    with ThreadPoolExecutor(8) as pool:

        def start(body: str, timeout_s: float = 5.0) -> Future:
            deadline, written = Deadline(timeout_s, "test"), threading.Event()
            future = pool.submit(
                lambda: lane.call(
                    "POST",
                    "/update",
                    body=body.encode(),
                    key="secret",
                    deadline=deadline,
                    phase="move",
                    retry=False,
                    written=written.set,
                )
            )
            future.add_done_callback(lambda _: written.set())
            assert written.wait(5)
            return future

        yield start


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def test_requests_lie_there_in_order_before_the_first_is_answered(server, ask):
    asked = [ask(text) for text in ("a", "bb", "ccc")]
    until(lambda: server.came != [] and len(server.bodies()) == 3)
    assert server.bodies() == [b"a", b"bb", b"ccc"] and len(server.connections) == 1
    assert server.came[0].count(b"Authorization: Bearer secret\r\n") == 3
    assert server.came[0].startswith(b"POST /update HTTP/1.1\r\n")
    assert not any(one.done() for one in asked)
    for number, one in enumerate(asked):
        server.connections[0].sendall(answer(f"to {number}"))
        assert one.result(5).content == f"to {number}".encode()
        assert not any(later.done() for later in asked[number + 1 :])


@pytest.mark.parametrize("size", [1, 7, 100_000], ids=["byte by byte", "by sevens", "all at once"])
def test_answers_that_come_in_any_pieces_go_to_their_own_callers(server, ask, size):
    asked = [ask(text) for text in "abc"]
    until(lambda: server.connections != [])
    texts = ["", "x" * 300, "last"]
    whole = b"HTTP/1.1 100 Continue\r\n\r\n" + b"".join(answer(t, status=f"20{i} OK") for i, t in enumerate(texts))
    for start in range(0, len(whole), size):
        server.connections[0].sendall(whole[start : start + size])
    replies = [one.result(5) for one in asked]
    assert [(r.status, r.content.decode()) for r in replies] == list(zip([200, 201, 202], texts, strict=True))


def test_a_chunked_answer_is_put_together(server, ask):
    one = ask("a")
    until(lambda: server.connections != [])
    server.connections[0].sendall(
        b"HTTP/1.1 400 Bad Request\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    )
    reply = one.result(5)
    assert (reply.status, reply.content, reply.is_success) == (400, b"abcde", False)


def test_the_connection_is_kept_and_one_that_stood_idle_or_was_closed_is_not(server, ask, monkeypatch):
    for number in range(2):
        one = ask("a")
        until(lambda: server.connections != [])
        server.connections[0].sendall(answer("yes"))
        assert one.result(5).status == 200 and len(server.connections) == 1, number
    server.drop(0)
    time.sleep(0.05)
    for count in (2, 3):
        one = ask("b")
        until(lambda count=count: len(server.connections) == count)
        server.connections[-1].sendall(answer("yes"))
        assert one.result(5).status == 200
        monkeypatch.setattr(lanes, "KEEPALIVE_S", -1.0)


def test_a_connection_that_breaks_ends_all_that_is_under_way_and_the_next_call_takes_another(server, ask):
    asked = [ask(text) for text in "abc"]
    until(lambda: server.connections != [])
    server.connections[0].sendall(answer("yes") + b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab")
    time.sleep(0.05)
    server.drop(0)
    assert asked[0].result(5).content == b"yes"
    for broken in asked[1:]:
        with pytest.raises(EngineLost, match="POST /update: the connection broke") as caught:
            broken.result(5)
        assert caught.value.engine == server.url and caught.value.phase == "move"
        assert not caught.value.safe_to_retry
    after = ask("d")
    until(lambda: len(server.connections) == 2)
    server.connections[1].sendall(answer("again"))
    assert after.result(5).content == b"again"


def test_an_answer_after_which_the_server_closes_leaves_the_next_call_lost_and_not_waiting(server, ask):
    asked = [ask(text) for text in "ab"]
    until(lambda: server.connections != [])
    server.connections[0].sendall(answer("no", "Connection: close", status="503 Service Unavailable"))
    assert asked[0].result(5).status == 503
    with pytest.raises(EngineLost, match="the call before it"):
        asked[1].result(5)


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\nContent-Le", answer("x" * 50)[:-1]])
def test_an_answer_that_does_not_come_is_a_timeout_of_its_own_and_loses_those_behind(server, ask, sent):
    first, second = ask("a", timeout_s=0.3), ask("b", timeout_s=4)
    until(lambda: server.connections != [])
    server.connections[0].sendall(sent)
    started = time.monotonic()
    with pytest.raises(TransferTimeout, match="POST /update: no answer within"):
        first.result(5)
    with pytest.raises(EngineLost):
        second.result(5)
    assert time.monotonic() - started < 2


def test_one_that_trickles_in_does_not_outlast_its_deadline(server, ask):
    one = ask("a", timeout_s=0.5)
    until(lambda: server.connections != [])
    server.connections[0].sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    started = time.monotonic()
    while not one.done() and time.monotonic() - started < 3:
        with contextlib.suppress(OSError):
            server.connections[0].sendall(b"x")
        time.sleep(0.02)
    with pytest.raises(TransferTimeout):
        one.result(5)
    assert time.monotonic() - started < 1.5


def test_a_call_behind_one_that_is_slow_ends_by_its_own_deadline(server, ask):
    ask_slow, second = ask("a", timeout_s=5), ask("b", timeout_s=0.3)
    with pytest.raises(TransferTimeout):
        second.result(5)
    with pytest.raises(EngineLost):
        ask_slow.result(5)


def test_what_is_no_http_is_a_broken_connection(server, ask):
    one = ask("a")
    until(lambda: server.connections != [])
    server.connections[0].sendall(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
    with pytest.raises(EngineLost, match="the connection broke"):
        one.result(5)


def test_nobody_there_says_where():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    nobody = Lane(f"http://127.0.0.1:{port}")
    with pytest.raises(EngineLost, match=f"127.0.0.1:{port}: no connection") as caught:
        nobody.call("POST", "/x", body=b"{}", key="", deadline=Deadline(2, "test"), phase="move", retry=False)
    assert caught.value.safe_to_retry


def test_closing_ends_what_is_under_way(server, ask, lane):
    asked = [ask(text) for text in "ab"]
    lane.close()
    for one in asked:
        with pytest.raises(EngineLost):
            one.result(2)
    lane.close()

"""A lane against a server that is a bare socket: what lies there before its turn, and everything that can break."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpcore
import pytest

from weightsync.deadline import Deadline
from weightsync.engines import lane as lanes
from weightsync.engines.lane import Held, Lane
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
        return [part.partition(b"\r\n\r\n")[2] for part in self.came[number].split(b"POST ")[1:]]

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


def hold(lane: Lane, body: str) -> Held:
    return lane.hold("POST", "/update", body=body.encode(), key="secret", deadline=Deadline(5, "test"))


@pytest.fixture
def make(lane: Lane) -> Iterator[Callable[..., Future]]:
    """Makes a request that is held in a thread of its own."""
    with ThreadPoolExecutor(8) as pool:

        def start(held: Held, timeout_s: float = 5.0) -> Future:
            deadline = Deadline(timeout_s, "test")
            return pool.submit(lambda: lane.make(held, deadline=deadline, phase="move", retry=False))

        yield start


@pytest.fixture
def connected(server: BareServer, lane: Lane, make: Callable[..., Future]) -> Lane:
    """After one call, so that there is a connection to write ahead to."""
    first = make(hold(lane, "first"))
    until(lambda: server.bodies(0) == [b"first"] if server.came else False)
    server.connections[0].sendall(answer("yes"))
    assert first.result(5).content == b"yes"
    return lane


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def test_the_next_request_lies_there_but_for_its_last_byte_while_one_is_made(server, connected, make):
    one = make(hold(connected, "one"))
    until(lambda: server.bodies(0) == [b"first", b"one"])
    held = hold(connected, "two!")
    until(lambda: len(server.bodies(0)) == 3)
    time.sleep(0.05)
    assert server.bodies(0)[2] == b"two" and len(server.connections) == 1
    server.connections[0].sendall(answer("to one"))
    assert one.result(5).content == b"to one"
    two = make(held)
    until(lambda: server.bodies(0)[2] == b"two!")
    server.connections[0].sendall(answer("to two"))
    assert two.result(5).content == b"to two" and two.result().to == "POST /update"
    assert server.came[0].count(b"Authorization: Bearer secret\r\n") == 3
    assert server.came[0].startswith(b"POST /update HTTP/1.1\r\n")


def test_only_the_next_one_is_written_ahead(server, connected, make):
    held = [hold(connected, text) for text in ("aa", "bb", "cc")]
    until(lambda: server.bodies(0) == [b"first", b"a"])
    for number, one in enumerate(held):
        made = make(one)
        until(lambda number=number: server.bodies(0)[1:] == [b"aa", b"bb", b"cc"][: number + 1])
        server.connections[0].sendall(answer(str(number)))
        assert made.result(5).content == str(number).encode()


def test_one_that_is_made_before_another_that_lies_there_is_no_part_of_it(server, connected, make):
    ahead = hold(connected, "ahead")
    until(lambda: server.bodies(0) == [b"first", b"ahea"])
    one = make(hold(connected, "one"))
    until(lambda: len(server.connections) == 2 and server.bodies(1) == [b"one"])
    server.connections[1].sendall(answer("to one"))
    assert one.result(5).content == b"to one"
    two = make(ahead)
    until(lambda: server.bodies(1) == [b"one", b"ahead"])
    server.connections[1].sendall(answer("to two"))
    assert two.result(5).content == b"to two"
    assert server.bodies(0) == [b"first", b"ahea"]


def test_one_that_is_dropped_was_never_made_and_the_next_takes_another_connection(server, connected, make):
    held = hold(connected, "never")
    until(lambda: server.bodies(0) == [b"first", b"neve"])
    connected.drop(held)
    connected.drop(held)
    after = make(hold(connected, "after"))
    until(lambda: len(server.connections) == 2 and server.bodies(1) == [b"after"])
    server.connections[1].sendall(answer("yes"))
    assert after.result(5).content == b"yes"
    assert server.bodies(0) == [b"first", b"neve"]


def test_dropping_the_next_one_leaves_the_one_that_is_made_alone(server, connected, make):
    one = make(hold(connected, "one"))
    until(lambda: server.bodies(0) == [b"first", b"one"])
    held = hold(connected, "two")
    until(lambda: server.bodies(0)[-1] == b"tw")
    connected.drop(held)
    server.connections[0].sendall(answer("to one"))
    assert one.result(5).content == b"to one"
    three = make(hold(connected, "three"))
    until(lambda: len(server.connections) == 2 and server.bodies(1) == [b"three"])
    server.connections[1].sendall(answer("to three"))
    assert three.result(5).content == b"to three"
    assert server.bodies(0) == [b"first", b"one", b"tw"]


def test_an_answer_may_end_with_the_connection(server, connected, make):
    one = make(hold(connected, "whole"))
    until(lambda: server.bodies(0)[-1] == b"whole")
    server.connections[0].sendall(b"HTTP/1.0 200 OK\r\n\r\nyes")
    server.drop(0)
    assert one.result(5).content == b"yes"


@pytest.mark.parametrize("how", ["it says so", "it just does"])
def test_where_the_server_closes_after_an_answer_what_was_held_is_written_again(server, connected, make, how):
    one = make(hold(connected, "one"))
    until(lambda: server.bodies(0) == [b"first", b"one"])
    held = hold(connected, "two")
    server.connections[0].sendall(answer("to one", *(["Connection: close"] if how == "it says so" else [])))
    assert one.result(5).content == b"to one"
    server.drop(0)
    time.sleep(0.05)
    two = make(held)
    until(lambda: len(server.connections) == 2 and server.bodies(1) == [b"two"])
    server.connections[1].sendall(answer("to two"))
    assert two.result(5).content == b"to two"


def test_what_comes_behind_an_answer_is_nobodys(server, connected, make):
    one = make(hold(connected, "one"))
    until(lambda: server.bodies(0) == [b"first", b"one"])
    server.connections[0].sendall(answer("yes") + answer("bye", "Connection: close", status="408 Request Timeout"))
    assert one.result(5).content == b"yes"
    two = make(hold(connected, "two"))
    until(lambda: len(server.connections) == 2 and server.bodies(1) == [b"two"])
    server.connections[1].sendall(answer("two"))
    assert two.result(5).content == b"two"


@pytest.mark.parametrize("size", [1, 7, 100_000], ids=["byte by byte", "by sevens", "all at once"])
def test_an_answer_may_come_in_any_pieces(server, connected, make, size):
    for number, text in enumerate(["", "x" * 300, "last"]):
        made = make(hold(connected, f"whole{number}"))
        until(lambda number=number: server.bodies(0)[-1] == f"whole{number}".encode())
        whole = b"HTTP/1.1 100 Continue\r\n\r\n" + answer(text, status=f"20{number} OK")
        for start in range(0, len(whole), size):
            server.connections[0].sendall(whole[start : start + size])
        reply = made.result(5)
        assert (reply.status, reply.content.decode()) == (200 + number, text)


def test_a_chunked_answer_is_put_together(server, connected, make):
    one = make(hold(connected, "whole"))
    until(lambda: server.bodies(0)[-1] == b"whole")
    server.connections[0].sendall(
        b"HTTP/1.1 400 Bad Request\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    )
    reply = one.result(5)
    assert (reply.status, reply.content, reply.is_success) == (400, b"abcde", False)


@pytest.mark.parametrize("when", ["before it is held", "before it is made"])
def test_a_connection_that_stood_idle_is_not_used(server, connected, make, when):
    held = None if when == "before it is held" else hold(connected, "one!")
    connected._used -= 2 * lanes.KEEPALIVE_S
    one = make(held or hold(connected, "one!"))
    until(lambda: len(server.connections) == 2 and server.bodies(1) == [b"one!"])
    server.connections[1].sendall(answer("yes"))
    assert one.result(5).status == 200 and server.bodies(0)[1:] in ([], [b"one"])


def test_a_connection_that_breaks_is_an_error_and_the_next_call_takes_another(server, connected, make):
    one = make(hold(connected, "one"))
    until(lambda: server.bodies(0) == [b"first", b"one"])
    held = hold(connected, "two")
    server.connections[0].sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab")
    server.drop(0)
    with pytest.raises(EngineLost, match="POST /update: the connection broke") as caught:
        one.result(5)
    assert caught.value.engine == server.url and caught.value.phase == "move"
    assert not caught.value.safe_to_retry
    two = make(held)
    until(lambda: len(server.connections) == 2 and server.bodies(1) == [b"two"])
    server.connections[1].sendall(answer("again"))
    assert two.result(5).content == b"again"


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\nContent-Le", answer("x" * 50)[:-1]])
def test_an_answer_that_does_not_come_is_a_timeout(server, connected, make, sent):
    one = make(hold(connected, "whole"), timeout_s=0.3)
    until(lambda: server.bodies(0)[-1] == b"whole")
    server.connections[0].sendall(sent)
    started = time.monotonic()
    hold(connected, "b")  # with a deadline of its own, which is later
    with pytest.raises(TransferTimeout, match="POST /update: no answer within"):
        one.result(5)
    assert time.monotonic() - started < 2


def test_one_that_trickles_in_does_not_outlast_its_deadline(server, connected, make):
    one = make(hold(connected, "whole"), timeout_s=0.5)
    until(lambda: server.bodies(0)[-1] == b"whole")
    server.connections[0].sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    started = time.monotonic()
    while not one.done() and time.monotonic() - started < 3:
        with contextlib.suppress(OSError):
            server.connections[0].sendall(b"x")
        time.sleep(0.02)
    with pytest.raises(TransferTimeout):
        one.result(5)
    assert time.monotonic() - started < 1.5


def test_what_is_no_http_is_a_broken_connection(server, connected, make):
    one = make(hold(connected, "whole"))
    until(lambda: server.bodies(0)[-1] == b"whole")
    server.connections[0].sendall(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
    with pytest.raises(EngineLost, match="the connection broke"):
        one.result(5)


def test_nobody_there_says_where():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    nobody = Lane(f"http://127.0.0.1:{port}")
    with pytest.raises(EngineLost, match=f"127.0.0.1:{port}: no connection") as caught:
        nobody.make(hold(nobody, "x"), deadline=Deadline(2, "test"), phase="move", retry=False)
    assert caught.value.safe_to_retry


def test_a_write_that_does_not_get_on_ends_by_the_deadline_and_does_not_keep_a_close(server, lane, make):
    listener = socket.create_server(("127.0.0.1", 0))
    full = Lane(f"http://127.0.0.1:{listener.getsockname()[1]}")
    held = full.hold("POST", "/update", body=b"x" * (64 << 20), key="", deadline=Deadline(5, "test"))
    started = time.monotonic()
    with pytest.raises(TransferTimeout):
        full.make(held, deadline=Deadline(0.5, "test"), phase="move", retry=False)
    full.close()
    assert time.monotonic() - started < 2
    listener.close()


def test_closing_ends_what_is_under_way(server, connected, make):
    one = make(hold(connected, "whole"))
    until(lambda: server.bodies(0)[-1] == b"whole")
    connected.close()
    with pytest.raises(EngineLost):
        one.result(2)
    connected.close()


def test_a_connection_is_made_for_what_is_held(server, lane, make):
    held = hold(lane, "one!")
    until(lambda: bool(server.came) and server.bodies(0) == [b"one"])
    one = make(held)
    until(lambda: server.bodies(0) == [b"one!"])
    server.connections[0].sendall(answer("yes"))
    assert one.result(5).content == b"yes" and len(server.connections) == 1


def test_who_waits_for_a_request_to_be_on_its_way_hears_of_it_before_the_answer(server, connected):
    def sent() -> None:
        until(lambda: server.bodies(0)[-1] == b"whole")
        server.connections[0].sendall(answer("yes"))

    deadline = Deadline(5, "test")
    held = hold(connected, "whole")
    reply = connected.make(held, deadline=deadline, phase="move", retry=False, sent=sent)
    assert reply.content == b"yes", "who waits for the answer first waits for ever"


def test_holding_what_does_not_get_through_takes_little_of_a_deadline(monkeypatch):
    monkeypatch.setattr(lanes, "AHEAD_S", 0.1)
    listener = socket.create_server(("127.0.0.1", 0))
    full, started = Lane(f"http://127.0.0.1:{listener.getsockname()[1]}"), time.monotonic()
    full.hold("POST", "/update", body=b"x" * (64 << 20), key="", deadline=Deadline(30, "test"))
    assert time.monotonic() - started < 2
    full.close()
    listener.close()


def test_one_that_is_made_while_another_waits_for_its_answer_has_a_connection_of_its_own(server, connected, make):
    one = make(hold(connected, "one!"))
    until(lambda: server.bodies(0)[-1] == b"one!")
    held = hold(connected, "two!")
    until(lambda: server.bodies(0)[-1] == b"two")
    two = make(held)
    until(lambda: len(server.connections) == 2 and server.bodies(1) == [b"two!"])
    server.connections[1].sendall(answer("to two"))
    server.connections[0].sendall(answer("to one"))
    assert (one.result(5).content, two.result(5).content) == (b"to one", b"to two")
    three = make(hold(connected, "three"))
    until(lambda: len(server.connections) == 3 and server.bodies(2) == [b"three"])
    server.connections[2].sendall(answer("to three"))
    assert three.result(5).content == b"to three", "where half a request lies is nothing for another"
    assert server.bodies(0) == [b"first", b"one!", b"two"]


def test_what_is_held_and_does_not_get_through_is_no_end_of_the_call_under_way(server, connected, make, monkeypatch):
    monkeypatch.setattr(lanes, "AHEAD_S", 0.1)
    one = make(hold(connected, "one!"))
    until(lambda: server.bodies(0)[-1] == b"one!")
    write, stream = connected._stream.write, connected._stream

    def full(data: bytes, timeout: float) -> None:
        write(data[:-5], timeout)
        raise httpcore.WriteTimeout

    with monkeypatch.context() as broken:
        broken.setattr(stream, "write", full)
        held = hold(connected, "two: too much")
    third = hold(connected, "three")
    assert held.stream is None and third.stream is None
    server.connections[0].sendall(answer("to one"))
    assert one.result(5).content == b"to one"
    two = make(held)
    until(lambda: len(server.connections) == 2 and server.bodies(1) == [b"two: too much"])
    server.connections[1].sendall(answer("to two"))
    assert two.result(5).content == b"to two"
    connected.drop(third)


def test_one_that_was_dropped_or_made_cannot_be_made(server, connected, make):
    held = hold(connected, "one!")
    connected.drop(held)
    with pytest.raises(AssertionError):
        make(held).result(5)
    two = make(hold(connected, "two!"))
    until(lambda: len(server.connections) == 2 and server.bodies(1) == [b"two!"])
    server.connections[1].sendall(answer("to two"))
    assert two.result(5).content == b"to two", "the lane goes on"


def test_one_that_is_too_late_takes_nothing_from_another_that_waits(server, connected, make):
    one = make(hold(connected, "one!"), timeout_s=0.3)
    until(lambda: server.bodies(0)[-1] == b"one!")
    two = make(hold(connected, "two!"))
    until(lambda: len(server.connections) == 2 and server.bodies(1) == [b"two!"])
    with pytest.raises(TransferTimeout):
        one.result(5)
    server.connections[1].sendall(answer("to two"))
    assert two.result(5).content == b"to two"


def test_over_tls_nothing_is_written_ahead(server):
    lane = Lane(server.url.replace("http:", "https:"))
    hold(lane, "a")
    time.sleep(0.1)
    assert not server.connections

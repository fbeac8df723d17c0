"""Calls that a server takes in the order in which they are made, without waiting for the answers in between.

On one HTTP/1.1 connection a server begins with a request when it has answered the one before (RFC 9112, pipelining). So
the next request can lie there already, and what it takes on its way costs nothing, yet no two can change places.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from urllib.parse import SplitResult, urlsplit

import h11
import httpcore

from weightsync.deadline import Deadline
from weightsync.engines.http import KEEPALIVE_S, Reply, headers_of, typed

READ_BYTES = 1 << 16
MIN_WAIT_S = 1e-3  # 0 would not wait, and look like a broken connection


class _Asked:
    """A request that was written.

    ``done``: its answer was read, and ``rest`` behind it; or no further one will be, here or behind it (``failed``).
    """

    def __init__(self, stream: httpcore.NetworkStream, parser: h11.Connection, before: _Asked | None) -> None:
        self.stream, self.parser, self.before = stream, parser, before
        self.done = threading.Event()
        self.failed = False
        self.rest = b""


class Lane:
    """One connection to ``base_url``, made when it is needed. Safe from several threads, which write in turn."""

    def __init__(self, base_url: str) -> None:
        self._base = base_url
        self._url: SplitResult = urlsplit(base_url)
        self._lock = threading.Lock()
        self._last: _Asked | None = None
        self._used = 0.0

    def call(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None,
        key: str,
        deadline: Deadline,
        phase: str,
        retry: bool,
        written: Callable[[], None] = lambda: None,
    ) -> Reply:
        """As ``Http.call``. ``written`` is called once the request is on its way, so that the next one may follow."""
        doing = f"{method} {path}"
        with typed(doing, self._base, phase, retry, deadline):
            headers = headers_of(self._base, key, body)
            asked = self._ask(method, path, headers, body or b"", deadline)
            written()
            status, content = self._answer(asked, deadline)
        return Reply(doing, status, content)

    def close(self) -> None:
        """Close the connection; answers that are still to come are errors. Idempotent."""
        with self._lock:
            last, self._last = self._last, None
        if last is not None:
            _shut(last.stream)

    def _ask(self, method: str, path: str, headers: dict[str, str], body: bytes, deadline: Deadline) -> _Asked:
        parser = h11.Connection(h11.CLIENT)
        head = h11.Request(
            method=method,
            target=self._url.path.rstrip("/") + path,
            headers=[*headers.items(), ("Content-Length", str(len(body)))],
        )
        events = [head, h11.Data(data=body), h11.EndOfMessage()]
        text = b"".join(parser.send(event) or b"" for event in events)
        with self._lock:
            before = self._usable()
            stream = before.stream if before is not None else self._connect(deadline)
            asked = self._last = _Asked(stream, parser, before)
            try:
                stream.write(text, timeout=_left(deadline))
            except BaseException:
                _fail(asked)
                raise
        return asked

    def _usable(self) -> _Asked | None:
        """The last request, if another one may follow it on its connection."""
        last = self._last
        if last is None or last.failed:
            return None
        if last.done.is_set():
            idle_s = time.monotonic() - self._used
            if idle_s > KEEPALIVE_S or last.stream.get_extra_info("is_readable"):  # readable: the server has closed it
                _shut(last.stream)
                return None
        return last

    def _connect(self, deadline: Deadline) -> httpcore.NetworkStream:
        host, tls = self._url.hostname or "", self._url.scheme == "https"
        port = self._url.port or (443 if tls else 80)
        stream = httpcore.SyncBackend().connect_tcp(host, port, timeout=_left(deadline))
        if tls:
            context: ssl.SSLContext = httpcore.default_ssl_context()
            stream = stream.start_tls(context, server_hostname=host, timeout=_left(deadline))
        return stream

    def _answer(self, asked: _Asked, deadline: Deadline) -> tuple[int, bytes]:
        try:
            rest = self._rest_of(asked.before, deadline)
            asked.before = None
            if rest:
                asked.parser.receive_data(rest)
            return self._read(asked, deadline)
        except h11.RemoteProtocolError as e:
            _fail(asked)
            raise httpcore.RemoteProtocolError(e) from e
        except BaseException:
            _fail(asked)
            raise

    @staticmethod
    def _rest_of(before: _Asked | None, deadline: Deadline) -> bytes:
        """What was read of this answer together with the one before."""
        if before is None:
            return b""
        if not before.done.wait(deadline.remaining_s()):
            raise TimeoutError
        if before.failed:
            raise httpcore.ReadError("the call before it on this connection failed")
        return before.rest

    def _read(self, asked: _Asked, deadline: Deadline) -> tuple[int, bytes]:
        status, chunks = 0, list[bytes]()
        while True:
            event = asked.parser.next_event()
            if event is h11.NEED_DATA:
                _wait_readable(asked.stream, deadline)
                asked.parser.receive_data(asked.stream.read(READ_BYTES, timeout=_left(deadline)))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                chunks.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                break
            elif not isinstance(event, h11.InformationalResponse):
                raise httpcore.RemoteProtocolError(f"the server closed the connection: {event!r}")
        asked.rest = bytes(asked.parser.trailing_data[0])
        asked.failed = asked.parser.their_state is not h11.DONE  # "Connection: close": no further answer comes
        self._used = time.monotonic()
        asked.done.set()
        return status, b"".join(chunks)


def _left(deadline: Deadline) -> float:
    return max(MIN_WAIT_S, deadline.remaining_s())


def _wait_readable(stream: httpcore.NetworkStream, deadline: Deadline) -> None:
    """Raise TimeoutError at the deadline. The socket's own timeout belongs to whoever writes meanwhile."""
    sock: socket.socket = stream.get_extra_info("socket")
    if isinstance(sock, ssl.SSLSocket) and sock.pending():
        return
    poll = select.poll()
    try:
        poll.register(sock, select.POLLIN)
    except ValueError:  # closed meanwhile: reading says so
        return
    if deadline.passed() or not poll.poll(int(_left(deadline) * 1000) + 1):
        raise TimeoutError


def _fail(asked: _Asked) -> None:
    asked.failed, asked.before = True, None
    asked.done.set()
    _shut(asked.stream)


def _shut(stream: httpcore.NetworkStream) -> None:
    """Close it, whoever may be reading from it."""
    with contextlib.suppress(OSError):
        stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
    stream.close()

"""Calls one after the other whose requests are on their way before it is their turn, all but the last byte.

A server cannot begin with a request that is not complete, so nothing happens before its turn, nor ever if it does not
come: the connection is closed. When it comes, a byte is all that has to travel.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import h11
import httpcore

from weightsync.deadline import Deadline
from weightsync.engines.http import KEEPALIVE_S, Reply, headers_of, host_of, left_s, typed

READ_BYTES = 1 << 16
AHEAD_S = 0.5
"""What writing ahead may take: it is there to save time."""


@dataclass
class Held:
    """A request that was not made yet. ``stream``: where all of it but the last byte was written, if anywhere."""

    doing: str
    text: bytes
    parser: h11.Connection
    stream: httpcore.NetworkStream | None = None


class Lane:
    """One connection to ``base_url``, made when it is needed.

    Requests are to be made one at a time, in the order in which they were held. One that is made meanwhile gets a
    connection of its own.
    """

    def __init__(self, base_url: str) -> None:
        self._base, self._host = base_url, host_of(base_url)
        self._url = urlsplit(base_url)
        self._lock = threading.Lock()  # who writes
        self._stream: httpcore.NetworkStream | None = None
        self._unmade: list[Held] = []
        self._ahead: Held | None = None  # of which all but a byte lies in the connection
        self._busy = False
        self._is_spoiled = False
        self._used = 0.0

    def hold(self, method: str, path: str, *, body: bytes, key: str, deadline: Deadline) -> Held:
        """Write a request but for its last byte, if it is the next one; else ``make`` writes all of it.

        The server must read the body before it does anything: with the head alone it may begin. Raises nothing: what
        is wrong with the connection shows in ``make``.
        """
        parser = h11.Connection(h11.CLIENT)
        headers = [*headers_of(self._host, key, body).items(), ("Content-Length", str(len(body)))]
        head = h11.Request(method=method, target=self._url.path.rstrip("/") + path, headers=headers)
        events = [head, h11.Data(data=body), h11.EndOfMessage()]
        held = Held(f"{method} {path}", b"".join(parser.send(event) or b"" for event in events), parser)
        self._unmade.append(held)
        if self._url.scheme != "https" and self._lock.acquire(blocking=False):  # OpenSSL does not read beside writing
            try:
                self._write_ahead(held, deadline)
            finally:
                self._lock.release()
        return held

    def make(
        self,
        held: Held,
        *,
        deadline: Deadline,
        phase: str,
        retry: bool,
        sent: Callable[[], None] = lambda: None,
    ) -> Reply:
        """Have the request carried out; as ``Http.call``. ``sent`` is called when all of it is on its way."""
        with typed(held.doing, self._base, phase, retry, deadline):
            stream, is_own = self._complete(held, deadline)
            try:
                sent()
                return self._read(held, stream, deadline)
            except h11.RemoteProtocolError as e:
                self._end(stream)
                raise httpcore.RemoteProtocolError(e) from e
            except BaseException:
                self._end(stream)
                raise
            finally:
                if is_own:
                    _shut(stream)
                else:
                    self._leave()

    def drop(self, held: Held) -> None:
        """Never make that request, if it was not made. Idempotent."""
        if held in self._unmade:
            self._unmade.remove(held)
            if held is self._ahead and self._lock.acquire(blocking=False):  # else whoever comes next closes it
                try:
                    if held is self._ahead and not self._busy:
                        self._ahead = None
                        self.close()
                finally:
                    self._lock.release()

    def close(self) -> None:
        """Close the connection; a call under way fails. Idempotent."""
        stream, self._stream, self._is_spoiled = self._stream, None, False
        if stream is not None:
            _shut(stream)

    def _write_ahead(self, held: Held, deadline: Deadline) -> None:
        if self._ahead is not None or self._unmade[0] is not held or (self._busy and self._is_spoiled):
            return
        if self._is_spoiled:
            self.close()
        soon = Deadline(min(AHEAD_S, deadline.remaining_s()), deadline.what)
        try:
            self._stream = stream = self._usable() or self._connect(soon)
            held.stream, self._ahead = stream, held
            stream.write(held.text[:-1], timeout=left_s(soon))
            self._used = time.monotonic()
        except (httpcore.NetworkError, httpcore.TimeoutException, UnicodeError):
            held.stream, self._ahead = None, None
            if self._busy:  # some of it lies behind what somebody waits for
                self._is_spoiled = True
            else:
                self.close()

    def _usable(self) -> httpcore.NetworkStream | None:
        """The connection, unless the server has closed it, or may be about to."""
        stream = self._stream
        if stream is None or self._busy:
            return stream
        if time.monotonic() - self._used > KEEPALIVE_S or stream.get_extra_info("is_readable"):
            self.close()
            return None
        return stream

    def _complete(self, held: Held, deadline: Deadline) -> tuple[httpcore.NetworkStream, bool]:
        """Write what is missing: the last byte, or all of it where nothing was written or that connection is closed.

        The connection, and whether it is this request's own: somebody else waits for an answer in the lane's.
        """
        assert held in self._unmade, "a request is made once, and not when it was dropped"
        if not self._lock.acquire(timeout=left_s(deadline)):
            raise TimeoutError
        try:
            lies_there, self._ahead = self._ahead, None
            if self._busy:
                self._ahead = None if lies_there is held else lies_there
                self._is_spoiled = self._is_spoiled or lies_there is held  # all but a byte of it stays there
                return self._write(self._connect(deadline), held, deadline), True
            if self._is_spoiled or lies_there not in (held, None):
                self.close()  # it would be taken for a part of what lies there
            self._stream, self._busy = self._usable() or self._connect(deadline), True
            try:
                return self._write(self._stream, held, deadline), False
            except BaseException:
                self.close()
                self._leave()
                raise
        finally:
            self._unmade.remove(held)
            self._lock.release()

    @staticmethod
    def _write(stream: httpcore.NetworkStream, held: Held, deadline: Deadline) -> httpcore.NetworkStream:
        try:
            stream.write(held.text[-1:] if stream is held.stream else held.text, timeout=left_s(deadline))
        except BaseException:
            _shut(stream)
            raise
        return stream

    def _leave(self) -> None:
        """The call in the lane's connection is over."""
        self._busy, self._used = False, time.monotonic()

    def _end(self, stream: httpcore.NetworkStream) -> None:
        """That connection is of no use any more."""
        if stream is self._stream:
            self.close()
        else:
            _shut(stream)

    def _connect(self, deadline: Deadline) -> httpcore.NetworkStream:
        host, tls = self._url.hostname or "", self._url.scheme == "https"
        port = self._url.port or (443 if tls else 80)
        stream = httpcore.SyncBackend().connect_tcp(host, port, timeout=left_s(deadline))
        if tls:
            stream = stream.start_tls(httpcore.default_ssl_context(), server_hostname=host, timeout=left_s(deadline))
        return stream

    def _read(self, held: Held, stream: httpcore.NetworkStream, deadline: Deadline) -> Reply:
        status, chunks, parser = 0, list[bytes](), held.parser
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                _wait_readable(stream, deadline)
                data = stream.read(READ_BYTES, timeout=left_s(deadline))
                if not data and not status:
                    raise httpcore.ReadError("the server closed it before it had answered")
                parser.receive_data(data)  # an answer may end with the connection
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                chunks.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                break
        if parser.their_state is not h11.DONE or parser.trailing_data[0]:
            self._end(stream)  # "Connection: close", or more than was asked for
        return Reply(held.doing, status, b"".join(chunks))


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
    if deadline.passed() or not poll.poll(int(left_s(deadline) * 1000) + 1):
        raise TimeoutError


def _shut(stream: httpcore.NetworkStream) -> None:
    """Close it, whoever may be reading from it."""
    with contextlib.suppress(OSError):
        stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
    stream.close()

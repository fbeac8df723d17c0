"""Calls between our own processes: both ends of one small request-reply wire over ZeroMQ, in msgpack.

A server offers the public methods of one object. Its address carries a token (``tcp://10.0.0.1:5555#token``): who has
the address may call, who has not is refused. Every call has a deadline; errors arrive as the errors they were.

    request   [id, token, method, msgpack(argument)]
    reply     [id, b"ok" | b"error", msgpack(result | error)]
"""

from __future__ import annotations

import hmac
import os
import queue
import secrets
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from weightsync.addresses import bind_host, endpoint, reachable_host, split_address
from weightsync.deadline import Deadline
from weightsync.dispatch import Dispatcher, read_reply
from weightsync.errors import ConfigError, TransferError, WeightSyncError

__all__ = ["Client", "Dispatcher", "Server", "reachable_host", "read_reply", "split_address"]

_encode = msgspec.msgpack.encode


class Server:
    """Serves the public methods of ``target`` from daemon threads until ``close``.

    A method takes no argument or one, annotated with the type to decode it into. Up to ``workers`` run at once; further
    calls wait their turn. ``prepare`` is called by each of its threads first. Raises ConfigError if it cannot listen on
    ``host``.
    """

    def __init__(
        self,
        target: object,
        *,
        host: str = "127.0.0.1",
        token: str = "",
        workers: int = 4,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self._prepare = prepare
        self._token = token or secrets.token_urlsafe(16)
        self._dispatcher = Dispatcher(target)
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 500
        try:
            port = self._bind(host)
            self.address = f"{endpoint(reachable_host(host.strip('[]')), port)}#{self._token}"
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._calls: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # whether ``_wake`` is open
        self._closed = threading.Event()
        self._workers = [self._start(self._work) for _ in range(workers)]
        self._thread = self._start(self._serve)

    def close(self) -> None:
        """Stop serving. Calls under way are answered with TransferError at once. Idempotent."""
        self._closed.set()
        self._notify()
        self._thread.join(timeout=5)
        for worker in set(self._workers) - {threading.current_thread()}:
            worker.join(timeout=0.2)  # one inside a method ends, as a daemon, when the method does

    def _bind(self, host: str) -> str:
        number = bind_host(host)
        self._router.ipv6 = ":" in number
        try:
            self._router.bind(endpoint(number, "*"))  # the kernel chooses the port: none can take it in between
        except zmq.ZMQError as e:
            raise ConfigError(f"cannot listen on host {host!r}: {e}") from e
        return self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]

    def _start(self, function: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            self._prepare()
            function()

        thread = threading.Thread(target=run, name="weightsync-rpc", daemon=True)
        thread.start()
        return thread

    def _serve(self) -> None:
        """Owns the socket. ``pending`` are the calls accepted and not yet answered, by peer and call id."""
        pending: dict[tuple[bytes, bytes], str] = {}
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while not self._closed.is_set():
            ready = dict(poller.poll())
            if self._wake in ready:
                os.eventfd_read(self._wake)
                self._send_replies(pending)
            if self._router in ready:
                self._accept(self._router.recv_multipart(), pending)
        self._send_replies(pending)
        for (peer, call_id), method in pending.items():
            self._refuse(peer, call_id, TransferError(f"{method}: the other side closed before it was done"))
        for _ in self._workers:
            self._calls.put(None)
        with self._lock:
            os.close(self._wake)
            self._wake = -1
        self._router.close()
        self._context.term()

    def _accept(self, frames: list[bytes], pending: dict[tuple[bytes, bytes], str]) -> None:
        if len(frames) != 5:
            return
        peer, call_id, token, method, _ = frames
        if not hmac.compare_digest(token, self._token.encode()):
            why = "wrong token: the address given does not belong to this server's current run"
            self._refuse(peer, call_id, ConfigError(why))
            return
        pending[peer, call_id] = method.decode(errors="replace")
        self._calls.put(frames)

    def _send_replies(self, pending: dict[tuple[bytes, bytes], str]) -> None:
        while not self._replies.empty():
            reply = self._replies.get()
            pending.pop((reply[0], reply[1]), None)
            self._router.send_multipart(reply)

    def _refuse(self, peer: bytes, call_id: bytes, error: WeightSyncError) -> None:
        self._router.send_multipart([peer, call_id, b"error", _encode(error.to_wire())])

    def _work(self) -> None:
        while (frames := self._calls.get()) is not None and not self._closed.is_set():
            peer, call_id, _, method, argument = frames
            self._replies.put([peer, call_id, *self._dispatcher.handle(method.decode(errors="replace"), argument)])
            self._notify()

    def _notify(self) -> None:
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)


class _Link:
    """One connection of a client, used by one call at a time; ``monitor`` tells when it drops.

    ``again``: there was one before, so one that is refused has dropped too, and is not tried until it works.
    """

    def __init__(self, context: zmq.Context, where: str, *, again: bool = False) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.ipv6 = True
        refused = zmq.EVENT_CONNECT_RETRIED if again else 0
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | refused)
        self.socket.connect(where)

    def dropped(self) -> bool:
        return bool(self.monitor.poll(0))

    def wait(self, timeout_s: float) -> bool:
        """True if a reply is there. Returns at once, False, if the connection drops."""
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.monitor, zmq.POLLIN)
        poller.poll(max(1, int(min(timeout_s, 86400.0) * 1000)))
        return bool(self.socket.poll(0))

    def close(self) -> None:
        self.monitor.close(linger=0)
        self.socket.close(linger=0)


class Client:
    """Calls one server. Safe from several threads: each call under way has a connection of its own.

    ``what`` names the server in errors, and ``lost`` is the kind of error when its connection drops. ``was_there``:
    it served before, so that a connection that is refused has dropped; else it may only be about to start.
    """

    def __init__(
        self, address: str, *, what: str = "", lost: type[WeightSyncError] = TransferError, was_there: bool = False
    ) -> None:
        self._endpoint, self._token = split_address(address)
        self.what = what or self._endpoint
        self._lost = lost
        self._context = zmq.Context()
        self._idle: list[_Link] = []
        self._lock = threading.Lock()
        self._closed = False
        self._has_dropped = was_there

    def call(self, method: str, argument: Any = None, *, deadline: Deadline, returns: Any = None) -> Any:
        """Call ``method`` and wait until ``deadline``. ``returns`` is the type to decode the result into.

        Raises the server's own WeightSyncError, TransferTimeout if no answer comes in time, or ``lost`` at once if the
        connection drops or this client is closed meanwhile: whether the call was carried out is then unknown.
        """
        frames = self._frames(method, argument)
        try:
            link = self._borrow()
            try:
                status, body = self._exchange(link, frames, deadline)
            except BaseException:
                link.close()
                raise
        except zmq.ZMQError as e:
            raise self._lost(f"{self.what}: {method}: {'this client was closed' if self._closed else e}") from e
        self._give_back(link)
        try:
            return read_reply(status, body, returns)
        except msgspec.MsgspecError as e:
            raise TransferError(f"{self.what}: {method}: an answer that is not as expected: {e}") from e

    def tell(self, method: str, argument: Any) -> bool:
        """Call ``method`` without waiting for the answer, which nobody reads. False if the connection has dropped."""
        frames = self._frames(method, argument)
        try:
            link = self._borrow()
        except zmq.ZMQError:  # this client was closed
            return False
        try:
            while link.socket.poll(0):
                link.socket.recv_multipart()  # the answer to an earlier one
            link.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:  # closed, or too much is on its way already
            link.close()
            return False
        self._give_back(link)
        return not link.dropped()

    def is_connected(self) -> bool:
        """Whether a connection of an earlier call stands. Asks nobody; a process that ended has closed it."""
        with self._lock:
            return any(not link.dropped() for link in self._idle)

    def close(self) -> None:
        """Close the connections; calls under way end with ``lost``. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()
        self._context.term()  # ends every wait, and returns when the callers have closed their connections

    def _frames(self, method: str, argument: Any) -> list[bytes]:
        return [secrets.token_bytes(8), self._token.encode(), method.encode(), _encode(argument)]

    def _exchange(self, link: _Link, frames: list[bytes], deadline: Deadline) -> tuple[bytes, bytes]:
        link.socket.send_multipart(frames)
        while link.wait(deadline.remaining_s()):
            call_id, status, body = link.socket.recv_multipart()
            if call_id == frames[0]:
                self._has_dropped = False
                return status, body
        doing = f"{self.what}: {frames[2].decode()}"
        if link.dropped():
            self._has_dropped = True
            raise self._lost(f"{doing}: the connection dropped, the process at the other end may be gone")
        raise deadline.error(doing)

    def _borrow(self) -> _Link:
        with self._lock:
            while self._idle:
                link = self._idle.pop()
                if not link.dropped():
                    return link
                self._has_dropped = True
                link.close()
            return _Link(self._context, self._endpoint, again=self._has_dropped)

    def _give_back(self, link: _Link) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(link)
                return
        link.close()

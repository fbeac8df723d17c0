"""Calls between our own processes: both ends of one small request-reply wire over ZeroMQ, in msgpack.

A server offers the public methods of one object. Its address carries a token (``tcp://10.0.0.1:5555#token``): who has
the address may call, who has not is refused. Every call has a deadline; errors arrive as the errors they were.

    request   [id, token, method, msgpack(argument)]
    reply     [id, b"ok" | b"error", msgpack(result | error)]
"""

from __future__ import annotations

import contextlib
import hmac
import inspect
import logging
import secrets
import socket
import threading
import typing
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import zmq

from weightsync.deadline import Deadline
from weightsync.errors import ConfigError, EngineLost, TransferError, WeightSyncError, error_from_wire

logger = logging.getLogger(__name__)

_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.decode


def reachable_host(bind_host: str, peer_host: str = "") -> str:
    """The address to advertise for a server bound to ``bind_host``: a wildcard becomes this machine's own address.

    With ``peer_host`` it is the local address from which that peer is reached. Raises ConfigError if there is none.
    """
    if bind_host not in ("0.0.0.0", "::", "*", ""):
        return bind_host
    for target in (peer_host, socket.gethostname(), "localhost"):
        if not target:
            continue
        with contextlib.suppress(OSError):
            family, _, _, _, sockaddr = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(sockaddr)  # sends nothing: asks the kernel for the route
                return probe.getsockname()[0]
    raise ConfigError(f"bind host {bind_host!r}: no address of this machine that others can reach was found")


def split_address(address: str) -> tuple[str, str]:
    """``(endpoint, token)`` of an address; raises ConfigError if it is not one of ours."""
    endpoint, _, token = address.partition("#")
    if not endpoint.startswith("tcp://") or not token:
        raise ConfigError(f"not an address of weightsync (tcp://HOST:PORT#TOKEN): {address.split('#')[0]!r}")
    return endpoint, token


class Dispatcher:
    """Decodes a call, makes it, encodes what came of it: the part of a server that needs no socket."""

    def __init__(self, target: object) -> None:
        self._methods = _public_methods(target)

    def handle(self, method: str, argument: bytes) -> tuple[bytes, bytes]:
        """``(b"ok", msgpack(result))`` or ``(b"error", msgpack(error))``; never raises."""
        try:
            if method not in self._methods:
                raise ConfigError(f"no method {method!r} here: the two sides run different versions of weightsync")
            function, takes = self._methods[method]
            args = [] if takes is None else [_decode(argument, type=takes)]
            return b"ok", _encode(function(*args))
        except WeightSyncError as e:
            return b"error", _encode(e.to_wire())
        except Exception as e:  # the boundary: whatever failed becomes a typed error at the caller
            logger.exception("call of %s failed", method)
            return b"error", _encode(TransferError(f"{method}: {type(e).__name__}: {e}").to_wire())


def read_reply(status: bytes, body: bytes, returns: Any = None) -> Any:
    """The result that ``Dispatcher.handle`` encoded, decoded into ``returns``; raises the error that it encoded."""
    if status == b"error":
        raise error_from_wire(_decode(body))
    return _decode(body, type=returns) if returns is not None else _decode(body)


def _public_methods(target: object) -> dict[str, tuple[Any, Any]]:
    methods = {}
    for name, function in inspect.getmembers(target, inspect.ismethod):
        if name.startswith("_"):
            continue
        hints = typing.get_type_hints(function)
        names = list(inspect.signature(function).parameters)
        methods[name] = (function, hints.get(names[0], Any) if names else None)
    return methods


class Server:
    """Serves the public methods of ``target`` from a daemon thread until ``close``.

    A method takes no argument or one, annotated with the type to decode it into. Up to ``workers`` run at once.
    """

    def __init__(self, target: object, *, host: str = "127.0.0.1", token: str = "", workers: int = 4) -> None:
        self._token = token or secrets.token_urlsafe(16)
        self._dispatcher = Dispatcher(target)
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 500
        if ":" in host:
            self._router.ipv6 = True
        bind = {"localhost": "127.0.0.1", "0.0.0.0": "*", "::": "*", "": "*"}.get(host, host)
        bind = f"[{bind}]" if ":" in bind else bind
        try:
            port = self._router.bind_to_random_port(f"tcp://{bind}")
        except zmq.ZMQError as e:
            self._context.destroy(linger=0)
            raise ConfigError(f"cannot listen on host {host!r}: {e}") from e
        advertised = reachable_host(host)
        advertised = f"[{advertised}]" if ":" in advertised else advertised
        self.address = f"tcp://{advertised}:{port}#{self._token}"
        self._done = self._context.socket(zmq.PULL)
        self._done.bind("inproc://done")
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="weightsync-rpc")
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="weightsync-rpc", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving. Calls under way get no answer. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join(timeout=5)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._done, zmq.POLLIN)
        while not self._closed.is_set():
            ready = dict(poller.poll(timeout=100))
            if self._done in ready:
                self._router.send_multipart(self._done.recv_multipart())
            if self._router in ready:
                self._accept(self._router.recv_multipart())
        self._router.close()
        self._done.close()

    def _accept(self, frames: list[bytes]) -> None:
        if len(frames) != 5:
            return
        peer, call_id, token, method, argument = frames
        if not hmac.compare_digest(token, self._token.encode()):
            refused = ConfigError("wrong token: the address given does not belong to this server's current run")
            self._router.send_multipart([peer, call_id, b"error", _encode(refused.to_wire())])
            return
        self._pool.submit(self._run, peer, call_id, method.decode(errors="replace"), argument)

    def _run(self, peer: bytes, call_id: bytes, method: str, argument: bytes) -> None:
        status, body = self._dispatcher.handle(method, argument)
        if not self._closed.is_set():
            self._reply_socket().send_multipart([peer, call_id, status, body])

    def _reply_socket(self) -> zmq.Socket:
        if not hasattr(self._local, "socket"):
            self._local.socket = self._context.socket(zmq.PUSH)
            self._local.socket.linger = 0
            self._local.socket.connect("inproc://done")
        return self._local.socket


class Client:
    """Calls one server. Safe from several threads; each thread has its own socket."""

    def __init__(self, address: str, *, what: str = "") -> None:
        self._endpoint, self._token = split_address(address)
        self.what = what or self._endpoint
        self._context = zmq.Context()
        self._local = threading.local()
        self._sockets: list[zmq.Socket] = []
        self._lock = threading.Lock()

    def call(self, method: str, argument: Any = None, *, deadline: Deadline, returns: Any = None) -> Any:
        """Call ``method`` and wait until ``deadline``. ``returns`` is the type to decode the result into.

        Raises the server's own WeightSyncError, or TransferTimeout if no answer comes in time.
        """
        sock, call_id = self._socket(), secrets.token_bytes(8)
        try:
            sock.send_multipart([call_id, self._token.encode(), method.encode(), _encode(argument)])
            while True:
                if not sock.poll(timeout=max(1, int(deadline.remaining_s() * 1000))):
                    raise deadline.error(f"{self.what}: {method}")
                reply_id, status, body = sock.recv_multipart()
                if reply_id == call_id:
                    break
        except zmq.ZMQError as e:
            raise EngineLost(f"{self.what}: {method}: {e}") from e
        return read_reply(status, body, returns)

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        with self._lock:
            for sock in self._sockets:
                sock.close(linger=0)
            self._sockets.clear()
        self._context.term()

    def _socket(self) -> zmq.Socket:
        if not hasattr(self._local, "socket"):
            sock = self._context.socket(zmq.DEALER)
            sock.linger = 0
            sock.ipv6 = True
            sock.connect(self._endpoint)
            self._local.socket = sock
            with self._lock:
                self._sockets.append(sock)
        return self._local.socket

"""The HTTP side of a fake engine: answers by ``engine.answer``, or misbehaves as one of its faults says."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from tests.fakes.payloads import Killed

How = Literal["500", "400", "200 false", "not json", "echo", "drop", "silent", "slow", "drip", "die"]


@dataclass
class Call:
    """One request: its path, its JSON body, and when it came (monotonic seconds)."""

    path: str
    body: Any
    at: float = field(default_factory=time.monotonic)


@dataclass
class Fault:
    """``skip`` calls of ``path`` pass, then ``times`` fail as ``how`` says; with ``applies`` the work is done first."""

    how: How
    path: str
    skip: int
    times: int
    seconds: float
    applies: bool


class Served(Protocol):
    """What the server needs of the engine behind it."""

    calls: list[Call]

    def key_for(self, path: str) -> str: ...
    def fault_for(self, path: str) -> Fault | None: ...
    def answer(self, path: str, body: Any) -> tuple[int, Any]: ...
    def wait_closing(self, seconds: float | None = None) -> bool: ...
    def die(self) -> None: ...


class Server(ThreadingHTTPServer):
    daemon_threads = False
    engine: Served

    def __init__(self, *args: Any) -> None:
        self._open: set[socket.socket] = set()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        return  # connections are dropped on purpose

    def drop_all(self) -> None:
        for request in list(self._open):
            try:
                request.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # as asyncio's servers do: head and body of an answer are two writes
    server: Server

    def do_GET(self) -> None:
        self._handle(None)

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._handle(json.loads(raw) if raw else None)

    def _handle(self, body: Any) -> None:
        engine, path = self.server.engine, urlsplit(self.path).path
        key = engine.key_for(path)
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            return self._send(401, {"error": "Unauthorized"})
        engine.calls.append(Call(path, body))
        fault = engine.fault_for(path)
        try:
            if fault is not None:
                return self._misbehave(fault, path, body)
            return self._send(*engine.answer(path, body))
        except Killed:
            engine.die()
            return self._drop()

    def _misbehave(self, fault: Fault, path: str, body: Any) -> None:
        engine, how = self.server.engine, fault.how
        if fault.applies:
            engine.answer(path, body)
        if how == "slow":
            engine.wait_closing(fault.seconds)
            return self._send(*engine.answer(path, body))
        if how == "drip":
            return self._drip(fault.seconds)
        if how == "silent":
            engine.wait_closing()
        if how == "die":
            engine.die()
        answers = {
            "500": (500, "Internal Server Error"),
            "400": (400, {"success": False, "message": "told to refuse"}),
            "200 false": (200, {"success": False, "message": "told to fail"}),
            "not json": (200, "<html>a proxy's page</html>"),
            "echo": (400, {"detail": [{"msg": "bad schema", "input": body}]}),
        }
        if how in answers:
            return self._send(*answers[how])
        return self._drop()

    def _drip(self, seconds: float) -> None:
        """A byte of a long answer every ``seconds``."""
        self.send_response(200)
        self.send_header("Content-Length", "100000")
        self.end_headers()
        while not self.server.engine.wait_closing(seconds):
            self.wfile.write(b" ")

    def _drop(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _send(self, status: int, content: Any) -> None:
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(content, str) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        return

"""The actor as a plain process, without Ray: ``weightsync serve`` in the pair's environment, for torchrun jobs."""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Protocol

import msgspec

from weightsync.config import Config
from weightsync.errors import ConfigError
from weightsync.ray_channel import ACTORS
from weightsync.rpc import Server, read_reply


def start(config: Config, *, host: str) -> Server:
    """Connect the actor of ``config.pair`` and serve it; the result's ``.address`` is for ``weightsync.connect``."""
    module, name = ACTORS[config.pair]
    actor = getattr(importlib.import_module(module), name)(msgspec.msgpack.encode(config))
    read_reply(*actor.connect())
    return actor.serve(host)


def read_addresses(file: Path, count: int, timeout_s: float) -> list[str]:
    """The publishers' addresses, one a line, once ``count`` are there. Raises ConfigError after ``timeout_s``."""
    give_up = time.monotonic() + timeout_s
    while True:
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        complete = [line.strip() for line in lines if line.endswith("\n") and line.strip()]
        if len(complete) >= count:
            return complete
        if time.monotonic() > give_up:
            raise ConfigError(f"{file} holds {len(complete)} of {count} publishers' addresses after {timeout_s:g} s")
        time.sleep(0.1)


def write_address(file: Path, address: str) -> None:
    """Write ``address``, which carries a token: a reader sees all of it or nothing, and only the owner may read."""
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        out.write(address + "\n")
    fresh.rename(file)


class Closing(Protocol):
    """What serves until it is closed."""

    def close(self) -> None: ...


def until_signalled(server: Closing) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    server.close()

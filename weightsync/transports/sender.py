"""Sender processes: started in milliseconds, ended at any moment. Both ends of how they are started.

Importing torch takes seconds, and a push that must replace a sender has none to spare. So one *nursery* imports what
senders need, touches no GPU, and forks one whenever it is asked to. Whoever dies takes those below with it: the actor
the nursery, the nursery the senders.

    request   {"device": GPU's UUID or "", "variables": {...}, "host": ...}   one line of JSON on the nursery's input
    reply     {"pid": ..., "address": tcp://HOST:PORT#TOKEN}                  one line on its output, from the sender
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from weightsync.deadline import Deadline
from weightsync.errors import TransferError, WeightSyncError
from weightsync.rpc import Client, Server

_PR_SET_PDEATHSIG = 1
_GONE_S = 5.0


class Nursery:
    """The end that asks. Made at once; what it imports is ready some seconds later. Senders listen on ``host``."""

    def __init__(self, *, host: str = "127.0.0.1") -> None:
        self._host = host
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "weightsync.transports.sender"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def start(self, device: str, variables: Mapping[str, str], deadline: Deadline) -> SenderProcess:
        """A new sender on a GPU ("": in host memory). ``variables`` are set there, whatever the actor's are.

        Raises TransferError if the nursery or the sender ended, TransferTimeout if it is not up in time.
        """
        request = json.dumps({"device": device, "variables": dict(variables), "host": self._host}).encode() + b"\n"
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with self._lock:
            try:
                stdin.write(request)
                stdin.flush()
                ready = _readable(stdout.fileno(), deadline.remaining_s())
                line = stdout.readline() if ready else b""
            except (OSError, ValueError) as e:
                raise TransferError(f"the process that starts senders is gone: {e}") from e
            if not ready:
                self.close()  # a late answer would be taken for that of the next request
                raise deadline.error("starting a sender process")
        reply: dict[str, Any] = json.loads(line) if line else {"error": f"ended with status {self._process.poll()}"}
        if "error" in reply:
            raise TransferError(f"no sender could be started: {reply['error']}")
        return SenderProcess(reply["pid"], reply["address"])

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End it, and every sender with it. Idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                assert pipe is not None
                pipe.close()


class SenderProcess:
    """One sender, at the actor's end. Calls raise TransferError at once if it dies or ``kill`` is called meanwhile."""

    def __init__(self, pid: int, address: str) -> None:
        self.pid = pid
        self.address = address
        self._handle = os.pidfd_open(pid)
        self._lock = threading.Lock()
        self._client = Client(address, what=f"sender process {pid}")

    @property
    def alive(self) -> bool:
        with self._lock:
            return self._handle >= 0 and not _readable(self._handle, 0)

    def call(self, method: str, argument: Any = None, *, deadline: Deadline, returns: Any = None) -> Any:
        """Call a method of ``nccl.Sender``."""
        return self._client.call(method, argument, deadline=deadline, returns=returns)

    def kill(self) -> None:
        """End it at once, whatever it is doing. Idempotent."""
        with self._lock:
            handle, self._handle = self._handle, -1
        if handle < 0:
            return  # whoever was first closes the client: two at once would wait for each other
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        _readable(handle, _GONE_S)
        os.close(handle)
        self._client.close()


def _readable(descriptor: int, timeout_s: float) -> bool:
    poll = select.poll()  # not select(), which takes no descriptor above 1023
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


# ---------------------------------------------------------------------------------------------------- the nursery


def main() -> None:
    """Read requests until standard input ends."""
    from weightsync.transports import nccl  # noqa: F401 - before the first request comes

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for senders
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if os.fork() == 0:
            _become_sender(request["device"], request["variables"], request["host"])


def _become_sender(device: str, variables: dict[str, str], host: str) -> None:
    status = 1
    try:
        _die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(variables)
        server = _serve(device, host)
        _reply({"pid": os.getpid(), "address": server.address})
        threading.Event().wait()
    except WeightSyncError as e:
        _reply({"error": e.message})
    except BaseException as e:
        _reply({"error": f"{type(e).__name__}: {e}"})
    finally:
        os._exit(status)


def _serve(device: str, host: str) -> Server:
    import torch

    from weightsync import devices
    from weightsync.transports.nccl import Sender

    return Server(Sender(devices.device_of(device) if device else torch.device("cpu")), host=host)


def _reply(content: dict[str, Any]) -> None:
    os.write(1, json.dumps(content).encode() + b"\n")


def _die_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main()

"""Senders on another node of the trainer: a small server there starts and ends them. Both ends of that.

A *node actor* runs on each further node that holds training ranks, in the pair's environment: under Ray, or as
``weightsync node``. The weight-sync actor asks it for senders, which open that node's memory (CUDA IPC, shared memory)
and join groups from there. An actor that is not heard of for ``LEASE_S`` is taken for dead, and its senders are ended.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

from weightsync.deadline import Deadline
from weightsync.errors import ConfigError, TransferError, WeightSyncError
from weightsync.rpc import Client, Server, split_address
from weightsync.spec import Struct
from weightsync.transports.sender import Nursery, SenderProcess

LEASE_S = 60.0
_RENEW_S = 10.0
_ASK_S = 5.0


class StartSender(Struct):
    """Start a sender for ``session`` on a GPU ("": host memory), with ``variables`` set there."""

    session: str
    device: str
    variables: dict[str, str]
    timeout_s: float


class Started(Struct):
    """A sender: its process id on its node, and where it is called."""

    pid: int
    address: str


class About(Struct):
    """A node actor: the host whose training ranks it reads, and what NCCL its senders have ("": none)."""

    host: str
    nccl: str


class SenderLike(Protocol):
    """A sender, wherever it runs. See ``sender.SenderProcess``."""

    @property
    def alive(self) -> bool: ...

    def call(self, method: str, argument: Any = None, *, deadline: Deadline, returns: Any = None) -> Any: ...

    def kill(self) -> None: ...


class NodeServer:
    """The node actor. ``host_name``: the host whose ranks it reads ("": this machine's name); serves on ``host``."""

    def __init__(self, *, host_name: str = "", host: str = "127.0.0.1") -> None:
        self._wire = NodeWire(host_name or socket.gethostname(), host)
        self._server = Server(self._wire, host=host, workers=16)
        self.address = self._server.address

    def close(self) -> None:
        """End every sender, and serve no more. Idempotent."""
        self._server.close()
        self._wire._close()


class NodeWire:
    """What the weight-sync actor can call. Runs in threads of the server."""

    def __init__(self, host_name: str, bind_host: str) -> None:
        self._host_name = host_name
        self._nursery = Nursery(host=bind_host)
        self._lock = threading.Lock()
        self._senders: dict[str, list[SenderProcess]] = {}
        self._heard: dict[str, float] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="weightsync-leases", daemon=True).start()

    def about(self) -> About:
        """Who this is."""
        from weightsync.transports.nccl_versions import nccl_version

        return About(self._host_name, nccl_version())

    def start(self, request: StartSender) -> Started:
        """Raises TransferError if no sender could be started, TransferTimeout."""
        sender = self._nursery.start(request.device, request.variables, Deadline(request.timeout_s, "a sender"))
        with self._lock:
            self._senders.setdefault(request.session, []).append(sender)
            self._heard[request.session] = time.monotonic()
        return Started(sender.pid, sender.address)

    def is_alive(self, pid: int) -> bool:
        """Whether that sender is of this node actor, and still there."""
        return any(sender.alive for sender in self._of(pid))

    def stop(self, pid: int) -> None:
        """End that sender at once; nothing if it is gone."""
        for sender in self._of(pid):
            sender.kill()
        with self._lock:
            for senders in self._senders.values():
                senders[:] = [sender for sender in senders if sender.pid != pid]

    def renew(self, session: str) -> None:
        """The actor of this session lives."""
        with self._lock:
            self._heard[session] = time.monotonic()

    def leave(self, session: str) -> None:
        """End all senders of a session."""
        with self._lock:
            gone = self._senders.pop(session, [])
            self._heard.pop(session, None)
        for sender in gone:
            sender.kill()

    def _of(self, pid: int) -> list[SenderProcess]:
        with self._lock:
            return [sender for senders in self._senders.values() for sender in senders if sender.pid == pid]

    def _watch(self) -> None:
        while not self._closed.wait(LEASE_S / 12):
            with self._lock:
                late = [s for s, heard in self._heard.items() if time.monotonic() - heard > LEASE_S]
            for session in late:
                self.leave(session)

    def _close(self) -> None:
        self._closed.set()
        for session in list(self._senders):
            self.leave(session)
        self._nursery.close()


class RemoteNursery:
    """The actor's end of one node actor: starts senders there. ``about`` is what it said of itself.

    Raises TransferError or TransferTimeout if it cannot be reached.
    """

    def __init__(self, address: str, deadline: Deadline) -> None:
        self.where = split_address(address)[0]
        self._client = Client(address, what=f"node actor {self.where}")
        self._session = secrets.token_hex(8)
        self._closed = threading.Event()
        try:
            self.about: About = self._client.call("about", deadline=deadline, returns=About)
        except BaseException:
            self._client.close()
            raise
        threading.Thread(target=self._renew, name="weightsync-renew", daemon=True).start()

    @property
    def host(self) -> str:
        """Its address, as number or name, without brackets."""
        return self.where.removeprefix("tcp://").rpartition(":")[0].strip("[]")

    def start(self, device: str, variables: Mapping[str, str], deadline: Deadline) -> SenderLike:
        """A new sender on that node; as ``Nursery.start``."""
        request = StartSender(self._session, device, dict(variables), deadline.remaining_s())
        started = self._client.call("start", request, deadline=deadline, returns=Started)
        return RemoteSender(self._client, started, self.about.host)

    def close(self) -> None:
        """End every sender that was started from here. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            with contextlib.suppress(WeightSyncError):
                self._client.call("leave", self._session, deadline=Deadline(_ASK_S, "leaving a node actor"))
            self._client.close()

    def _renew(self) -> None:
        while not self._closed.wait(_RENEW_S):
            with contextlib.suppress(WeightSyncError):
                self._client.call("renew", self._session, deadline=Deadline(_ASK_S, "renewing the lease"))


class RemoteSender:
    """One sender on another node, at the actor's end. Calls raise TransferError at once if it dies meanwhile."""

    def __init__(self, node: Client, started: Started, host: str) -> None:
        self._node = node
        self.pid = started.pid
        self._what = f"sender process {started.pid} on {host}"
        self._client = Client(started.address, what=self._what)
        self._lock = threading.Lock()
        self._killed = False

    @property
    def alive(self) -> bool:
        if self._killed:
            return False
        try:
            return self._node.call("is_alive", self.pid, deadline=Deadline(_ASK_S, self._what), returns=bool)
        except WeightSyncError:
            return False

    def call(self, method: str, argument: Any = None, *, deadline: Deadline, returns: Any = None) -> Any:
        """Call a method of ``nccl.Sender``."""
        return self._client.call(method, argument, deadline=deadline, returns=returns)

    def kill(self) -> None:
        """End it, whatever it is doing; best effort if its node does not answer. Idempotent."""
        with self._lock:
            killed, self._killed = self._killed, True
        if not killed:
            with contextlib.suppress(WeightSyncError):
                self._node.call("stop", self.pid, deadline=Deadline(_ASK_S, f"ending {self._what}"))
            self._client.close()


def check_reachable(node: RemoteNursery, others: str) -> None:
    """Raise ConfigError if ``others`` (a host of ours that it must reach) is a loopback address and it is not here."""
    loopback = ("127.0.0.1", "::1")
    if others in loopback and node.host not in loopback:
        raise ConfigError(
            f"node actor {node.where} cannot reach this node at {others}: set bind_host to an address of this node, "
            "0.0.0.0 or ::"
        )


__all__ = ["About", "NodeServer", "RemoteNursery", "RemoteSender", "SenderLike", "TransferError", "check_reachable"]

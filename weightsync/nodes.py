"""Where senders can run: on the actor's own node, and on each further node that has a node actor. Runs in the actor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from weightsync.addresses import bind_host, reachable_host
from weightsync.config import Config
from weightsync.deadline import Deadline
from weightsync.errors import ConfigError
from weightsync.transports.node import RemoteNursery, SenderLike, check_reachable

_LOOPBACK = ("127.0.0.1", "::1")


class Place(NamedTuple):
    """Where a sender runs: the host of a node actor ("": here, which sorts first), and a GPU ("": host memory)."""

    host: str
    device: str


class Starter(Protocol):
    """What starts senders on one node. See ``sender.Nursery``."""

    def start(self, device: str, variables: Mapping[str, str], deadline: Deadline) -> SenderLike: ...

    def close(self) -> None: ...


class Nodes:
    """``own`` starts senders here. Node actors are those of ``config.node_actors``, met by ``connect``."""

    def __init__(self, own: Starter, config: Config) -> None:
        self._own = own
        self._config = config
        self._remote: dict[str, RemoteNursery] = {}

    def connect(self, deadline: Deadline) -> None:
        """Meet every node actor, once. Raises TransferError, TransferTimeout, ConfigError if two read one host."""
        met = {remote.where for remote in self._remote.values()}
        for one in self._config.node_actors:
            if not one.address:
                raise ConfigError("node_actors: an actor that is not launched under Ray needs their addresses")
            if one.address.partition("#")[0] in met:
                continue
            remote = RemoteNursery(one.address, deadline)
            other = self._remote.setdefault(remote.about.host, remote)
            if other is not remote:
                remote.close()
                raise ConfigError(
                    f"node actors {other.where} and {remote.where} are both of host {remote.about.host}: start one a "
                    "node, or tell them apart by host"
                )

    def places(self, hosts: Mapping[int, str], devices: Mapping[int, str]) -> dict[int, Place]:
        """By training rank, where a sender that reads it must run.

        Raises ConfigError if ranks are on several hosts that have no node actor, or none is on the actor's node.
        """
        here = {host for host in hosts.values() if host not in self._remote}
        if len(here) > 1:
            raise ConfigError(
                f"training ranks are on hosts {sorted(set(hosts.values()))}; one of {sorted(here)} may be the actor's, "
                "the others need a node actor each (node_actors), or source: nccl"
            )
        if not here:
            raise ConfigError(
                f"training ranks are on hosts {sorted(set(hosts.values()))}, none of them the actor's node: place the "
                "actor on one of them, or use source: nccl"
            )
        return {
            rank: Place(host if host in self._remote else "", devices.get(rank, "")) for rank, host in hosts.items()
        }

    def start(self, place: Place, variables: Mapping[str, str], deadline: Deadline) -> SenderLike:
        """A new sender there."""
        starter = self._remote[place.host] if place.host else self._own
        return starter.start(place.device, variables, deadline)

    def nccl_versions(self) -> dict[str, str]:
        """By host of a node actor, the NCCL of its senders ("": none)."""
        return {host: remote.about.nccl for host, remote in self._remote.items()}

    def meeting_host(self, places: Iterable[Place], peer_url: str = "") -> str:
        """Where a rendezvous here is served: an address that senders at ``places`` and ``peer_url`` can reach.

        A loopback address serves peers at loopback addresses only; for others this machine's own is taken.
        """
        remotes = [self._remote[host] for host in sorted({place.host for place in places}) if host]
        outside = next((remote.host for remote in remotes if remote.host not in _LOOPBACK), "")
        host = meeting_host(self._config.bind_host, peer_url or f"//{outside or '127.0.0.1'}", beyond=outside)
        for remote in remotes:
            check_reachable(remote, host)
        return host

    def close(self) -> None:
        """End every sender. Idempotent."""
        for remote in self._remote.values():
            remote.close()
        self._remote = {}
        with contextlib.suppress(OSError):
            self._own.close()


def meeting_host(bind: str, peer_url: str, *, beyond: str = "") -> str:
    """Where the rendezvous is served: an address of this machine that the peer can reach, and ``beyond`` if given."""
    peer = urlsplit(peer_url).hostname or ""
    loopback = bind_host(bind) in _LOOPBACK
    if beyond and (peer in _LOOPBACK or peer == "localhost"):
        peer = beyond
    return reachable_host(("::" if ":" in peer else "") if loopback else bind, peer_host=peer)

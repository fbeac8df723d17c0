"""The process groups of one engine, as the actor sees them: made when needed, given up when anything goes wrong.

An engine that refuses, dies or stalls ends the senders of its own group and of no other; the next push makes a new
group. Nothing is applied to an engine before its group has carried a first, tiny message.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence

from weightsync.deadline import Deadline
from weightsync.engines import GroupSpec
from weightsync.errors import EngineLost, TransferError, WeightSyncError
from weightsync.fanout import Fanout
from weightsync.fleet import EngineLink
from weightsync.nodes import Nodes, Place
from weightsync.transports.nccl_wire import Join, Listen
from weightsync.transports.node import SenderLike

NAME = "weightsync-{}"
CLOSE_S = 5.0
CTAS = 32
"""With its own choice NCCL sends 328 GB/s between two H200s, with this 373, where a plain peer copy makes 389."""


def together(ask: Callable[[], object], act: Callable[[], object], give_up: Callable[[], None]) -> None:
    """``ask`` the engine while ``act`` does the senders' part in a thread; the first to fail ends the other.

    Raises the failure that came first, with the engine's words if it had any; EngineLost before all others.
    """
    failures: list[tuple[str, WeightSyncError]] = []

    def run(side: str, function: Callable[[], object]) -> None:
        try:
            function()
        except Exception as e:
            fault = TransferError(f"{type(e).__name__}: {e}")
            failures.append((side, e if isinstance(e, WeightSyncError) else fault))
            give_up()

    acting = threading.Thread(target=run, args=("sender", act), name="weightsync-act", daemon=True)
    acting.start()
    run("engine", ask)
    acting.join()
    if not failures:
        return
    lost = [e for side, e in failures if isinstance(e, EngineLost)]
    side, first = failures[0]
    if not lost and side == "sender" and len(failures) > 1:
        first.message = f"{first.message}; then the engine: {failures[1][1].message}"
    raise lost[0] if lost else first


class Senders:
    """Sender processes, one a place, replaced after they were killed: the first ranks of a group."""

    _ctas = 0
    """See ``rendezvous.Group``; 0 where others than ourselves make the group too."""

    def __init__(
        self,
        fanout: Fanout,
        nodes: Nodes,
        places: Sequence[Place],
        *,
        variables: Mapping[str, str],
        backend: str,
        peers: int = 0,
        peer_url: str = "",
    ) -> None:
        """``peers``: other members, who come from ``peer_url``; ``variables`` and ``backend``: as theirs."""
        assert places and not places[0].host, "the first sender serves the rendezvous, and that is here"
        self._fanout = fanout
        self._nodes = nodes
        self._places = list(places)
        self._variables = variables
        self._backend = backend
        self._peers = peers
        self._host = nodes.meeting_host(places, peer_url)
        self._senders: list[SenderLike] = []
        self._joined = False

    def give_up(self) -> None:
        """End the senders, and with them whatever they wait for."""
        self._joined = False
        for sender in self._senders:
            sender.kill()

    def started(self, deadline: Deadline) -> bool:
        """Start the senders if there are none or some were killed; False if all were there."""
        if self._senders and all(self._fanout.all(lambda sender: sender.alive, self._senders)):
            return False
        self.give_up()
        self._senders = self._fanout.all(
            lambda place: self._nodes.start(place, self._variables, deadline), self._places
        )
        return True

    def unmap(self, deadline: Deadline) -> None:
        """Have the senders map nothing any more. One that fails is ended, which does it as well."""
        try:
            self._fanout.all(lambda sender: sender.call("unmap", deadline=deadline), self._senders)
        except WeightSyncError:
            self.give_up()

    def _spec(self, name: str, port: int) -> GroupSpec:
        senders = len(self._places)
        return GroupSpec(name, self._host, port, senders, senders + self._peers, self._backend)

    def _join_senders(self, spec: GroupSpec, deadline: Deadline) -> None:
        def join(rank: int) -> None:
            request = join_request(spec, rank, deadline, ctas=self._ctas)
            self._senders[rank].call("join", request, deadline=deadline)

        self._fanout.all(join, range(len(self._senders)))

    def _listen(self, deadline: Deadline) -> int:
        request = Listen(self._host, deadline.remaining_s())
        return self._senders[0].call("listen", request, deadline=deadline, returns=int)


class EngineGroup(Senders):
    """Senders and the TP ranks of one engine."""

    def __init__(self, link: EngineLink, fanout: Fanout, nodes: Nodes, places: Sequence[Place]) -> None:
        assert link.info is not None, "connect first"
        self.link = link
        self.info = link.info
        super().__init__(
            fanout,
            nodes,
            places,
            variables=link.info.nccl_variables,
            backend=backend_of(link),
            peers=link.info.tp_size,
            peer_url=link.url,
        )


def backend_of(link: EngineLink) -> str:
    """Of a group with this engine."""
    assert link.info is not None, "connect first"
    return "gloo" if link.info.device == "cpu" else "nccl"


def join_request(spec: GroupSpec, rank: int, deadline: Deadline, greeted_by: int = 0, ctas: int = 0) -> Join:
    return Join(
        name=spec.group_name,
        host=spec.master_address,
        port=spec.master_port,
        rank=rank,
        world_size=spec.world_size,
        backend=spec.backend,
        timeout_s=deadline.remaining_s(),
        greeted_by=greeted_by,
        ctas=ctas,
    )


def quietly(function: Callable[[], object], kind: type[WeightSyncError] = WeightSyncError) -> None:
    with contextlib.suppress(kind):
        function()

"""The process group of a stock engine: one sender, which broadcasts whole buckets. Runs in the actor."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

from weightsync.deadline import Deadline
from weightsync.engines import Tensors
from weightsync.errors import EngineRejected, TransferError, WeightSyncError
from weightsync.fanout import Fanout
from weightsync.fleet import EngineLink
from weightsync.groups import CLOSE_S, NAME, EngineGroup, quietly, together
from weightsync.nodes import Nodes, Place
from weightsync.spec import Segment
from weightsync.transports.nccl import PROBE_BYTES, Broadcast

PROBE = Tensors(names=["weightsync.probe"], dtypes=["uint8"], shapes=[(1,)])
_NAMES_TRIED = 8
_CHANNELS = 64
_BUFFER_BYTES = 4 << 20  # of a channel, unless NCCL_BUFFSIZE says otherwise


class Turn:
    """A bucket's place in the order of a group: the engine is asked when it has surely begun with the one before.

    While the engine loads one bucket the request for the next one is then there already, and no third. Earlier the two
    requests could change places on their way.
    """

    def __init__(self, before: threading.Event) -> None:
        self.before, self.over = before, threading.Event()


class BroadcastGroup(EngineGroup):
    """A stock engine's group: one sender, which broadcasts. ``device``: the GPU of the arenas ("": host memory)."""

    def __init__(self, link: EngineLink, fanout: Fanout, nodes: Nodes, device: str) -> None:
        super().__init__(link, fanout, nodes, [Place("", device)])
        self._name = ""
        self._failed = False
        self._buffered_bytes = 0
        self._last = threading.Event()
        self._last.set()

    def ready(self, probe: Segment, deadline: Deadline) -> None:
        """Make the group if there is none that works, and send the first byte of ``probe`` through it."""
        if self._failed:
            self.give_up()
        for number in range(_NAMES_TRIED):
            self.started(deadline)
            if self._joined:
                return
            try:
                self._make(NAME.format(number), deadline)
            except EngineRejected as e:
                if "already been created" not in e.message:
                    raise
                continue  # a dead run's group that the engine could not take down
            self._send(probe, PROBE_BYTES, PROBE, deadline, "the first message of the group")
            if self._backend != "gloo":  # whose broadcasts wait for every member
                settings = self._senders[0].call("settings", deadline=deadline, returns=dict[str, str])
                self._buffered_bytes = buffered_bytes(settings)
            self._joined = True

    def turn(self) -> Turn:
        """The next place in the order; whoever takes one must come ``in_turn``."""
        turn = Turn(self._last)
        self._last = turn.over
        return turn

    @contextlib.contextmanager
    def in_turn(self, turn: Turn, deadline: Deadline, what: str) -> Iterator[None]:
        """Wait for a place in the order, to ``send`` there. Raises TransferError if a bucket before it failed."""
        try:
            if not turn.before.wait(deadline.remaining_s()):
                raise deadline.error(f"{what}: the broadcast before it is not over")
            if self._failed or not self._joined:
                raise TransferError(f"{what} was not sent: one before it failed")
            yield
        except WeightSyncError:
            self._failed = True
            raise
        finally:
            turn.over.set()

    def send(self, turn: Turn, segment: Segment, nbytes: int, tensors: Tensors, deadline: Deadline, what: str) -> None:
        """Broadcast one bucket; returns when the engine has loaded it. The next one's turn may come before that."""
        tells = nbytes > self._buffered_bytes  # a broadcast that is over here has begun there
        self._send(segment, nbytes, tensors, deadline, what, turn.over.set if tells else lambda: None)

    def give_up(self) -> None:
        super().give_up()
        self._failed = False

    def close(self) -> None:
        """Have the engine leave, and end the sender."""
        if self._joined:
            deadline = Deadline(CLOSE_S, "leaving the group")
            quietly(lambda: self.link.client.destroy_weights_update_group(self._name, deadline))
        self.give_up()

    def _make(self, name: str, deadline: Deadline) -> None:
        client = self.link.client
        quietly(lambda: client.destroy_weights_update_group(name, deadline), EngineRejected)  # of a run that is gone
        port = self._listen(deadline)
        spec = self._spec(name, port)
        self._name = name
        try:
            together(
                lambda: client.init_weights_update_group(spec, deadline),
                lambda: self._join_senders(spec, deadline),
                self.give_up,
            )
        except WeightSyncError as e:
            self.give_up()
            e.message = f"joining group {name} at {self._host}:{port}: {e.message}"
            raise

    def _send(
        self,
        segment: Segment,
        nbytes: int,
        tensors: Tensors,
        deadline: Deadline,
        what: str,
        broadcast: Callable[[], None] = lambda: None,
    ) -> None:
        """``broadcast`` is called when the sender's part is over, whatever came of it."""
        request = Broadcast(segment, nbytes, deadline.remaining_s())
        client = self.link.client

        def ask() -> None:
            try:
                client.update_weights_from_distributed(tensors, self._name, deadline, what=what)
            except EngineRejected as e:
                if tensors is not PROBE or PROBE.names[0] not in e.message:  # a loader that takes no unknown names
                    raise

        together(ask, lambda: self._senders[0].call("broadcast", request, deadline=deadline), self.give_up, broadcast)


def buffered_bytes(settings: Mapping[str, str]) -> int:
    """How much of a broadcast NCCL may take off the sender's hands before the others have come, at most."""
    said = settings.get("NCCL_BUFFSIZE", "")
    return _CHANNELS * max(_BUFFER_BYTES, int(said) if said.isdecimal() else 0)

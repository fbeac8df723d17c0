"""How the process groups of a stock engine are made: two, with one sender in both. Runs in the actor.

Nothing is sent by a group before its first byte has arrived. What a dead run left behind in the engine is taken down,
or passed over if the engine cannot. What is sent then, and in which order, says ``groups_broadcast``.
"""

from __future__ import annotations

from weightsync.deadline import Deadline
from weightsync.engines import Tensors
from weightsync.errors import EngineRejected, TransferError, WeightSyncError
from weightsync.fanout import Fanout
from weightsync.fleet import EngineLink
from weightsync.groups import NAME, EngineGroup, quietly, together
from weightsync.nodes import Nodes, Place
from weightsync.spec import Segment
from weightsync.transports.nccl_wire import PROBE_BYTES, Broadcast, Fill, Finish
from weightsync.transports.node import SenderLike

WIRES = 2
"""Groups of one engine."""

PROBE = Tensors(names=["weightsync.probe"], dtypes=["uint8"], shapes=[(1,)])
_NAMES_TRIED = 8


class StockGroup(EngineGroup):
    """A stock engine's groups and their sender. ``device``: the GPU of the arena ("": host memory)."""

    def __init__(self, link: EngineLink, fanout: Fanout, nodes: Nodes, device: str) -> None:
        super().__init__(link, fanout, nodes, [Place("", device)])
        self._names: list[str] = []
        self._num_wires = 1
        self._fill: Fill | None = None
        self._prepared: SenderLike | None = None

    @property
    def fills(self) -> bool:
        """Whether its sender fills the arena too."""
        return self._fill is not None and bool(self._fill.buckets)

    @property
    def works(self) -> bool:
        """Whether it is made."""
        return self._joined and len(self._names) >= self._num_wires and all(sender.alive for sender in self._senders)

    def prepare(self, fill: Fill, num_buckets: int, deadline: Deadline) -> None:
        """Have the sender map the arena, and nothing else but what it fills it from, if it does."""
        self._fill, self._prepared = fill, None
        self._num_wires = min(WIRES, max(num_buckets, 1))
        self.started(deadline)
        self._prepare(deadline)

    def ready(self, probe: Segment, deadline: Deadline) -> None:
        """Make the groups that are missing, and send the first byte of ``probe`` through each."""
        taken: list[str] = []  # by dead runs' groups that the engine could not take down
        while True:
            self.started(deadline)
            self._prepare(deadline)
            if self._joined and len(self._names) >= self._num_wires:
                return
            names = [NAME.format(number) for number in range(_NAMES_TRIED)]
            name = next((name for name in names if name not in self._names + taken), "")
            if not name:
                raise TransferError(
                    f"{self.link.url} still has groups of runs that are gone, and keeps them: restart it"
                )
            try:
                self._make(name, deadline)
            except EngineRejected as e:
                if "already been created" not in e.message:
                    raise
                taken.append(name)
                continue
            self._send_probe(name, probe, deadline)
            self._names.append(name)
            self._joined = True

    def give_up(self) -> None:
        """As of all groups."""
        super().give_up()
        self._names = []

    def unmap(self, deadline: Deadline) -> None:
        """As of all groups; what to map is told anew."""
        self._fill = self._prepared = None
        super().unmap(deadline)

    def _send_probe(self, name: str, probe: Segment, deadline: Deadline) -> None:
        """Ask and begin at once: with the first message NCCL connects, so each side waits for the other."""
        what, sender, begun = "the first message of the group", self._senders[0], list[int]()
        request = Broadcast(name, probe, PROBE_BYTES, deadline.remaining_s())
        update = self.link.client.update_from_distributed(PROBE, name, deadline, what=what)

        def ask() -> None:
            try:
                update.make(deadline)
            except EngineRejected as e:
                if PROBE.names[0] not in e.message:  # a loader that takes no unknown names has received it all the same
                    raise

        try:
            together(
                ask,
                lambda: begun.append(sender.call("begin", request, deadline=deadline, returns=int)),
                self.give_up,
            )
            sender.call("finish", Finish(begun[0], deadline.remaining_s()), deadline=deadline)
        except WeightSyncError:
            self.give_up()
            raise
        finally:
            update.drop()

    def _prepare(self, deadline: Deadline) -> None:
        if self._fill is not None and self._prepared is not self._senders[0]:
            self._senders[0].call("prepare", self._fill, deadline=deadline)
            self._prepared = self._senders[0]

    def _make(self, name: str, deadline: Deadline) -> None:
        client = self.link.client
        quietly(lambda: client.destroy_weights_update_group(name, deadline), EngineRejected)  # of a run that is gone
        port = self._listen(deadline)
        spec = self._spec(name, port)
        try:
            together(
                lambda: client.init_weights_update_group(spec, deadline),
                lambda: self._join_senders(spec, deadline),
                self.give_up,
            )
        except WeightSyncError as e:
            e.message = f"joining group {name} at {self._host}:{port}: {e.message}"
            raise

"""The process group of a stock engine: one sender, which broadcasts whole buckets. Runs in the actor.

The engine answers when it takes part in a broadcast, which may be long before that is over, and a request takes longer
on its way than a small bucket's bytes. So two are under way: the next one is written, where the engine must take it
after this one, as soon as this one is, and its bucket follows in the same order. Whatever was asked for has to be sent:
an engine that is left in a broadcast stays there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from weightsync.deadline import Deadline
from weightsync.engines import Tensors
from weightsync.errors import EngineRejected, TransferError, WeightSyncError
from weightsync.fanout import Fanout
from weightsync.fleet import EngineLink
from weightsync.groups import CLOSE_S, NAME, EngineGroup, quietly, together
from weightsync.nodes import Nodes, Place
from weightsync.spec import Segment
from weightsync.transports.nccl import PROBE_BYTES, Broadcast, Fill, FillBucket, Finish
from weightsync.transports.node import SenderLike

PROBE = Tensors(names=["weightsync.probe"], dtypes=["uint8"], shapes=[(1,)])
_NAMES_TRIED = 8
_GRACE_S = 2.0
"""What an engine that refused a bucket may still be in the middle of is let finish: a sender killed meanwhile would
leave it there for ever."""


class Turn:
    """A bucket's place in the order of a group.

    ``goes``: nothing keeps it back. ``under_way``: it was asked for and begun, the next one may follow. ``over``: the
    engine is not in the middle of it any more. The latter two are set, too, when something failed.
    """

    def __init__(self, before: Turn | None) -> None:
        self.before = before
        self.after: Turn | None = None
        self.goes = False
        self.under_way, self.over = threading.Event(), threading.Event()
        if before is not None:
            before.after = self


class BroadcastGroup(EngineGroup):
    """A stock engine's group: one sender, which broadcasts. ``device``: the GPU of the arenas ("": host memory)."""

    def __init__(self, link: EngineLink, fanout: Fanout, nodes: Nodes, device: str) -> None:
        super().__init__(link, fanout, nodes, [Place("", device)])
        self._name = ""
        self._lock = threading.Lock()  # whether a turn goes, or one before it has failed
        self._failed = False
        self._failure: WeightSyncError | None = None  # the first; others follow from it
        self._last: Turn | None = None
        self._fill: Fill | None = None
        self._prepared: SenderLike | None = None

    @property
    def fills(self) -> bool:
        """Whether its sender fills the arenas too."""
        return self._fill is not None and bool(self._fill.buckets)

    def prepare(self, fill: Fill, deadline: Deadline) -> None:
        """Have the sender map the arenas, and nothing else but what it fills them from, if it does."""
        self._fill, self._prepared = fill, None
        self.started(deadline)
        self._prepare(deadline)

    def ready(self, probe: Segment, deadline: Deadline) -> None:
        """Make the group if there is none that works, and send the first byte of ``probe`` through it."""
        if self._failed:
            self.give_up()
            self._failed, self._failure, self._last = False, None, None
        for number in range(_NAMES_TRIED):
            self.started(deadline)
            self._prepare(deadline)
            if self._joined:
                return
            try:
                self._make(NAME.format(number), deadline)
            except EngineRejected as e:
                if "already been created" not in e.message:
                    raise
                continue  # a dead run's group that the engine could not take down
            with self.in_turn(self.turn(), deadline, "the first message of the group") as turn:
                request = Broadcast(probe, PROBE_BYTES, deadline.remaining_s())
                self.send(turn, request, PROBE, deadline, "the first message of the group")
            self._joined = True

    def fill(self, number: int, deadline: Deadline) -> None:
        """Have the sender fill a bucket, if it is the one that fills."""
        if self.fills:
            self._senders[0].call("fill", FillBucket(number), deadline=deadline)

    def turn(self) -> Turn:
        """The next place in the order; whoever takes one must come ``in_turn``."""
        self._last = Turn(self._last)
        return self._last

    @contextlib.contextmanager
    def in_turn(
        self,
        turn: Turn,
        deadline: Deadline,
        what: str,
        *,
        ahead: bool = True,
        first: Callable[[], None] = lambda: None,
    ) -> Iterator[Turn]:
        """Do what comes ``first`` and wait for a place in the order, to ``send`` there: right behind the bucket before
        it, or once the engine has that (not ``ahead``). Raises TransferError if one before it failed already.

        What fails of those under way fails with the first of them: that is what ended the sender.
        """
        try:
            first()
            before = turn.before
            if before is not None and not (before.under_way if ahead else before.over).wait(deadline.remaining_s()):
                raise deadline.error(f"{what}: its turn did not come")
            with self._lock:
                if self._failed:
                    raise TransferError(f"{what} was not sent: one before it failed")
                turn.goes = True
            yield turn
        except WeightSyncError as e:
            failure = self._fail(e if turn.goes else None)
            if failure is None or failure is e or not turn.goes:
                raise
            raise failure from None
        finally:
            turn.under_way.set()
            turn.over.set()
            turn.before = None

    def send(self, turn: Turn, request: Broadcast, tensors: Tensors, deadline: Deadline, what: str) -> None:
        """Broadcast one bucket, in turn; returns when the engine has taken it. The next turn comes before that."""
        client, sender, begun, written = self.link.client, self._senders[0], list[int](), threading.Event()

        def ask() -> None:
            try:
                client.update_weights_from_distributed(
                    tensors, self._name, deadline, flattened=not request.parts, what=what, written=written.set
                )
            except EngineRejected as e:
                if tensors is PROBE and PROBE.names[0] in e.message:
                    return  # a loader that takes no unknown names
                if (cause := self._cause(turn, begun)) is None:
                    self._fail(e)
                    raise
                cause.message = f"{cause.message}; then the engine: {e.message}"
                self._fail(cause)
                raise cause from e
            except WeightSyncError as e:
                self._fail(e)
                raise
            finally:
                written.set()  # or never will be, and then the next one does not go

        def begin() -> None:
            begun.append(sender.call("begin", request, deadline=deadline, returns=int))
            if written.wait(deadline.remaining_s()):
                turn.under_way.set()

        together(ask, begin, self.give_up)
        try:
            sender.call("finish", Finish(begun[0], deadline.remaining_s()), deadline=deadline)
        except WeightSyncError:
            self.give_up()
            raise

    def close(self) -> None:
        """Have the engine leave, and end the sender."""
        if self._joined:
            deadline = Deadline(CLOSE_S, "leaving the group")
            quietly(lambda: self.link.client.destroy_weights_update_group(self._name, deadline))
        self.give_up()

    def _cause(self, turn: Turn, begun: list[int]) -> WeightSyncError | None:
        """Why the engine refused, if it is that the sender is gone; else what is under way is let finish."""
        self._fail(None)
        grace = Deadline(_GRACE_S, "letting the engine finish")
        try:
            for number in begun:
                self._senders[0].call("finish", Finish(number, grace.remaining_s()), deadline=grace)
        except WeightSyncError as e:
            return None if self._senders[0].alive else e
        finally:
            turn.over.set()  # before waiting for the others, who wait for this one
            for other in (turn.before, turn.after):
                if other is not None and other.goes:
                    other.over.wait(grace.remaining_s())
        return None

    def _fail(self, error: WeightSyncError | None) -> WeightSyncError | None:
        """No further turn goes. Returns the first failure, if any is known."""
        with self._lock:
            self._failed, self._failure = True, self._failure or error
            return self._failure

    def unmap(self, deadline: Deadline) -> None:
        """As of all groups; what to map is told anew."""
        self._fill = self._prepared = None
        super().unmap(deadline)

    def _prepare(self, deadline: Deadline) -> None:
        if self._fill is not None and self._prepared is not self._senders[0]:
            self._senders[0].call("prepare", self._fill, deadline=deadline)
            self._prepared = self._senders[0]

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
            e.message = f"joining group {name} at {self._host}:{port}: {e.message}"
            raise

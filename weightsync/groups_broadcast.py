"""The process group of a stock engine: one sender, which broadcasts whole buckets. Runs in the actor.

The engine answers when it takes part in a broadcast, which may be long before that is over. So requests are made one
after the other, each as soon as the one before is granted, and several broadcasts are under way: small tensors keep an
engine's processor longer than its GPU, large ones its GPU. The next request lies at the server by then, all but its
last byte. Were it complete, an engine that refuses a bucket would go on to the next one, and take for it the bytes of
the one that it refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from weightsync.deadline import Deadline
from weightsync.engines import Call, Tensors
from weightsync.errors import EngineLost, EngineRejected, TransferError, TransferTimeout, WeightSyncError
from weightsync.fanout import Fanout
from weightsync.fleet import EngineLink
from weightsync.groups import CLOSE_S, NAME, EngineGroup, quietly, together
from weightsync.nodes import Nodes, Place
from weightsync.receivers import PING_S
from weightsync.spec import Segment
from weightsync.transports.nccl_wire import PROBE_BYTES, Broadcast, Fill, Finish
from weightsync.transports.node import SenderLike

PROBE = Tensors(names=["weightsync.probe"], dtypes=["uint8"], shapes=[(1,)])
MIN_STALL_S = 5.0
STALL_SHARE = 0.25
"""Of the push's time: what one bucket may take before its engine counts as stalled, so that the others still finish."""

_NAMES_TRIED = 8
_GRACE_S = 2.0
"""What an engine that failed a bucket may still be in the middle of is let finish: a sender killed meanwhile would
leave it there for ever."""


class Turn:
    """A bucket's place in the order of a group.

    ``begun``: the sender has begun with it, ``asked``: the engine was asked for it, ``granted``: it takes part,
    ``over``: it has the bytes. All are set, too, when something failed.
    """

    def __init__(self, before: Turn | None = None) -> None:
        self.before = before
        self.begun, self.asked, self.granted, self.over = (threading.Event() for _ in range(4))

    def end(self) -> None:
        for event in (self.begun, self.asked, self.granted, self.over):
            event.set()
        self.before = None


@dataclass(frozen=True)
class Sending:
    """A bucket on its way. ``update`` makes the engine's part of it, ``what`` names it in errors.

    ``granted`` is called when the engine takes part, ``filled``, if the sender fills, when it has done so.
    """

    request: Broadcast
    update: Callable[[], Call]
    what: str
    granted: Callable[[], None] = lambda: None
    filled: Callable[[], None] | None = None


class BroadcastGroup(EngineGroup):
    """A stock engine's group: one sender, which broadcasts. ``device``: the GPU of the arenas ("": host memory)."""

    def __init__(self, link: EngineLink, fanout: Fanout, nodes: Nodes, device: str) -> None:
        super().__init__(link, fanout, nodes, [Place("", device)])
        self._name = ""
        self._lock = threading.Lock()
        self._failure: BaseException | None = None  # the first, after which nothing more is asked for
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
        if self._failure is not None:
            self.give_up()
            self._failure, self._last = None, None
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
            self._send_probe(probe, deadline)
            self._joined = True

    @property
    def works(self) -> bool:
        """Whether it is made and nothing has failed since."""
        return self._joined and self._failure is None and all(sender.alive for sender in self._senders)

    def turn(self) -> Turn:
        """The next place in the order; whoever takes one must ``send``. Updates are made in the same order."""
        self._last = Turn(self._last)
        return self._last

    def barrier(self) -> Turn:
        """A place in the order past which the engine is asked for nothing before it is ``granted``."""
        self._last = turn = Turn()
        turn.begun.set()
        turn.asked.set()
        turn.over.set()
        return turn

    def call_off(self, barrier: Turn) -> None:
        """End the group: its sender may have begun with what the engine is not going to be asked for."""
        self._fail(TransferError("the push ended before the engine was asked for anything"))
        self.give_up()
        barrier.end()

    def update(self, tensors: Tensors, flattened: bool, what: str, deadline: Deadline) -> Call:
        """The engine's part of a broadcast, to be made in turn."""
        return self.link.client.update_from_distributed(tensors, self._name, deadline, flattened=flattened, what=what)

    def send(self, turn: Turn, bucket: Sending, deadline: Deadline) -> None:
        """Broadcast one bucket, in turn; returns when the engine has it. The next one's turn comes before that.

        The sender begins with it as soon as it has begun with the one before: only then is there a broadcast for the
        engine to enter. Raises TransferError, having asked for nothing, if another one failed.
        """
        sender, before, update = self._senders[0], turn.before or _first(), None
        try:
            self._wait(before.begun, deadline, bucket)
            number = sender.call("begin", bucket.request, deadline=deadline, returns=int)
            turn.begun.set()
            self._wait(before.asked, deadline, bucket)
            update = bucket.update()  # all but its last byte lies there while the engine is with the one before
            self._wait(before.granted, deadline, bucket)
            self.link.progress.applied = True  # before the call: one that times out may still be loaded
            self._ask(turn, update, number, step_of(deadline))
            turn.granted.set()
            bucket.granted()
            if bucket.filled is not None:
                sender.call("filled", Finish(number, deadline.remaining_s()), deadline=deadline)
                bucket.filled()
            self._await(before.over, deadline, bucket)
            within = step_of(deadline)
            sender.call("finish", Finish(number, within.remaining_s()), deadline=within)
        except BaseException as e:
            if self._fail(e):  # the first ends the sender
                self._let_finish(before)
                self.give_up()
            raise
        finally:
            if update is not None:
                update.drop()
            turn.end()

    def close(self) -> None:
        """Have the engine leave, and end the sender."""
        if self._joined:
            deadline = Deadline(CLOSE_S, "leaving the group")
            quietly(lambda: self.link.client.destroy_weights_update_group(self._name, deadline))
        self.give_up()

    @staticmethod
    def _await(reached: threading.Event, deadline: Deadline, bucket: Sending) -> None:
        """Until the one before it has come so far, or failed. Raises TransferTimeout."""
        if not reached.wait(deadline.remaining_s()):
            raise deadline.error(f"{bucket.what}: its turn did not come")

    def _wait(self, reached: threading.Event, deadline: Deadline, bucket: Sending) -> None:
        """As ``_await``; TransferError if any other one failed: nothing more is to be asked for."""
        self._await(reached, deadline, bucket)
        if self._failure is not None:
            raise TransferError(f"{bucket.what} was given up, since another one failed: {self._failure}")

    def _fail(self, error: BaseException) -> bool:
        """Nothing more is asked for. True for the first failure."""
        with self._lock:
            first, self._failure = self._failure is None, self._failure or error
        return first

    def _ask(self, turn: Turn, update: Call, number: int, deadline: Deadline) -> None:
        """Have the engine take part. An error of it comes when nothing is under way any more, if that may end."""
        try:
            update.make(deadline, sent=turn.asked.set)
        except TransferTimeout as e:
            self._fail(e)
            self.give_up()  # it is stalled: nothing is to be waited for
            raise
        except EngineLost as e:
            if self._is_there():
                self._let_engine_finish(turn, number)
            else:
                self._fail(e)
                self.give_up()
            raise
        except WeightSyncError as e:
            if (cause := self._let_engine_finish(turn, number)) is None:
                raise
            cause.message = f"{cause.message}; then the engine: {e.message}"
            raise cause from e

    def _is_there(self) -> bool:
        """Whether the engine's process still answers, as one does that is in a broadcast."""
        try:
            self.link.client.weight_version(Deadline(PING_S, f"asking {self.link.url} for its version"))
        except EngineLost:
            return False
        except WeightSyncError:
            pass
        return True

    def _let_engine_finish(self, turn: Turn, number: int) -> WeightSyncError | None:
        """Wait for what is under way. Returns why the engine failed, if it is that the sender is gone."""
        self._let_finish(turn.before or _first())
        grace = Deadline(_GRACE_S, "letting the engine finish")
        try:
            self._senders[0].call("finish", Finish(number, grace.remaining_s()), deadline=grace)
        except WeightSyncError as e:
            return None if self._senders[0].alive else e
        return None

    @staticmethod
    def _let_finish(before: Turn) -> None:
        """Its sender ends it by its own deadline, if the engine does not."""
        before.over.wait()

    def unmap(self, deadline: Deadline) -> None:
        """As of all groups; what to map is told anew."""
        self._fill = self._prepared = None
        super().unmap(deadline)

    def _send_probe(self, probe: Segment, deadline: Deadline) -> None:
        """Ask and begin at once: with the first message NCCL connects, so each side waits for the other."""
        what, sender, begun = "the first message of the group", self._senders[0], list[int]()
        request = Broadcast(probe, PROBE_BYTES, deadline.remaining_s())
        update = self.update(PROBE, True, what, deadline)

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


def _first() -> Turn:
    """What comes before the first."""
    turn = Turn()
    turn.end()
    return turn


def step_of(deadline: Deadline) -> Deadline:
    """What one step of a push may take."""
    allowed_s = max(MIN_STALL_S, deadline.timeout_s * STALL_SHARE)
    return Deadline(min(allowed_s, deadline.remaining_s()), f"{deadline.what}, a step of it")

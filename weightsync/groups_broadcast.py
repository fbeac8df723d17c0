"""Whole buckets by the process groups of a stock engine: its sender broadcasts them in turns. Runs in the actor.

The engine answers when it takes part in a broadcast, which may be long before that is over, and an answer and the next
request take their time. So that request waits in its server already, and several broadcasts are under way: an engine's
processor is busy with small tensors longer than its GPU, with large ones shorter. But an engine that refuses a bucket
goes on to the one that waits, and would take the bytes of the one that it refused for it. So buckets go by two groups
in turns, and in each the engine is asked for the next one when it takes part in the one before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from weightsync.deadline import Deadline
from weightsync.engines import Call
from weightsync.errors import EngineLost, TransferError, TransferTimeout, WeightSyncError
from weightsync.fanout import Fanout
from weightsync.fleet import EngineLink
from weightsync.groups import CLOSE_S, quietly
from weightsync.groups_stock import StockGroup
from weightsync.nodes import Nodes
from weightsync.receivers import PING_S
from weightsync.spec import Segment
from weightsync.transports.nccl_wire import Broadcast, Finish
from weightsync.turns import Turn, Turns, nobody

MIN_STALL_S = 5.0
STALL_SHARE = 0.25
"""Of the push's time: what one bucket may take before its engine counts as stalled, so that the others still finish."""

_GRACE_S, _SLOW_BYTES_S = 2.0, 256 << 20
"""What an engine that failed a bucket may be in the middle of is let finish: a sender killed meanwhile would leave it
there for ever. It takes no longer than two buckets take at that many bytes a second, or it has not begun.
"""
_BEYOND_S = 2.0
"""How much longer than the push its threads may take to end."""


@dataclass(frozen=True)
class Sending:
    """A bucket on its way. ``update`` makes the engine's part of it in a group.

    ``is_beside``: it lies beside the one before, and is filled though that one has not been sent. ``granted`` is called
    when the engine takes part, ``filled``, if the sender fills, when it has done so.
    """

    request: Broadcast
    update: Callable[[str], Call]
    is_beside: bool
    granted: Callable[[], None] = lambda: None
    filled: Callable[[], None] | None = None


class BroadcastGroup(StockGroup):
    """A stock engine's groups, by which its sender broadcasts."""

    def __init__(self, link: EngineLink, fanout: Fanout, nodes: Nodes, device: str) -> None:
        super().__init__(link, fanout, nodes, device)
        self._turns = Turns()

    def ready(self, probe: Segment, deadline: Deadline) -> None:
        """As of all; anew after a failure."""
        if self._turns.failure is not None:
            self.give_up()
            self._turns.reset()
        super().ready(probe, deadline)

    @property
    def works(self) -> bool:
        """Whether it is made and nothing has failed since."""
        return super().works and self._turns.failure is None

    def turn(self, what: str) -> Turn:
        """The next place in the order; whoever takes one must ``send``. Updates are made in the same order."""
        return self._turns.next(what, self._names)

    def barrier(self) -> Turn:
        """A place in the order past which the engine is asked for nothing before it is ``granted``."""
        return self._turns.barrier()

    def call_off(self, barrier: Turn) -> None:
        """End the group: its sender may have begun with what the engine is not going to be asked for."""
        self._turns.fail(TransferError("the push ended before the engine was asked for anything"))
        self.give_up()
        barrier.end()

    def send(self, turn: Turn, bucket: Sending, deadline: Deadline) -> None:
        """Broadcast one bucket, in turn; returns when the engine has it. The next one's turn comes before that.

        Raises TransferError, having asked for nothing, if another one failed.
        """
        try:
            self._broadcast(turn, bucket, deadline)
        except BaseException as e:
            if (cause := self._failed(turn, e, bucket.request.nbytes, deadline)) is not None:
                raise cause from e
            raise
        finally:
            turn.end()

    def _broadcast(self, turn: Turn, bucket: Sending, deadline: Deadline) -> None:
        """The sender begins as soon as it has begun with the one before: only then is there something for the engine to
        enter.
        """
        sender, before, same = self._senders[0], turn.before or nobody(), turn.same or nobody()
        self._wait(turn, before.begun, deadline)
        request = msgspec.structs.replace(bucket.request, group=turn.group)
        turn.number = sender.call("begin", request, deadline=deadline, returns=int)
        turn.begun.set()
        self._wait(turn, same.asked, deadline)
        update = bucket.update(turn.group)  # all but its last byte lies there while the engine is with that one
        try:
            # Requests on two connections may overtake each other, and an engine would wait in this one for ever if its
            # sender fills it only when the one before has been sent.
            self._wait(turn, before.asked if bucket.is_beside else before.granted, deadline)
            self._wait(turn, same.granted, deadline)
            self._turns.ask(turn)
            self.link.progress.applied = True  # before the call: one that times out may still be loaded
            steps = 1 if before.granted.is_set() else 2  # the engine is with that one still
            update.make(step_of(deadline, steps), sent=turn.asked.set)
        finally:
            update.drop()
        turn.granted.set()
        bucket.granted()
        if bucket.filled is not None:
            sender.call("filled", Finish(turn.number, deadline.remaining_s()), deadline=deadline)
            bucket.filled()
        turn.await_(before.over, deadline)
        within = step_of(deadline)
        turn.is_finished = True
        sender.call("finish", Finish(turn.number, within.remaining_s()), deadline=within)

    def close(self) -> None:
        """Have the engine leave its groups, and end the sender."""
        if self._joined:
            deadline = Deadline(CLOSE_S, "leaving the group")
            for name in self._names if self._turns.stop(CLOSE_S) else ():  # in use, it would take the engine down
                quietly(partial(self.link.client.destroy_weights_update_group, name, deadline))
        self.give_up()

    def _wait(self, turn: Turn, reached: threading.Event, deadline: Deadline) -> None:
        """Until another one has come so far. Raises TransferTimeout; TransferError if any one has failed."""
        turn.await_(reached, deadline)
        self._turns.check(turn)

    def _is_there(self) -> bool:
        """Whether the engine's process still answers, as one does that is in a broadcast."""
        try:
            self.link.client.weight_version(Deadline(PING_S, f"asking {self.link.url} for its version"))
        except EngineLost:
            return False
        except WeightSyncError:
            pass
        return True

    def _failed(self, turn: Turn, error: BaseException, nbytes: int, deadline: Deadline) -> BaseException | None:
        """The first failure ends the sender when nothing is under way any more that may end: killed before, it would
        leave the engine in a broadcast for ever. Returns what it failed for, if that is another error.
        """
        is_first, is_lost = self._turns.fail(error), isinstance(error, EngineLost)
        is_stalled = turn.was_asked and isinstance(error, TransferTimeout)
        if is_first and (is_stalled or (turn.was_asked and is_lost and not self._is_there())):
            self.give_up()
            return None
        bound_s = deadline.remaining_s() + _BEYOND_S  # the others' own threads see to that they end before
        if turn.before is not None:
            turn.before.over.wait(bound_s)
        cause: BaseException | None = None
        if turn.was_asked and not is_stalled and not turn.is_finished:
            grace_s = min(_GRACE_S + 2 * nbytes / _SLOW_BYTES_S, step_of(deadline).timeout_s)
            cause = self._sender_failure(turn.number, Deadline(grace_s, "letting the engine finish"))
        turn.over.set()
        if not is_first:
            return self._turns.failure if turn.was_asked and not is_lost else None
        for later in turn.later():
            if later.was_asked:
                later.over.wait(bound_s)
        self.give_up()
        if is_lost or not isinstance(cause, WeightSyncError) or not isinstance(error, WeightSyncError):
            return None
        cause.message = f"{cause.message}; then the engine: {error.message}"
        return cause

    def _sender_failure(self, number: int, deadline: Deadline) -> WeightSyncError | None:
        """Let an engine finish what may have been queued before it answered. An error if the sender is gone."""
        try:
            self._senders[0].call("finish", Finish(number, deadline.remaining_s()), deadline=deadline)
        except WeightSyncError as e:
            return None if self._senders[0].alive else e
        return None


def step_of(deadline: Deadline, count: int = 1) -> Deadline:
    """What one step of a push may take, or ``count`` of them."""
    allowed_s = count * max(MIN_STALL_S, deadline.timeout_s * STALL_SHARE)
    return Deadline(min(allowed_s, deadline.remaining_s()), f"{deadline.what}, a step of it")

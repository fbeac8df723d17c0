"""The engine's end: traces what an engine rank needs, pulls it at every push, and reads it back. And that end's wire.

Started with ``--custom-weight-loader weightsync.receiver.load``, SGLang calls ``load`` in every TP rank with what an
``update_weights_from_tensor`` carries: one *command*. Attach and Pull touch weights and run there, in SGLang's event
loop. Everything else is asked of the receiver's own server, which answers from a thread. The actor imports this file
for the wire alone.
"""

from __future__ import annotations

import base64
import logging
import os
import pickle
import secrets
import sys
import threading
import weakref
from urllib.parse import urlsplit

import msgspec
import torch
from torch import nn

from weightsync.deadline import Deadline
from weightsync.errors import EngineLost, TransferError, WeightSyncError
from weightsync.rpc import Client, reachable_host, split_address
from weightsync.sharing import Pass
from weightsync.spec import RankPlan, Segment, Shard, Struct, TensorSpec

logger = logging.getLogger(__name__)

LOADER = "weightsync.receiver.load"
"""What an engine is started with (``--custom-weight-loader``), and the load format of our commands."""

BOOT_ID = secrets.token_hex(8)
"""Of this process: a restarted engine has another."""

ANNOUNCE_S = 5.0
RESULT_S = 10.0
SWITCH_INTERVAL_S = 1e-4
"""How long the engine's event loop, which never rests, may keep the interpreter from a thread of ours that wants it.

Python's own 5 ms would be spent at every answer of the receiver's server, and between any two small operations of a
verification.
"""


class Attach(Struct, tag=True):
    """Begin ``session``: trace the needs for ``tensors`` and announce yourself at ``reply`` (an rpc address)."""

    reply: str
    session: str
    tp_rank: int
    tensors: list[TensorSpec]


class Pull(Struct, tag=True):
    """Run plan ``plan_id`` once. ``full``: write the constants back too, so that nothing of before is left.

    ``verify``: read all of it back as well, here where the event loop does not compete for the interpreter.

    ``timeout_s`` ends an exchange whose senders stall, and a pull in rounds whose actor does.

    Whoever does not know ``session`` says so at ``reply`` by calling ``unknown``, if an address is given.
    """

    session: str
    push_id: str
    plan_id: str
    step: int
    full: bool = False
    reply: str = ""
    tp_rank: int = -1
    timeout_s: float = 0.0
    verify: bool = False


class Announcement(Struct):
    """A receiver's answer to Attach: where it can be called. ``error``: why it cannot serve (``address`` is "")."""

    session: str
    tp_rank: int
    address: str
    boot_id: str
    pid: int
    error: str = ""


class Exchange(Struct):
    """A rank's slices arrive over a process group. ``senders``: by trainer rank, the group rank that sends for it.

    ``passes``: what it then passes on to other ranks of its engine and is passed, by group rank, one after the other.
    """

    senders: dict[int, int]
    chunk_bytes: int
    passes: list[Pass] = []


class Install(Struct):
    """A rank's part of a plan. ``segments`` and ``shards`` by trainer rank; ``pulls`` false: only verify by it.

    ``verified``: every push will be, so what a GPU needs for that is prepared now.

    With ``exchange`` nothing is mapped: what the copies would read is received.

    ``rounds``: how many of the plan's copies each round has, one after the other (see ``weightsync.rounds``); empty:
    all are made at once, when the pull begins.
    """

    plan_id: str
    segments: dict[int, list[Segment]]
    shards: dict[int, list[Shard]]
    plan: RankPlan
    pulls: bool = True
    verified: bool = False
    exchange: Exchange | None = None
    rounds: list[int] = []


class ResultRequest(Struct):
    """Which pull. ``timeout_s``: how long ``result`` waits for it to end."""

    push_id: str
    timeout_s: float = RESULT_S


class PullResult(Struct):
    """How a pull went. ``applied``: a weight may have been written. ``kind`` of failure: not_started, unknown_plan,

    layout_moved, derived_stale, not_ended or failed; "" if ok. ``seconds``: of the copies alone. ``fingerprints``: as
    ``verify`` gives them, where the pull asked for them and nothing is wrong with a constant; else None.
    """

    push_id: str
    started: bool = False
    applied: bool = False
    ok: bool = False
    kind: str = ""
    error: str = ""
    step: int = -1
    num_bytes: int = 0
    seconds: float = 0.0
    fingerprints: list[int] | None = None

    @property
    def ended(self) -> bool:
        """False if it has not begun, or not ended, yet."""
        return self.kind not in ("not_started", "not_ended")


class Status(Struct):
    """What a receiver is. ``session`` and ``plan_id`` are "" when it must be attached (again) or installed."""

    boot_id: str
    session: str
    plan_id: str
    pid: int
    num_segments: int


def payload(command: Attach | Pull) -> str:
    """A command as one TP rank's entry of ``serialized_named_tensors``: a base64 pickle of one named uint8 tensor.

    Runs in the actor. The bytes travel by value and name only globals that the strictest unpickler allows.
    """
    body = torch.frombuffer(bytearray(msgspec.msgpack.encode(command)), dtype=torch.uint8)
    return base64.b64encode(pickle.dumps([("weightsync", body)], protocol=4)).decode()


def pull_error(result: PullResult, *, engine: str, rank: int) -> WeightSyncError:
    """The error that says how a pull failed; safe to retry if no weight was written. Runs in the actor."""
    kind = EngineLost if result.kind in ("not_started", "unknown_plan") else TransferError
    return kind(result.error, engine=engine, rank=rank, phase="move", safe_to_retry=not result.applied)


# ------------------------------------------------------------------------------------------- in the engine


def load(model: nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """SGLang's custom weight loader: carries out one command on ``model``. Never raises: that would end the server."""
    try:
        command = _command(named_tensors)
        if isinstance(command, Attach):
            _attach(model, command)
            return
        session = _sessions.get(model)
        if session is None or session.session != command.session:
            logger.warning("weightsync: a pull for session %s, which is not attached here", command.session)
            _call_actor(command.reply, "unknown", _announcement(command, ""))
            return
        session._pull(command)
    except Exception:
        logger.exception("weightsync: a command failed")


_sessions: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _command(named_tensors: list[tuple[str, torch.Tensor]]) -> Attach | Pull:
    ((_, body),) = named_tensors
    return msgspec.msgpack.decode(body.cpu().numpy().tobytes(), type=Attach | Pull)


def _attach(model: nn.Module, command: Attach) -> None:
    from weightsync.receiver_session import ReceiverSession

    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
    before = _sessions.pop(model, None)
    if before is not None:
        before._retire()
    try:
        host = reachable_host("", peer_host=urlsplit(split_address(command.reply)[0]).hostname or "")
        session = ReceiverSession(model, command, host=host, before=before)
        _sessions[model] = session
        answer = _announcement(command, session._address)
    except Exception as e:  # the actor must hear of it, whatever it is
        logger.exception("weightsync: attaching failed")
        answer = _announcement(command, "", f"{type(e).__name__}: {e}")
    _call_actor(command.reply, "announce", answer)


def _announcement(command: Attach | Pull, address: str, error: str = "") -> Announcement:
    return Announcement(
        session=command.session,
        tp_rank=command.tp_rank,
        address=address,
        boot_id=BOOT_ID,
        pid=os.getpid(),
        error=error,
    )


def _call_actor(address: str, method: str, answer: Announcement) -> None:
    """Tell the actor, from a thread: SGLang's event loop does not wait for it."""
    if address:
        threading.Thread(target=_tell, args=(address, method, answer), name="weightsync-announce", daemon=True).start()


def _tell(address: str, method: str, answer: Announcement) -> None:
    try:
        client = Client(address, what="the weight-sync actor")
        try:
            client.call(method, answer, deadline=Deadline(ANNOUNCE_S, "announcing a receiver"))
        finally:
            client.close()
    except WeightSyncError as e:
        logger.warning("weightsync: %s to the actor failed: %s", method, e)

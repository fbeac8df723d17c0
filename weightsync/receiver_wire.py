"""What actor and receivers say to each other: commands in the engine's own update call, and calls of our server."""

from __future__ import annotations

import base64
import pickle
import secrets

import msgspec
import torch

from weightsync.errors import EngineLost, TransferError, WeightSyncError
from weightsync.sharing import Pass
from weightsync.spec import RankPlan, Segment, Shard, Struct, TensorSpec

LOADER = "weightsync.receiver.load"
"""What an engine is started with (``--custom-weight-loader``), and the load format of our commands."""

BOOT_ID = secrets.token_hex(8)
"""Of this process: a restarted engine has another."""

RESULT_S = 10.0


class Attach(Struct, tag=True):
    """Begin ``session``: trace the needs for ``tensors`` and announce yourself at ``reply`` (an rpc address)."""

    reply: str
    session: str
    tp_rank: int
    tensors: list[TensorSpec]


class Pull(Struct, tag=True):
    """Run plan ``plan_id`` once. ``full``: write the constants back too, so that nothing of before is left.

    ``verify``: read all of it back as well, here where the event loop does not compete for the interpreter.

    ``timeout_s`` ends an exchange whose senders stall, and a pull in rounds whose actor does. ``beside``: the engine is
    paused until all ranks have ended, so a pull that can go on by itself need not keep the event loop: the engine's
    answer then says that it has begun, and the board of each rank that it has landed.

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
    beside: bool = False


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


class Installed(Struct):
    """A receiver's answer to Install.

    ``goes_on``: its pulls can go on beside the event loop of a paused engine, and say on ``board`` when they have
    landed (see ``weightsync.board``), with fingerprints if the plan is ``verified``: one for each of the plan's needs
    that ``order`` names, then one for each constant, which must be as in ``constants``.
    """

    goes_on: bool = False
    board: Segment | None = None
    order: list[int] = []
    constants: list[int] = []


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


def command(named_tensors: list[tuple[str, torch.Tensor]]) -> Attach | Pull:
    """What ``payload`` made one from, as the engine hands it over. Runs in the engine."""
    ((_, body),) = named_tensors
    return msgspec.msgpack.decode(body.cpu().numpy().tobytes(), type=Attach | Pull)

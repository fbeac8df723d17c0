"""The engine's end: traces what an engine rank needs, pulls it at every push, and reads it back.

Started with ``--custom-weight-loader weightsync.receiver.load``, SGLang calls ``load`` in every TP rank with what an
``update_weights_from_tensor`` carries: one *command*. Attach and Pull touch weights and run there, in SGLang's event
loop. Everything else is asked of the receiver's own server, which answers from a thread.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from urllib.parse import urlsplit

import torch
from torch import nn

from weightsync import receiver_wire as wire
from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.gil import share_the_interpreter
from weightsync.rpc import Client, reachable_host, split_address

logger = logging.getLogger(__name__)

ANNOUNCE_S = 5.0


def load(model: nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """SGLang's custom weight loader: carries out one command on ``model``. Never raises: that would end the server."""
    try:
        command = wire.command(named_tensors)
        if isinstance(command, wire.Attach):
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


def _attach(model: nn.Module, command: wire.Attach) -> None:
    from weightsync.receiver_session import ReceiverSession  # here: the actor is told if it cannot be had

    share_the_interpreter()
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


def _announcement(command: wire.Attach | wire.Pull, address: str, error: str = "") -> wire.Announcement:
    return wire.Announcement(
        session=command.session,
        tp_rank=command.tp_rank,
        address=address,
        boot_id=wire.BOOT_ID,
        pid=os.getpid(),
        error=error,
    )


def _call_actor(address: str, method: str, answer: wire.Announcement) -> None:
    """Tell the actor, from a thread: SGLang's event loop does not wait for it."""
    if address:
        threading.Thread(target=_tell, args=(address, method, answer), name="weightsync-announce", daemon=True).start()


def _tell(address: str, method: str, answer: wire.Announcement) -> None:
    try:
        client = Client(address, what="the weight-sync actor")
        try:
            client.call(method, answer, deadline=Deadline(ANNOUNCE_S, "announcing a receiver"))
        finally:
            client.close()
    except WeightSyncError as e:
        logger.warning("weightsync: %s to the actor failed: %s", method, e)

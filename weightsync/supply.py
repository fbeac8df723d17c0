"""Sending a training rank's exported memory over a group with the actor, where no actor is on its node.

Runs in the training worker, in threads of its server. The group is made beside torch's, which do not know of it.
"""

from __future__ import annotations

import threading

import torch

from weightsync.deadline import Deadline
from weightsync.errors import TransferError
from weightsync.offer import Offer
from weightsync.spec import Copy
from weightsync.transports.exchange import GroupLike, Outgoing
from weightsync.transports.nccl import join, outgoing
from weightsync.transports.nccl_versions import group_version
from weightsync.transports.nccl_wire import PROBE_BYTES, Greet, Join, Load, Send


class Supplier:
    """One rank's end. What is sent lies where ``Offer.export`` put it."""

    def __init__(self, offer: Offer) -> None:
        self._offer = offer
        self._lock = threading.Lock()
        self._group: GroupLike | None = None
        self._outgoing: list[Outgoing] = []
        self._generation = -1

    def version(self) -> str:
        """What the group would be made with here: ``gloo``, or ``NCCL 2.30.7``. Raises TransferError without CuPy."""
        return group_version(self._offer.device)

    def join(self, request: Join) -> None:
        """Leave any other group and join this one."""
        self.leave()
        group = join(request, self._offer.device, in_engine=True)
        with self._lock:
            self._group = group

    def hear(self, request: Greet) -> None:
        """Receive the group's first byte from each peer."""
        byte = torch.zeros(len(request.peers), PROBE_BYTES, dtype=torch.uint8, device=self._offer.device)
        group = self._joined()
        group.finish(group.start([], list(zip(request.peers, byte))), Deadline(request.timeout_s, "being greeted"))

    def load(self, request: Load) -> None:
        """What to send, by index of the exported shards."""
        with self._offer.exported() as (generation, views):

            def view(copy: Copy) -> torch.Tensor:
                whole = views[copy.source.storage]
                assert whole is not None, f"nothing of {copy.tensor} is here"
                return whole.as_strided(copy.box.size, copy.source.strides, whole.storage_offset() + copy.source.offset)

            self._outgoing = outgoing(request, view, self._offer.device)
            self._generation = generation

    def send(self, request: Send) -> int:
        """Send once; the number of bytes. Raises TransferError if the memory moved since ``load``."""
        with self._offer.exported() as (generation, _):
            if generation != self._generation:
                raise TransferError("its memory moved since it was told what to send", safe_to_retry=True)
            return self._outgoing[request.part].run(self._joined(), Deadline(request.timeout_s, "supplying"))

    def unload(self) -> None:
        """Forget what to send, which holds its memory."""
        self._outgoing, self._generation = [], -1

    def leave(self) -> None:
        """Give the group up; a ``send`` that waits in it is released. Idempotent."""
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _joined(self) -> GroupLike:
        group = self._group
        if group is None:
            raise TransferError("this training rank is in no group with the actor")
        return group

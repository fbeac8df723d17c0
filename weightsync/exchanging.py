"""A plan whose slices arrive over a process group instead of mapped memory, and the membership in it. In the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from weightsync import receiver_wire as wire
from weightsync.deadline import Deadline
from weightsync.errors import TransferError
from weightsync.live import LiveWeights
from weightsync.pulling import SlotViews
from weightsync.spec import Copy, Segment
from weightsync.transports import nccl
from weightsync.transports.exchange import Buffers, Chunk, Incoming, Outgoing, chunked, streams, swap
from weightsync.transports.nccl_wire import PROBE_BYTES, Join
from weightsync.transports.rendezvous import Group


class Membership:
    """The one group that an engine rank is in. ``join`` and ``leave`` may be called while a pull waits in the group."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._group: Group | None = None

    def join(self, request: Join) -> None:
        """Leave any other group, join this one and hear from its senders. Raises TransferError, TransferTimeout."""
        self.leave()
        deadline = Deadline(request.timeout_s, "joining")
        group = nccl.join(request, self.device, in_engine=True)
        try:
            byte = torch.zeros(request.greeted_by, PROBE_BYTES, dtype=torch.uint8, device=self.device)
            group.finish(group.start([], list(enumerate(byte.unbind()))), deadline)
        except BaseException:
            group.abort()
            raise
        with self._lock:
            self._group = group

    def leave(self) -> None:
        """Give the group up, if there is one; whoever waits in it is released."""
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            group.abort()

    def group(self) -> Group:
        """The group; raises TransferError if this rank is in none."""
        if self._group is None:
            raise TransferError("this rank is in no process group")
        return self._group


class ExchangedPlan:
    """The copies and fills that one engine rank makes at every push, and the needs by which it is verified.

    What several ranks need alike is passed from one to the next when the senders are done. Raises PlanError if a copy
    would have to cast.
    """

    segments: list[Segment] = []  # nothing is mapped

    def __init__(self, install: wire.Install, *, live: LiveWeights, membership: Membership) -> None:
        assert install.exchange is not None
        self.plan_id = install.plan_id
        self.needs = install.plan.needs
        self._live = live
        self._fills = install.plan.fills
        self._membership = membership
        shards, limit_bytes, views = install.shards, install.exchange.chunk_bytes, SlotViews(live)

        def target(copy: Copy) -> torch.Tensor:
            dtype = getattr(torch, shards[copy.rank][copy.source.storage].dtype)
            return views.of_copy(copy, dtype)

        def by_peer(copies: dict[int, list[Copy]]) -> dict[int, list[Chunk]]:
            return {peer: chunked(parts, shards, limit_bytes) for peer, parts in copies.items()}

        direct = streams(install.plan.copies, shards, install.exchange.senders, limit_bytes)
        sends = [by_peer(one.sends) for one in install.exchange.passes]
        receives = [by_peer(one.receives) for one in install.exchange.passes]
        sending, receiving = Buffers(membership.device), Buffers(membership.device)
        sending.reserve(sends)
        receiving.reserve([direct, *receives])
        self._incoming = Incoming(direct, shards, target, receiving)
        self._passes = [
            (Outgoing(out, shards, target, sending), Incoming(into, shards, target, receiving))
            for out, into in zip(sends, receives, strict=True)
        ]
        passed = [c for one in install.exchange.passes for copies in one.receives.values() for c in copies]
        self.num_bytes = sum(target(copy).nbytes for copy in [*install.plan.copies, *passed])

    goes_on = False

    def check(self) -> None:
        """Raises TransferError if this rank is in no group."""
        self._membership.group()

    def start(self, timeout_s: float) -> Callable[[], float]:
        """Receive, unpack, pass on and fill. What is returned gives the seconds that took but for the fills.

        A group that fails is left.
        """
        started = time.perf_counter()
        with torch.inference_mode():
            try:
                group, deadline = self._membership.group(), Deadline(timeout_s, "receiving")
                self._incoming.run(group, deadline)
                for out, into in self._passes:
                    swap(group, out, into, deadline)
            except TransferError:
                self._membership.leave()
                raise
            seconds = time.perf_counter() - started
            for fill in self._fills:
                self._live.view(fill.view, fill.size).fill_(fill.value)
        return lambda: seconds

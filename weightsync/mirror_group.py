"""The group over which training workers send shards to the actor, and where those lie there. Runs in the actor."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from weightsync.boxes import volume
from weightsync.deadline import Deadline
from weightsync.errors import ConfigError, WeightSyncError
from weightsync.fanout import Fanout
from weightsync.fit import dtype_bytes
from weightsync.groups import NAME, Senders, join_request
from weightsync.nodes import Nodes, Place
from weightsync.spec import Copy, Export, Segment, Shard, Struct, View
from weightsync.transports.nccl_wire import Expect, Greet, Load, Send
from weightsync.workers import Workers

_ALIGN = 256


class MirrorLayout(Struct):
    """``sizes``: bytes a receiver. ``shards``: by rank, where each lies now. ``copies``: by receiver and rank."""

    sizes: list[int]
    shards: dict[int, list[Shard]]
    copies: list[dict[int, list[Copy]]]


class MirrorGroup(Senders):
    """The group of all publishers that send anything, and of a receiving process for each GPU of the actor's."""

    def __init__(
        self, fanout: Fanout, nodes: Nodes, workers: Workers, receivers: Sequence[str], publisher_host: str
    ) -> None:
        self.backend = "cupy" if any(receivers) else "gloo"
        self._workers = workers
        self._suppliers: list[int] = []
        super().__init__(
            fanout,
            nodes,
            [Place("", device) for device in receivers],
            variables={},
            backend=self.backend,
            peer_url=f"//{publisher_host}",
        )

    def prepare(
        self,
        layout: MirrorLayout,
        segments: list[Segment],
        exports: dict[int, Export],
        chunk_bytes: int,
        deadline: Deadline,
    ) -> None:
        """Compare versions, before anything is opened; then tell every member what it sends or receives."""
        self._suppliers = sorted({rank for copies in layout.copies for rank in copies})
        self._peers = len(self._suppliers)
        self.started(deadline)
        self._check_versions(deadline)
        first = len(self._places)
        member = {rank: first + index for index, rank in enumerate(self._suppliers)}
        shards = {rank: exports[rank].shards for rank in self._suppliers}
        self._expects = [
            Expect(segment, shards, [{member[rank]: own for rank, own in copies.items()}], chunk_bytes)
            for segment, copies in zip(segments, layout.copies, strict=True)
        ]
        self._loads = {
            rank: Load(
                segments={},
                shards={rank: shards[rank]},
                parts=[{number: copies[rank] for number, copies in enumerate(layout.copies) if rank in copies}],
                chunk_bytes=chunk_bytes,
            )
            for rank in self._suppliers
        }
        self._greets = [[member[rank] for rank in copies] for copies in layout.copies]
        self._load(deadline)

    def fetch(self, deadline: Deadline) -> int:
        """Bring every shard here; the number of bytes. Raises TransferError, TransferTimeout: nothing was applied."""
        try:
            if self.started(deadline):
                self._load(deadline)
            if not self._joined:
                self._join(deadline)
            request = Send(deadline.remaining_s())
            return sum(self._each("receive", [request] * len(self._places), "send", request, deadline, int)) // 2
        except WeightSyncError as e:
            self.give_up()
            e.message, e.safe_to_retry = f"receiving shards from the training workers: {e.message}", True
            raise

    def give_up(self) -> None:
        """End the receiving processes, and have the publishers leave."""
        super().give_up()
        deadline = Deadline(5.0, "leaving the group")
        for rank in self._suppliers:
            with contextlib.suppress(WeightSyncError):
                self._workers.call(rank, "leave", None, deadline)

    def _check_versions(self, deadline: Deadline) -> None:
        ours = self._senders[0].call("group_version", deadline=deadline, returns=str)
        for rank in self._suppliers:
            theirs = self._workers.call(rank, "group_version", None, deadline, str)
            if theirs != ours:
                raise ConfigError(
                    f"source: nccl: training rank {rank} would use {theirs} and the actor's environment {ours}; "
                    "members of one group must have the same. Use an actor's environment that fits the trainer",
                    rank=rank,
                )

    def _load(self, deadline: Deadline) -> None:
        jobs = [(s, "expect", e) for s, e in zip(self._senders, self._expects, strict=True)]
        self._fanout.all(lambda job: job[0].call(job[1], job[2], deadline=deadline), jobs)
        self._fanout.all(lambda rank: self._workers.call(rank, "load", self._loads[rank], deadline), self._suppliers)

    def _join(self, deadline: Deadline) -> None:
        spec = self._spec(NAME.format(secrets.token_hex(4)), self._listen(deadline))
        first = len(self._places)
        joins = [join_request(spec, number, deadline) for number in range(first + self._peers)]
        self._calls("join", joins[:first], "join", joins[first:], deadline)
        left = deadline.remaining_s()
        heard = [[n for n, peers in enumerate(self._greets) if first + i in peers] for i in range(self._peers)]
        self._calls("greet", [Greet(p, left) for p in self._greets], "hear", [Greet(p, left) for p in heard], deadline)
        self._joined = True

    def _each(self, here: str, ours: list, there: str, theirs: Struct, deadline: Deadline, returns: Any) -> list:
        return self._calls(here, ours, there, [theirs] * self._peers, deadline, returns)

    def _calls(
        self, here: str, ours: list, there: str, theirs: list, deadline: Deadline, returns: Any = None
    ) -> list[Any]:
        """Call every member at once; the first that fails ends the others, who may wait for it."""

        def run(job: tuple[Any, int, str, Any]) -> Any:
            sender, rank, method, argument = job
            try:
                if sender is not None:
                    return sender.call(method, argument, deadline=deadline, returns=returns)
                return self._workers.call(rank, method, argument, deadline, returns)
            except WeightSyncError:
                self.give_up()
                raise

        jobs = [(sender, -1, here, argument) for sender, argument in zip(self._senders, ours, strict=True)]
        jobs += [(None, rank, there, argument) for rank, argument in zip(self._suppliers, theirs, strict=True)]
        return self._fanout.all(run, jobs)


def lay_out(shards: dict[int, list[Shard]], receiver_of: dict[int, int], receivers: int) -> MirrorLayout:
    """Room for every shard, once for those that several ranks hold alike, with the strides that it has at home."""
    sizes = [0] * receivers
    copies: list[dict[int, list[Copy]]] = [{} for _ in range(receivers)]
    placed: dict[tuple, tuple[int, int]] = {}
    moved: dict[int, list[Shard]] = {}
    for rank, own in shards.items():
        moved[rank] = []
        for index, shard in enumerate(own):
            if shard.segment < 0 or not volume(shard.box):
                moved[rank].append(shard)
                continue
            key = (shard.tensor, shard.box, shard.strides, shard.dtype)
            if key not in placed:
                number, itemsize = receiver_of[rank], dtype_bytes(shard.dtype)
                start = -(-sizes[number] // _ALIGN) * _ALIGN
                placed[key] = (number, start)
                span = sum((n - 1) * s for n, s in zip(shard.box.size, shard.strides)) + 1
                sizes[number] = start + span * itemsize
                target = View(0, start // itemsize, shard.strides)
                copy = Copy(shard.tensor, shard.box, rank, View(index, 0, shard.strides), target)
                copies[number].setdefault(rank, []).append(copy)
            number, start = placed[key]
            moved[rank].append(msgspec.structs.replace(shard, segment=number, byte_offset=start))
    return MirrorLayout(sizes, moved, copies)

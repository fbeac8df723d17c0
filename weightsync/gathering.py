"""Buckets for stock engines out of memory on several nodes: what lies elsewhere comes over a group of senders alone.

The broadcasting node's gatherer, a sender like the others, receives it into the actor's arena, next to what the actor
itself copies there. Runs in the actor.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from weightsync.boxes import dense_strides
from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.fanout import Fanout
from weightsync.fit import dtype_bytes
from weightsync.fleet import EngineLink
from weightsync.groups import CTAS, NAME, Senders, backend_of
from weightsync.nodes import Nodes, Place
from weightsync.spec import Copy, Export, Segment, Struct, View
from weightsync.transports.bucket import Bucket
from weightsync.transports.nccl_wire import Expect, Greet, Load, Send
from weightsync.transports.node import SenderLike


class GatherGroup(Senders):
    """Senders alone: those on other nodes give one here, rank 0, what completes the buckets of stock engines."""

    _ctas = CTAS

    def __init__(self, fanout: Fanout, nodes: Nodes, places: Sequence[Place], *, like: EngineLink) -> None:
        assert like.info is not None, "connect first"
        super().__init__(fanout, nodes, places, variables=like.info.nccl_variables, backend=backend_of(like))
        self._expect: Expect
        self._loads: list[Load] = []
        self._loaded_into: list[SenderLike] = []

    def install(self, expect: Expect, loads: list[Load]) -> None:
        """What to receive here, and what the others send, a load each."""
        self._expect, self._loads, self._loaded_into = expect, loads, []

    def fill(self, number: int, deadline: Deadline) -> None:
        """Complete bucket ``number``. Raises TransferError, TransferTimeout; the group is given up then."""
        if not self._expect.parts[number]:
            return
        try:
            self._ready(deadline)
            request = Send(deadline.remaining_s(), number)
            methods = ["receive", *["send"] * len(self._loads)]
            self._all(methods, [request] * len(methods), deadline)
        except WeightSyncError as e:
            self.give_up()
            e.message = f"gathering bucket {number + 1} of {len(self._expect.parts)} from other nodes: {e.message}"
            raise

    def _ready(self, deadline: Deadline) -> None:
        self.started(deadline)
        if self._loaded_into != self._senders:
            self._all(["expect", *["load"] * len(self._loads)], [self._expect, *self._loads], deadline)
            self._loaded_into = list(self._senders)
        if not self._joined:
            spec = self._spec(NAME.format(secrets.token_hex(4)), self._listen(deadline))
            self._join_senders(spec, deadline)
            within_s, others = deadline.remaining_s(), range(1, len(self._senders))
            greets = [Greet(list(others), within_s), *[Greet([0], within_s) for _ in others]]
            self._all(["hear", *["greet" for _ in others]], greets, deadline)
            self._joined = True

    def _all(self, methods: Sequence[str], arguments: Sequence[Struct], deadline: Deadline) -> None:
        """Call each sender's method; the first that fails ends the others, who may wait for it."""

        def call(job: tuple[SenderLike, str, Struct]) -> None:
            try:
                job[0].call(job[1], job[2], deadline=deadline)
            except WeightSyncError:
                self.give_up()
                raise

        self._fanout.all(call, list(zip(self._senders, methods, arguments, strict=True)))


def gathered(bucket: Bucket, copies: Sequence[tuple[int, Copy]], exports: dict[int, Export]) -> list[Copy]:
    """``copies`` with the index of their tensor in ``bucket``, aimed at the arena where that is placed."""
    aimed = []
    for index, copy in copies:
        entry = bucket.entries[index]
        start = (bucket.start + entry.start) // dtype_bytes(exports[copy.rank].shards[copy.source.storage].dtype)
        strides = dense_strides(entry.tensor.shape)
        within = sum(o * s for o, s in zip(copy.box.offset, strides, strict=True))
        aimed.append(Copy(copy.tensor, copy.box, copy.rank, copy.source, View(0, start + within, strides)))
    return aimed


def to_gather(
    wanted: Sequence[Sequence[Copy]],
    places: dict[int, Place],
    remote: Sequence[Place],
    exports: dict[int, Export],
    arena: Segment,
    chunk_bytes: int,
) -> tuple[Expect, list[Load]]:
    """What the gatherer receives, and what the sender at each of ``remote`` sends; ``wanted`` a bucket."""
    number = {place: 1 + index for index, place in enumerate(remote)}

    def of(copies: Sequence[Copy], place: Place) -> list[Copy]:
        return [copy for copy in copies if places[copy.rank] == place]

    shards = {rank: exports[rank].shards for rank in places}
    expect = Expect(
        segment=arena,
        shards=shards,
        parts=[{number[place]: own for place in remote if (own := of(copies, place))} for copies in wanted],
        chunk_bytes=chunk_bytes,
    )
    loads = [
        Load(
            segments={rank: exports[rank].segments for rank, at in places.items() if at == place},
            shards={rank: own for rank, own in shards.items() if places[rank] == place},
            parts=[{0: of(copies, place)} for copies in wanted],
            chunk_bytes=chunk_bytes,
        )
        for place in remote
    ]
    return expect, loads

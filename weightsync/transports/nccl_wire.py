"""What an actor says to its senders, and a publisher or receiver to the groups that it is in. See ``nccl``."""

from __future__ import annotations

from weightsync.spec import Copy, Segment, Shard, Struct

PROBE_BYTES = 1


class Listen(Struct):
    """Serve the rendezvous at ``host``; the answer is the port."""

    host: str
    timeout_s: float


class Join(Struct):
    """Become ``rank`` of group ``name``; met at ``host`` and ``port``, which may be the process's own rendezvous.

    ``greeted_by``: an engine rank waits for a first byte from that many senders, the first ranks of the group.
    ``ctas``: see ``rendezvous.Group``.
    """

    name: str
    host: str
    port: int
    rank: int
    world_size: int
    backend: str
    timeout_s: float
    greeted_by: int = 0
    ctas: int = 0


class Fill(Struct):
    """How a sender fills the arena that it broadcasts from: a list of copies a bucket.

    The target of a copy is a view of the arena, in elements of the dtype of its shard.
    """

    segments: dict[int, list[Segment]]
    shards: dict[int, list[Shard]]
    arena: Segment
    buckets: list[list[Copy]]


class Part(Struct):
    """Bytes ``start`` to ``end`` of a bucket: a tensor of ``dtype``."""

    start: int
    end: int
    dtype: str


class Broadcast(Struct):
    """Give ``nbytes`` of ``segment``, from ``start`` on, to all members: as one message, or as ``parts``, in order.

    ``group``: the group's name; ``fills``: the bucket of ``Fill`` that is to be in there; None: what is there already.
    """

    group: str
    segment: Segment
    nbytes: int
    timeout_s: float
    parts: list[Part] = []
    fills: int | None = None
    start: int = 0


class Finish(Struct):
    """Wait for a broadcast, known by the number that its beginning returned."""

    number: int
    timeout_s: float


class Load(Struct):
    """What to send: a part is copies by the group rank that gets them. ``segments`` hold the memory that they read."""

    segments: dict[int, list[Segment]]
    shards: dict[int, list[Shard]]
    parts: list[dict[int, list[Copy]]]
    chunk_bytes: int


class Expect(Struct):
    """What to receive into ``segment``, part by part: copies by the group rank they come from.

    The target of a copy is a view of the segment, in elements of the dtype of its shard. ``shards`` is for that alone.
    """

    segment: Segment
    shards: dict[int, list[Shard]]
    parts: list[dict[int, list[Copy]]]
    chunk_bytes: int


class Greet(Struct):
    """Exchange one byte with each of ``peers``: the first thing that a group does, since only this connects it."""

    peers: list[int]
    timeout_s: float


class Send(Struct):
    """Send, or receive, one part of what was loaded, once."""

    timeout_s: float
    part: int = 0

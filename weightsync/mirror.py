"""``source: nccl``: training workers on nodes without an actor send their shards into arenas at the actor.

Publishers and receiving processes of the actor form one group of their own, with the trainer's version of NCCL (gloo in
host memory), and every shard has the same strides in the arena as at home: so plans, routes and verification go on from
there as if the trainer were on this node. Shards that several ranks hold alike arrive once. Runs in the actor.
"""

from __future__ import annotations

import socket

import msgspec

from weightsync import devices, transports
from weightsync.config import BUCKET_BYTES, Config
from weightsync.deadline import Deadline
from weightsync.errors import ConfigError
from weightsync.fanout import Fanout
from weightsync.mirror_group import MirrorGroup, lay_out
from weightsync.nodes import Nodes
from weightsync.spec import Export, Published
from weightsync.transports import Memory
from weightsync.transports.sender import Nursery
from weightsync.workers import Regions, Workers


class MirroredWorkers(Workers):
    """Publishers whose memory is read here, out of copies that every ``publish`` renews."""

    def __init__(self, addresses: list[str], *, trainer: str, deadline: Deadline, config: Config) -> None:
        self._config = config
        self._memories: list[Memory] = []
        self._generations: dict[int, int] = {}
        self._pool = Fanout("mirror", workers=1024)
        self._nodes = Nodes(Nursery(), config)
        self._group: MirrorGroup | None = None
        super().__init__(addresses, trainer=trainer, deadline=deadline)
        try:
            self._receivers = _receiving_devices([d for d in super().devices().values() if d])
        except BaseException:
            self.close()
            raise

    def devices(self) -> dict[int, str]:
        """By rank, the GPU that holds its copy here."""
        return {rank: self._receivers[number] for rank, number in self._receiver_of().items()}

    def hosts(self) -> dict[int, str]:
        """By rank, this host: that of its copy."""
        return dict.fromkeys(self.ranks, socket.gethostname())

    def export(
        self, dtypes: dict[str, str], transport: str, deadline: Deadline, *, arena_bytes: int = 0, reply: str = ""
    ) -> dict[int, Export]:
        """As ``Workers.export``, but of the copies here: they are made room for, and the group is prepared.

        Nobody maps the trainer's own memory, so nobody needs to be told when it goes.
        """
        exports = super().export(dtypes, transport, deadline, arena_bytes=arena_bytes)
        if any(any(e.rounds) for e in exports.values()):
            raise ConfigError(f"a trainer's copy here needs whole arenas: set arena_bytes ({arena_bytes}) to 0")
        self._generations = {rank: e.generation for rank, e in exports.items()}
        self._let_go()
        layout = lay_out({rank: e.shards for rank, e in exports.items()}, self._receiver_of(), len(self._receivers))
        self._memories = [
            transports.get(transport).allocate(max(nbytes, 1), device)
            for nbytes, device in zip(layout.sizes, self._receivers, strict=True)
        ]
        group = MirrorGroup(self._pool, self._nodes, self, self._receivers, _host_of(self._config.publishers[0]))
        self._group = group
        group.prepare(layout, [memory.segment for memory in self._memories], exports, self._chunk_bytes(), deadline)
        segments = [memory.segment for memory in self._memories]
        note = f"{sum(layout.sizes)} bytes arrive over a group of their own ({group.backend}) in memory of the actor"
        return {
            rank: msgspec.structs.replace(e, segments=segments, shards=layout.shards[rank], notes=[*e.notes, note])
            for rank, e in exports.items()
        }

    def publish(self, step: int, regions: Regions, deadline: Deadline) -> dict[int, Published]:
        """As ``Workers.publish``, and returns when the copies here are of that step.

        What has moved at a publisher is not fetched: its generation says so.
        """
        published = super().publish(step, regions, deadline)
        if self._group is not None and all(p.generation == self._generations[r] for r, p in published.items()):
            self._group.fetch(deadline)
        return published

    def close(self) -> None:
        """Leave the group, and give the copies up. Idempotent."""
        self._let_go()
        self._nodes.close()
        self._pool.close()
        super().close()

    def _let_go(self) -> None:
        if self._group is not None:
            self._group.give_up()
        self._group = None
        for memory in self._memories:
            memory.close()
        self._memories = []

    def _receiver_of(self) -> dict[int, int]:
        return {rank: index % len(self._receivers) for index, rank in enumerate(self.ranks)}

    def _chunk_bytes(self) -> int:
        """Two from each rank that a receiver hears make one bucket."""
        heard = -(-len(self.ranks) // len(self._receivers))
        return max(1, (self._config.bucket_bytes or BUCKET_BYTES) // (2 * heard))


def _receiving_devices(trainers: list[str]) -> list[str]:
    """The GPUs that shards arrive on: all that this process sees but the trainer's own; "" for a trainer on CPUs."""
    if not trainers:
        return [""]
    free = [uuid for uuid in devices.visible_uuids() if uuid not in trainers]
    if not free:
        raise ConfigError(
            "source: nccl: the actor sees no GPU that is not the trainer's, and NCCL takes one member a GPU; place the "
            "actor next to the engines, or use source: mapped"
        )
    return free


def _host_of(address: str) -> str:
    """The host of a publisher's address, with the brackets of IPv6."""
    return address.partition("#")[0].removeprefix("tcp://").rpartition(":")[0]

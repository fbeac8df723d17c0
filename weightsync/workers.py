"""The training workers as the actor sees them: one publisher a rank, always asked all at once."""

from __future__ import annotations

from typing import Any

from weightsync.deadline import Deadline
from weightsync.errors import ConfigError, TransferError
from weightsync.fanout import Fanout
from weightsync.publisher import ExportRequest, FillRequest, PublishRequest, SealRequest
from weightsync.rpc import Client
from weightsync.spec import Description, Export, Published, Rule, Sealed, SourceRegion

Regions = dict[int, list[SourceRegion]]


class Workers:
    """All publishers of one trainer. Ranks are 0 to world_size - 1, each exactly once."""

    def __init__(self, addresses: list[str], *, trainer: str, deadline: Deadline) -> None:
        assert addresses, "check_peers before"
        self._fanout = Fanout("workers")
        clients = [Client(a, what=f"publisher {a.split('#')[0]}") for a in addresses]
        self._clients = dict(enumerate(clients))
        try:
            described = self._fanout.all(lambda c: c.call("describe", deadline=deadline, returns=Description), clients)
            _check(described, trainer)
        except BaseException:
            self.close()
            raise
        self._clients = {d.rank: c for d, c in zip(described, clients, strict=True)}
        self.descriptions = {d.rank: d for d in described}

    @property
    def ranks(self) -> list[int]:
        return sorted(self.descriptions)

    @property
    def rules(self) -> list[Rule]:
        """The mapping, once: every rank reports the rules of what it holds, and they agree where they overlap."""
        return list(dict.fromkeys(rule for rank in self.ranks for rule in self.descriptions[rank].rules))

    def devices(self) -> dict[int, str]:
        """By rank, the UUID of the GPU that holds its parameters; empty for host memory."""
        return {r: (d.devices[0] if d.devices else "") for r, d in self.descriptions.items()}

    def hosts(self) -> dict[int, str]:
        """By rank, the name of the host that it runs on."""
        return {r: d.host for r, d in self.descriptions.items()}

    def export(
        self, dtypes: dict[str, str], transport: str, deadline: Deadline, *, arena_bytes: int = 0, reply: str = ""
    ) -> dict[int, Export]:
        """Have every rank make its memory mappable by ``transport``, each tensor in the dtype named for it.

        ``reply``: our own server, which ranks call before they give that memory back.

        Raises TransferError if ``arena_bytes`` (0: no limit) is less than one tensor that needs an arena.
        """
        in_place = transport != "shm"
        request = ExportRequest(
            transport=transport, dtypes=dtypes, in_place=in_place, arena_bytes=arena_bytes, reply=reply
        )
        return self._each("export", dict.fromkeys(self.ranks, request), deadline, Export)

    def publish(self, step: int, regions: Regions, deadline: Deadline) -> dict[int, Published]:
        """Wait until every rank has marked ``step`` and its bytes lie readable; fingerprints of ``regions``."""
        wait_s = deadline.remaining_s()
        requests = {r: PublishRequest(step=step, regions=regions[r], timeout_s=wait_s) for r in self.ranks}
        grace = Deadline(wait_s + 2.0, deadline.what)  # so that a worker's own, better error arrives
        return self._each("publish", requests, grace, Published)

    def fill(self, step: int, number: int, deadline: Deadline) -> None:
        """Have every rank fill a part of its arena with what round ``number`` holds of ``step``."""
        self._each("fill", dict.fromkeys(self.ranks, FillRequest(step=step, number=number)), deadline, None)

    def seal(self, step: int, regions: Regions, deadline: Deadline) -> dict[int, Sealed]:
        """Fingerprints of the sources after the move. Raises TransferError naming what changed meanwhile."""
        requests = {r: SealRequest(step=step, regions=regions[r]) for r in self.ranks}
        sealed = self._each("seal", requests, deadline, Sealed)
        for rank, answer in sealed.items():
            if answer.changed:
                names = ", ".join(answer.changed[:5]) + (" ..." if len(answer.changed) > 5 else "")
                raise TransferError(
                    f"training rank {rank} changed {len(answer.changed)} tensor(s) while step {step} was being "
                    f"moved: {names}. Call step_done only when the weights stay as they are until push returns.",
                    rank=rank,
                    tensor=answer.changed[0],
                    safe_to_retry=True,
                )
        return sealed

    def call(self, rank: int, method: str, argument: Any, deadline: Deadline, returns: Any = None) -> Any:
        """Call one rank's publisher."""
        return self._clients[rank].call(method, argument, deadline=deadline, returns=returns)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._fanout.close()

    def _each(self, method: str, requests: dict, deadline: Deadline, returns: type | None) -> dict:
        def ask(rank: int) -> Any:
            return self._clients[rank].call(method, requests[rank], deadline=deadline, returns=returns)

        return dict(zip(self.ranks, self._fanout.all(ask, self.ranks), strict=True))


def _check(described: list[Description], trainer: str) -> None:
    world = described[0].world_size
    ranks = sorted(d.rank for d in described)
    if ranks != list(range(world)) or any(d.world_size != world for d in described):
        raise ConfigError(
            f"publishers are of ranks {ranks} with world sizes {sorted({d.world_size for d in described})}; "
            "every rank from 0 to world_size - 1 must be there once"
        )
    wrong = [d for d in described if d.trainer != trainer]
    if wrong:
        raise ConfigError(
            f"this actor reads trainer {trainer!r}, but the publisher of rank {wrong[0].rank} is of trainer "
            f"{wrong[0].trainer!r}: choose the pair that fits"
        )

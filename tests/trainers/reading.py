"""The other side of publishers, for tests: calls them, maps what they export, and puts whole tensors together."""

from __future__ import annotations

import torch

from weightsync.deadline import Deadline
from weightsync.publisher import ExportRequest, PublishRequest, SealRequest
from weightsync.rpc import Client
from weightsync.spec import Box, Description, Export, Published, Rule, Sealed, SourceRegion, View
from weightsync.transports import shm


class Reading:
    """All publishers of one trainer, by rank."""

    def __init__(self, addresses: list[str], *, transport: str = "shm") -> None:
        self.transport = transport
        self.clients = [Client(address) for address in addresses]
        self.exports: list[Export] = []

    def describe(self) -> list[Description]:
        return [c.call("describe", deadline=_soon(), returns=Description) for c in self.clients]

    def export(self, dtypes: dict[str, str] | None = None, *, in_place: bool = False) -> list[Export]:
        request = ExportRequest(transport=self.transport, dtypes=dtypes or {}, in_place=in_place)
        self.exports = [c.call("export", request, deadline=_soon(), returns=Export) for c in self.clients]
        return self.exports

    def publish(self, step: int, timeout_s: float = 10.0) -> list[Published]:
        return [self.publish_one(rank, step, timeout_s) for rank in range(len(self.clients))]

    def publish_one(self, rank: int, step: int, timeout_s: float = 10.0) -> Published:
        request = PublishRequest(step=step, regions=self.regions(rank), timeout_s=timeout_s)
        return self.clients[rank].call("publish", request, deadline=_soon(), returns=Published)

    def seal(self, step: int) -> list[Sealed]:
        return [
            c.call("seal", SealRequest(step=step, regions=self.regions(r)), deadline=_soon(), returns=Sealed)
            for r, c in enumerate(self.clients)
        ]

    def regions(self, rank: int) -> list[SourceRegion]:
        """Every shard whole, in the trainer's own coordinates."""
        shards = self.exports[rank].shards
        return [SourceRegion(s.box, View(i, 0, s.strides)) for i, s in enumerate(shards) if s.segment >= 0]

    def close(self) -> None:
        for client in self.clients:
            client.close()

    # -------------------------------------------------------------------------------------------------- reading

    def parts(self) -> dict[str, list[tuple[Box, torch.Tensor, tuple[int, ...]]]]:
        """By trainer tensor, every box that some rank exports, its bytes, and the whole shape."""
        found: dict[str, list] = {}
        for export in self.exports:
            mapped = [shm.open_segment(segment) for segment in export.segments]
            for shard in export.shards:
                parts = found.setdefault(shard.tensor, [])
                if shard.segment >= 0:
                    parts.append((shard.box, _read(mapped[shard.segment].tensor, shard), shard.shape))
            for memory in mapped:
                memory.close()
        return found

    def assembled(self, rules: list[Rule]) -> dict[str, torch.Tensor]:
        """Whole Hugging Face tensors, with -1 bits where no rank gave anything; replicas must agree."""
        parts, whole = self.parts(), {}
        for rule in rules:
            for box, part, shape in parts[rule.source]:
                full = torch.zeros(shape, dtype=torch.bool)
                inside = tuple(slice(o, o + n) for o, n in zip(rule.box.offset, rule.box.size, strict=True))
                source = torch.zeros(shape, dtype=part.dtype)
                where = tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))
                full[where], source[where] = True, part
                target = whole.setdefault(rule.target, torch.full(rule.target_shape, -7, dtype=part.dtype))
                _place(rule, target, source[inside], full[inside])
        return whole


def _place(rule: Rule, target: torch.Tensor, source: torch.Tensor, is_given: torch.Tensor) -> None:
    dropped = [d for d in range(source.dim()) if d not in rule.dims]
    order = [*dropped, *(d for d in rule.dims if d is not None)]
    source, is_given = source.permute(order), is_given.permute(order)
    for _ in dropped:
        source, is_given = source[0], is_given[0]
    part = target[tuple(slice(o, o + n) for o, n in zip(rule.target_offset, source.shape, strict=True))]
    assert bool(((part == source) | (part == -7))[is_given].all()), f"replicas of {rule.target} differ"
    part[is_given] = source[is_given]


def _read(memory: torch.Tensor, shard) -> torch.Tensor:
    dtype = getattr(torch, shard.dtype)
    flat = torch.empty(0, dtype=dtype).set_(
        memory.untyped_storage(), shard.byte_offset // dtype.itemsize, shard.box.size, shard.strides
    )
    return flat.clone()


def _soon() -> Deadline:
    return Deadline(30, "test")

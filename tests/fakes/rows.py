"""A trainer of several ranks, all in this process: rows of every tensor, on hosts that bear the names given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from weightsync.consumers import Consumers
from weightsync.offer import Offer
from weightsync.publisher import Wire
from weightsync.rpc import Server
from weightsync.spec import Description, Rule
from weightsync.trainers import Held
from weightsync.trainers.dtensor_mapping import rules_of


class Rows:
    """A ``trainers.Reader``: part ``rank`` of ``world_size`` of every tensor, cut along dim 0, empty if need be.

    Tensors named in ``replicated`` are held whole.
    """

    reading = 0

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], rank: int, world_size: int, replicated: Sequence[str]
    ) -> None:
        self._held = []
        for name, tensor in tensors.items():
            parts = [tensor] * world_size if name in replicated else tensor.tensor_split(world_size)
            first = 0 if name in replicated else sum(p.shape[0] for p in parts[:rank])
            offset = (first,) + (0,) * (tensor.dim() - 1)
            self._held.append(Held(name, parts[rank].clone(), tuple(tensor.shape), offset))

    def settle(self) -> None:
        return None

    def swapped(self) -> list[str]:
        return []

    def read(self) -> list[Held]:
        return self._held

    def glance(self) -> None:
        return None

    def rules(self, held: list[Held]) -> list[Rule]:
        return rules_of({h.name: h.shape for h in held})


class HostedOffer(Offer):
    """An offer that says it is on another host."""

    host = ""

    def describe(self) -> Description:
        return msgspec.structs.replace(super().describe(), host=self.host)


class RowTrainer:
    """One rank a name in ``hosts``. ``tensors`` are the whole ones, as last trained.

    With ``ranks`` only those are here; servers listen on ``bind``.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        hosts: Sequence[str],
        *,
        replicated: Sequence[str] = (),
        ranks: Sequence[int] | None = None,
        bind: str = "127.0.0.1",
    ) -> None:
        self.tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
        here = range(len(hosts)) if ranks is None else ranks
        self._readers = [Rows(self.tensors, rank, len(hosts), replicated) for rank in here]
        self.offers, self.servers = [], []
        for rank, reader in zip(here, self._readers, strict=True):
            offer = HostedOffer(reader, rank=rank, world_size=len(hosts), trainer="dtensor_v2")
            offer.host = hosts[rank]
            self.offers.append(offer)
            self.servers.append(Server(Wire(offer, Consumers(rank)), host=bind))

    @property
    def addresses(self) -> list[str]:
        return [server.address for server in self.servers]

    def train(self, step: int, values: Mapping[str, torch.Tensor] | None = None) -> None:
        """New weights, ``values`` or random ones, marked as those of ``step``."""
        generator = torch.Generator().manual_seed(step)
        for name, tensor in self.tensors.items():
            tensor.copy_(values[name] if values else torch.randn(tensor.shape, generator=generator))
        for reader, offer in zip(self._readers, self.offers, strict=True):
            for held in reader.read():
                rows = slice(held.offset[0], held.offset[0] + held.tensor.shape[0])
                held.tensor.copy_(self.tensors[held.name][rows])
            offer.mark(step)

    def close(self) -> None:
        for offer, server in zip(self.offers, self.servers, strict=True):
            offer.close()
            server.close()

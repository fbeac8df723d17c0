"""The training worker's end: offers a rank's weights to the weight-sync actor, and that end's wire.

    publisher = Publisher(model, rank=rank, world_size=world_size)
    addresses = ...                       # every rank's publisher.address, to the driver
    for step in range(steps):
        train_step()
        publisher.step_done(step)         # from here until push(step) returns the weights stay as they are

It imports torch, pyzmq and msgspec only, and serves from threads of its own; ``step_done`` is what the training thread
calls. The actor imports this file for the requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from weightsync import trainers
from weightsync.consumers import Consumers
from weightsync.errors import ConfigError
from weightsync.offer import Offer
from weightsync.rpc import Server
from weightsync.spec import Description, Export, Published, Sealed, SourceRegion, Struct
from weightsync.supply import Supplier
from weightsync.transports import shm
from weightsync.transports.nccl_wire import Greet, Join, Load, Send

WITHDRAW_S = 30.0


class ExportRequest(Struct):
    """Make memory mappable by ``transport``, each tensor (by trainer name) in its dtype of ``dtypes`` or else its own.

    ``in_place``: share the trainer's own memory where it can be shared; false: copy everything into an arena.
    ``arena_bytes``: the most that the arena may take, filled in rounds if that is not enough for all; 0: no limit.
    ``reply``: the actor's server, which is told before the memory goes (see ``consumers``).
    """

    transport: str
    dtypes: dict[str, str]
    in_place: bool
    arena_bytes: int = 0
    reply: str = ""


class PublishRequest(Struct):
    """Wait up to ``timeout_s`` for the mark of ``step``, bring its bytes where they are read, fingerprint regions."""

    step: int
    regions: list[SourceRegion]
    timeout_s: float


class FillRequest(Struct):
    """Bring what round ``number`` holds of ``step`` into the arena, over what lay in that part before."""

    step: int
    number: int


class SealRequest(Struct):
    """Fingerprint the sources of ``regions`` (those of the publish, or none) as they are now; what changed since?"""

    step: int
    regions: list[SourceRegion]


class _Publish(Struct):
    """``PublishRequest`` as it is read: its regions are those of the last push, as a rule, and are decoded once."""

    step: int
    regions: msgspec.Raw
    timeout_s: float


class _Seal(Struct):
    """``SealRequest`` as it is read."""

    step: int
    regions: msgspec.Raw


class Wire:
    """What the actor can call. Runs in threads of the server."""

    def __init__(self, offer: Offer, consumers: Consumers) -> None:
        self._offer = offer
        self._supplier = Supplier(offer)
        self._consumers = consumers
        self._regions: tuple[bytes, list[SourceRegion]] = (b"", [])

    def describe(self) -> Description:
        """Who this is, what it holds in its own layout, and how that maps to Hugging Face tensors."""
        return self._offer.describe()

    def export(self, request: ExportRequest) -> Export:
        """Make the tensors' memory mappable; moves nothing. Raises TransferError where there is no room."""
        self._consumers.add(request.reply)
        return self._offer.export(
            request.transport, request.dtypes, in_place=request.in_place, arena_bytes=request.arena_bytes
        )

    def publish(self, request: _Publish) -> Published:
        """Raises TransferError if a later step is marked or weights were written after the mark, TransferTimeout.

        If exported memory has moved or was withdrawn, the answer has another generation than the export and no
        fingerprints: nothing was published, export again.
        """
        return self._offer.publish(request.step, self._decoded(request.regions), request.timeout_s)

    def fill(self, request: FillRequest) -> None:
        """For an arena that is filled in rounds; one filled already is left as it is. Raises TransferError if weights
        were written after the mark, or ``request.step`` is not what was published last.
        """
        self._offer.fill(request.step, request.number)

    def seal(self, request: _Seal) -> Sealed:
        """Raises TransferError if ``request.step`` is not what was published last, or its memory is gone."""
        return self._offer.seal(request.step, self._decoded(request.regions))

    def _decoded(self, encoded: msgspec.Raw) -> list[SourceRegion]:
        """The regions, the same list for the same bytes: what was checked of it holds."""
        known, regions = self._regions
        if known != bytes(encoded):
            regions = msgspec.msgpack.decode(encoded, type=list[SourceRegion])
            self._regions = (bytes(encoded), regions)
        return regions

    def group_version(self) -> str:
        """As the following, for ``source: nccl``: see ``supply.Supplier``."""
        return self._supplier.version()

    def join(self, request: Join) -> None:
        self._supplier.join(request)

    def hear(self, request: Greet) -> None:
        self._supplier.hear(request)

    def load(self, request: Load) -> None:
        self._supplier.load(request)

    def send(self, request: Send) -> int:
        return self._supplier.send(request)

    def leave(self) -> None:
        self._supplier.leave()

    def _let_go(self) -> None:
        """Hold nothing of the trainer's memory any more."""
        self._supplier.unload()


class Publisher:
    """Offers one training rank's weights. Made, like ``step_done`` and ``close``, in the training thread.

    ``model_or_tensors`` is a module, or a mapping of names to tensors or DTensors that is looked into anew at every
    push; for ``trainer="megatron"`` one model or a list of model chunks, with ``trainer_options`` of its own
    (``trainers.megatron.Options``). ``trainer`` says how shards are read. The server listens on ``host``. Raises
    ConfigError, naming the tensor, where something cannot be published (adapters that are not merged, parameters on the
    meta device, partial sums).
    """

    def __init__(
        self,
        model_or_tensors: nn.Module | Mapping[str, torch.Tensor] | Sequence[nn.Module],
        *,
        rank: int,
        world_size: int,
        trainer: str = "dtensor_v2",
        trainer_options: Mapping[str, Any] | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} of world_size {world_size}: ranks go from 0 to world_size - 1")
        shm.sweep()
        reader = trainers.get(trainer)(model_or_tensors, **(trainer_options or {}))
        self._offer = Offer(reader, rank=rank, world_size=world_size, trainer=trainer)
        self._consumers = Consumers(rank)
        self._wire = Wire(self._offer, self._consumers)
        self._server = Server(self._wire, host=host)

    @property
    def address(self) -> str:
        """Where the actor reaches this publisher, with the token that it needs: ``tcp://HOST:PORT#TOKEN``."""
        return self._server.address

    def step_done(self, step: int) -> None:
        """Mark the weights as those of ``step``, readable once what this thread's CUDA stream has queued is done."""
        self._offer.mark(step)
        self._consumers.marked(step)

    def withdraw(self, timeout_s: float = WITHDRAW_S) -> None:
        """Give the exported memory back, before the weights are offloaded. The next push exports it again.

        Returns when no engine and no actor has it mapped any more, so that freeing it frees it. Whoever does not
        confirm that within ``timeout_s`` is logged as a warning, and forgotten.
        """
        self._offer.void()
        self._wire._let_go()
        self._consumers.withdrawn(timeout_s)
        self._offer.withdraw()

    def close(self) -> None:
        """Stop serving and free all memory; a push under way fails. Idempotent."""
        self._offer.close()
        self._server.close()
        self._consumers.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

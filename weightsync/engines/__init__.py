"""Engines: the protocol that a push speaks, whoever serves. One module an engine; the first is ``sglang``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

import msgspec

from weightsync.config import EngineConfig
from weightsync.deadline import Deadline

RECEIVER_LOADER = "weightsync.receiver.load"
PauseMode = Literal["abort", "retract", "in_place"]


class EngineInfo(msgspec.Struct, frozen=True):
    """What an engine said about itself at connect.

    ``generation``: ``plain`` takes weight updates at any time, ``session`` only between begin and end. ``tp_size``
    counts data-parallel-attention and expert-parallel ranks: it is how many payloads an update carries. ``device`` is
    the engine's word for it (``cpu``, ``cuda``). ``has_receiver``: our receiver was named as custom loader. ``nccl``:
    its version ("": not known), ``nccl_variables`` what members of a group must agree on: as its SGLang comes with
    them, until it is ``corrected``.
    """

    url: str
    version: str
    generation: Literal["plain", "session"]
    tp_size: int
    device: str
    model_path: str
    architecture: str
    weight_version: str
    has_receiver: bool
    nnodes: int = 1
    memory_saver: bool = False
    nccl: str = ""
    nccl_variables: dict[str, str] = {}

    def corrected(self, told: Mapping[str, str], configured: EngineConfig) -> EngineInfo:
        """With what its receivers have ``told`` of its NCCL (``Layout.versions``), and with what is ``configured``."""
        of_it = {name: told[name] for name in self.nccl_variables if name in told} | configured.nccl_variables
        return msgspec.structs.replace(
            self,
            nccl=configured.nccl or told.get("nccl") or self.nccl,
            nccl_variables=self.nccl_variables | of_it,
        )


class GroupSpec(msgspec.Struct, frozen=True):
    """A process group that an engine is asked to join: its TP ranks become ``rank_offset`` and following."""

    group_name: str
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    backend: str


class Tensors(msgspec.Struct, frozen=True):
    """What a broadcast carries, in order: ``dtypes`` by torch's names; one flattened bucket."""

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]


class Call(Protocol):
    """A call that is on its way to the engine but for its end: nothing happens before it is made."""

    def make(self, deadline: Deadline, *, sent: Callable[[], None] = lambda: None) -> None:
        """Have it carried out. ``sent`` is called when all of it is on its way.

        Of an update between GPUs an answer says that the engine takes part, not that the bytes are there.
        """
        ...

    def drop(self) -> None:
        """It will never be made, if it was not. Idempotent."""
        ...


class Engine(Protocol):
    """One running engine, seen from the weight-sync actor. Every call ends by its deadline.

    Calls may come from any thread. All raise EngineRejected (it answered and said no), EngineLost (no connection, or it
    broke), TransferTimeout (no answer in time) and ConfigError (a wrong key), with the engine's URL and the phase.
    """

    url: str

    def connect(self, deadline: Deadline) -> EngineInfo:
        """Ask the engine what it is. Raises ConfigError that names every reason why it cannot be pushed to."""
        ...

    def pause(self, mode: PauseMode, deadline: Deadline, *, sent: Callable[[], None] = lambda: None) -> None:
        """Stop generation; ``mode`` says what becomes of running requests. ``sent``: see ``Call.make``."""
        ...

    def num_requests(self, deadline: Deadline) -> int:
        """How many requests run or wait, as far as the engine says: 0 also where it does not."""
        ...

    def drain(self, num_requests: int, deadline: Deadline) -> None:
        """End running requests as ``pause("abort")`` will, and wait a little for that. New ones may still come."""
        ...

    def flush(self, deadline: Deadline, wait: bool = False) -> None:
        """Drop the KV cache. While requests wait: EngineRejected, or with ``wait`` again until the deadline."""
        ...

    def begin(self, deadline: Deadline) -> str:
        """Open a weight update. Returns "", or a note if a session left open by somebody else was closed first."""
        ...

    def update(self, payloads: list[str], load_format: str | None, deadline: Deadline, *, what: str = "") -> None:
        """Hand over one payload a TP rank; returns when every rank has loaded its own. ``what`` names it in errors."""
        ...

    def update_ahead(self, payloads: list[str], load_format: str | None, deadline: Deadline) -> Call:
        """As ``update``, but made by ``Call.make``, one at a time: it is on its way until then, all but a byte."""
        ...

    def init_weights_update_group(self, group: GroupSpec, deadline: Deadline) -> None:
        """Have every TP rank join a group; the engine does nothing else until all members have come."""
        ...

    def update_from_distributed(
        self, tensors: Tensors, group_name: str, deadline: Deadline, *, flattened: bool = True, what: str = ""
    ) -> Call:
        """A call that has the engine receive one bucket by a broadcast, or by one a tensor if not ``flattened``, and
        load it. It is made by ``Call.make``, one at a time in a group. ``what`` names the bucket in errors.
        """
        ...

    def destroy_weights_update_group(self, group_name: str, deadline: Deadline) -> None:
        """Leave a group. EngineRejected if there is none of that name."""
        ...

    def end(self, deadline: Deadline) -> None:
        """Close the weight update: the engine finalises what was loaded."""
        ...

    def stamp(self, version: str, deadline: Deadline) -> None:
        """Set the weight version that the engine reports."""
        ...

    def stamp_ahead(self, version: str, deadline: Deadline) -> Call:
        """As ``stamp``, but made by ``Call.make``."""
        ...

    def confirm(self, version: str, deadline: Deadline) -> None:
        """Raise EngineRejected if the engine reports another weight version."""
        ...

    def resume(self, deadline: Deadline) -> None:
        """Go on generating."""
        ...

    def resume_ahead(self, deadline: Deadline) -> Call:
        """As ``resume``, but made by ``Call.make``."""
        ...

    def weight_version(self, deadline: Deadline) -> str:
        """The weight version that the engine reports now."""
        ...

    def close(self) -> None:
        """Close the connections. Idempotent."""
        ...

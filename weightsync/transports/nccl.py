"""Sending over a process group that engines take part in, and who sits in which NCCL world.

NCCL refuses members of different versions, and a member that hangs hangs its whole process. So the training worker, the
actor and the engine never share a communicator: a *sender* does it, a process of the actor's environment with the
engine's NCCL version and settings, which can be killed at any moment without anybody else noticing (``sender`` beside).

    trainer's world        no group        the engine's own groups: its NCCL
    ┌───────────────┐    ┌──────────┐    ┌─────────────────────────────────────────┐
    │ FSDP, TP, ... │    │  actor   │    │ sender(s) ─────────> engine TP 0, 1, ... │
    │ rank 0 .. n   │    │ the plan │    │ rank 0..s-1          rank s..s+tp-1      │
    └───────┬───────┘    └────┬─────┘    └───┬─────────────────────────────────────┘
            └ mapped memory: CUDA IPC or shm ┘    (no communicator crosses a border)

A stock engine gets whole tensors: one sender broadcasts buckets, by two groups in turns. An engine with our receiver
gets slices: one sender for each GPU of the trainer, so that every GPU sends. No two engines share a group, so a dead
one wedges no other.

This file is the sender's end; ``nccl_wire`` is what passes between it and the actor.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from weightsync import transports
from weightsync.deadline import Deadline
from weightsync.errors import TransferError
from weightsync.pulling import MappedSegments
from weightsync.spec import Copy, Shard
from weightsync.transports import Memory, Puller
from weightsync.transports.exchange import Buffers, Chunk, Incoming, Outgoing, chunked
from weightsync.transports.nccl_versions import group_version, nccl_version, settings
from weightsync.transports.nccl_wire import (
    PROBE_BYTES,
    Broadcast,
    Expect,
    Fill,
    Finish,
    Greet,
    Join,
    Listen,
    Load,
    Send,
)
from weightsync.transports.rendezvous import Group, connect, listen
from weightsync.versions import library_versions
from weightsync.views import SourceViews


class UnderWay(NamedTuple):
    """A broadcast that has begun, of bytes ``start`` to ``end`` of its memory. ``filled`` waits for these."""

    group: Group
    works: list[Any]
    start: int
    end: int
    filled: Callable[[], object]


class Sender:
    """The sender's end: the public methods are what the actor calls. ``device``: where its memory is, CPU or a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._store: Any = None
        self._groups: dict[str, Group] = {}
        self._mapped = MappedSegments()
        self._outgoing: list[Outgoing] = []
        self._incoming: list[Incoming] = []
        self._fillers: list[Puller] = []
        self._under_way: dict[int, UnderWay] = {}
        self._numbers = itertools.count()

    def versions(self) -> dict[str, str]:
        """Of the libraries here; ``host`` is this machine's name."""
        return library_versions() | {"nccl": nccl_version(), "host": socket.gethostname()}

    def group_version(self) -> str:
        """What a group with training workers would be made with here. Raises TransferError without CuPy."""
        return group_version(self._device)

    def settings(self) -> dict[str, str]:
        """What NCCL is told by environment variables here: it must fit what the engine is told."""
        return settings()

    def listen(self, request: Listen) -> int:
        """Bind a port for the rendezvous, before anybody is told of it."""
        self._store, port = listen(request.host, request.timeout_s)
        return port

    def join(self, request: Join) -> None:
        """Join a group; returns when every member has come."""
        with self._on_device():
            self._groups[request.name] = join(request, self._device, self._store)

    def greet(self, request: Greet) -> None:
        """Send one byte to each peer."""
        group, byte = self._joined(), torch.ones(PROBE_BYTES, dtype=torch.uint8, device=self._device)
        with self._on_device():
            group.finish(group.start([(p, byte) for p in request.peers], []), Deadline(request.timeout_s, "greeting"))

    def hear(self, request: Greet) -> None:
        """Receive one byte from each peer."""
        group = self._joined()
        byte = torch.zeros(len(request.peers), PROBE_BYTES, dtype=torch.uint8, device=self._device)
        with self._on_device():
            receives = list(zip(request.peers, byte.unbind()))
            group.finish(group.start([], receives), Deadline(request.timeout_s, "being greeted"))

    def begin(self, request: Broadcast) -> int:
        """Begin a broadcast, after those begun before; the number by which to ``finish`` it.

        What it is to fill is filled when nobody reads those bytes any more, beside broadcasts of others. A GPU does all
        that in its own time.
        """
        with self._on_device():
            group, deadline = self._joined(request.group), Deadline(request.timeout_s, "broadcast")
            (memory,) = self._mapped.open([request.segment])
            start, end = request.start, request.start + request.nbytes
            filled: Callable[[], object] = _nothing
            if request.fills is not None:
                for one in list(self._under_way.values()):
                    if one.start < end and start < one.end:
                        one.group.follow(one.works, deadline)
                filled = self._fillers[request.fills].start(alone=False)
            flat = memory.tensor[start:end]
            parts = [flat[p.start : p.end].view(getattr(torch, p.dtype)) for p in request.parts] or [flat]
            number, works = next(self._numbers), group.start_broadcasts(parts, deadline)
            self._under_way[number] = UnderWay(group, works, start, end, filled)
            return number

    def filled(self, request: Finish) -> None:
        """Done when what a broadcast had to fill is filled."""
        self._under_way[request.number].filled()

    def finish(self, request: Finish) -> None:
        """Done when every member has it, or has it in its buffers."""
        with self._on_device():
            one = self._under_way[request.number]
            one.group.finish(one.works, Deadline(request.timeout_s, "broadcast"), doing="broadcast")
            del self._under_way[request.number]  # not before: another thread may begin with what is to follow it

    def prepare(self, request: Fill) -> None:
        """Map the trainer's memory and the arena, and make ready what fills it; unmap all else."""
        with self._on_device():
            (arena,) = self._mapped.open([request.arena])
            memories = {rank: self._mapped.open(segments) for rank, segments in request.segments.items()}
            sources = SourceViews(memories, request.shards)

            def pair(copy: Copy) -> tuple[torch.Tensor, torch.Tensor]:
                return _target(arena.tensor, copy, request.shards), sources(copy)

            self._fillers = [transports.make_puller([pair(copy) for copy in copies]) for copies in request.buckets]
            self._mapped.close_all_but([request.arena, *(s for own in request.segments.values() for s in own)])

    def unmap(self) -> None:
        """Map nothing any more."""
        with self._on_device():
            self._outgoing, self._incoming, self._fillers = [], [], []
            self._mapped.close_all_but([])

    def load(self, request: Load) -> None:
        """Map the trainer's memory and make the arenas for sending from it."""
        with self._on_device():
            wanted = [s for segments in request.segments.values() for s in segments]
            memories = {rank: self._mapped.open(segments) for rank, segments in request.segments.items()}
            self._outgoing = outgoing(request, SourceViews(memories, request.shards), self._device)
            self._mapped.close_all_but(wanted)

    def send(self, request: Send) -> int:
        """Send one part; the number of bytes."""
        with self._on_device():
            return self._outgoing[request.part].run(self._joined(), Deadline(request.timeout_s, "sending"))

    def expect(self, request: Expect) -> None:
        """Map the memory that is received into and make the arenas for that."""
        with self._on_device():
            (memory,) = self._mapped.open([request.segment])
            self._incoming = incoming(request, memory, self._device)
            self._mapped.close_all_but([request.segment])

    def receive(self, request: Send) -> int:
        """Receive one part; the number of bytes."""
        with self._on_device():
            return self._incoming[request.part].run(self._joined(), Deadline(request.timeout_s, "receiving"))

    def _joined(self, name: str = "") -> Group:
        """The group of that name; "": the only one."""
        name = name or next(iter(self._groups), "")
        if name not in self._groups:
            raise TransferError(f"this sender is in no group {name}".strip())
        return self._groups[name]

    def _on_device(self) -> contextlib.AbstractContextManager:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()


def _nothing() -> None:
    pass


def outgoing(request: Load, view: Callable[[Copy], torch.Tensor], device: torch.device) -> list[Outgoing]:
    """The parts of ``request``, ready to be sent one after the other; ``view`` gives the memory that a copy reads."""
    parts = [_chunks(copies, request) for copies in request.parts]
    buffers = Buffers(device)
    buffers.reserve(parts)
    return [Outgoing(part, request.shards, view, buffers) for part in parts]


def incoming(request: Expect, memory: Memory, device: torch.device) -> list[Incoming]:
    """The parts of ``request``, ready to be received one after the other into ``memory``."""
    parts = [_chunks(copies, request) for copies in request.parts]
    buffers = Buffers(device)
    buffers.reserve(parts)

    def into(copy: Copy) -> torch.Tensor:
        return _target(memory.tensor, copy, request.shards)

    return [Incoming(part, request.shards, into, buffers) for part in parts]


def _chunks(copies: dict[int, list[Copy]], request: Load | Expect) -> dict[int, list[Chunk]]:
    return {peer: chunked(wanted, request.shards, request.chunk_bytes) for peer, wanted in copies.items() if wanted}


def _target(memory: torch.Tensor, copy: Copy, shards: dict[int, list[Shard]]) -> torch.Tensor:
    dtype = getattr(torch, shards[copy.rank][copy.source.storage].dtype)
    start = memory.storage_offset() // dtype.itemsize + copy.target.offset
    view = torch.empty(0, dtype=dtype, device=memory.device)
    return view.set_(memory.untyped_storage(), start, copy.box.size, copy.target.strides)


def join(request: Join, device: torch.device, store: Any = None, *, in_engine: bool = False) -> Any:
    """Join a group as its request says. ``store``: the rendezvous if this process serves it."""
    store = store if store is not None else connect(request.host, request.port, request.timeout_s)
    if request.backend == "cupy":
        from weightsync.transports.cupy_group import CupyGroup

        return CupyGroup(
            store,
            name=request.name,
            rank=request.rank,
            world_size=request.world_size,
            device=device,
            timeout_s=request.timeout_s,
        )
    return Group(
        store,
        name=request.name,
        rank=request.rank,
        world_size=request.world_size,
        backend=request.backend,
        device=device,
        timeout_s=request.timeout_s,
        in_engine=in_engine,
        ctas=request.ctas,
    )

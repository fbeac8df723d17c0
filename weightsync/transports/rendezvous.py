"""A process group that an engine takes part in: made as SGLang makes its own, and given up by a deadline.

SGLang prefixes the store with the group's name and then names the group once more; torch's public
``init_process_group`` does neither, and two sides that differ wait for each other for ever. Runs in the actor's sender
processes and, for our own groups, inside the engine.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import Backend, BroadcastOptions, PrefixStore, ProcessGroup, TCPStore, distributed_c10d

from weightsync.addresses import bind_host
from weightsync.deadline import Deadline
from weightsync.errors import ConfigError, TransferError

Transfers = Sequence[tuple[int, torch.Tensor]]
"""Group ranks, each with the contiguous uint8 tensor that goes there or comes from there."""

_BACKLOG = 1024
_NEVER = timedelta(days=30)
_POLL_S = 50e-6
_WATCHES = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT")
_EARLY_S = 0.1
"""Gloo counts in milliseconds of its own: what fails so shortly before the deadline has reached it."""


def listen(host: str, timeout_s: float) -> tuple[TCPStore, int]:
    """A store for a rendezvous, served by this process at ``host`` and a port that is bound already.

    The kernel chooses the port and nobody can take it in between. Raises ConfigError if ``host`` is not ours.
    """
    number = bind_host(host)
    listener = socket.socket(socket.AF_INET6 if ":" in number else socket.AF_INET)
    try:
        listener.bind((number, 0))
        listener.listen(_BACKLOG)
    except OSError as e:
        listener.close()
        raise ConfigError(f"cannot listen on host {host!r} ({number}): {e.strerror or e}") from e
    port = listener.getsockname()[1]
    store = TCPStore(
        number,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )
    return store, port


def connect(host: str, port: int, timeout_s: float) -> TCPStore:
    """The store that another process serves. Raises TransferError naming the address if it cannot be reached."""
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as e:
        raise TransferError(f"no rendezvous at {host}:{port} within {timeout_s:g} s: {_first_line(e)}") from e


class Group:
    """Membership in one process group. Every wait ends by its deadline; who misses one must ``abort`` and make anew.

    ``device`` is where the tensors lie: the CPU with gloo, a GPU with nccl. Raises TransferError if not all have come
    before ``timeout_s``. Nothing has been sent yet then: NCCL connects at the first collective. ``in_engine``: leave no
    trace in torch's list of groups, which is the engine's. ``ctas``: how many blocks NCCL runs, in a group where all
    members ask for the same; 0: as it chooses.
    """

    def __init__(
        self,
        store: TCPStore,
        *,
        name: str,
        rank: int,
        world_size: int,
        backend: str,
        device: torch.device,
        timeout_s: float,
        in_engine: bool = False,
        ctas: int = 0,
    ) -> None:
        self.rank, self.world_size, self.device, self.name = rank, world_size, device, name
        self._store = store
        self._registered = not (in_engine or ctas)
        limit = _NEVER if backend == "nccl" else timedelta(seconds=timeout_s)
        store.set_timeout(timedelta(seconds=timeout_s))
        make = _as_sglang if self._registered else partial(_unregistered, ctas=ctas)
        try:
            with _errors_left_to_us():
                made = make(PrefixStore(name, store), name, rank, world_size, backend, limit)
        except (RuntimeError, ValueError) as e:
            raise TransferError(f"group {name} ({backend}, {world_size} members): {_first_line(e)}") from e
        self._group: ProcessGroup | None = made
        if device.type == "cuda":  # of another pool than the streams of copies, which must not wait here
            self._waiting = torch.cuda.Stream(device, priority=-1)

    def start_broadcasts(self, tensors: Sequence[torch.Tensor], deadline: Deadline) -> list[Any]:
        """Begin to give rank 0's ``tensors`` to all, one after the other, or to receive them; ``finish`` the result.

        Raises TransferError, TransferTimeout.
        """
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = _left(deadline) if self.device.type == "cpu" else _NEVER
        with self._failing("broadcast", deadline):
            return [self._alive().broadcast([tensor], options) for tensor in tensors]

    def start(self, sends: Transfers, receives: Transfers) -> list[Any]:
        """Begin sends and receives as one; hand the result to ``finish``. Until then the tensors must be left alone."""
        group = self._alive()
        with self._failing("exchange"):
            if self.device.type == "cpu":
                out = [group.send([tensor], peer, 0) for peer, tensor in sends]
                return out + [group.recv([tensor], peer, 0) for peer, tensor in receives]
            if not sends and not receives:
                return []
            group._start_coalescing(self.device)
            for peer, tensor in sends:
                group.send([tensor], peer, 0)
            for peer, tensor in receives:
                group.recv([tensor], peer, 0)
            return [group._end_coalescing(self.device)]

    def finish(self, works: list[Any], deadline: Deadline, *, doing: str = "exchange") -> None:
        """Wait for what was begun, and for nothing that was begun after it. Raises TransferError, TransferTimeout."""
        for work in works if self.device.type == "cpu" else ():
            with self._failing(doing, deadline):
                work.wait(_left(deadline))
        if self.device.type == "cpu" or not works:
            return
        with self._failing(doing, deadline), torch.cuda.stream(self._waiting):
            for work in works:
                work.wait()
            done = torch.cuda.Event()
            done.record()
        while not done.query():
            if deadline.passed():
                self.abort()
                raise deadline.error(f"group {self.name}: {doing}")
            time.sleep(_POLL_S)

    def follow(self, works: list[Any], deadline: Deadline) -> None:
        """What this thread does next comes after what was begun: on a GPU that waits there, in a CPU here."""
        if self.device.type == "cpu":
            self.finish(works, deadline, doing="broadcast")
            return
        with self._failing("broadcast", deadline):
            for work in works:
                work.wait()

    def abort(self) -> None:
        """Give the group up at once, whatever its members are doing; a thread of ours that waits in it is released."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RuntimeError, ValueError):
                if self.device.type == "cuda":
                    group.abort()
                if self._registered:
                    distributed_c10d.destroy_process_group(group)

    close = abort

    def _alive(self) -> ProcessGroup:
        if self._group is None:
            raise TransferError(f"group {self.name} was given up")
        return self._group

    @contextlib.contextmanager
    def _failing(self, doing: str, deadline: Deadline | None = None) -> Iterator[None]:
        try:
            yield
        except RuntimeError as e:
            if deadline is not None and deadline.remaining_s() < _EARLY_S:
                raise deadline.error(f"group {self.name}: {doing}") from e
            raise TransferError(f"group {self.name}: {doing}: {_first_line(e)}") from e


def _as_sglang(
    store: PrefixStore, name: str, rank: int, world_size: int, backend: str, limit: timedelta
) -> ProcessGroup:
    """The call that SGLang makes, with the arguments that it gives."""
    group, _ = distributed_c10d._new_process_group_helper(
        world_size, rank, [], Backend(backend), store, group_name=name, timeout=limit
    )
    return group


def _unregistered(
    store: PrefixStore, name: str, rank: int, world_size: int, backend: str, limit: timedelta, *, ctas: int
) -> ProcessGroup:
    """The same group to its other members, without torch's lists of groups knowing of it."""
    device = "cuda" if backend == "nccl" else "cpu"
    inner = PrefixStore(f"{name}/", store)
    group = ProcessGroup(inner, rank, world_size)
    if backend == "nccl":
        options = distributed_c10d.ProcessGroupNCCL.Options()
        options._timeout, options.group_name = limit, name
        if ctas:
            options.config.min_ctas = options.config.max_ctas = ctas
        kind, made = (
            ProcessGroup.BackendType.NCCL,
            distributed_c10d.ProcessGroupNCCL(PrefixStore(f"{device}/", inner), rank, world_size, options),
        )
    else:
        kind, made = (
            ProcessGroup.BackendType.GLOO,
            distributed_c10d.ProcessGroupGloo(PrefixStore(f"{device}/", inner), rank, world_size, timeout=limit),
        )
    group._set_default_backend(kind)
    group._register_backend(torch.device(device), kind, made)
    return group


@contextlib.contextmanager
def _errors_left_to_us() -> Iterator[None]:
    """Torch would end the process, which may be an engine, when an NCCL group loses a member; we abort the group.

    Nor is it to watch the group by its rendezvous, which ends with a sender: it would complain every second.
    """
    with _watches.lock:
        if not _watches.makers:
            _watches.before = {name: os.environ.get(name) for name in _WATCHES}
            os.environ |= dict.fromkeys(_WATCHES, "0")
        _watches.makers += 1
    try:
        yield
    finally:
        with _watches.lock:
            _watches.makers -= 1
            if not _watches.makers:
                _watches.restore()


class _Watches:
    """What the environment said before groups were made, of which there may be several at once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.makers = 0
        self.before: dict[str, str | None] = {}

    def restore(self) -> None:
        for name, value in self.before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_watches = _Watches()


def _left(deadline: Deadline) -> timedelta:
    return timedelta(seconds=max(0.001, deadline.remaining_s()))


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

"""A process group over NCCL made with CuPy, beside torch's: for training workers, whose own groups stay untouched.

It has what ``exchange`` needs of a ``rendezvous.Group``. Waits end by their deadline, and so does making it, at the
price of a thread that stays in NCCL where another member never comes. Runs in training workers and in the actor's
sender processes; imported where it is needed, since CuPy need not be there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import cupy
import torch
from cupy.cuda import nccl
from torch.distributed import PrefixStore, TCPStore

from weightsync.deadline import Deadline
from weightsync.errors import TransferError

_POLL_S = 50e-6
_KEY = "unique_id"


def version() -> str:
    """The NCCL that CuPy uses here, like ``2.30.7``."""
    number = nccl.get_version()
    return f"{number // 10_000}.{number // 100 % 100}.{number % 100}"


class CupyGroup:
    """Membership in one communicator, on GPU ``device``. Raises TransferError, or TransferTimeout if not all come."""

    def __init__(
        self, store: TCPStore, *, name: str, rank: int, world_size: int, device: torch.device, timeout_s: float
    ) -> None:
        self.rank, self.world_size, self.device, self.name = rank, world_size, device, name
        self._communicator: Any = None
        self._stream = torch.cuda.Stream(device)
        deadline = Deadline(timeout_s, f"making group {name}")
        unique_id = _exchange_id(PrefixStore(name, store), rank, name)
        outcome: list[Any] = []

        def make() -> None:
            try:
                with torch.cuda.device(device):
                    outcome.append(nccl.NcclCommunicator(world_size, unique_id, rank))
            except (RuntimeError, TypeError, nccl.NcclError) as e:
                outcome.append(e)

        making = threading.Thread(target=make, name="weightsync-nccl", daemon=True)
        making.start()
        making.join(deadline.remaining_s())
        if not outcome:
            raise deadline.error(f"group {name}: not all {world_size} members came")
        if isinstance(outcome[0], Exception):
            raise TransferError(f"group {name}: {outcome[0]}")
        self._communicator = outcome[0]

    def start(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> list[Any]:
        """Begin sends and receives as one; hand the result to ``finish``. Until then the tensors must be left alone."""
        if not sends and not receives:
            return []
        communicator = self._alive()
        try:
            with torch.cuda.device(self.device):
                self._stream.wait_stream(torch.cuda.current_stream(self.device))
                nccl.groupStart()
                for peer, tensor in sends:
                    communicator.send(*self._what(tensor), peer, self._stream.cuda_stream)
                for peer, tensor in receives:
                    communicator.recv(*self._what(tensor), peer, self._stream.cuda_stream)
                nccl.groupEnd()
                done = torch.cuda.Event()
                done.record(self._stream)
        except nccl.NcclError as e:
            raise TransferError(f"group {self.name}: exchange: {e}") from e
        return [done]

    def finish(self, works: list[Any], deadline: Deadline) -> None:
        """Wait for what ``start`` began. Raises TransferError, TransferTimeout; the group is given up then."""
        for done in works:
            while not done.query():
                try:
                    self._alive().check_async_error()
                except nccl.NcclError as e:
                    self.abort()
                    raise TransferError(f"group {self.name}: exchange: {e}") from e
                if deadline.passed():
                    self.abort()
                    raise deadline.error(f"group {self.name}: exchange")
                time.sleep(_POLL_S)

    def abort(self) -> None:
        """Give the group up at once; a thread of ours that waits in it is released. Idempotent."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort()

    close = abort

    def _what(self, tensor: torch.Tensor) -> tuple[int, int, int]:
        assert tensor.is_contiguous() and tensor.dtype == torch.uint8, "messages are contiguous bytes"
        return tensor.data_ptr(), tensor.numel(), nccl.NCCL_UINT8

    def _alive(self) -> Any:
        if self._communicator is None:
            raise TransferError(f"group {self.name} was given up")
        return self._communicator


def _exchange_id(store: PrefixStore, rank: int, name: str) -> bytes | tuple[int, ...]:
    """The first rank makes it; the others read it from the rendezvous. Bytes from CuPy 14 on, before that integers."""
    try:
        if rank == 0:
            unique_id = nccl.get_unique_id()
            store.set(_KEY, ",".join(map(str, unique_id)))
            return unique_id
        read = [int(part) for part in store.get(_KEY).decode().split(",")]
    except (RuntimeError, nccl.NcclError) as e:
        raise TransferError(f"group {name}: no unique id: {str(e).splitlines()[0]}") from e
    return bytes(read) if int(cupy.__version__.split(".")[0]) >= 14 else tuple(read)

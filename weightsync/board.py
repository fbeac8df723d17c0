"""Where the GPU itself says that a pull has landed: shared memory of one engine rank and its actor. Both ends.

An engine's event loop never rests, and a thread beside it may wait a hundred times as long for the interpreter as the
copies take. So nobody there is asked: behind the copies, and behind the fingerprints if they are wanted, the GPU writes
the pull's number where the actor looks.

    word    written by
    0       the loader       number of the pull that goes on by itself, once all of it is launched
    1       the loader       the bytes that it writes
    2       the loader       when it was launched: nanoseconds of the machine's monotonic clock
    3       the loader       number of the last pull that was to be fingerprinted too
    4       the GPU, last    number of the pull that has landed
    5 ...   the GPU          the fingerprints that were asked for
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from weightsync.errors import TransferError
from weightsync.spec import Segment
from weightsync.transports import shm

HEAD = 5
_GOES_ON, _NUM_BYTES, _LAUNCHED, _PRINTED, _LANDED = range(HEAD)
_WORD_BYTES = 8


class Board:
    """The engine's end, with room for ``num_words`` fingerprints. Raises TransferError if it cannot be made."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        self.num_words = num_words
        self._device = device
        self._memory = shm.allocate((HEAD + num_words) * _WORD_BYTES)
        self._words = self._memory.tensor.view(torch.int64)
        self._registered = False
        if device.type == "cuda":  # so that the GPU writes it without a thread of ours
            error = int(torch.cuda.cudart().cudaHostRegister(self._words.data_ptr(), self._words.nbytes, 0))
            if error:
                self._memory.close()
                with suppress(RuntimeError):
                    torch.zeros(1, device=device)  # the runtime keeps an error for whoever launches next in this thread
                raise TransferError(f"shared memory cannot be registered with the GPU: CUDA error {error}")
            self._registered = True

    @property
    def segment(self) -> Segment:
        return self._memory.segment

    @property
    def prints(self) -> torch.Tensor:
        """int64 [num_words], for fingerprints."""
        return self._words[HEAD:]

    def land(self, push_id: str) -> Callable[[], None]:
        """Have the GPU say, after all that the current stream holds, that this pull has landed.

        What is returned waits until it has: nothing is on its way here then.
        """
        number = torch.full((1,), _number_of(push_id), dtype=torch.int64, device=self._device)
        self._words[_LANDED : _LANDED + 1].copy_(number, non_blocking=True)
        if self._device.type != "cuda":
            return lambda: None
        said = torch.cuda.Event()
        said.record()
        return said.synchronize

    def accept(self, push_id: str, *, num_bytes: int, launched_ns: int, printed: bool = False) -> None:
        """Say that this pull goes on by itself, and will ``land``. ``launched_ns``: of ``time.monotonic_ns``.

        ``printed``: its fingerprints are written before that.
        """
        self._words[_NUM_BYTES], self._words[_LAUNCHED] = num_bytes, launched_ns
        self._words[_PRINTED] = _number_of(push_id) if printed else 0
        self._words[_GOES_ON] = _number_of(push_id)

    def close(self) -> None:
        """Nothing may be on its way here any more (see ``land``). Idempotent."""
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._words.data_ptr())
            self._registered = False
        self._memory.close()
        self._words = torch.zeros(HEAD + self.num_words, dtype=torch.int64)


class Reader:
    """The actor's end. Raises TransferError if the memory cannot be opened: the engine may see another /dev/shm."""

    def __init__(self, segment: Segment) -> None:
        self._memory = shm.open_segment(segment)
        self._words = self._memory.tensor.view(torch.int64)

    def goes_on(self, push_id: str) -> bool:
        """Whether the loader says so; asked when the engine has answered. If not, the receiver must be asked."""
        return int(self._words[_GOES_ON]) == _number_of(push_id)

    def has_landed(self, push_id: str) -> bool:
        """Whether all its bytes are there, and its fingerprints."""
        return int(self._words[_LANDED]) == _number_of(push_id)

    def num_bytes(self) -> int:
        """Of the pull that goes on."""
        return int(self._words[_NUM_BYTES])

    def seconds(self) -> float:
        """Since the pull that goes on was launched."""
        return (time.monotonic_ns() - int(self._words[_LAUNCHED])) / 1e9

    def prints(self, push_id: str) -> list[int]:
        """The fingerprints of that pull, as they were written; none if it was not to have any."""
        if int(self._words[_PRINTED]) != _number_of(push_id):
            return []
        return [number & 0xFFFF_FFFF_FFFF_FFFF for number in self._words[HEAD:].tolist()]

    def close(self) -> None:
        """Unmap. Idempotent."""
        self._memory.close()
        self._words = torch.zeros(HEAD, dtype=torch.int64)


def _number_of(push_id: str) -> int:
    """A positive number of 56 bits, never 0."""
    return 1 + int.from_bytes(hashlib.blake2b(push_id.encode(), digest_size=7).digest())

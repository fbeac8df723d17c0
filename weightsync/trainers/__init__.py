"""What each kind of trainer holds, behind one interface. Runs in training workers.

A trainer's module has a function ``reader(model_or_tensors, **options) -> Reader``. It is imported when it is asked
for, so that a worker needs its own trainer's libraries only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from weightsync.errors import ConfigError
from weightsync.spec import Box, Rule

TRAINERS = ("dtensor_v2", "megatron")


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A rank's part of one tensor, as it is at this moment.

    What is published is ``tensor`` or, where there is a ``compute``, what that makes of it: a tensor of the same shape
    and dtype that shares no memory with it.

    ``tensor`` is the trainer's own memory (plain, detached, any strides), ``shape`` that of the whole tensor,
    ``offset`` where ``tensor`` starts in it. A rank that holds nothing has a ``tensor`` with a size of 0. ``owner`` is
    the object that trainer and optimizer write through, where there is one: a DTensor over ``tensor``, a Parameter.
    """

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    is_buffer: bool = False
    owner: torch.Tensor | None = None
    compute: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def box(self) -> Box:
        return Box(self.offset, tuple(self.tensor.shape))

    @property
    def dtype(self) -> str:
        """torch's name of the dtype without the prefix: ``bfloat16``."""
        return str(self.tensor.dtype).removeprefix("torch.")


class Seen(NamedTuple):
    """Of every ``Held``, in their order, what tells of writes: the memory, not detached, and its owner. Not to be kept.

    Three lists side by side, since a push looks at every tensor of the model three times.
    """

    names: list[str]
    tensors: list[torch.Tensor]
    owners: list[torch.Tensor | None]

    @staticmethod
    def of(held: list[Held]) -> Seen:
        return Seen([h.name for h in held], [h.tensor for h in held], [h.owner for h in held])


class Reader(Protocol):
    """Reads one trainer. All methods raise ConfigError that names a tensor they cannot describe.

    ``reading`` numbers what reads have found: two reads with one number between them gave the same names and boxes over
    the same memory.
    """

    reading: int

    def settle(self) -> None:
        """Finish what the trainer still has under way with its weights. In the training thread, by every rank."""
        ...

    def swapped(self) -> list[str]:
        """Names of tensors seen to hold other values than when ``settle`` ended, as far as a small sample shows it."""
        ...

    def read(self) -> list[Held]:
        """Every tensor of the model as it is now, in a stable order, each name once. Copies nothing."""
        ...

    def glance(self) -> Seen | None:
        """What ``read`` would give, without its cost; None where only ``read`` can tell, or would find other things."""
        ...

    def rules(self, held: list[Held]) -> list[Rule]:
        """How the tensors of ``read`` become Hugging Face tensors."""
        ...


def get(name: str) -> Callable[..., Reader]:
    """The ``reader`` function of a trainer, of a model and options. Raises ConfigError that lists those there are."""
    if name not in TRAINERS:
        raise ConfigError(f"unknown trainer {name!r}; there are {', '.join(TRAINERS)}")
    return importlib.import_module(f"weightsync.trainers.{name}").reader

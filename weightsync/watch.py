"""Whether a trainer's tensors were written to. Runs in training workers.

Three things tell of a write at no cost: version counters, addresses, and the hooks that torch runs around every
optimizer step (a ``foreach`` or fused step on DTensors raises no version counter). What gets past all three, such as
``tensor.data`` or a kernel of someone's own, is seen by fingerprints only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from weightsync.trainers import Seen


class OptimizerSteps:
    """Counts, for each parameter, the beginnings and ends of steps of whatever optimizer of this process has it."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = defaultdict(int)
        self._hooks = [register_optimizer_step_pre_hook(self._count), register_optimizer_step_post_hook(self._count)]

    def of(self, parameter: torch.Tensor | None) -> int:
        return self._counts.get(id(parameter), 0)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _count(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._counts[id(parameter)] += 1


class Watch:
    """The state of tensors at one moment, to compare with that of a later one: for each its address, the counters of
    its memory and of its owner, and the owner's optimizer steps."""

    def __init__(self, now: Seen, steps: OptimizerSteps) -> None:
        addresses = [tensor.data_ptr() for tensor in now.tensors]
        self._names = now.names
        self._marks = list(zip(addresses, _versions(now.tensors), _versions(now.owners), map(steps.of, now.owners)))

    def changed(self, now: Watch) -> list[str]:
        """Names of tensors that were written to, that lie elsewhere, or that came or went."""
        if self._equals(now):
            return []
        before, after = self._by_name(), now._by_name()
        return [n for n in {**before, **after} if before.get(n) != after.get(n)]

    def moved(self, now: Watch) -> bool:
        """Whether any tensor lies elsewhere than it did, of the same ones."""
        return [mark[0] for mark in self._marks] != [mark[0] for mark in now._marks]

    def written(self, now: Watch) -> list[str]:
        """Names of tensors that were written to where they are. One that moved is not among them."""
        if self._equals(now):
            return []
        before = self._by_name()
        pairs = [(name, before.get(name), new) for name, new in now._by_name().items()]
        return [name for name, old, new in pairs if old is not None and old[0] == new[0] and old != new]

    def _equals(self, now: Watch) -> bool:
        return self._marks == now._marks and self._names == now._names

    def _by_name(self) -> dict[str, tuple]:
        return dict(zip(self._names, self._marks, strict=True))


def _versions(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]  # type: ignore[union-attr]
    except (RuntimeError, AttributeError):  # one made in inference mode, which has no counter, or no owner
        return [_version(tensor) for tensor in tensors]


def _version(tensor: torch.Tensor | None) -> int:
    if tensor is None:
        return -1
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode: it has no counter
        return -1

"""One installed plan, ready to run: trainer memory mapped, source and target views made. Runs in the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch

from weightsync import transports
from weightsync.errors import PlanError
from weightsync.live import LiveWeights
from weightsync.rounds import Gate
from weightsync.spec import Copy, RankPlan, Segment, Shard, View
from weightsync.views import SourceViews


class MappedSegments:
    """Trainer memory mapped into this process: each handle once, until nobody asks for it any more."""

    def __init__(self) -> None:
        self._memories: dict[tuple[str, bytes], transports.Memory] = {}

    @property
    def count(self) -> int:
        return len(self._memories)

    def open(self, segments: list[Segment]) -> list[transports.Memory]:
        """The memory of each segment; what is already mapped is not mapped again."""
        for segment in segments:
            key = (segment.transport, segment.handle)
            if key not in self._memories:
                self._memories[key] = transports.get(segment.transport).open_segment(segment)
        return [self._memories[s.transport, s.handle] for s in segments]

    def close_all_but(self, segments: list[Segment]) -> None:
        """Unmap what none of ``segments`` is."""
        keep = {(s.transport, s.handle) for s in segments}
        for key in [k for k in self._memories if k not in keep]:
            self._memories.pop(key).close()


class InstalledPlan:
    """The copies and fills that one engine rank makes at every push, and the needs by which it is verified.

    Raises PlanError if a copy would have to cast, TransferError if memory cannot be mapped.
    """

    def __init__(
        self,
        plan_id: str,
        plan: RankPlan,
        segments: dict[int, list[Segment]],
        shards: dict[int, list[Shard]],
        *,
        live: LiveWeights,
        mapped: MappedSegments,
        rounds: Sequence[int] = (),
        gate: Gate | None = None,
    ) -> None:
        """``rounds``: how many copies each has, one after the other, as ``gate`` lets them; none: all at once."""
        self.plan_id = plan_id
        self.needs = plan.needs
        self._live = live
        self._fills = plan.fills
        used = {(c.rank, shards[c.rank][c.source.storage].segment) for c in plan.copies}
        self.segments = [segments[rank][index] for rank, index in sorted(used)]
        memories: dict[int, dict[int, transports.Memory]] = {}
        for (rank, index), memory in zip(sorted(used), mapped.open(self.segments)):
            memories.setdefault(rank, {})[index] = memory
        pairs, sources, targets = [], SourceViews(memories, shards), SlotViews(live)
        for copy in plan.copies:
            source = sources(copy)
            pairs.append((targets.of_copy(copy, source.dtype), source))
        self._gate = gate if rounds else None
        self._pullers = _pullers(pairs, rounds or [len(pairs)])
        self.num_bytes = sum(target.nbytes for target, _ in pairs)

    @property
    def goes_on(self) -> bool:
        """Whether ``start`` returns before its copies are done."""
        return self._gate is None and self._pullers[0].goes_on

    def check(self) -> None:
        """Nothing but its own memory is needed."""

    def start(self, timeout_s: float = 0.0) -> Callable[[], float]:
        """Begin to copy and fill. What is returned waits for the copies, and gives the seconds that they took.

        What this thread queues on a GPU after that comes after both. ``timeout_s`` is for plans that wait for others.
        """
        with torch.inference_mode():
            finish = self._pullers[0].start() if self._gate is None else self._in_rounds(self._gate, timeout_s)
            for fill in self._fills:
                self._live.view(fill.view, fill.size).fill_(fill.value)
        return finish

    def _in_rounds(self, gate: Gate, timeout_s: float) -> Callable[[], float]:
        seconds = sum(gate.run(number, puller.run, timeout_s) for number, puller in enumerate(self._pullers))
        return lambda: seconds


def _pullers(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], rounds: Sequence[int]) -> list[transports.Puller]:
    """One a round."""
    assert sum(rounds) == len(pairs), f"{rounds} copies in rounds, {len(pairs)} in all"
    ends = [0, *accumulate(rounds)]
    return [transports.make_puller(pairs[start:end]) for start, end in pairwise(ends)]


class SlotViews:
    """Regions of live memory as views, each after checking that it stays inside its tensor's storage.

    Make one for each use: tensors are looked up once. A view is one operation of torch (see ``views.SourceViews``).
    """

    def __init__(self, live: LiveWeights) -> None:
        self._live = live
        self._slots: dict[int, tuple[torch.Tensor, int, int]] = {}

    def __call__(self, at: View, size: tuple[int, ...]) -> torch.Tensor:
        if at.storage not in self._slots:
            tensor = self._live.slots[at.storage].tensor()
            end = tensor.untyped_storage().nbytes() // tensor.itemsize
            self._slots[at.storage] = tensor, tensor.storage_offset(), end
        tensor, start, end = self._slots[at.storage]
        first = start + at.offset
        last = first + sum((n - 1) * s for n, s in zip(size, at.strides)) if 0 not in size else -1
        assert at.offset >= 0 and last < end, f"{at} is outside"
        return tensor.as_strided(size, at.strides, first)

    def of_copy(self, copy: Copy, dtype: torch.dtype) -> torch.Tensor:
        """The engine's memory of a copy. Raises PlanError if it is of another dtype than what is published."""
        target = self(copy.target, copy.box.size)
        if target.dtype != dtype:
            name = self._live.slots[copy.target.storage].name
            raise PlanError(f"{name} is {target.dtype}, {copy.tensor} is published as {dtype}", tensor=copy.tensor)
        return target

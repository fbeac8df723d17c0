"""What a publisher does for the actor: describe, export, publish, seal. One a training rank, called from threads.

A push reads one step: the training thread *marks* it, ``publish`` waits for that mark, and ``seal`` says afterwards
whether anything was written to meanwhile. From the mark on, every write is noticed.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch

from weightsync import devices
from weightsync.arena import Arena, Outlet
from weightsync.deadline import Deadline
from weightsync.errors import TransferError
from weightsync.marks import Mark, Marks
from weightsync.source_checks import KeptChecks
from weightsync.spec import Description, Export, Published, Sealed, Shard, SourceRegion
from weightsync.trainers import Held, Reader, Seen
from weightsync.versions import library_versions
from weightsync.watch import OptimizerSteps, Watch


class _Shown(NamedTuple):
    """What was published last. ``fingerprints`` waits for those of its regions, on which a GPU may still be at work."""

    step: int
    regions: Sequence[SourceRegion]
    watch: Watch
    fingerprints: Callable[[], list[int]]
    num_filled: int = 1
    seen: Seen | None = None


class Offer:
    """One rank's weights. ``generation`` counts exports that became void: their memory moved or was withdrawn."""

    def __init__(self, reader: Reader, *, rank: int, world_size: int, trainer: str) -> None:
        self._reader, self._rank, self._world_size, self._trainer = reader, rank, world_size, trainer
        self._boot_id = secrets.token_hex(8)
        self._lock = threading.Lock()  # the outlet and what was shown
        self._outlet: Outlet | None = None
        self._arena: Arena | None = None
        self._shown: _Shown | None = None
        self._checks = KeptChecks(reader)
        self._fits = -1  # the number of a reading that what is exported was found to fit, where it was
        self._generation = 0
        self._marks = Marks(rank)
        held = reader.read()
        reader.rules(held)
        self._steps = OptimizerSteps()
        self._device = next((t.device for h in held for t in (h.tensor, h.owner) if t is not None and t.is_cuda), None)

    # ---------------------------------------------------------------------------------------- the training thread

    def mark(self, step: int) -> None:
        """The weights are those of ``step`` from here on (from this point of the current CUDA stream)."""
        self._reader.settle()
        event = None
        if self._device is not None:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
        seen = self._reader.glance()
        seen = Seen.of(self._reader.read()) if seen is None else seen
        self._marks.put(Mark(step, Watch(seen, self._steps), event, seen, self._reader.reading))

    def void(self) -> None:
        """What is published next must be exported first."""
        with self._lock:
            self._void()

    def withdraw(self) -> None:
        """Let go of exported memory; what is published next must be exported first."""
        with self._lock:
            self._void()
            self._marks.forget_tensors()
            if self._arena is not None:
                self._arena.close()
                self._arena = None

    def close(self) -> None:
        """Withdraw, and end every wait. Idempotent."""
        self._marks.close()
        self._steps.close()
        self.withdraw()

    # -------------------------------------------------------------------------------------------------- the actor

    def describe(self) -> Description:
        """See ``publisher.Wire``, as for the others."""
        with self._lock:
            held = self._reader.read()
            return Description(
                rank=self._rank,
                world_size=self._world_size,
                trainer=self._trainer,
                host=socket.gethostname(),
                pid=os.getpid(),
                boot_id=self._boot_id,
                versions=library_versions(),
                devices=[] if self._device is None else [devices.uuid_of(self._device)],
                shards=[_as_it_lies(h) for h in held],
                rules=self._reader.rules(held),
                step=self._marks.step,
            )

    def export(self, transport: str, dtypes: Mapping[str, str], *, in_place: bool, arena_bytes: int = 0) -> Export:
        with self._lock, self._on_device():
            self._marks.check_open()
            held = self._reader.read()
            device = devices.uuid_of(self._device) if self._device is not None and transport != "shm" else ""
            before, generation = self._outlet, self._generation
            self._void()
            outlet = Outlet(
                held,
                transport=transport,
                device=device,
                dtypes=dtypes,
                in_place=in_place,
                arena=self._take_arena(),
                limit_bytes=arena_bytes,
            )
            self._outlet, self._arena = outlet, outlet.arena
            if before is not None and (before.segments, before.shards) == (outlet.segments, outlet.shards):
                self._generation = generation  # whoever has it mapped reads the same
            return Export(
                segments=outlet.segments,
                shards=outlet.shards,
                generation=self._generation,
                arena_bytes=outlet.arena_bytes,
                notes=outlet.notes,
                rounds=outlet.rounds,
                num_parts=outlet.num_parts,
            )

    @property
    def device(self) -> torch.device:
        """Where the parameters are: this rank's GPU, or the CPU."""
        return self._device or torch.device("cpu")

    @contextmanager
    def exported(self) -> Iterator[tuple[int, list[torch.Tensor | None]]]:
        """The generation of what is exported and its memory, by shard index; held where it is until the block ends."""
        with self._lock, self._on_device():
            self._marks.check_open()
            if self._outlet is None:
                raise self._error("nothing is exported: its memory moved or was withdrawn")
            yield self._generation, self._outlet.views

    def publish(self, step: int, regions: Sequence[SourceRegion], timeout_s: float) -> Published:
        start = time.perf_counter()
        mark = self._marks.wait_for(step, Deadline(timeout_s, f"publish of step {step}"))
        with self._lock, self._on_device():
            reading = self._reader.reading
            held: list[Held] = []
            now, watch = mark.seen, self._as_marked(mark)
            if now is None or watch is None:
                now = self._glance()
                held = self._reader.read() if now is None else []
                now = Seen.of(held) if now is None else now
                watch = Watch(now, self._steps)
            self._check_unwritten(step, mark.watch.written(watch))
            outlet = self._current(held, reading) if held else self._outlet
            if outlet is not None:
                if mark.event is not None:
                    mark.event.synchronize()
                self._check_unwritten(step, self._reader.swapped())
                filled = min(outlet.num_parts, outlet.num_rounds)
                if outlet.arena is not None:
                    for number in range(filled):
                        outlet.fill(held, number)
                    self._check_unwritten(step, watch.changed(Watch(Seen.of(held), self._steps)))
                begun = self._checks.start_published(outlet, held, regions)
                self._shown = _Shown(step, regions, watch, begun, filled, now if outlet.arena is None else None)
            return Published(step, self._generation, time.perf_counter() - start)

    def fill(self, step: int, number: int) -> None:
        with self._lock, self._on_device():
            (shown, outlet), held = self._published(step), self._reader.read()
            if number < shown.num_filled or number >= outlet.num_rounds:
                return
            self._check_unwritten(step, shown.watch.changed(Watch(Seen.of(held), self._steps)))
            outlet.fill(held, number)
            self._check_unwritten(step, shown.watch.changed(Watch(Seen.of(held), self._steps)))
            self._shown = shown._replace(num_filled=number + 1)

    def seal(self, step: int, regions: Sequence[SourceRegion]) -> Sealed:
        start = time.perf_counter()
        with self._lock, self._on_device():
            (shown, outlet), reading = self._published(step), self._reader.reading
            if regions and shown.regions != regions:
                raise self._error(f"step {step} was published anew for other engines, before it was sealed for these")
            held = self._reader.read() if shown.seen is None else []
            changed = shown.watch.changed(Watch(shown.seen or Seen.of(held), self._steps))
            if held:
                self._check_same_tensors(outlet, held, reading)
            published = shown.fingerprints() if regions else []
            found = self._checks.of_sources(outlet, held, regions, published)
            different = [region for region, then, now in zip(regions, published, found) if now != then]
            names = dict.fromkeys(outlet.shards[region.view.storage].tensor for region in different)
            changed += [name for name in names if name not in changed]
            self._shown = shown._replace(seen=None)
            self._marks.forget_tensors()
            return Sealed(found, published, changed, time.perf_counter() - start)

    def _as_marked(self, mark: Mark) -> Watch | None:
        """The marked tensors now, if they are all that is exported and none of them moved since; else None."""
        if mark.seen is None or not self._lies_in_place(mark.reading):
            return None
        now = Watch(mark.seen, self._steps)
        return None if mark.watch.moved(now) else now

    def _glance(self) -> Seen | None:
        """All that is exported, if nothing moved since it was compared with a reading; None if it must be read.

        That is all there is to do where bytes are not copied here.
        """
        return self._reader.glance() if self._lies_in_place(self._reader.reading) else None

    def _lies_in_place(self, reading: int) -> bool:
        """Whether all that is exported is the trainer's own memory, and was found to fit that reading."""
        return self._outlet is not None and self._outlet.arena is None and self._fits == reading

    # -------------------------------------------------------------------------------------------------- conditions

    def _published(self, step: int) -> tuple[_Shown, Outlet]:
        if self._shown is None or self._shown.step != step or self._outlet is None:
            raise self._error(f"nothing is published as step {step}: memory moved, was withdrawn or exported anew")
        return self._shown, self._outlet

    def _check_unwritten(self, step: int, written: list[str]) -> None:
        if written:
            names = ", ".join(written[:5]) + (", ..." if written[5:] else "")
            raise TransferError(
                f"training rank {self._rank}: {len(written)} tensors were written to after step {step} was marked "
                f"(step_done), before it was published: {names}",
                rank=self._rank,
                tensor=written[0],
                safe_to_retry=True,
            )

    def _current(self, held: Sequence[Held], reading: int) -> Outlet | None:
        """The outlet, or None if what it exported is void: then the generation has changed.

        ``reading`` is the reader's number before it gave ``held``.
        """
        if self._outlet is None:
            return None
        if self._fits == reading == self._reader.reading:
            return self._outlet
        self._check_same_tensors(self._outlet, held, reading)
        if self._outlet.moved(held):
            self._void()
        elif reading == self._reader.reading:  # what was read is that reading, and no later one
            self._fits = reading
        return self._outlet

    def _check_same_tensors(self, outlet: Outlet, held: Sequence[Held], reading: int) -> None:
        if self._fits == reading == self._reader.reading:
            return
        now, then = {h.name: (h.shape, h.box) for h in held}, {s.tensor: (s.shape, s.box) for s in outlet.shards}
        different = [name for name in {**then, **now} if now.get(name) != then.get(name)]
        if different:
            raise self._error(
                f"{len(different)} tensors came, went or are cut differently since they were exported "
                f"({', '.join(different[:5])}): connect again"
            )

    def _void(self) -> None:
        if self._outlet is not None:
            self._generation += 1
        self._outlet = self._shown = None
        self._checks.forget()
        self._fits = -1

    def _take_arena(self) -> Arena | None:
        arena, self._arena = self._arena, None
        return arena

    def _error(self, why: str) -> TransferError:
        return TransferError(f"training rank {self._rank}: {why}", rank=self._rank)

    def _on_device(self) -> AbstractContextManager:
        return nullcontext() if self._device is None else torch.cuda.device(self._device)


def _as_it_lies(held: Held) -> Shard:
    strides = tuple(held.tensor.stride())
    return Shard(held.name, held.shape, held.dtype, held.box, strides, is_buffer=held.is_buffer)

"""Route ``bucket``: whole tensors by SGLang's own calls, so that a stock engine can be pushed to. Runs in the actor.

A bucket is planned like an engine rank whose parameters are its tensors. Two arenas alternate: one is filled from the
trainer's mapped memory while the engines load the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from weightsync import transports
from weightsync.boxes import dense_strides, volume, whole
from weightsync.config import Config
from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.fanout import Fanout
from weightsync.fleet import EngineLink
from weightsync.plan import Plan, build_plan
from weightsync.routes import Outcome, install_plan
from weightsync.sources import map_sources
from weightsync.spec import Copy, Export, Layout, Need, Param, Rule, TensorSpec, View
from weightsync.transports import Memory, Puller, bucket
from weightsync.transports.bucket_cuda import CudaArena, share_by_handle
from weightsync.views import box_of, source_view


class BucketRoute:
    """``select`` limits the route to some tensors, by Hugging Face name."""

    def __init__(self, fanout: Fanout, config: Config, rules: list[Rule], select: Callable[[str], bool]) -> None:
        self._fanout = fanout
        self._config = config
        self._rules = rules
        self._select = select
        self._unselected: list[str] = []
        self._buckets: list[bucket.Bucket] = []
        self._pullers: list[Puller] = []
        self._arenas: list[bucket.Arena | CudaArena | Memory] = []
        self._gpu = ""
        self._mapped: list[Memory] = []

    def prepare(self, links: list[EngineLink], plan: Plan, exports: dict[int, Export], deadline: Deadline) -> None:
        """Plan the buckets, map the trainer's memory and make the two arenas."""
        self.close()
        install_plan(self._fanout, links, plan, exports, deadline, pulls=False)
        tensors = self._tensors(exports)
        self._buckets = self._pack(tensors)
        largest = max((b.nbytes for b in self._buckets), default=0)
        self._gpu = next((layout.device for link in links for layout in link.layouts), "") or _gpu_of(exports)
        self._arenas = [self._new_arena(largest, exports) for _ in self._buckets[:2]]
        segments = self._map(exports)
        for number, copies in enumerate(self._copies(tensors, exports)):
            targets = bucket.views(self._arena(number), self._buckets[number])
            pairs = [
                (box_of(targets[i], copy.box), source_view(segments, exports[copy.rank].shards, copy))
                for i, copy in copies
            ]
            self._pullers.append(transports.make_puller(pairs))

    def move(self, links: list[EngineLink], step: int, deadline: Deadline) -> list[Outcome]:
        """Fill one arena while the engines load the other. An engine that fails at one bucket gets no further ones."""
        outcomes: dict[str, Outcome] = dict.fromkeys((link.url for link in links), None)
        sending: list[tuple[EngineLink, Future]] = []
        for number in range(len(self._buckets)):
            self._pullers[number].run()
            self._collect(sending, outcomes)
            sending = [
                (link, self._fanout.submit(self._sender(link, number, deadline)))
                for link in links
                if outcomes[link.url] is None
            ]
        self._collect(sending, outcomes)
        return [outcomes[link.url] for link in links]

    def close(self) -> None:
        """Give arenas and mappings back. Idempotent."""
        self._pullers, self._buckets = [], []
        for memory in [*self._mapped, *self._arenas]:
            memory.close()
        self._mapped, self._arenas = [], []

    # ------------------------------------------------------------------------------------------------- planning

    def _pack(self, tensors: list[TensorSpec]) -> list[bucket.Bucket]:
        return bucket.plan_buckets(tensors, self._config.bucket_bytes)

    def _new_arena(self, nbytes: int, exports: dict[int, Export]) -> bucket.Arena | CudaArena | Memory:
        return CudaArena(nbytes, self._gpu) if self._gpu else bucket.Arena(nbytes)

    def _tensors(self, exports: dict[int, Export]) -> list[TensorSpec]:
        shards = {rank: export.shards for rank, export in exports.items()}
        sources = map_sources(shards, self._rules, self._config.rename, self._config.leave_out)
        self._unselected = [name for name in sources.tensors if not self._select(name)]
        return [s.spec for name, s in sources.tensors.items() if self._select(name)]

    def _copies(self, tensors: list[TensorSpec], exports: dict[int, Export]) -> list[list[tuple[int, Copy]]]:
        """For each bucket, the copies that fill it, each with the index of its tensor in the bucket."""
        leave_out = [*self._config.leave_out, *(f"^{re.escape(name)}$" for name in self._unselected)]
        plan = build_plan(
            {rank: export.shards for rank, export in exports.items()},
            self._rules,
            {"bucket": [_layout_of(tensors)]},
            config=msgspec.structs.replace(self._config, leave_out=leave_out),
            source_devices=dict.fromkeys(exports, ""),
        )
        order = {e.tensor.name: (n, i) for n, b in enumerate(self._buckets) for i, e in enumerate(b.entries)}
        copies: list[list[tuple[int, Copy]]] = [[] for _ in self._buckets]
        for copy in plan.rank_plan("bucket", 0).copies:
            number, i = order[copy.tensor]
            copies[number].append((i, copy))
        return copies

    def _map(self, exports: dict[int, Export]) -> dict[int, list[Memory]]:
        mapped = {
            rank: [transports.get(s.transport).open_segment(s) for s in export.segments]
            for rank, export in exports.items()
        }
        self._mapped = [memory for memories in mapped.values() for memory in memories]
        return mapped

    # -------------------------------------------------------------------------------------------------- sending

    def _arena(self, number: int) -> Any:
        return self._arenas[number % 2].tensor

    def _sender(self, link: EngineLink, number: int, deadline: Deadline) -> Callable[[], None]:
        one, what = self._buckets[number], f"bucket {number + 1} of {len(self._buckets)}"

        def send() -> None:
            link.progress.applied = True  # before the call: one that times out may still be loaded
            share = share_by_handle if self._gpu else bucket.share_by_file
            payloads = bucket.payloads(self._arena(number), one, tp_size=link.tp_size, share=share)
            link.client.update(payloads, bucket.LOAD_FORMAT, deadline, what=what)
            link.progress.num_bytes += one.nbytes

        return send

    @staticmethod
    def _collect(sending: list[tuple[EngineLink, Future]], outcomes: dict[str, Outcome]) -> None:
        for link, future in sending:
            error = future.exception()
            if error is not None and not isinstance(error, WeightSyncError):
                raise error
            outcomes[link.url] = error


def _gpu_of(exports: dict[int, Export]) -> str:
    """The UUID of the GPU that holds the first rank's memory; "" for host memory."""
    return next((segment.device for export in exports.values() for segment in export.segments), "")


def _layout_of(tensors: list[TensorSpec]) -> Layout:
    """Buckets as the planner sees them: one engine rank whose parameters are the tensors, whole and contiguous."""
    params = [Param(t.name, t.shape, t.dtype, volume(whole(t.shape))) for t in tensors]
    needs = [Need(t.name, whole(t.shape), View(i, 0, dense_strides(t.shape))) for i, t in enumerate(tensors)]
    return Layout(
        rank=0,
        boot_id="",
        device="",
        host="",
        params=params,
        needs=needs,
        fills=[],
        constants=[],
        derived=[],
        opaque={},
        ignored=[],
        versions={},
    )

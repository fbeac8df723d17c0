"""Route ``bucket``: whole tensors by SGLang's own calls, so that a stock engine can be pushed to. Runs in the actor.

A bucket is planned like an engine rank whose parameters are its tensors. Two arenas alternate: one is filled from the
trainer's mapped memory while the engines load the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from itertools import chain
from typing import Any

from weightsync import transports
from weightsync.boxes import dense_strides, volume, whole
from weightsync.config import BUCKET_BYTES, Config
from weightsync.deadline import Deadline
from weightsync.errors import ConfigError, EngineLost, TransferTimeout, WeightSyncError
from weightsync.fanout import Fanout, ended
from weightsync.fleet import EngineLink
from weightsync.plan import Plan, build_plan
from weightsync.receivers import PING_S
from weightsync.routes import Outcome, install_plan, note_contexts
from weightsync.sources import map_sources
from weightsync.spec import Copy, Export, Layout, Need, Param, Rule, TensorSpec, View
from weightsync.transports import Memory, Puller, bucket
from weightsync.transports.bucket_cuda import CudaArena, limit_bytes, share_by_handle
from weightsync.views import SourceViews, box_of

NOTE = "buckets:"
IN_TURNS = 2
"""Arenas, or ends of one: while a bucket is filled the one before may be on its way."""
_HERE = "here"


class BucketRoute:
    """``select`` limits the route to some tensors, by Hugging Face name."""

    _engines_map_arenas = True
    """Whether an engine that is late may still read an arena that the next push would fill."""

    def __init__(self, fanout: Fanout, config: Config, rules: list[Rule], select: Callable[[str], bool]) -> None:
        self._fanout = fanout
        self._config = config
        self._rules = rules
        self._select = select
        self._unselected: set[str] = set()
        self._buckets: list[bucket.Bucket] = []
        self._pullers: list[Puller] = []
        self._arenas: Sequence[bucket.Arena | CudaArena | Memory] = []
        self._stale: list[bucket.Arena | CudaArena | Memory] = []
        self._timed_out = False
        self._noted = False
        self._is_prepared = False
        self._largest = 0
        self._planned: list[list[tuple[int, Copy]]] = []
        self._exports: dict[int, Export] = {}
        self._gpu = ""
        self._mapped: list[Memory] = []
        self._segments: dict[int, list[Memory]] = {}

    def prepare(self, links: list[EngineLink], plan: Plan, exports: dict[int, Export], deadline: Deadline) -> None:
        """Plan the buckets, map the trainer's memory and make the arenas."""
        self.close()
        install_plan(self._fanout, links, plan, exports, deadline, pulls=False)
        tensors = self._tensors(exports)
        self._gpu = next((layout.device for link in links for layout in link.layouts), "") or _gpu_of(exports)
        _check_visible(self._gpu, links)
        self._buckets = self._pack(tensors)
        self._largest = max((b.nbytes for b in self._buckets), default=0)
        self._exports = exports
        self._planned = self._copies(tensors, exports)
        self._make_arenas()
        self._is_prepared = True
        nbytes = sum(arena.tensor.nbytes for arena in self._arenas)
        note = f"{NOTE} {len(self._buckets)} of at most {self._largest} bytes, in arenas of {nbytes}"
        for link in links:
            link.notes = [n for n in link.notes if not n.startswith(NOTE)] + [note]

    def begin(self, link: EngineLink, deadline: Deadline) -> None:
        """Nothing: engines map the arenas, and one may still read the first."""

    def end_push(self) -> None:
        """Nothing."""

    def move(self, links: list[EngineLink], step: int, deadline: Deadline) -> list[Outcome]:
        """Fill one arena while the engines load the other. An engine found to have failed gets no further buckets.

        After a timeout the next move takes new arenas: that engine may still read the old ones.
        """
        if self._timed_out and self._engines_map_arenas:
            self._stale += self._arenas
            self._make_arenas()
        self._timed_out = True
        outcomes = self._move(links, deadline)
        self._timed_out = any(isinstance(o, TransferTimeout | EngineLost) for o in outcomes)
        self._note_contexts([link for link, o in zip(links, outcomes, strict=True) if o is None], deadline)
        if not self._timed_out:
            for memory in self._stale:
                memory.close()
            self._stale = []
        return outcomes

    def _note_contexts(self, links: list[EngineLink], deadline: Deadline) -> None:
        """Once, after the first buckets: only then have engines mapped the arenas."""
        if links and not self._noted and self._gpu and self._engines_map_arenas:
            self._noted = True
            within = Deadline(min(PING_S, deadline.remaining_s()), "asking which contexts there are")
            self._fanout.each(lambda link: note_contexts(link, link is links[0], within), links)

    def _move(self, links: list[EngineLink], deadline: Deadline) -> list[Outcome]:
        assert self._is_prepared, "without arenas every bucket would count as moved"
        outcomes: dict[str, Outcome] = dict.fromkeys((link.url for link in links), None)
        under_way: deque[list[tuple[EngineLink, Future]]] = deque()
        try:
            for number in range(len(self._buckets)):
                while len(under_way) > self._most_while_filling(number):
                    self._collect(under_way.popleft(), outcomes)  # it lies where this one is to lie
                self._fill(number, deadline)
                if len(under_way) >= self._most_under_way:
                    self._collect(under_way.popleft(), outcomes)
                under_way.append([])
                for link in links:
                    if outcomes[link.url] is None:
                        under_way[-1].append((link, self._send(link, number, deadline)))
            self._collect(chain(*under_way), outcomes)
        finally:
            ended(future for _, future in chain(*under_way))  # what goes on would reach engines that were let go
        return [outcomes[link.url] for link in links]

    def let_go(self, deadline: Deadline) -> None:
        """Give mappings back, and arenas, which the next ``prepare`` makes anew anyway."""
        self.close()

    def close(self) -> None:
        """Give arenas and mappings back. Idempotent."""
        self._is_prepared = False
        self._pullers, self._buckets, self._planned = [], [], []
        for memory in [*self._mapped, *self._arenas, *self._stale]:
            memory.close()
        self._mapped, self._arenas, self._stale = [], [], []
        self._segments, self._timed_out, self._noted = {}, False, False

    # ------------------------------------------------------------------------------------------------- planning

    @property
    def _most_under_way(self) -> int:
        """Buckets that are sent at once: one that comes while an engine loads the one before waits in the engine."""
        return IN_TURNS if self._gpu else 1

    def _is_here(self, rank: int) -> bool:
        """Whether this process can map what that training rank exported."""
        return True

    def _make_arenas(self) -> None:
        """The arenas, and what fills them from memory that is mapped here."""
        self._arenas = self._new_arenas()
        self._pullers = []
        if self._arenas:
            with transports.on_device_of(self._arena(0)):
                self._make_pullers()

    def _make_pullers(self) -> None:
        if not self._segments:
            self._segments = self._map({r: export for r, export in self._exports.items() if self._is_here(r)})
        sources = SourceViews(self._segments, {rank: export.shards for rank, export in self._exports.items()})
        for number, copies in enumerate(self._planned):
            targets = bucket.views(self._arena(number), self._buckets[number])
            pairs = [(box_of(targets[i], copy.box), sources(copy)) for i, copy in copies if self._is_here(copy.rank)]
            self._pullers.append(transports.make_puller(pairs))

    def _pack(self, tensors: list[TensorSpec]) -> list[bucket.Bucket]:
        limit = self._config.bucket_bytes or (limit_bytes(self._gpu) if self._gpu else BUCKET_BYTES)
        return bucket.plan_buckets(tensors, limit)

    def _new_arenas(self) -> Sequence[bucket.Arena | CudaArena | Memory]:
        """Two, that take turns."""
        gpu, nbytes = self._gpu, self._largest
        return [CudaArena(nbytes, gpu) if gpu else bucket.Arena(nbytes) for _ in self._buckets[:IN_TURNS]]

    def _tensors(self, exports: dict[int, Export]) -> list[TensorSpec]:
        shards = {rank: export.shards for rank, export in exports.items()}
        sources = map_sources(shards, self._rules, self._config.rename, self._config.leave_out)
        self._unselected = {name for name in sources.tensors if not self._select(name)}
        return [s.spec for name, s in sources.tensors.items() if self._select(name)]

    def _copies(self, tensors: list[TensorSpec], exports: dict[int, Export]) -> list[list[tuple[int, Copy]]]:
        """For each bucket, the copies that fill it, each with the index of its tensor in the bucket."""
        plan = build_plan(
            {rank: export.shards for rank, export in exports.items()},
            self._rules,
            {"bucket": [_layout_of(tensors)]},
            config=self._config,
            source_devices=dict.fromkeys(exports, ""),
            source_hosts={rank: _HERE if self._is_here(rank) else "" for rank in exports},
            without=self._unselected,
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

    def _fill(self, number: int, deadline: Deadline) -> None:
        self._pullers[number].run()

    def _most_while_filling(self, number: int) -> int:
        """How many buckets before that one may be on their way while it is filled."""
        return IN_TURNS - 1

    def _arena(self, number: int) -> Any:
        """The bytes in which that bucket begins."""
        return self._arenas[number % IN_TURNS].tensor

    def _send(self, link: EngineLink, number: int, deadline: Deadline) -> Future[int]:
        return self._fanout.submit(self._sender(link, number, deadline))

    def _sender(self, link: EngineLink, number: int, deadline: Deadline) -> Callable[[], int]:
        """The call that sends a bucket, and returns its bytes."""
        one, what = self._buckets[number], f"bucket {number + 1} of {len(self._buckets)}"

        def send() -> int:
            link.progress.applied = True  # before the call: one that times out may still be loaded
            share = share_by_handle if self._gpu else bucket.share_by_file
            payloads = bucket.payloads(self._arena(number), one, tp_size=link.tp_size, share=share)
            link.client.update(payloads, bucket.LOAD_FORMAT, deadline, what=what)
            return one.nbytes

        return send

    @staticmethod
    def _collect(sending: Iterable[tuple[EngineLink, Future]], outcomes: dict[str, Outcome]) -> None:
        """Wait for all of them. Raises what was a fault of ours."""
        fault: BaseException | None = None
        for link, future in sending:
            error = future.exception()
            if error is None:
                link.progress.num_bytes += future.result()
            elif not isinstance(error, WeightSyncError):
                fault = fault or error
            elif outcomes[link.url] is None or isinstance(error, EngineLost):  # which all else may follow from
                outcomes[link.url] = error
        if fault is not None:
            raise fault


def _gpu_of(exports: dict[int, Export]) -> str:
    """The UUID of the GPU that holds the first rank's memory; "" for host memory."""
    return next((segment.device for export in exports.values() for segment in export.segments), "")


def _check_visible(gpu: str, links: list[EngineLink]) -> None:
    """Raise ConfigError if an engine rank that told us what it sees does not see the GPU of the arenas."""
    for link in links:
        for layout in link.layouts:
            if gpu and layout.visible and gpu not in layout.visible:
                raise ConfigError(
                    f"route bucket: TP rank {layout.rank} sees {', '.join(layout.visible)}, and buckets are filled on "
                    f"{gpu}, which is masked from it: use route direct, or let CUDA_VISIBLE_DEVICES include it",
                    engine=link.url,
                )


def _layout_of(tensors: list[TensorSpec]) -> Layout:
    """Buckets as the planner sees them: one engine rank whose parameters are the tensors, whole and contiguous."""
    params = [Param(t.name, t.shape, t.dtype, volume(whole(t.shape))) for t in tensors]
    needs = [Need(t.name, whole(t.shape), View(i, 0, dense_strides(t.shape))) for i, t in enumerate(tensors)]
    return Layout(
        rank=0,
        boot_id="",
        device="",
        host=_HERE,
        params=params,
        needs=needs,
        fills=[],
        constants=[],
        derived=[],
        opaque={},
        ignored=[],
        versions={},
    )

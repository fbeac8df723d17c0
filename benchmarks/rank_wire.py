"""What the benchmark and its training ranks say to each other. Both ends of that wire; no torch."""

from __future__ import annotations

from benchmarks.parallel import Parallel
from benchmarks.rows import Struct


class RankSpec(Struct):
    """What a rank is to be. ``device``: ``cpu`` or ``cuda:N``.

    ``kind``: ``plain`` and ``automodel`` as in ``trainer_build.build``, with ``stacked``; or ``megatron``, laid out as
    ``parallel`` says.
    """

    rank: int
    ranks: int
    rendezvous: str
    model: str
    dtype: str
    device: str
    kind: str = "plain"
    stacked: bool = False
    threads: int = 1
    parallel: Parallel = Parallel()


class Ready(Struct):
    """A rank that can be pushed from: where its publisher is, and where it takes commands."""

    publisher: str
    control: str


class Info(Struct):
    """What a rank is and holds. ``device_uuid`` is empty on a CPU."""

    trainer: str
    device_name: str
    device_uuid: str
    num_bytes: int
    versions: dict[str, str]


class Memory(Struct):
    """Bytes that torch's allocator holds in this rank, now and at most so far."""

    allocated: int
    peak: int


class FloorRequest(Struct):
    """``dtype`` is what is written, ``device`` the UUID of the GPU written to ("": where the tensors are)."""

    dtype: str
    device: str = ""
    repeats: int = 10


class Floor(Struct):
    """``num_bytes`` written by one copy of everything, and the median seconds of each way to do it."""

    num_bytes: int
    seconds: dict[str, float]

    @property
    def best_s(self) -> float:
        return min(self.seconds.values())


class StockRequest(Struct):
    """One push by stock calls. ``limit_bytes`` is how much one call carries: 0 one tensor, -1 all of them.

    ``flattened``: tensors are packed into one buffer first. ``distributed``: broadcast over the group that was
    connected before, instead of handing over memory handles. ``dtype`` is the engine's. ``with_token``: a request
    for one token follows.
    """

    dtype: str
    limit_bytes: int
    flattened: bool
    distributed: bool = False
    with_token: bool = False


class StockSetup(Struct):
    """The engines that stock calls go to; with ``group_port`` also a group for distributed updates is made.

    Of several engines each has an equal share of the training ranks beside it, in order, and is called by its first.
    """

    urls: list[str]
    tp_size: int
    group_port: int = 0


class Took(Struct):
    """Seconds of one stock push: ``whole`` with pause, flush and continue, ``calls`` of its update calls alone.

    Both until the last byte has left, too, if it was broadcast; then ``answered`` is whole, but until the last answer,
    and ``token`` until the engine has also answered a request for one token, if one was to follow.
    """

    whole: float = 0.0
    calls: float = 0.0
    answered: float = 0.0
    token: float = 0.0


class Times(Struct):
    """Each repetition, as a rank that calls an engine saw it (empty on others)."""

    pushes: list[Took]


class StockRuns(Struct):
    """Repetitions of one stock push, one before them that does not count; fewer than ``n`` if ``budget_s`` is over."""

    request: StockRequest
    n: int
    budget_s: float

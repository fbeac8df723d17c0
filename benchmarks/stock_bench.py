"""SGLang's own update calls, measured as ``bench`` measures pushes of ours: a row for each way to make them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from benchmarks import rows
from benchmarks.bench import CALL_TIMEOUT_S, Bench, StockCalls
from benchmarks.rank_wire import StockRequest, StockRuns, StockSetup, Times, Took
from benchmarks.rows import STOCK
from weightsync.engines.local import free_port


def measure(bench: Bench, calls: Sequence[StockCalls], *, tokens: int = 0) -> None:
    """Each failure is noted on its own. ``tokens``: as in ``Bench.push``, for calls that are ``distributed``."""
    port = free_port() if any(c.distributed for c in calls) else 0
    setup = StockSetup(bench.urls, bench.subject.engine.tp, port)
    each = bench.trainers.each
    if not bench.attempt("stock setup", lambda: each("stock_setup", setup, timeout_s=CALL_TIMEOUT_S)):
        return
    for c in calls:
        bench.attempt(f"stock: {c.name}", lambda c=c: _measure(bench, c, tokens if c.distributed else 0))
    bench.attempt("stock end", lambda: each("stock_close", timeout_s=CALL_TIMEOUT_S))


def _measure(bench: Bench, calls: StockCalls, tokens: int) -> None:
    name = f"stock: {calls.name}"
    request = StockRequest(bench.subject.dtype, calls.limit_bytes, calls.flattened, calls.distributed)
    together = _runs(bench, request, bench.plan.n)
    updates = statistics.median(max(took.calls for took in one) for one in together)
    bench.add(name, STOCK, "none", [max(took.whole for took in one) for one in together], {"move": updates})
    if calls.distributed:
        answered = rows.stats([max(took.answered for took in one) for one in together])
        bench.details[name] = {"answered_s": msgspec.to_builtins(answered)}
    if tokens:
        followed = _runs(bench, msgspec.structs.replace(request, with_token=True), tokens)
        told = rows.stats([max(took.token for took in one) for one in followed])
        bench.details[name]["token_s"] = msgspec.to_builtins(told)


def _runs(bench: Bench, request: StockRequest, n: int) -> list[tuple[Took, ...]]:
    """By repetition, what it took each engine."""
    runs = StockRuns(request, n, bench.plan.stock_budget_s)
    times = bench.trainers.each("stock", runs, returns=Times, timeout_s=CALL_TIMEOUT_S)
    return list(zip(*(t.pushes for t in times if t.pushes), strict=True))

"""Doing one thing for many peers at once. Runs in the weight-sync actor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress

from weightsync.errors import TransferError, WeightSyncError


class Fanout:
    """A pool of threads that calls one function for each of several peers and waits for all of them."""

    def __init__(self, name: str, workers: int = 64) -> None:
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix=f"weightsync-{name}")

    def each[T, R](self, function: Callable[[T], R], peers: Sequence[T]) -> list[R | WeightSyncError]:
        """``function(peer)`` for every peer, in their order; an error takes its peer's place in the list."""
        if len(peers) == 1:
            return [_guarded(function, peers[0])]
        return list(self._pool.map(lambda peer: _guarded(function, peer), peers))

    def all[T, R](self, function: Callable[[T], R], peers: Sequence[T]) -> list[R]:
        """As ``each``, but the first error is raised, after every call has ended."""
        results: list[R] = []
        for outcome in self.each(function, peers):
            if isinstance(outcome, WeightSyncError):
                raise outcome
            results.append(outcome)
        return results

    def submit[R](self, function: Callable[[], R]) -> Future[R]:
        """Start ``function`` on its own; returns its future."""
        return self._pool.submit(function)

    def begin[T, R](self, function: Callable[[T], R], peer: T) -> Future[R | WeightSyncError]:
        """Start ``function(peer)`` on its own; returns the future of what ``each`` would give for it."""
        return self._pool.submit(_guarded, function, peer)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def ended(futures: Iterable[Future]) -> None:
    """Wait for all of them, however they end."""
    for future in futures:
        with suppress(CancelledError):
            future.exception()


def _guarded[T, R](function: Callable[[T], R], peer: T) -> R | WeightSyncError:
    try:
        return function(peer)
    except WeightSyncError as e:
        return e
    except Exception as e:  # a fault of ours must not leave other engines paused
        error = TransferError(f"{type(e).__name__}: {e}")
        error.__cause__ = e
        return error

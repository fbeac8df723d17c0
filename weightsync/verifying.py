"""Whether engines hold what was published: sources sealed, engines read back, both compared. Runs in the actor."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

from weightsync.deadline import Deadline
from weightsync.errors import TransferError, VerifyMismatch, WeightSyncError
from weightsync.fanout import Fanout
from weightsync.fleet import EngineLink
from weightsync.plan import Plan
from weightsync.spec import Sealed
from weightsync.workers import Regions, Workers


class Verification:
    """Of one push. Sources are sealed as soon as all bytes have been read for all engines, or when it is asked for.

    ``regions`` are what the training ranks fingerprint; ``reads_back`` false: engines are not asked.
    """

    def __init__(
        self,
        step: int,
        *,
        workers: Workers,
        plan: Plan,
        regions: Regions,
        reads_back: bool,
        fanout: Fanout,
        deadline: Deadline,
    ) -> None:
        self.trainer_seconds = 0.0
        self._step = step
        self._workers = workers
        self._plan = plan
        self._regions = regions
        self._reads_back = reads_back
        self._fanout = fanout
        self._deadline = deadline
        self._lock = threading.Lock()
        self._landed: set[str] = set()
        self._sealing: Future[dict[int, Sealed]] | None = None

    def on_landed(self, link: EngineLink, links: Sequence[EngineLink]) -> None:
        """For this engine nothing is read any more, though its own answer is on the way. ``links``: who takes part."""
        with self._lock:
            self._landed.add(link.url)
            if self._landed >= {other.url for other in links}:
                self._seal()

    def outcomes(self, links: Sequence[EngineLink]) -> list[WeightSyncError | None]:
        """Seal, read back and compare; an outcome a link. Raises TransferError if a source was written to meanwhile."""
        with self._lock:
            sealing = self._seal()
        read = self._fanout.each(self._read_back, links)
        published = self._published(sealing.result())
        return [
            found if isinstance(found, WeightSyncError) else self._compare(link, found, published)
            for link, found in zip(links, read, strict=True)
        ]

    def _seal(self) -> Future[dict[int, Sealed]]:
        if self._sealing is None:
            self._sealing = self._fanout.submit(lambda: self._workers.seal(self._step, self._regions, self._deadline))
        return self._sealing

    def _published(self, sealed: dict[int, Sealed]) -> dict[int, list[int]]:
        """By trainer rank, one fingerprint a region."""
        self.trainer_seconds = max(answer.seconds for answer in sealed.values())
        rewritten = [rank for rank, answer in sealed.items() if answer.fingerprints != answer.published]
        if rewritten:
            raise TransferError(
                f"training ranks {rewritten}: their weights are not those that were published as step {self._step}; "
                "something wrote to them during the move",
                rank=rewritten[0],
                safe_to_retry=True,
            )
        return {rank: answer.published for rank, answer in sealed.items()}

    def _read_back(self, link: EngineLink) -> list[list[int]]:
        """By TP rank, one fingerprint a need; nothing where there is nothing to ask."""
        return link.fingerprints(self._deadline) if self._reads_back and link.has_receiver else []

    def _compare(
        self, link: EngineLink, found: list[list[int]], published: dict[int, list[int]]
    ) -> VerifyMismatch | None:
        for rank, actual in enumerate(found):
            expected = self._plan.expected(link.url, rank, published)
            needs = link.layouts[rank].needs
            wrong = [n.tensor for n, e, a in zip(needs, expected, actual, strict=True) if e != a]
            if wrong:
                return VerifyMismatch(
                    f"{len(wrong)} of {len(needs)} regions in the engine's memory differ from what was published "
                    f"as step {self._step}: {', '.join(dict.fromkeys(wrong[:8]))}",
                    engine=link.url,
                    rank=rank,
                    tensor=wrong[0],
                )
        link.progress.verified = bool(found) and link.fully_verifiable
        return None

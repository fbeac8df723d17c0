"""What the actor knows of a trainer without asking: which step each rank has marked, and on which GPUs they are."""

from __future__ import annotations

from collections.abc import Iterable

from weightsync.consumers import Marked
from weightsync.fleet import EngineLink
from weightsync.spec import Description


class Readiness:
    """Of the ranks described by ``trainer``."""

    def __init__(self, trainer: Iterable[Description]) -> None:
        described = list(trainer)
        self._ranks = {d.rank for d in described}
        self._places = {(d.host, device) for d in described for device in d.devices or [""]}
        self._marked: dict[int, int] = {}

    def on_marked(self, marked: Marked) -> None:
        """A rank says so. From any thread."""
        self._marked[marked.rank] = marked.step

    def is_ready_beside(self, link: EngineLink, step: int) -> bool:
        """Whether every rank has marked ``step`` and this engine shares a GPU, or a host without any, with one."""
        if any(self._marked.get(rank) != step for rank in self._ranks):
            return False
        return any((layout.host, layout.device) in self._places for layout in link.layouts)

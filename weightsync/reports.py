"""What a session is asked for, and what it answers."""

from __future__ import annotations

import msgspec

from weightsync.spec import Struct


class EngineReport(Struct):
    """One engine after a push. ``state``: serving, fenced (paused, unusable until healed) or lost."""

    url: str
    state: str
    weight_version: str
    verified: bool
    num_bytes: int
    seconds: dict[str, float] = {}
    error: str = ""


class PushRequest(Struct):
    """Arguments of a push: the step, a timeout in place of the configured one, and whether an older step is allowed."""

    step: int
    timeout_s: float | None = None
    force: bool = False


class Status(Struct):
    """What a session knows: the last step pushed, each engine's state, and who publishes."""

    pair: str
    step: int | None
    engines: list[EngineReport]
    publishers: list[str]


class SyncReport(Struct):
    """What a push did. ``seconds``: wall time of publish, pause, begin, move, verify, commit, continue and the total;
    ``remap`` is what came before them, if memory had to be mapped anew.

    ``verified`` is true only if every engine's live memory was fingerprinted and matched; ``notes`` says why not, why
    a route was chosen, and what was published through an arena. ``trainer_seconds``: of publish and verify, what the
    slowest training rank took for its part.
    """

    step: int
    weight_version: str
    route: str
    num_tensors: int
    num_bytes: int
    seconds: dict[str, float]
    verified: bool
    engines: list[EngineReport]
    notes: list[str] = []
    trainer_seconds: dict[str, float] = {}

    def to_dict(self) -> dict[str, object]:
        """The report as plain dicts, lists, strings and numbers, ready for JSON."""
        return msgspec.to_builtins(self)

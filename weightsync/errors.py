"""The error tree. Every failure that leaves weightsync is one of these; foreign exceptions are translated at the edge.

WeightSyncError
├── ConfigError        a value, key, option or token is wrong; nothing was started or moved
├── EnvError           an environment is missing, half-built or of the wrong Python or Ray
├── PlanError          tensors without a home, parameters without a source, shapes or dtypes that do not fit
├── StaleVersion       the step asked for is not newer than what the engines hold
├── TransferError      the move failed, or a source changed while it was read
│   └── TransferTimeout    a wait reached its deadline
├── EngineRejected     an engine answered, and said no
├── EngineLost         an engine does not answer, dropped the connection, or was restarted
└── VerifyMismatch     an engine's live memory is not what the trainer published
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "EngineLost",
    "EngineRejected",
    "EnvError",
    "PlanError",
    "StaleVersion",
    "TransferError",
    "TransferTimeout",
    "VerifyMismatch",
    "WeightSyncError",
    "error_from_wire",
]


_FIELDS = ("message", "engine", "rank", "tensor", "phase", "safe_to_retry", "report")


class WeightSyncError(Exception):
    """Base of all errors of weightsync.

    ``engine``, ``rank`` and ``tensor`` name where it happened ("" or None: not applicable), ``phase`` the phase of the
    push, ``safe_to_retry`` whether the same call may simply be made again, ``report`` what each engine's state is now
    (a list of plain dicts, one an engine; empty when no push was under way).
    """

    def __init__(
        self,
        message: str,
        *,
        engine: str = "",
        rank: int | None = None,
        tensor: str = "",
        phase: str = "",
        safe_to_retry: bool = False,
        report: list[dict] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.engine = engine
        self.rank = rank
        self.tensor = tensor
        self.phase = phase
        self.safe_to_retry = safe_to_retry
        self.report = report or []

    def __str__(self) -> str:
        where = [f"engine {self.engine}"] if self.engine else []
        where += [f"rank {self.rank}"] if self.rank is not None else []
        where += [f"phase {self.phase}"] if self.phase else []
        prefix = f"[{', '.join(where)}] " if where else ""
        return f"{prefix}{self.message}"

    def __reduce__(self) -> tuple:
        return (error_from_wire, (self.to_wire(),))

    def to_wire(self) -> dict:
        """The error as plain values; ``error_from_wire`` is the inverse."""
        return {"type": type(self).__name__, **{name: getattr(self, name) for name in _FIELDS}}


class ConfigError(WeightSyncError, ValueError):
    """A value, key, option or token is wrong. Nothing was started or moved."""


class EnvError(WeightSyncError):
    """An environment is missing, half-built, or has the wrong Python or Ray."""


class PlanError(WeightSyncError):
    """The trainer's tensors and the engine's needs do not fit together. Nothing was moved."""


class StaleVersion(WeightSyncError):
    """The step asked for is not newer than what the engines hold. Nothing was moved."""


class TransferError(WeightSyncError):
    """The move failed, or a source changed while it was read."""


class TransferTimeout(TransferError):
    """A wait reached its deadline."""


class EngineRejected(WeightSyncError):
    """An engine answered, and said no. The message carries the engine's own text."""


class EngineLost(WeightSyncError):
    """An engine does not answer, dropped the connection, or was restarted."""


class VerifyMismatch(WeightSyncError):
    """An engine's live memory is not what the trainer published. ``tensor`` names the first tensor that differs."""


def error_from_wire(wire: dict) -> WeightSyncError:
    """The error that ``to_wire`` described. From a newer peer: an unknown type becomes a plain WeightSyncError, and
    fields that are unknown here are dropped.
    """
    kind = globals().get(wire.get("type", ""), WeightSyncError)
    if not (isinstance(kind, type) and issubclass(kind, WeightSyncError)):
        kind = WeightSyncError
    return kind(**{name: wire[name] for name in _FIELDS if name in wire})

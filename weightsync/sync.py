"""The driver's end: ``launch`` starts the pair's actor under Ray, ``connect`` reaches one that runs as a plain process.

Runs in the training loop's own environment and imports neither torch nor an engine nor a trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from weightsync.config import Config, EngineConfig, check_peers, load_config
from weightsync.deadline import Deadline
from weightsync.errors import TransferError
from weightsync.plan import PlanSummary
from weightsync.reports import PushRequest, Status, SyncReport
from weightsync.rpc import Client

GRACE_S = 15.0


class Channel(Protocol):
    """How the driver reaches the actor."""

    def call(self, method: str, argument: Any, returns: Any, timeout_s: float) -> Any: ...

    def close(self) -> None: ...


class WeightSync:
    """Brings a trainer's weights into engines: ``push(step)`` after each training step. A context manager.

    Every method raises a subclass of ``WeightSyncError``. Safe to use from one thread at a time.
    """

    def __init__(self, channel: Channel, *, timeout_s: float, connect_timeout_s: float, owns_actor: bool) -> None:
        self._channel = channel
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._owns_actor = owns_actor
        self._closed = False

    def push(self, step: int, *, timeout_s: float | None = None, force: bool = False) -> SyncReport:
        """Bring the weights that every training rank has marked with ``step_done(step)`` into every engine.

        Returns when every engine serves ``weight_version == str(step)``. ``timeout_s`` replaces the configured one for
        this push; ``force`` allows a step that is not newer. Raises StaleVersion, TransferTimeout, TransferError,
        EngineRejected, EngineLost or VerifyMismatch; ``error.report`` says what state each engine is in.
        """
        wait_s = (self._timeout_s if timeout_s is None else timeout_s) + GRACE_S
        return self._call("push", PushRequest(step=step, timeout_s=timeout_s, force=force), SyncReport, wait_s)

    def plan(self) -> PlanSummary:
        """What a push moves; ``.explain()`` is the same as text."""
        return self._call("plan", None, PlanSummary)

    def status(self) -> Status:
        """The last step pushed and each engine's state and weight version."""
        return self._call("status", None, Status)

    def add_engine(self, url: str, *, api_key: str = "", admin_api_key: str = "") -> PlanSummary:
        """Take one more engine in; it is paused until the next push. Returns the new plan."""
        return self._call("add_engine", EngineConfig(url, api_key, admin_api_key), PlanSummary)

    def remove_engine(self, url: str) -> None:
        """Let an engine go with the weights it has."""
        self._call("remove_engine", url, None)

    def close(self) -> None:
        """End the session if it was launched from here (a served actor lives on), and disconnect. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._owns_actor:
                self._call("close", None, None, 30.0)
        finally:
            self._channel.close()

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _call(self, method: str, argument: Any, returns: Any, timeout_s: float | None = None) -> Any:
        wait_s = self._connect_timeout_s + GRACE_S if timeout_s is None else timeout_s
        return self._channel.call(method, argument, returns, wait_s)


def launch(
    config: str | Path | dict[str, Any] | Config,
    *,
    publishers: Sequence[str],
    engines: Sequence[str | EngineConfig] | None = None,
) -> WeightSync:
    """Start the pair's actor under Ray in its own environment and connect it.

    ``config`` is a YAML path, a mapping or a Config; ``publishers`` the addresses of every training rank's Publisher;
    ``engines`` the engines' URLs in place of the configured ones. Raises ConfigError, EnvError (the environment is
    missing or does not fit this process's Python and Ray), PlanError or EngineLost; then nothing is left running.
    """
    from weightsync.ray_channel import RayChannel

    loaded = with_peers(load_config(config), publishers, engines)
    check_peers(loaded)
    return WeightSync(
        RayChannel(loaded),
        timeout_s=loaded.timeout_s,
        connect_timeout_s=loaded.connect_timeout_s,
        owns_actor=True,
    )


def connect(address: str, *, timeout_s: float = 120.0) -> WeightSync:
    """Reach an actor that ``weightsync serve`` runs, by the address it printed. ``timeout_s`` is a push's default."""
    return WeightSync(_RpcChannel(address), timeout_s=timeout_s, connect_timeout_s=timeout_s, owns_actor=False)


def with_peers(config: Config, publishers: Sequence[str], engines: Sequence[str | EngineConfig] | None) -> Config:
    """``config`` with these publishers and, unless None, these engines."""
    changes: dict[str, Any] = {"publishers": list(publishers)}
    if engines is not None:
        changes["engines"] = [e if isinstance(e, EngineConfig) else EngineConfig(url=e) for e in engines]
    return load_config(msgspec.structs.replace(config, **changes))


class _RpcChannel:
    def __init__(self, address: str) -> None:
        self._client = Client(address, what="weight-sync actor")

    def call(self, method: str, argument: Any, returns: Any, timeout_s: float) -> Any:
        return self._client.call(method, argument, deadline=Deadline(timeout_s, "served actor"), returns=returns)

    def close(self) -> None:
        self._client.close()


__all__ = ["TransferError", "WeightSync", "connect", "launch", "with_peers"]

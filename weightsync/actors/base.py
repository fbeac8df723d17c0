"""What the actors of all pairs share: the surface that Ray and the plain server call."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, ClassVar

import msgspec

from weightsync.config import Config
from weightsync.errors import ConfigError, WeightSyncError
from weightsync.rpc import Dispatcher, Server

if TYPE_CHECKING:
    from weightsync.session import Session


class WeightSyncActor:
    """Holds the session of one pair. Under Ray it is driven through ``call``, as a plain process through ``serve``.

    The constructor takes the configuration as msgpack, so that nothing but bytes and strings crosses from a driver of
    another environment; it connects nothing. ``connect`` does, and reports errors as values.
    """

    pair: ClassVar[str]
    trainer: ClassVar[str]

    def __init__(self, config: bytes) -> None:
        self._config = msgspec.msgpack.decode(config, type=Config)
        if self._config.pair != self.pair:
            raise ConfigError(f"configuration is for pair {self._config.pair!r}, this actor is of {self.pair!r}")
        self._dispatcher: Dispatcher | None = None
        self._session: Session | None = None

    def versions(self) -> dict[str, str]:
        """Python and the libraries of this environment that matter to a transfer."""
        from weightsync.envs import library_versions

        return library_versions()

    def connect(self) -> tuple[bytes, bytes]:
        """Connect trainer and engines and make the plan. Answers like ``rpc.Dispatcher.handle``; moves nothing."""
        from weightsync.session import Session

        try:
            self._session = Session(self._config, trainer=self.trainer)
        except WeightSyncError as e:
            return b"error", msgspec.msgpack.encode(e.to_wire())
        gc.freeze()  # what is here stays: a collection that walked through it would stop a push for tens of ms
        self._dispatcher = Dispatcher(self._session)
        return b"ok", msgspec.msgpack.encode(None)

    def call(self, method: str, argument: bytes) -> tuple[bytes, bytes]:
        """Call a public method of the session by name, with its argument as msgpack."""
        assert self._dispatcher is not None, "connect first"
        return self._dispatcher.handle(method, argument)

    def serve(self, host: str) -> Server:
        """Serve the session to ``weightsync.connect`` until the returned server is closed."""
        assert self._session is not None, "connect first"
        return Server(self._session, host=host)

"""The node actor under Ray: see ``weightsync.transports.node``. Runs in the pair's environment on a trainer node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from weightsync.errors import WeightSyncError

if TYPE_CHECKING:
    from weightsync.transports.node import NodeServer


class NodeActor:
    """``host_name``: the host whose training ranks it reads ("": this machine's name); it listens on ``bind_host``."""

    def __init__(self, host_name: str, bind_host: str) -> None:
        self._host_name, self._bind_host = host_name, bind_host
        self._server: NodeServer | None = None

    def versions(self) -> dict[str, str]:
        """Python and the libraries of this environment that matter to a transfer."""
        from weightsync.versions import library_versions

        return library_versions()

    def serve(self) -> tuple[bytes, bytes]:
        """Start serving; the address, in the form of ``rpc.Dispatcher.handle``'s answers."""
        from weightsync.transports.node import NodeServer

        try:
            self._server = self._server or NodeServer(host_name=self._host_name, host=self._bind_host)
        except WeightSyncError as e:
            return b"error", msgspec.msgpack.encode(e.to_wire())
        return b"ok", msgspec.msgpack.encode(self._server.address)

    def close(self) -> None:
        """End the senders, which would otherwise go with this process."""
        if self._server is not None:
            self._server.close()

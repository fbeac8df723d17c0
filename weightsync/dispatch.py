"""What a call says, without a socket: both ends of argument, result and error in msgpack. ``rpc`` and Ray carry it."""

from __future__ import annotations

import inspect
import logging
import typing
from typing import Any

import msgspec

from weightsync.errors import ConfigError, TransferError, WeightSyncError, error_from_wire

logger = logging.getLogger(__name__)

_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.decode


class Dispatcher:
    """Decodes a call, makes it, encodes what came of it: the part of a server that needs no socket."""

    def __init__(self, target: object) -> None:
        self._methods = _public_methods(target)

    def handle(self, method: str, argument: bytes) -> tuple[bytes, bytes]:
        """``(b"ok", msgpack(result))`` or ``(b"error", msgpack(error))``; never raises."""
        try:
            if method not in self._methods:
                raise ConfigError(f"no method {method!r} here: the two sides run different versions of weightsync")
            function, takes = self._methods[method]
            args = [] if takes is None else [_decode(argument, type=takes)]
            return b"ok", _encode(function(*args))
        except WeightSyncError as e:
            return b"error", _encode(e.to_wire())
        except Exception as e:  # the boundary: whatever failed becomes a typed error at the caller
            logger.exception("call of %s failed", method)
            return b"error", _encode(TransferError(f"{method}: {type(e).__name__}: {e}").to_wire())


def read_reply(status: bytes, body: bytes, returns: Any = None) -> Any:
    """The result that ``Dispatcher.handle`` encoded, decoded into ``returns``; raises the error that it encoded."""
    if status == b"error":
        raise error_from_wire(_decode(body))
    return _decode(body, type=returns) if returns is not None else _decode(body)


def _public_methods(target: object) -> dict[str, tuple[Any, Any]]:
    methods = {}
    for name, _ in inspect.getmembers(type(target), inspect.isfunction):  # of the class: properties are not read
        function = getattr(target, name)
        if name.startswith("_") or not inspect.ismethod(function):
            continue
        hints = typing.get_type_hints(function)
        names = list(inspect.signature(function).parameters)
        methods[name] = (function, hints.get(names[0], Any) if names else None)
    return methods

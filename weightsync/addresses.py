"""Addresses of our servers: ``tcp://HOST:PORT#TOKEN``. What is advertised must be what others can reach."""

from __future__ import annotations

import contextlib
import socket

from weightsync.errors import ConfigError

_WILDCARDS = {"0.0.0.0": socket.AF_INET, "*": socket.AF_INET, "": socket.AF_INET, "::": socket.AF_UNSPEC}
# Never sent to: the kernel is asked which of this machine's addresses it would use towards the outside.
_OUTSIDE = ("192.0.2.1", "2001:db8::1")


def bind_host(host: str) -> str:
    """The number to bind for ``host``, which may be a name, a number with or without brackets, or a wildcard.

    ``localhost`` is 127.0.0.1 and nothing else, so that it means the same to both ends. Raises ConfigError if the name
    is unknown here.
    """
    host = host.strip("[]")
    if host in _WILDCARDS:
        return "::" if host == "::" else "0.0.0.0"
    if host == "localhost":
        return "127.0.0.1"
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as e:
        raise ConfigError(f"cannot listen on host {host!r}: {e.strerror or e}") from e


def reachable_host(bind: str, peer_host: str = "") -> str:
    """The address to advertise for a server bound to ``bind``: a wildcard becomes this machine's own address.

    With ``peer_host`` it is the local address from which that peer is reached. Raises ConfigError, naming what was
    tried, if there is none.
    """
    if bind not in _WILDCARDS:
        return bind_host(bind)
    tried = [target for target in (peer_host, *_OUTSIDE, socket.gethostname(), "localhost") if target]
    for target in tried:
        with contextlib.suppress(OSError):
            family, _, _, _, sockaddr = socket.getaddrinfo(target, 9, _WILDCARDS[bind], socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as route:
                route.connect(sockaddr)
                return str(route.getsockname()[0])
    raise ConfigError(f"host {bind!r}: no address of this machine is reachable; tried routes to {', '.join(tried)}")


def endpoint(host: str, port: int | str) -> str:
    """ZeroMQ's form, with brackets around IPv6."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def split_address(address: str) -> tuple[str, str]:
    """``(endpoint, token)`` of an address; raises ConfigError, without the token, if it is not one of ours."""
    where, _, token = address.partition("#")
    if not (where.startswith("tcp://") and token and where.rpartition(":")[2].isdecimal()):
        raise ConfigError(f"not an address of weightsync (tcp://HOST:PORT#TOKEN): {where!r}")
    return where, token

"""One HTTP server as a push needs it: a whole answer within a deadline, or a typed error. Runs in the actor.

By httpcore and not httpx, which is built on it: a push makes half a dozen small calls, and what httpx adds to one takes
as long as the answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpcore

from weightsync.deadline import Deadline
from weightsync.errors import EngineLost

KEEPALIVE_S = 2.0  # below the server's own 5 s, so that no call is written into a connection it is closing

MIN_WAIT_S = 1e-3


class Reply(NamedTuple):
    """``to``: what it answers, such as ``POST /flush_cache``."""

    to: str
    status: int
    content: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


class Http:
    """Connections to ``base_url``, kept open between calls. Safe from several threads."""

    def __init__(self, base_url: str) -> None:
        self._url = base_url
        self._host = host_of(base_url)
        self._pool = httpcore.ConnectionPool(keepalive_expiry=KEEPALIVE_S, max_connections=None)

    def call(
        self, method: str, path: str, *, body: bytes | None, key: str, deadline: Deadline, phase: str, retry: bool
    ) -> Reply:
        """``body`` is JSON. Raises EngineLost if there is no connection or it breaks, TransferTimeout at the deadline.

        ``retry``: what the error says of trying again once the call may have been carried out.
        """
        doing = f"{method} {path}"
        with typed(doing, self._url, phase, retry, deadline):
            return self._exchange(doing, headers_of(self._host, key, body), body, deadline)

    def close(self) -> None:
        self._pool.close()

    def _exchange(self, doing: str, headers: dict[str, str], body: bytes | None, deadline: Deadline) -> Reply:
        """The whole answer; httpcore's timeouts are one read's, so a body that trickles in is cut off here."""
        method, path = doing.split(" ", 1)
        asked = self._pool.stream(
            method, self._url + path, headers=headers, content=body, extensions={"timeout": _Remaining(deadline)}
        )
        with asked as reply:
            chunks = []
            for chunk in reply.iter_stream():
                chunks.append(chunk)
                if deadline.passed():
                    raise TimeoutError
        return Reply(doing, reply.status, b"".join(chunks))


def host_of(base_url: str) -> str:
    """As a Host header has it; httpcore's own leaves the brackets of IPv6 out."""
    return urlsplit(base_url).netloc.rpartition("@")[2]


def headers_of(host: str, key: str, body: bytes | None) -> dict[str, str]:
    """Of a request with ``body``, which is JSON."""
    headers = {"Host": host} | ({"Authorization": f"Bearer {key}"} if key else {})
    return headers | ({"Content-Type": "application/json"} if body is not None else {})


@contextmanager
def typed(doing: str, base_url: str, phase: str, retry: bool, deadline: Deadline) -> Iterator[None]:
    """What httpcore raises inside, as errors of ours; see ``Http.call``."""
    where: dict[str, Any] = {"engine": base_url, "phase": phase}
    deadline.check(doing, **where, safe_to_retry=True)
    try:
        yield
    except (httpcore.ConnectError, httpcore.ConnectTimeout, UnicodeError) as e:  # UnicodeError: no name of a host
        tried = f"{doing} at {base_url}: no connection ({_reason(e)})"
        raise EngineLost(tried, **where, safe_to_retry=True) from e
    except (httpcore.TimeoutException, TimeoutError) as e:
        raise deadline.error(doing, **where, safe_to_retry=retry) from e
    except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol) as e:
        raise EngineLost(f"{doing}: the connection broke ({_reason(e)})", **where, safe_to_retry=retry) from e


class _Remaining(dict[str, float]):
    """httpcore's timeouts: it asks for one as it connects, writes, and begins to read head and body."""

    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self._deadline = deadline

    def get(self, key: str, default: Any = None) -> float:
        return left_s(self._deadline)


def left_s(deadline: Deadline) -> float:
    """What a socket may still wait, never 0: that would not wait, and look like a broken connection."""
    return max(MIN_WAIT_S, deadline.remaining_s())


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__

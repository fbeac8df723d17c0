"""One call of one SGLang server: keys, JSON, refusals in its own words, and calls that are written ahead.

Runs in the weight-sync actor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import msgspec

from weightsync.deadline import Deadline
from weightsync.engines.http import Http, Reply
from weightsync.engines.lane import Held, Lane
from weightsync.errors import ConfigError, EngineRejected, WeightSyncError

TEXT_LIMIT = 600
AHEAD = (
    "/pause_generation",
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/update_weight_version",
    "/continue_generation",
)
"""What may be written ahead: calls whose body the server reads first."""


class Calls:
    """Of the server at ``url``. ``keys``: by method, the key that it wants; "": none."""

    def __init__(self, url: str, keys: Mapping[str, str]) -> None:
        self._url, self._keys = url, keys
        self._http = Http(url)
        self.lanes: dict[tuple[str, str], Lane] = {}

    def ahead(
        self,
        path: str,
        phase: str,
        deadline: Deadline,
        body: dict[str, Any],
        *,
        retry: bool = False,
        what: str = "",
        beside: str = "",
    ) -> LaneCall:
        """A call of ``json`` that is on its way until it is made. ``what`` names it in errors.

        Calls of one path are made one at a time, but for those that differ in ``beside``.
        """
        assert path in AHEAD, f"the server may begin with {path} before it has the body"
        lane = self.lanes.get((path, beside)) or self.lanes.setdefault((path, beside), Lane(self._url))
        held = lane.hold("POST", path, body=msgspec.json.encode(body), key=self._keys["POST"], deadline=deadline)
        return LaneCall(self, lane, held, phase, retry, what)

    def json(
        self, method: str, path: str, phase: str, deadline: Deadline, body: Any = None, *, retry: bool = False
    ) -> dict[str, Any]:
        """A call whose answer is a JSON object without ``success: false``. ``retry``: making it twice does no harm."""
        return self._accepted(self.call(method, path, phase, deadline, body, retry=retry), phase, retry)

    def _accepted(self, reply: Reply, phase: str, retry: bool = False) -> dict[str, Any]:
        if not reply.is_success:
            raise self.rejected(reply, phase, retry)
        try:
            content = msgspec.json.decode(reply.content)
        except msgspec.DecodeError:
            raise self.rejected(reply, phase, retry, hint="the answer is not JSON") from None
        if not isinstance(content, dict) or content.get("success") is False:
            raise self.rejected(reply, phase, retry)
        return content

    def call(
        self, method: str, path: str, phase: str, deadline: Deadline, body: Any = None, *, retry: bool = False
    ) -> Reply:
        """Any answer but that the key is wrong."""
        key, content = self._keys[method], None if body is None else msgspec.json.encode(body)
        reply = self._http.call(method, path, body=content, key=key, deadline=deadline, phase=phase, retry=retry)
        return self._authorised(reply, method, phase)

    def _authorised(self, reply: Reply, method: str, phase: str) -> Reply:
        if reply.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            name = "api_key" if method == "GET" else "admin_api_key (or api_key, if it has no other)"
            given = bool(self._keys[method])
            why = f"it does not accept this {name}" if given else f"it wants an {name}, and none is configured"
            raise ConfigError(f"{reply.to}: HTTP {reply.status}: {why}", engine=self._url, phase=phase)
        return reply

    def check(self, reply: Reply, phase: str, retry: bool) -> None:
        """Raise what a call that was answered so raises."""
        self._accepted(self._authorised(reply, "POST", phase), phase, retry)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._http.close()
        for lane in list(self.lanes.values()):
            lane.close()

    def rejected(self, reply: Reply, phase: str, retry: bool, hint: str = "") -> EngineRejected:
        """The error that says so."""
        text = self._text(reply)
        said = f"{reply.to}: HTTP {reply.status}"
        parts = [said, *([hint] if hint else []), f"the engine says: {text or '(nothing)'}"]
        return EngineRejected("; ".join(parts), engine=self._url, phase=phase, safe_to_retry=retry)

    def _text(self, reply: Reply) -> str:
        """The server's own words: its ``message`` or ``error`` if it sent one, cut to a readable length, key masked."""
        text = reply.content.decode(errors="replace")
        try:
            content = msgspec.json.decode(reply.content)
        except msgspec.DecodeError:
            content = None
        if isinstance(content, dict):
            text = str(content.get("message") or content.get("error") or content.get("detail") or text)
        text = text.strip()
        for key in filter(None, self._keys.values()):
            text = text.replace(key, "***")
        return text if len(text) <= TEXT_LIMIT else f"{text[:TEXT_LIMIT]}... ({len(text)} characters)"


class LaneCall:
    """A call that lies in a lane; see ``engines.Call``."""

    def __init__(self, calls: Calls, lane: Lane, held: Held, phase: str, retry: bool, what: str) -> None:
        self._calls, self._lane, self._held = calls, lane, held
        self._phase, self._retry, self._what = phase, retry, what

    def make(self, deadline: Deadline, *, sent: Callable[[], None] = lambda: None) -> None:
        with named(self._what):
            reply = self._lane.make(self._held, deadline=deadline, phase=self._phase, retry=self._retry, sent=sent)
            self._calls.check(reply, self._phase, self._retry)

    def drop(self) -> None:
        self._lane.drop(self._held)


def made(call: LaneCall, deadline: Deadline, sent: Callable[[], None] = lambda: None) -> None:
    """Make a call at once."""
    try:
        call.make(deadline, sent=sent)
    finally:
        call.drop()


@contextmanager
def named(what: str) -> Iterator[None]:
    """Errors say what was being updated."""
    try:
        yield
    except WeightSyncError as e:
        e.message = f"{what}: {e.message}" if what else e.message
        raise

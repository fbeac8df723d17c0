"""SGLang over HTTP, both generations of its weight-update calls. Runs in the weight-sync actor; imports no sglang.

Before 0.5.21 an engine takes updates at any time; from then on only between ``/begin_weight_update`` and
``/end_weight_update``. Nothing here flushes or stamps as a side effect of an update: both are steps of their own.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import msgspec

from weightsync.config import Config
from weightsync.deadline import Deadline
from weightsync.engines import RECEIVER_LOADER, EngineInfo, GroupSpec, PauseMode, Tensors
from weightsync.engines.refusals import SESSION_SINCE, Asked, refusals
from weightsync.engines.sglang_calls import Calls, LaneCall, made, named
from weightsync.engines.sglang_nccl import nccl_of, nccl_variables
from weightsync.errors import ConfigError, EngineRejected

FLUSH_RETRY_S = 0.25
DRAIN_S, DRAIN_POLL_S = 0.1, 0.005
ANSWERS_S, ANSWER_S = 0.01, 0.0005  # in which a server answers requests that its scheduler has ended, and each of them


class SglangEngine:
    """One SGLang engine at ``url``.

    One started with both keys wants ``api_key`` for questions and ``admin_api_key``, and no other, for what changes it.
    """

    def __init__(self, url: str, *, api_key: str = "", admin_api_key: str = "", config: Config) -> None:
        self.url = url.rstrip("/")
        if not re.match(r"https?://[^/]", self.url):
            raise ConfigError(f"engine URL must start with http:// or https:// and name a host, got {url!r}")
        _check_url(self.url)
        for name, key in (("api_key", api_key), ("admin_api_key", admin_api_key)):
            if not (key.isascii() and key.isprintable() and key == key.strip()):
                raise ConfigError(f"{name} is not plain text on one line, as a header wants it", engine=self.url)
        self._config = config
        keys = {"GET": api_key or admin_api_key, "POST": admin_api_key or api_key}
        self._has_sessions: bool | None = None
        self._calls = Calls(self.url, keys)

    # ----------------------------------------------------------------------------------------------- the protocol

    def connect(self, deadline: Deadline) -> EngineInfo:
        """Ask ``/server_info`` and ``/model_info``. ConfigError gives every reason to refuse, EngineLost if gone."""
        server = self._calls.json("GET", "/server_info", "connect", deadline, retry=True)
        model = self._calls.json("GET", "/model_info", "connect", deadline, retry=True)
        text = str(server.get("version", ""))
        version = _version(text)
        if version is None:
            raise ConfigError(f"not a version of SGLang that is known: {text!r}", engine=self.url, phase="connect")
        asked = Asked(version, pause=self._config.pause, same_node=self._config.route != "nccl")
        if found := refusals(server, asked):
            raise ConfigError("this engine cannot be pushed to. " + "; ".join(found), engine=self.url, phase="connect")
        self._has_sessions = version >= SESSION_SINCE
        return EngineInfo(
            url=self.url,
            version=text,
            generation="session" if self._has_sessions else "plain",
            tp_size=int(server.get("tp_size") or 1),
            device=str(server.get("device") or "cuda"),
            model_path=str(model.get("model_path", "")),
            architecture=str((model.get("architectures") or [""])[0]),
            weight_version=str(model.get("weight_version", "")),
            has_receiver=RECEIVER_LOADER in (server.get("custom_weight_loader") or []),
            nnodes=int(server.get("nnodes") or 1),
            memory_saver=bool(server.get("enable_memory_saver")),
            nccl=nccl_of(version),
            nccl_variables=nccl_variables(server),
        )

    def pause(self, mode: PauseMode, deadline: Deadline, *, sent: Callable[[], None] = lambda: None) -> None:
        """``/pause_generation``. ``abort`` returns when no request runs any more."""
        made(self._calls.ahead("/pause_generation", "pause", deadline, {"mode": mode}, retry=True), deadline, sent)

    def num_requests(self, deadline: Deadline) -> int:
        """``/v1/loads``. From 0.5.21 on that may be a second old."""
        try:
            loads = self._calls.json("GET", "/v1/loads?include=core", "pause", deadline, retry=True).get("loads") or []
        except (EngineRejected, ConfigError):
            return 0
        return sum(int(one.get(key) or 0) for one in loads for key in ("num_running_reqs", "num_waiting_reqs"))

    def drain(self, num_requests: int, deadline: Deadline) -> None:
        """``/abort_request``, for ``/pause_generation`` looks only once a second whether requests have ended."""
        body = {"rid": "", "abort_all": True}
        if not self._calls.call("POST", "/abort_request", "pause", deadline, body, retry=True).is_success:
            return  # pausing does the same, and says what is wrong
        until = Deadline(min(DRAIN_S, deadline.remaining_s()), "draining")
        while self.num_requests(deadline) and not until.passed():
            time.sleep(DRAIN_POLL_S)
        time.sleep(min(ANSWERS_S + num_requests * ANSWER_S, deadline.remaining_s()))

    def flush(self, deadline: Deadline, wait: bool = False) -> None:
        """``/flush_cache``. Refused while requests run or wait; with ``wait`` it is asked again until the deadline."""
        while True:
            reply = self._calls.call("POST", "/flush_cache", "flush", deadline, retry=True)
            if reply.is_success:
                return
            error = self._calls.rejected(
                reply, "flush", True, hint="the KV cache was not flushed: requests are waiting"
            )
            if not wait or reply.status != HTTPStatus.BAD_REQUEST:
                raise error
            if deadline.remaining_s() <= FLUSH_RETRY_S:
                raise deadline.error(error.message, engine=self.url, phase="flush", safe_to_retry=True)
            time.sleep(FLUSH_RETRY_S)

    def begin(self, deadline: Deadline) -> str:
        """``/begin_weight_update`` from 0.5.21 on. A session that is open already is closed first; the note says so."""
        if not self._sessions():
            return ""
        try:
            self._calls.json("POST", "/begin_weight_update", "begin", deadline, {"selector": "target"})
            return ""
        except EngineRejected as e:
            if "already open" not in e.message:
                raise
        self.end(deadline)
        self._calls.json("POST", "/begin_weight_update", "begin", deadline, {"selector": "target"})
        return f"{self.url}: closed a weight-update session that an earlier run had left open"

    def update(self, payloads: list[str], load_format: str | None, deadline: Deadline, *, what: str = "") -> None:
        """``/update_weights_from_tensor``, one base64 payload a TP rank. Never flushes, never stamps a version."""
        with named(what):
            self._calls.json(
                "POST", "/update_weights_from_tensor", "move", deadline, self._update_of(payloads, load_format)
            )

    def update_ahead(self, payloads: list[str], load_format: str | None, deadline: Deadline) -> LaneCall:
        """As ``update``, in two steps."""
        return self._calls.ahead(
            "/update_weights_from_tensor", "move", deadline, self._update_of(payloads, load_format)
        )

    def init_weights_update_group(self, group: GroupSpec, deadline: Deadline) -> None:
        """``/init_weights_update_group``. The port must be bound already, and the call made from a thread."""
        self._calls.json("POST", "/init_weights_update_group", "move", deadline, msgspec.to_builtins(group))

    def update_from_distributed(
        self, tensors: Tensors, group_name: str, deadline: Deadline, *, flattened: bool = True, what: str = ""
    ) -> LaneCall:
        """``/update_weights_from_distributed``. Never flushes, never stamps. Groups are asked beside each other."""
        body = msgspec.to_builtins(tensors) | {
            "group_name": group_name,
            "load_format": "flattened_bucket" if flattened else None,
            "flush_cache": False,
            "abort_all_requests": False,
        }
        body |= {"selector": "target"} if self._sessions() else {}
        path = "/update_weights_from_distributed"
        return self._calls.ahead(path, "move", deadline, body, what=what, beside=group_name)

    def destroy_weights_update_group(self, group_name: str, deadline: Deadline) -> None:
        """``/destroy_weights_update_group``."""
        self._calls.json("POST", "/destroy_weights_update_group", "move", deadline, {"group_name": group_name})

    def end(self, deadline: Deadline) -> None:
        """``/end_weight_update`` from 0.5.21 on."""
        if self._sessions():
            self._calls.json("POST", "/end_weight_update", "end", deadline, {})

    def stamp(self, version: str, deadline: Deadline) -> None:
        """``/update_weight_version``, which leaves running requests alone."""
        made(self.stamp_ahead(version, deadline), deadline)

    def stamp_ahead(self, version: str, deadline: Deadline) -> LaneCall:
        """As ``stamp``, in two steps."""
        if not isinstance(version, str) or not version:
            raise ConfigError(f"a weight version is a non-empty string, got {version!r}")
        body = {"new_version": version, "abort_all_requests": False}
        return self._calls.ahead("/update_weight_version", "commit", deadline, body, retry=True)

    def confirm(self, version: str, deadline: Deadline) -> None:
        """``/model_info``: an answer of ``success`` proves nothing."""
        if (reported := self.weight_version(deadline)) != version:
            raise EngineRejected(
                f"stamped {version!r}, but /model_info reports {reported!r}",
                engine=self.url,
                phase="commit",
                safe_to_retry=True,
            )

    def resume(self, deadline: Deadline) -> None:
        """``/continue_generation``."""
        made(self.resume_ahead(deadline), deadline)

    def resume_ahead(self, deadline: Deadline) -> LaneCall:
        """As ``resume``, in two steps."""
        return self._calls.ahead("/continue_generation", "continue", deadline, {}, retry=True)

    def weight_version(self, deadline: Deadline) -> str:
        """The ``weight_version`` of ``/model_info``; "default" after a start."""
        return str(self._calls.json("GET", "/model_info", "version", deadline, retry=True).get("weight_version", ""))

    def close(self) -> None:
        self._calls.close()

    def _update_of(self, payloads: list[str], load_format: str | None) -> dict[str, Any]:
        body: dict[str, Any] = {
            "serialized_named_tensors": payloads,
            "load_format": load_format,
            "flush_cache": False,
            "abort_all_requests": False,
        }
        return body | ({"selector": "target"} if self._sessions() else {"disable_draft_model": True})

    def _sessions(self) -> bool:
        assert self._has_sessions is not None, "connect first"
        return self._has_sessions


def _check_url(url: str) -> None:
    try:
        usable = url.isascii() and urlsplit(url).port != 0
    except ValueError as e:  # a port that is none
        raise ConfigError(f"engine URL {url!r}: {e}") from None
    if not usable:
        raise ConfigError(f"engine URL must be ASCII and have a port above 0, got {url!r}")


def _version(text: str) -> tuple[int, int, int] | None:
    match = re.match(r"v?(\d+)\.(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None

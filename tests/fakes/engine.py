"""A small HTTP server that answers SGLang's weight-update calls, of either generation, and misbehaves when told to.

With ``models`` (one torch module a TP rank, having ``load_weights(iterable of (name, tensor))``) it really loads what
it is sent, custom loaders included. What would kill a real engine kills this one: it drops the connection and is gone.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from tests.fakes.groups import Groups
from tests.fakes.payloads import Killed, load_into, open_payload
from tests.fakes.serving import Call, Fault, Handler, How, Server

RECEIVER = "weightsync.receiver.load"
UPDATE = "/update_weights_from_tensor"
DISTRIBUTED = "/update_weights_from_distributed"


QUESTIONS = ("/server_info", "/model_info", "/v1/loads")


class FakeEngine:
    """One fake engine at ``url``, a context manager. ``calls`` records every request in order.

    ``waiting`` requests make a flush fail. ``info`` overrides fields of ``/server_info``. ``weight_version``,
    ``paused`` and ``session_open`` are the engine's state, to be read or set by tests.
    """

    def __init__(
        self,
        *,
        version: str = "0.5.23",
        models: Sequence[Any] = (),
        tp_size: int = 0,
        receiver: bool = False,
        api_key: str = "",
        admin_api_key: str = "",
        host: str = "127.0.0.1",
        info: dict[str, Any] | None = None,
    ) -> None:
        self.models = list(models)
        self.version, self.api_key, self.admin_api_key = version, api_key, admin_api_key
        self.sessions = tuple(int(p) for p in version.split(".")[:3]) >= (0, 5, 21)
        self.tp_size = tp_size or len(self.models) or 1
        self.loaders = [RECEIVER] if receiver else []
        self.info = info or {}
        self.weight_version, self.paused, self.session_open, self.waiting = "default", False, False, 0
        self.calls: list[Call] = []
        self.groups = Groups(self.models)
        self._faults: list[Fault] = []
        self._loop = threading.Lock()  # like the scheduler's event loop: one update at a time
        self._closing, self._closed = threading.Event(), threading.Lock()
        self._server = Server((host, 0), Handler)
        self._server.engine = self
        self.port = self._server.server_address[1]
        self.url = f"http://{host}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="fake-engine")
        self._thread.start()

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop every connection and stop; no thread or socket is left. Idempotent."""
        with self._closed:
            if self._closing.is_set():
                return
            self._closing.set()
            self._server.shutdown()
            self._thread.join()
            self._server.drop_all()
            self._server.server_close()

    def misbehave(
        self, path: str, how: How, *, at: int = 1, times: int = 1, seconds: float = 0.0, applies: bool = False
    ) -> None:
        """From the ``at``-th call of ``path`` from now on, ``times`` times. ``applies``: do the work first."""
        self._faults.append(Fault(how, path, at - 1, times, seconds, applies))

    def paths(self, *, without: Sequence[str] = QUESTIONS) -> list[str]:
        """The paths called, in order."""
        return [c.path for c in self.calls if c.path not in without]

    # ------------------------------------------------------------------------------------- what the handler uses

    def key_for(self, path: str) -> str:
        """The key that a call of ``path`` must carry; "": none."""
        asks = path in QUESTIONS
        return self.api_key if asks else self.admin_api_key or self.api_key

    def fault_for(self, path: str) -> Fault | None:
        for fault in self._faults:
            if fault.path != path or fault.times == 0:
                continue
            if fault.skip:
                fault.skip -= 1
                return None
            fault.times -= 1
            return fault
        return None

    def wait_closing(self, seconds: float | None = None) -> bool:
        return self._closing.wait(seconds)

    def die(self) -> None:
        threading.Thread(target=self.close, name="fake-engine-death").start()

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and content: a dict becomes JSON, a string is sent as it is."""
        handlers = {
            "/server_info": self._server_info,
            "/model_info": self._model_info,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/v1/loads": self._loads,
            "/abort_request": self._abort,
            "/update_weight_version": self._stamp,
            UPDATE: self._update,
            "/init_weights_update_group": self.groups.init,
            "/destroy_weights_update_group": self.groups.destroy,
            DISTRIBUTED: self._update_distributed,
        }
        if self.sessions:
            handlers |= {"/begin_weight_update": self._begin, "/end_weight_update": self._end}
        if path not in handlers:
            return 404, {"detail": "Not Found"}
        with self._loop:
            return handlers[path](body)

    def _server_info(self, body: Any) -> tuple[int, Any]:
        plain = {
            "version": self.version,
            "tp_size": self.tp_size,
            "pp_size": 1,
            "dp_size": 1,
            "nnodes": 1,
            "device": "cpu",
            "quantization": None,
            "moe_runner_backend": "auto",
            "custom_weight_loader": self.loaders,
            "api_key": self.api_key or None,
            "admin_api_key": self.admin_api_key or None,
            "internal_states": [{}],
        }
        return 200, plain | self.info

    def _model_info(self, body: Any) -> tuple[int, Any]:
        return 200, {
            "model_path": "/models/fake",
            "architectures": ["FakeForCausalLM"],
            "weight_version": self.weight_version,
        }

    def _pause(self, body: Any) -> tuple[int, Any]:
        if body.get("mode") not in ("abort", "retract", "in_place"):
            return 400, {"error": {"message": f"mode: {body.get('mode')!r} is not one of abort, retract, in_place"}}
        self.paused = True
        if body["mode"] == "abort":
            self.waiting = 0
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    def _loads(self, body: Any) -> tuple[int, Any]:
        return 200, {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": self.waiting}]}

    def _abort(self, body: Any) -> tuple[int, Any]:
        self.waiting = 0
        return 200, ""

    def _continue(self, body: Any) -> tuple[int, Any]:
        self.paused = False
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    def _flush(self, body: Any) -> tuple[int, Any]:
        return (400, "Flush cache failed.\n") if self.waiting else (200, "Cache flushed.\n")

    def _stamp(self, body: Any) -> tuple[int, Any]:
        if not isinstance(body.get("new_version"), str):
            return 400, {"error": {"message": "new_version: expected a string"}}
        self.weight_version = body["new_version"]
        return 200, {"success": True, "message": "stamped", "new_version": self.weight_version}

    def _begin(self, body: Any) -> tuple[int, Any]:
        if self.session_open:
            message = "a weight-update session is already open; call end_weight_update() first"
            return 400, {"success": False, "message": message}
        self.session_open = True
        return 200, {"success": True, "message": "Success"}

    def _end(self, body: Any) -> tuple[int, Any]:
        if not self.session_open:
            return 400, {"success": False, "message": "no weight-update session is open"}
        self.session_open = False
        return 200, {"success": True, "message": "Success"}

    def _update(self, body: Any) -> tuple[int, Any]:
        if self.sessions and not self.session_open:
            return 400, {"success": False, "message": "must run between begin_weight_update() and end_weight_update()"}
        payloads, load_format = body["serialized_named_tensors"], body.get("load_format")
        if len(payloads) < self.tp_size:
            raise Killed(f"{len(payloads)} payloads for {self.tp_size} ranks")
        if load_format not in (None, "flattened_bucket", *self.loaders):
            raise Killed(f"unknown load_format {load_format!r}")
        self._load_in_each_rank(payloads, load_format)
        if isinstance(body.get("weight_version"), str):
            self.weight_version = body["weight_version"]
        return 200, {"success": True, "message": "Success"}

    def _load_in_each_rank(self, payloads: list[str], load_format: str | None) -> None:
        """At once, as processes that wait for each other. Plain threads: a receiver runs executors' jobs in line."""
        killed: list[Killed] = []

        def load(model: Any, payload: str) -> None:
            try:
                load_into(model, open_payload(payload), load_format)
            except Killed as e:
                killed.append(e)

        threads = [threading.Thread(target=load, args=pair) for pair in zip(self.models, payloads, strict=False)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if killed:
            raise killed[0]

    def _update_distributed(self, body: Any) -> tuple[int, Any]:
        if self.sessions and not self.session_open:
            return 400, {"success": False, "message": "must run between begin_weight_update() and end_weight_update()"}
        if not self.groups.knows(body["group_name"]):
            raise Killed(f"group {body['group_name']} is not known")
        return self.groups.update(body)

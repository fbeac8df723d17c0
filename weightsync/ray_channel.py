"""The actor under Ray: start it in its environment within seconds or say why not, and call it. Runs in the driver."""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import Any

import msgspec

from weightsync import envs
from weightsync.config import Config, EnvConfig
from weightsync.deadline import Deadline
from weightsync.errors import EnvError, TransferError
from weightsync.rpc import read_reply

ACTORS = {
    "sgl_dtensor_v2": ("weightsync.actors.sgl_dtensor_v2", "SglDTensorV2WeightSync"),
    "sgl_megatron": ("weightsync.actors.sgl_megatron", "SglMegatronWeightSync"),
}


class RayChannel:
    """Starts the actor of ``config.pair`` and connects it. Raises EnvError or whatever its connecting raised."""

    def __init__(self, config: Config) -> None:
        import ray

        environment = envs.ensure(config.pair, config.envs.get(config.pair, EnvConfig()))
        deadline = Deadline(config.connect_timeout_s, "starting the weight-sync actor (connect_timeout_s)")
        envs.check_fits(environment, deadline)
        if not ray.is_initialized():
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="warning")
        module, name = ACTORS[config.pair]
        actor_class = ray.remote(getattr(importlib.import_module(module), name))
        self._ray = ray
        self._actor = actor_class.options(
            num_cpus=0,
            max_concurrency=4,
            runtime_env={
                "py_executable": envs.py_executable(environment),
                "env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", **environment.env},
            },
        ).remote(msgspec.msgpack.encode(config))
        try:
            self._get(self._actor.versions.remote(), deadline.remaining_s(), f"start in environment {config.pair}")
            wait_s = config.connect_timeout_s + 5.0
            read_reply(*self._get(self._actor.connect.remote(), wait_s, "connect"))
        except BaseException:
            self.close()
            raise

    def call(self, method: str, argument: Any, returns: Any, timeout_s: float) -> Any:
        reply = self._actor.call.remote(method, msgspec.msgpack.encode(argument))
        status, body = self._get(reply, timeout_s, method)
        return read_reply(status, body, returns)

    def close(self) -> None:
        with contextlib.suppress(Exception):  # already dead, or Ray itself was shut down
            self._ray.kill(self._actor)

    def _get(self, reference: Any, timeout_s: float, what: str) -> Any:
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(reference, timeout=timeout_s)
        except exceptions.GetTimeoutError:
            raise Deadline(timeout_s, "Ray").error(f"weight-sync actor: {what}", phase="") from None
        except exceptions.RuntimeEnvSetupError as e:
            raise EnvError(f"weight-sync actor: {what}: {e}") from e
        except exceptions.RayTaskError as e:
            raise TransferError(f"weight-sync actor: {what}: {e.cause}") from e
        except exceptions.RayActorError as e:
            raise TransferError(f"weight-sync actor: {what}: the actor's process ended: {e}") from e

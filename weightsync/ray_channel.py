"""The actor under Ray: start it in its environment within seconds or say why not, and call it. Runs in the driver.

Environments are built on the node that needs them, by a task there: so weightsync must be importable in the Python that
Ray's workers have on every such node.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import Any

import msgspec

from weightsync import envs
from weightsync.config import Config, EnvConfig, NodeActorConfig
from weightsync.deadline import Deadline
from weightsync.errors import EnvError, TransferError, WeightSyncError
from weightsync.placing import Placed, options, place, with_addresses
from weightsync.rpc import read_reply
from weightsync.versions import library_versions

ACTORS = {
    "sgl_dtensor_v2": ("weightsync.actors.sgl_dtensor_v2", "SglDTensorV2WeightSync"),
    "sgl_megatron": ("weightsync.actors.sgl_megatron", "SglMegatronWeightSync"),
}


def environment_here(pair: str, config: EnvConfig, driver: dict[str, str], timeout_s: float) -> envs.Environment:
    """The pair's environment on this node, built if need be. Raises EnvError if it does not fit the driver."""
    environment = envs.ensure(pair, config)
    return envs.check_fits(environment, Deadline(timeout_s, "looking into the environment"), driver)


def _as_task(pair: str, config: bytes, driver: dict[str, str], timeout_s: float) -> tuple[bytes, bytes]:
    """``environment_here`` as a task on another node: bytes in, an answer like ``rpc.Dispatcher.handle``'s out."""
    try:
        found = environment_here(pair, msgspec.msgpack.decode(config, type=EnvConfig), driver, timeout_s)
    except WeightSyncError as e:
        return b"error", msgspec.msgpack.encode(e.to_wire())
    return b"ok", msgspec.msgpack.encode(found, enc_hook=str)


def start_ray(**options: Any) -> None:
    """Start Ray on this machine, quietly. Raises EnvError in a line where Ray itself would fill a page."""
    import ray

    try:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="warning", **options)
    except Exception as e:  # of several kinds, Ray's and Python's
        said = str(e).strip().splitlines() or [type(e).__name__]
        raise EnvError(f"Ray did not start: {said[0]}") from e


class RayChannel:
    """Starts the actor of ``config.pair`` and connects it. Raises EnvError or whatever its connecting raised."""

    def __init__(self, config: Config) -> None:
        import ray

        self._ray = ray
        self._config = config
        self._actor: Any = None
        self._node_actors: list[Any] = []
        alone = not ray.is_initialized()
        here = self._here() if alone else None  # before Ray starts: it may have to be built first
        if alone:
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            start_ray()
        try:
            self._start(here)
        except BaseException:
            self.close()
            raise

    def _start(self, here: envs.Environment | None) -> None:
        nodes = [node["NodeManagerAddress"] for node in self._ray.nodes() if node["Alive"]]
        placed = place(self._config, nodes)
        wanted = self._options(placed)
        started = [one for one in placed.node_actors if not one.address]
        there = [self._there(options(one.resources, one.labels)) for one in started]
        elsewhere = len(nodes) > 1 and len(wanted) > 1
        environment = self._there(wanted) if elsewhere else here or self._here()
        deadline = Deadline(self._config.connect_timeout_s, "starting the weight-sync actor (connect_timeout_s)")
        addresses = [self._start_node_actor(*pair, deadline) for pair in zip(started, there, strict=True)]
        config = with_addresses(self._config, placed.node_actors, addresses)
        module, name = ACTORS[config.pair]
        actor_class = self._ray.remote(getattr(importlib.import_module(module), name))
        self._actor = actor_class.options(**wanted, max_concurrency=4, runtime_env=_runtime_env(environment)).remote(
            msgspec.msgpack.encode(config)
        )
        self._get(self._actor.versions.remote(), deadline.remaining_s(), f"start in environment {config.pair}")
        read_reply(*self._get(self._actor.connect.remote(), config.connect_timeout_s + 5.0, "connect"))

    def _options(self, placed: Placed) -> dict[str, Any]:
        wanted = options(placed.actor.resources, placed.actor.labels)
        if placed.at_driver:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            node_id = self._ray.get_runtime_context().get_node_id()
            wanted["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=False)
        return wanted

    def _start_node_actor(self, one: NodeActorConfig, environment: envs.Environment, deadline: Deadline) -> str:
        """Start a node actor; its address."""
        from weightsync.actors.node import NodeActor

        actor_class = self._ray.remote(NodeActor)
        actor = actor_class.options(
            **options(one.resources, one.labels), max_concurrency=2, runtime_env=_runtime_env(environment)
        ).remote(one.host, self._config.bind_host)
        self._node_actors.append(actor)
        what = f"node actor on {_shown(options(one.resources, one.labels))}"
        self._get(actor.versions.remote(), deadline.remaining_s(), f"{what}: start")
        status, body = self._get(actor.serve.remote(), deadline.remaining_s(), what)
        return read_reply(status, body, str)

    def _here(self) -> envs.Environment:
        config = self._config
        env_config = config.envs.get(config.pair, EnvConfig())
        return environment_here(config.pair, env_config, library_versions(), config.connect_timeout_s)

    def _there(self, wanted: dict[str, Any]) -> envs.Environment:
        """The pair's environment on the node that ``wanted`` chooses, built there if need be."""
        env_config = self._config.envs.get(self._config.pair, EnvConfig())
        timeout_s = self._config.connect_timeout_s
        task = self._ray.remote(_as_task).options(**wanted, max_retries=0)
        reply = task.remote(self._config.pair, msgspec.msgpack.encode(env_config), library_versions(), timeout_s)
        what = f"environment {self._config.pair} on {_shown(wanted)}"
        status, body = self._get(reply, envs.BUILD_TIMEOUT_S + timeout_s, what)
        if status == b"error":
            read_reply(status, body)
        return msgspec.msgpack.decode(body, type=envs.Environment, dec_hook=lambda kind, value: kind(value))

    def call(self, method: str, argument: Any, returns: Any, timeout_s: float) -> Any:
        reply = self._actor.call.remote(method, msgspec.msgpack.encode(argument))
        status, body = self._get(reply, timeout_s, method)
        return read_reply(status, body, returns)

    def close(self) -> None:
        for actor in [self._actor, *self._node_actors]:
            with contextlib.suppress(Exception):  # already dead, or Ray itself was shut down
                self._ray.kill(actor)

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


def _runtime_env(environment: envs.Environment) -> dict[str, Any]:
    return {
        "py_executable": envs.py_executable(environment),
        "env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", **environment.env},
    }


def _shown(wanted: dict[str, Any]) -> str:
    """Where something was to be placed, for errors."""
    parts = [f"{key} {wanted[key]}" for key in ("resources", "label_selector") if wanted.get(key)]
    return f"a node with {' and '.join(parts)}" if parts else "the driver's node"

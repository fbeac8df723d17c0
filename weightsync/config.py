"""Configuration: YAML into frozen structs. No environment variable is read below this file; no torch, no ray."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from weightsync.errors import ConfigError

Route = Literal["auto", "direct", "bucket", "nccl", "shm"]
BUCKET_BYTES = 512 << 20


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the configuration structs."""


class EnvConfig(Struct):
    """One environment. ``python`` names an interpreter in place of the uv one; ``pythonpath`` is put before its own.

    ``env`` are further environment variables of processes started in it.
    """

    python: str = ""
    pythonpath: list[str] = []
    env: dict[str, str] = {}


class RenameConfig(Struct):
    """A rule on tensor names: what the regular expression ``pattern`` finds first becomes ``to``, as by ``re.sub``."""

    pattern: str
    to: str


class EngineConfig(Struct):
    """One engine. ``api_key`` and ``admin_api_key`` are SGLang's options of those names, if it was given them.

    For route ``nccl``, where it is not what its SGLang comes with and sets, and no receiver is there to say so:
    ``nccl``, its NCCL version, and ``nccl_variables``, of the variables that members of a group must agree on.
    """

    url: str
    api_key: str = ""
    admin_api_key: str = ""
    nccl: str = ""
    nccl_variables: dict[str, str] = {}

    def __repr__(self) -> str:
        keys = {"api_key": self.api_key, "admin_api_key": self.admin_api_key}
        shown = ", ".join(f"{name}={'<hidden>' if key else ''!r}" for name, key in keys.items())
        return f"EngineConfig(url={self.url!r}, {shown}, nccl={self.nccl!r}, nccl_variables={self.nccl_variables!r})"


class PlacementConfig(Struct):
    """Which node, under Ray: with these custom ``resources`` and these node ``labels``. Neither: see ``placing``."""

    resources: dict[str, float] = {}
    labels: dict[str, str] = {}


class NodeActorConfig(Struct):
    """A node actor. ``address``: of one that runs (``weightsync node``); without it one is started under Ray, on a node
    with ``resources`` and ``labels``. ``host``: whose training ranks it reads, if its machine's name is another.
    """

    address: str = ""
    host: str = ""
    resources: dict[str, float] = {}
    labels: dict[str, str] = {}

    def __repr__(self) -> str:
        shown = self.address.partition("#")[0]
        return f"NodeActorConfig(address={shown!r}, host={self.host!r}, {self.resources!r}, {self.labels!r})"


class Config(Struct):
    """Everything a weight sync can be told. Times in seconds, sizes in bytes.

    ``pair``: which actor. ``route``: how bytes travel; ``auto`` takes the fastest that fits and the report says why.
    ``verify``: ``fingerprint`` reads every engine's live memory back (it needs our receiver in the engine), ``none``
    trusts SGLang's replies. ``pause``: SGLang's mode. ``on_flush_refused``: what to do when the KV cache cannot be
    flushed because requests wait. ``on_engine_failure``: ``raise`` fails the push, ``exclude`` goes on with the others.
    ``constants``: patterns of engine parameters that no trainer tensor feeds and no push writes; ``leave_out``:
    patterns of trainer tensors that no engine gets. ``envs``: by environment name, e.g. ``sgl_dtensor_v2``.
    ``bucket_bytes``: of one bucket; memory is taken for two, or for the largest tensor. None: by what the GPU has free;
    BUCKET_BYTES in host memory, and over NCCL too, but for broadcasts to stock engines, of 1 GiB. Those are a ninth
    smaller where the trainer is on several nodes.
    """

    pair: Literal["sgl_dtensor_v2", "sgl_megatron"]
    engines: list[EngineConfig] = []
    publishers: list[str] = []
    route: Route = "auto"
    verify: Literal["fingerprint", "none"] = "fingerprint"
    pause: Literal["abort", "retract", "in_place", "none"] = "abort"
    on_flush_refused: Literal["fail", "wait"] = "fail"
    bucket_bytes: int | None = None
    arena_bytes: int = 0
    timeout_s: float = 120.0
    connect_timeout_s: float = 120.0
    on_engine_failure: Literal["raise", "exclude"] = "raise"
    rename: list[RenameConfig] = []
    constants: list[str] = []
    leave_out: list[str] = []
    bind_host: str = "127.0.0.1"
    source: Literal["mapped", "nccl"] = "mapped"
    placement: PlacementConfig = PlacementConfig()
    node_actors: list[NodeActorConfig] = []
    envs: dict[str, EnvConfig] = {}

    def __post_init__(self) -> None:
        for name in ("bucket_bytes", "timeout_s", "connect_timeout_s"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name} must be positive, got {value}")
        if self.arena_bytes < 0:
            raise ConfigError(f"arena_bytes must be 0 (no limit) or positive, got {self.arena_bytes}")
        for pattern in [*(r.pattern for r in self.rename), *self.constants, *self.leave_out]:
            try:
                re.compile(pattern)
            except re.error as e:
                raise ConfigError(f"not a regular expression: {pattern!r} ({e})") from None
        urls = [engine.url.rstrip("/") for engine in self.engines]
        for kind, addresses in (("engine", urls), ("publisher", [p.partition("#")[0] for p in self.publishers])):
            twice = sorted({a for a in addresses if addresses.count(a) > 1})
            if twice:
                raise ConfigError(f"{kind} named twice: {', '.join(twice)}")


def check_peers(config: Config) -> None:
    """Raise ConfigError if there is nobody to push from or to."""
    for side, given in (("engines", config.engines), ("publishers", config.publishers)):
        if not given:
            raise ConfigError(f"no {side}: name them in the configuration or give them to launch")


def load_config(source: str | Path | dict[str, Any] | Config) -> Config:
    """A Config from a YAML path, a mapping or a Config.

    Raises ConfigError that names the key, its value, and for an unknown key the nearest valid one.
    """
    if isinstance(source, Config):  # checked like the rest: a struct's constructor does not check types
        return _convert(msgspec.to_builtins(source), "configuration")
    if isinstance(source, dict):
        return _convert(source, "configuration")
    try:
        raw = msgspec.yaml.decode(Path(source).read_bytes())
    except OSError as e:
        raise ConfigError(f"cannot read configuration {source}: {e.strerror}") from e
    except msgspec.DecodeError as e:
        raise ConfigError(f"{source} is not valid YAML: {e}") from e
    return _convert(raw, str(source))


def _convert(raw: Any, where: str) -> Config:
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: expected a mapping of keys, got {type(raw).__name__}")
    for path, part, kind in _parts(raw):
        valid = kind.__struct_fields__
        for key in part:
            if key not in valid:
                near = difflib.get_close_matches(str(key), valid, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(valid)}"
                raise ConfigError(f"{where}: unknown key {path}{key}; {hint}")
    try:
        config = msgspec.convert(raw, Config)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{where}: {_with_value(str(e), raw)}") from None
    for engine in config.engines:
        if not re.match(r"https?://[^/]", engine.url):
            raise ConfigError(f"{where}: an engine's url must be like http://HOST:PORT, got {engine.url!r}")
    return config


def _parts(raw: dict) -> Iterator[tuple[str, dict, type[Struct]]]:
    """Every mapping with fixed keys in a configuration: its path, itself and the struct that it becomes."""
    yield "", raw, Config
    if isinstance(raw.get("placement"), dict):
        yield "placement.", raw["placement"], PlacementConfig
    for name, kind in (("engines", EngineConfig), ("rename", RenameConfig), ("node_actors", NodeActorConfig)):
        entries = raw.get(name)
        for i, part in enumerate(entries if isinstance(entries, list) else []):
            if isinstance(part, dict):
                yield f"{name}[{i}].", part, kind
    environments = raw.get("envs")
    for name, part in environments.items() if isinstance(environments, dict) else ():
        if isinstance(part, dict):
            yield f"envs.{name}.", part, EnvConfig


def _with_value(message: str, raw: dict) -> str:
    """msgspec's message, which names the path but not the value, with the value added if it is one and no secret."""
    match = re.search(r"at `\$((?:\.\w+|\[\d+\])+)`", message)
    parts = re.findall(r"\w+", match.group(1)) if match else []
    value: Any = raw
    for part in parts:
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, TypeError):
            return message
    shown = match is not None and not isinstance(value, dict | list) and not parts[-1].endswith("api_key")
    return f"{message} (value: {value!r})" if shown else message

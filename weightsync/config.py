"""Configuration: YAML into frozen structs. No environment variable is read below this file; no torch, no ray."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from weightsync.errors import ConfigError

Route = Literal["auto", "direct", "bucket", "nccl", "shm"]


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
    """A rule on tensor names: the regular expression ``pattern`` is replaced by ``to`` (as by ``re.sub``, first match)."""

    pattern: str
    to: str


class EngineConfig(Struct):
    """One engine. ``api_key`` is SGLang's ``--admin-api-key`` if it was started with one, else its ``--api-key``."""

    url: str
    api_key: str = ""


class Config(Struct):
    """Everything a weight sync can be told. Times in seconds, sizes in bytes.

    ``pair``: which actor. ``route``: how bytes travel; ``auto`` takes the fastest that fits and the report says why.
    ``verify``: ``fingerprint`` reads every engine's live memory back (it needs our receiver in the engine), ``none``
    trusts SGLang's replies. ``pause``: SGLang's mode. ``on_flush_refused``: what to do when the KV cache cannot be
    flushed because requests wait. ``on_engine_failure``: ``raise`` fails the push, ``exclude`` goes on with the others.
    ``constants``: patterns of engine parameters that no trainer tensor feeds and no push writes; ``leave_out``:
    patterns of trainer tensors that no engine gets. ``envs``: by environment name, e.g. ``sgl_dtensor_v2``.
    """

    pair: Literal["sgl_dtensor_v2", "sgl_megatron"]
    engines: list[EngineConfig] = []
    publishers: list[str] = []
    route: Route = "auto"
    verify: Literal["fingerprint", "none"] = "fingerprint"
    pause: Literal["abort", "retract", "in_place", "none"] = "abort"
    on_flush_refused: Literal["fail", "wait"] = "fail"
    bucket_bytes: int = 512 << 20
    arena_bytes: int = 0
    timeout_s: float = 120.0
    connect_timeout_s: float = 120.0
    on_engine_failure: Literal["raise", "exclude"] = "raise"
    rename: list[RenameConfig] = []
    constants: list[str] = []
    leave_out: list[str] = []
    bind_host: str = "127.0.0.1"
    envs: dict[str, EnvConfig] = {}

    def __post_init__(self) -> None:
        for name in ("bucket_bytes", "timeout_s", "connect_timeout_s"):
            value = getattr(self, name)
            if value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.arena_bytes < 0:
            raise ValueError(f"arena_bytes must be 0 (no limit) or positive, got {self.arena_bytes}")
        for pattern in [*(r.pattern for r in self.rename), *self.constants, *self.leave_out]:
            try:
                re.compile(pattern)
            except re.error as e:
                raise ValueError(f"not a regular expression: {pattern!r} ({e})") from None


def load_config(source: str | Path | dict[str, Any] | Config) -> Config:
    """A Config from a YAML path, a mapping or a Config.

    Raises ConfigError that names the key, its value, and for an unknown key the nearest valid one.
    """
    if isinstance(source, Config):
        return source
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
    unknown = [k for k in raw if k not in Config.__struct_fields__]
    if unknown:
        near = difflib.get_close_matches(str(unknown[0]), Config.__struct_fields__, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else f"; valid keys: {', '.join(Config.__struct_fields__)}"
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}{hint}")
    try:
        return msgspec.convert(raw, Config)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{where}: {_with_value(str(e), raw)}") from e


def _with_value(message: str, raw: dict) -> str:
    """msgspec's message, which names the path but not the value, with the value added."""
    match = re.search(r"at `\$((?:\.\w+|\[\d+\])+)`", message)
    value: Any = raw
    for part in re.findall(r"\w+", match.group(1)) if match else []:
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, TypeError):
            return message
    return f"{message} (value: {value!r})" if match else message

"""What this machine has and what does not fit: data for ``weightsync doctor``. Runs in the driver; no torch, no ray."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import typing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from weightsync import builds, envs
from weightsync.config import Config
from weightsync.deadline import Deadline
from weightsync.errors import EnvError

PAIRS: tuple[str, ...] = typing.get_args(typing.get_type_hints(Config)["pair"])
SHM = Path("/dev/shm")
# Containers often come with 64 MiB, which holds no model; the shm route needs the weights' size, twice with an arena.
SHM_WANTED_BYTES = 1 << 30


class EnvironmentHealth(msgspec.Struct, frozen=True):
    """One environment. ``state`` as ``builds.state`` has it, or ``named`` for an interpreter of the configuration's.

    ``problem`` is why it cannot be used as it is ("": nothing known); one that is missing is built when needed, which
    is no problem.
    """

    name: str
    python: str
    state: str
    versions: dict[str, str]
    problem: str = ""


class Gpu(msgspec.Struct, frozen=True):
    """As ``nvidia-smi`` reports it."""

    name: str
    memory_mib: int
    driver: str


class Health(msgspec.Struct, frozen=True):
    """Everything found. ``problems`` are all that matter, one sentence each; empty: nothing stands in the way."""

    driver: dict[str, str]
    environments: list[EnvironmentHealth]
    gpus: list[Gpu]
    shm_total_bytes: int
    shm_free_bytes: int
    problems: list[str]


def examine(config: Config | None = None, *, root: Path | None = None, timeout_s: float = 30.0) -> Health:
    """Look at this machine; builds nothing, changes nothing. ``config`` may name interpreters of its own.

    Every interpreter is run once, at the same time, for at most ``timeout_s``.
    """
    driver = envs.library_versions()
    configured = config.envs if config else {}
    deadline = Deadline(timeout_s, "weightsync doctor")
    wanted = sorted({*envs.names(root), *configured})
    with ThreadPoolExecutor(max(1, len(wanted))) as pool:
        environments = list(pool.map(lambda n: _look_at(n, configured, root, driver, deadline), wanted))
    shm = shutil.disk_usage(SHM) if SHM.is_dir() else None
    free = shm.free if shm else 0
    problems = [f"environment {e.name}: {e.problem}" for e in environments if e.problem]
    if free < SHM_WANTED_BYTES:
        problems.append(f"{SHM} has {free >> 20} MiB free: route shm, and engines with TP > 1, need more")
    problems += _nccl_misfits(environments)
    return Health(driver, environments, gpus(), shm.total if shm else 0, free, problems)


def gpus() -> list[Gpu]:
    """The machine's NVIDIA GPUs; empty where ``nvidia-smi`` is not there or fails."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    found = []
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        out = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        for line in out.splitlines():
            name, memory_mib, version = line.rsplit(",", 2)
            found.append(Gpu(name.strip(), int(memory_mib), version.strip()))
    return found


def _look_at(
    name: str, configured: dict, root: Path | None, driver: dict[str, str], deadline: Deadline
) -> EnvironmentHealth:
    try:
        environment = envs.resolve(name, configured.get(name), root=root)
    except EnvError as e:
        return EnvironmentHealth(name, "", "missing", {}, e.message)
    state = builds.state(environment.project) if environment.project else "named"
    if state == "missing":
        return EnvironmentHealth(name, str(environment.python), state, {})
    try:
        versions = envs.probe(environment, deadline).versions
    except EnvError as e:
        return EnvironmentHealth(name, str(environment.python), state, {}, e.message)
    # Whoever has Ray in it talks to the driver's cluster; a pair's actor must.
    has_ray = name in PAIRS or "ray" in versions
    problem = envs.misfit(versions, driver) if has_ray and "ray" in driver else ""
    return EnvironmentHealth(name, str(environment.python), state, versions, problem)


def _nccl_misfits(environments: list[EnvironmentHealth]) -> list[str]:
    """The actor joins the engine's NCCL world on the nccl route, and NCCL refuses ranks of different versions."""
    by_name = {e.name: e.versions.get("nccl") for e in environments}
    engine = by_name.get("sglang")
    return [
        f"route nccl: NCCL {by_name[pair]} in {pair} and {engine} in sglang are not the same"
        for pair in PAIRS
        if engine and by_name.get(pair) and by_name[pair] != engine
    ]

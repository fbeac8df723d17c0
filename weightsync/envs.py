"""Environments: which interpreter a process runs in, what is in it, and whether it fits the driver. No torch, no ray.

An environment is a uv project ``envs/<name>`` of the checkout, built when first needed (``weightsync.builds``), or
whatever interpreter the configuration names in its place, for clusters whose containers bring everything.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from weightsync import builds, versions
from weightsync.config import EnvConfig
from weightsync.deadline import Deadline
from weightsync.errors import EnvError
from weightsync.versions import library_versions

PROBE_TIMEOUT_S = 30.0
BUILD_TIMEOUT_S = 1800.0

__all__ = [
    "Environment",
    "check_fits",
    "ensure",
    "library_versions",
    "misfit",
    "names",
    "probe",
    "process_env",
    "project_root",
    "py_executable",
    "resolve",
    "runtime_env",
]


class Environment(msgspec.Struct, frozen=True):
    """Where a process runs. ``project`` is its uv project, None where the configuration named ``python``.

    ``pythonpath`` is the whole ``PYTHONPATH`` of its processes and ``env`` further variables. ``versions`` (``python``,
    ``ray``, ``torch``, ``nccl``, ...; absent: not installed) are filled in by ``probe`` and ``check_fits``.
    """

    name: str
    python: Path
    project: Path | None = None
    pythonpath: tuple[str, ...] = ()
    env: dict[str, str] = {}
    versions: dict[str, str] = {}


def project_root() -> Path | None:
    """The checkout that this package runs from, or None if it was installed without its ``envs/``."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / "envs").is_dir() else None


def names(root: Path | None = None) -> list[str]:
    """Names of the checkout's environments, sorted."""
    root = root or project_root()
    return sorted(p.parent.name for p in root.glob("envs/*/pyproject.toml")) if root else []


def resolve(name: str, config: EnvConfig | None = None, *, root: Path | None = None) -> Environment:
    """The environment ``name``, without building, running or checking anything.

    A folder ``stubs`` in its project goes onto its ``PYTHONPATH``, after what ``config`` puts there. Raises EnvError if
    there is no such project and ``config`` names no interpreter.
    """
    config = config or EnvConfig()
    if config.python:
        python = shutil.which(config.python) or config.python
        return Environment(name, Path(python).absolute(), None, tuple(config.pythonpath), config.env)
    root = root or project_root()
    where = f"configuration key envs.{name}.python may name an interpreter instead"
    if root is None:
        raise EnvError(f"environment {name}: weightsync is installed without its envs/ folder; {where}")
    project = root / "envs" / name
    if not (project / "pyproject.toml").is_file():
        raise EnvError(f"no environment {name!r} in {root / 'envs'} (there are: {', '.join(names(root))}); {where}")
    stubs = [str(project / "stubs")] if (project / "stubs").is_dir() else []
    return Environment(name, builds.interpreter(project), project, (*config.pythonpath, *stubs), config.env)


def ensure(
    name: str,
    config: EnvConfig | None = None,
    *,
    root: Path | None = None,
    groups: Sequence[str] = (),
    timeout_s: float = BUILD_TIMEOUT_S,
    progress: Callable[[str], None] | None = None,
    uv: Sequence[str] = (),
) -> Environment:
    """The environment ``name``, built on this node if it is missing, incomplete or behind its lock file.

    However many processes ask at once, one builds and the others wait for it. ``groups`` are dependency groups to
    include, ``progress`` gets uv's lines as they come, ``uv`` is the command to use (default: found). An interpreter
    named by the configuration is taken as it is. Raises EnvError with uv's own words, or after ``timeout_s``.
    """
    environment = resolve(name, config, root=root)
    if environment.project is not None:
        builds.build(environment.project, groups=groups, timeout_s=timeout_s, progress=progress, uv=uv)
    return environment


def probe(environment: Environment, deadline: Deadline) -> Environment:
    """The environment with its ``versions``, as its own interpreter reports them in one short run.

    Raises EnvError if the interpreter is missing, fails, or gives no answer within ``PROBE_TIMEOUT_S``.
    """
    timeout_s = min(PROBE_TIMEOUT_S, deadline.remaining_s())
    where = f"environment {environment.name}: {environment.python}"
    try:
        ran = subprocess.run(
            [environment.python, "-c", Path(versions.__file__).read_text()],
            env=process_env(environment),
            cwd="/",  # where no checkout passes for an installed package
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except OSError as e:
        raise EnvError(f"{where} cannot be run: {e.strerror}{_how_to_build(environment)}") from e
    except subprocess.TimeoutExpired:
        raise EnvError(f"{where} gave no answer within {timeout_s:.3g} s") from None
    try:
        found = msgspec.json.decode(ran.stdout.strip().splitlines()[-1], type=dict[str, str])
    except (IndexError, msgspec.DecodeError):
        said = " ".join((ran.stderr or ran.stdout).split()[-40:])
        raise EnvError(f"{where} does not work (exit status {ran.returncode}): {said}") from None
    return msgspec.structs.replace(environment, versions=found)


def misfit(found: dict[str, str], driver: dict[str, str]) -> str:
    """Why an actor cannot run where ``found`` is installed under a driver that has ``driver``; "" if it can.

    Ray refuses a worker whose Ray or full Python version (3.12.1) is not the cluster's, and only after it was started.
    """
    if "weightsync" not in found:
        return "weightsync cannot be imported in it"
    for package, shown in (("ray", "Ray"), ("python", "Python")):
        has, wants = found.get(package), driver.get(package)
        if has is None:
            return f"{shown} is not installed in it; the driver has {shown} {wants}"
        if wants is not None and has != wants:
            return f"it has {shown} {has}, the driver has {shown} {wants}; Ray wants them equal"
    return ""


def check_fits(environment: Environment, deadline: Deadline, driver: dict[str, str] | None = None) -> Environment:
    """``probe``, and EnvError naming both versions if an actor could not run in it under this driver."""
    probed = probe(environment, deadline)
    why = misfit(probed.versions, driver or library_versions())
    if why:
        raise EnvError(f"environment {environment.name}: {environment.python}: {why}{_how_to_build(environment)}")
    return probed


def py_executable(environment: Environment) -> str:
    """The value of Ray's ``py_executable``: shell text, so no wrapper file has to exist on the actor's node."""
    python = shlex.quote(str(environment.python))
    if environment.pythonpath:
        return f"env PYTHONPATH={shlex.quote(os.pathsep.join(environment.pythonpath))} {python}"
    return f"env -u PYTHONPATH {python}" if environment.project else python


def runtime_env(environment: Environment) -> dict[str, object]:
    """Ray's ``runtime_env`` for an actor in ``environment``."""
    return {"py_executable": py_executable(environment), "env_vars": dict(environment.env)}


def process_env(environment: Environment) -> dict[str, str]:
    """Variables for a process started in ``environment``: this process's, without the traces of its own environment.

    A uv environment is complete, so the starter's ``PYTHONPATH`` does not reach into it; an interpreter named by the
    configuration keeps it unless the configuration gives another.
    """
    variables = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONHOME")}
    if environment.project is not None:
        variables.pop("PYTHONPATH", None)
    if environment.pythonpath:
        variables["PYTHONPATH"] = os.pathsep.join(environment.pythonpath)
    return variables | environment.env


def _how_to_build(environment: Environment) -> str:
    if environment.project is None:
        return f" (named by configuration key envs.{environment.name}.python)"
    version = platform.python_version()
    return f" (to rebuild it: uv sync --project {environment.project} --frozen --python {version})"

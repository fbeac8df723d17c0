"""Building a uv project's environment: once, whole, under a lock that dies with its holders.

Beside a project's ``.venv`` lies ``.build``, the file that builders lock. Its text is "building" from before uv starts
until after the environment is complete, so whoever gets the lock and reads it knows that the last builder was killed:
what it left is thrown away, because uv takes a package that is there in part for one that is there. The last thing
written into a complete environment is its marker.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec

from weightsync.deadline import Deadline
from weightsync.errors import EnvError

MARKER = "weightsync-complete.json"
Progress = Callable[[str], None]


class Marker(msgspec.Struct, frozen=True):
    """What a complete environment was built from. ``path``: where, because an environment cannot be moved."""

    inputs: str
    packages: str
    groups: list[str]
    path: str


def interpreter(project: Path) -> Path:
    """The interpreter of a project's environment, whether it exists yet or not."""
    return project / ".venv" / "bin" / "python"


def is_whole(project: Path, groups: Sequence[str] = ()) -> bool:
    """Whether the environment was built to the end from today's lock file, with ``groups``, and not changed since."""
    marker = _read_marker(project)
    return (
        marker is not None
        and set(groups) <= set(marker.groups)
        and marker == _marker_of(project, marker.groups)
        and interpreter(project).exists()
    )


def state(project: Path) -> str:
    """``whole``, ``missing``, ``unfinished`` (being built, or cut short), or ``unmarked``: by hand, or out of date."""
    if not interpreter(project).exists():
        return "missing"
    lock = project / ".build"
    if lock.is_file() and lock.read_text():
        return "unfinished"
    return "whole" if is_whole(project) else "unmarked"


def build(
    project: Path,
    *,
    groups: Sequence[str] = (),
    timeout_s: float,
    progress: Progress | None = None,
    uv: Sequence[str] = (),
) -> None:
    """Build or complete the environment of ``project`` with uv, unless it is whole. Arguments as ``envs.ensure``'s.

    Raises EnvError if uv is not there, fails, or is not done (here or in another process) within ``timeout_s``.
    """
    if is_whole(project, groups):
        return
    deadline = Deadline(timeout_s, f"building {project}")
    say = progress or (lambda line: None)
    with _locked(project, deadline, say) as lock:
        if is_whole(project, groups):
            return
        _build_locked(project, groups, deadline, say, list(uv) or find_uv(project), lock)


def find_uv(project: Path) -> list[str]:
    """The uv that ``bootstrap.sh`` found for the checkout around ``project``, else this machine's."""
    ours = [str(root / ".tools" / "uv") for root in project.parents]
    candidates = [[path] for path in [*ours, shutil.which("uv")] if path and os.access(path, os.X_OK)]
    for candidate in [*candidates, [sys.executable, "-m", "uv"]]:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run([*candidate, "--version"], capture_output=True, check=True, timeout=10)
            return candidate
    raise EnvError(f"cannot build {project}: no uv on this machine; run bootstrap.sh of the checkout, or install uv")


def _build_locked(
    project: Path, groups: Sequence[str], deadline: Deadline, say: Progress, uv: list[str], lock: IO[str]
) -> None:
    venv, before = project / ".venv", _read_marker(project)
    moved = before is not None and before.path != str(venv.resolve())
    lock.seek(0)
    if lock.read() or moved:
        say(f"{project.name}: {'it was moved' if moved else 'its last build was cut short'}, starting over")
        shutil.rmtree(venv, ignore_errors=True)
        before = None
    _write_state(lock, "building")
    with contextlib.suppress(FileNotFoundError):
        (venv / MARKER).unlink()
    wanted = sorted({*groups, *(before.groups if before else [])})
    _sync(project, wanted, deadline, say, uv, lock)
    fresh = venv / f"{MARKER}.new"
    fresh.write_bytes(msgspec.json.encode(_marker_of(project, wanted)))
    fresh.rename(venv / MARKER)
    _write_state(lock, "")


def _sync(project: Path, groups: list[str], deadline: Deadline, say: Progress, uv: list[str], lock: IO[str]) -> None:
    say(f"{project.name}: building")
    # The driver's own interpreter: Ray wants equal versions. --inexact: what a person added by hand may stay.
    python = os.path.realpath(sys.executable)
    command = [*uv, "sync", "--frozen", "--inexact", "--project", str(project), "--python", python]
    command += [f"--group={group}" for group in groups]
    try:
        process = _start(command, lock)
    except OSError as e:
        raise EnvError(f"cannot build {project}: {uv[0]}: {e.strerror}") from e
    lines: list[str] = []
    reader = threading.Thread(target=_relay, args=(process.stdout, lines, project.name, say), daemon=True)
    reader.start()
    try:
        status = process.wait(timeout=deadline.remaining_s())
    except subprocess.TimeoutExpired:
        raise EnvError(f"building {project} took longer than {deadline.timeout_s:g} s; {_last_words(lines)}") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(timeout=5)
    if status != 0:
        raise EnvError(f"building {project} failed (uv's exit status {status}); {_last_words(lines)}")


def _start(command: list[str], lock: IO[str]) -> subprocess.Popen[str]:
    hidden = ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT", "PYTHONPATH")
    return subprocess.Popen(
        command,
        env={k: v for k, v in os.environ.items() if k not in hidden},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        pass_fds=(lock.fileno(),),  # a uv that outlives its killed parent still holds the lock while it writes
    )


def _relay(stream: IO[str], lines: list[str], name: str, say: Progress) -> None:
    with stream:
        for line in stream:
            lines.append(line.rstrip())
            say(f"{name}: {line.rstrip()}")


def _last_words(lines: list[str]) -> str:
    return "uv said: " + (" / ".join(line.strip() for line in lines[-8:] if line.strip()) or "nothing")


@contextlib.contextmanager
def _locked(project: Path, deadline: Deadline, say: Progress) -> Iterator[IO[str]]:
    try:
        file = open(project / ".build", "a+")  # noqa: SIM115  closed below, on every path
    except OSError as e:
        raise EnvError(f"cannot build {project}: {e.strerror}: {project / '.build'}") from e
    with file:
        waiting = False
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if not waiting:
                say(f"{project.name}: another process is building it, waiting")
            waiting = True
            if deadline.passed():
                raise EnvError(f"{project}: another process was still building it after {deadline.timeout_s:g} s")
            time.sleep(0.05)
        yield file


def _write_state(lock: IO[str], state: str) -> None:
    lock.seek(0)
    lock.truncate()
    lock.write(state)
    lock.flush()


def _read_marker(project: Path) -> Marker | None:
    try:
        return msgspec.json.decode((project / ".venv" / MARKER).read_bytes(), type=Marker)
    except (OSError, msgspec.DecodeError):
        return None


def _marker_of(project: Path, groups: list[str]) -> Marker:
    """The marker that fits what is on disk now."""
    inputs = [(project / name).read_bytes() for name in ("pyproject.toml", "uv.lock") if (project / name).is_file()]
    packages = sorted(p.name for p in (project / ".venv").glob("lib/python*/site-packages/*.dist-info"))
    return Marker(_digest(inputs), _digest([p.encode() for p in packages]), groups, str((project / ".venv").resolve()))


def _digest(parts: list[bytes]) -> str:
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()

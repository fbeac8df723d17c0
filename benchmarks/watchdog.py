"""A command with a time limit, after which neither it nor anything that it started is left. Linux only. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
TIMED_OUT = 124


def run(command: Sequence[str], *, timeout_s: float, env: dict[str, str] | None = None) -> int:
    """Run ``command`` with this process's output; its exit status, or TIMED_OUT.

    Whatever way it ends, and when this process is told to (SIGTERM), its descendants are killed, those in sessions of
    their own as well: this process becomes the parent of orphans among them. To be called in the main thread.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = set(_children(os.getpid()))
    told = signal.signal(signal.SIGTERM, _exit)
    process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    finally:
        _kill_descendants(before)
        process.wait()
        signal.signal(signal.SIGTERM, told)


def _exit(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # told twice, as by timeout(1), it must not stop halfway
    raise SystemExit(128 + number)


def _kill_descendants(spared: set[int], timeout_s: float = 20.0) -> None:
    """Kill what this process has started, over and over until nothing of it is left, sparing children of before."""
    give_up = time.monotonic() + timeout_s
    while found := [pid for pid in _children(os.getpid()) if pid not in spared]:
        for pid in [*found, *(below for child in found for below in _descendants(child))]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in found:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > give_up:
            return
        time.sleep(0.05)


def _descendants(pid: int) -> list[int]:
    below = []
    for child in _children(pid):
        below += [child, *_descendants(child)]
    return below


def _children(pid: int) -> list[int]:
    """Children of all threads of ``pid``; zombies count until they are waited for."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in (task / "children").read_text().split()]
    return found

"""The watchdog leaves nothing running, whatever a command started and however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import watchdog

ORPHAN = "import os, subprocess, sys, time; p = subprocess.Popen(['sleep', '300'], start_new_session=True); "


def run(script: str, timeout_s: float) -> tuple[int, float]:
    """The watchdog's status and how long it took, in a process of its own: it becomes the parent of orphans."""
    started = time.monotonic()
    return start(script, timeout_s).wait(timeout=60), time.monotonic() - started


def start(script: str, timeout_s: float = 60.0) -> subprocess.Popen:
    """A watchdog over ``script``, running."""
    code = (
        f"import sys; sys.path.insert(0, {os.getcwd()!r}); from benchmarks import watchdog; "
        f"sys.exit(watchdog.run([sys.executable, '-c', {script!r}], timeout_s={timeout_s}))"
    )
    return subprocess.Popen([sys.executable, "-c", code])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_status_is_handed_on():
    assert run("import sys; sys.exit(7)", 30)[0] == 7


def test_a_command_that_hangs_is_killed_with_what_it_started_in_a_session_of_its_own(tmp_path):
    note = tmp_path / "pid"
    status, seconds = run(ORPHAN + f"open({str(note)!r}, 'w').write(str(p.pid)); time.sleep(300)", 3)
    assert status == watchdog.TIMED_OUT
    assert seconds < 30
    assert not alive(int(note.read_text()))


def test_orphans_of_a_command_that_ends_by_itself_are_killed_too(tmp_path):
    note = tmp_path / "pid"
    assert run(ORPHAN + f"open({str(note)!r}, 'w').write(str(p.pid))", 30)[0] == 0
    assert not alive(int(note.read_text()))


def test_a_watchdog_that_is_told_to_end_takes_everything_with_it(tmp_path):
    note = tmp_path / "pid"
    process = start(ORPHAN + f"open({str(note)!r}, 'w').write(str(p.pid)); time.sleep(300)")
    give_up = time.monotonic() + 30
    while not (note.exists() and note.read_text()) and time.monotonic() < give_up:
        time.sleep(0.05)
    process.terminate()
    process.terminate()
    assert process.wait(timeout=30) == 143
    assert not alive(int(note.read_text()))

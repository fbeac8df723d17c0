"""How threads of ours get the interpreter from an engine's event loop, which never rests. Runs in the engine.

Who wants the interpreter waits for the switch interval, and asks its holder to yield only if nothing happened until
then. Such a loop lets go of it every few microseconds, at every look at a socket, and has it again before a thread that
this wakes is awake. So the wait must end by itself before that happens, and the kernel must not add the 50 microseconds
by which it lets the timers of a thread be late. ``benchmarks.beside_loop`` measures what that is worth.
"""

from __future__ import annotations

import ctypes
import sys

SWITCH_INTERVAL_S = 1e-6
_PR_SET_TIMERSLACK = 29
_LEAST_NS = 1


def share_the_interpreter() -> None:
    """For the process: a thread that wants the interpreter asks for it at once. Idempotent."""
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))


def be_punctual() -> None:
    """For the thread that calls it: its timers are not late."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _LEAST_NS, 0, 0, 0)

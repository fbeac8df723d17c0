"""Python's garbage collector, out of the way of what makes many objects and no cycles. Any process."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No search for cycles meanwhile, in all of this process: it walks every object there is, again and again.

    That was a third of the time of planning, and an engine has many more objects.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

"""Wait for what must happen: as long as a busy machine may take, and no longer than it takes."""

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE = 60.0
"""Seconds for anything that takes a moment on a quiet machine. What a test calls wrong must take
longer than this.
"""
Found = TypeVar("Found")


def eventually(holds: Callable[[], Found], seconds: float = PATIENCE, pause: float = 0.05) -> Found:
    """Ask repeatedly until the answer is true or the time is up; return the last answer."""
    until = time.monotonic() + seconds
    while not (result := holds()) and time.monotonic() < until:
        time.sleep(pause)
    return result


def reaches(value: Callable[[], float], wanted: float, pause: float = 0.1) -> bool:
    """Return whether a growing number reaches its goal. It may take any time, but must not stall
    for `PATIENCE`.
    """
    last = value()
    while last < wanted and eventually(lambda before=last: value() > before, pause=pause):
        last = value()
    return last >= wanted

"""A bound on the processor's time for code that somebody else wrote, which may never return."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from minivllm.errors import MinivllmError


@contextmanager
def bounded(seconds: float, whose: str) -> Iterator[None]:
    """Ends what runs inside after `seconds` of the processor's time.

    Only the main thread of a process can be stopped like this, and not on Windows: elsewhere nothing is bounded.

    Raises:
        MinivllmError: the time is over; the message says that `whose` did not return.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: object) -> None:
        raise MinivllmError(f"{whose} did not return within {seconds:g} s: does a loop in it never end?")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)

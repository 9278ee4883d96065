"""A limit on the CPU time of code that someone else wrote and that may never return."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from minivllm.errors import MinivllmError

AGAIN = 0.05
"""Seconds until code that has caught `_Over` is interrupted again."""


class _Over(BaseException):
    """The exception raised when the time is up. No `except Exception` in the running code catches
    it.
    """


@contextmanager
def bounded(seconds: float, whose: str) -> Iterator[None]:
    """Stop the code in the block after `seconds` of CPU time.

    A thread beside it stops it. Code that waits instead of computing is not stopped, nor is a single
    call into C, before it returns. In a browser, the page stops its worker instead.

    Raises:
        MinivllmError: the time is up; the message says that `whose` did not return.
    """
    if sys.platform == "emscripten":
        yield
        return
    try:
        with _stopped_after(seconds):
            yield
    except _Over:
        message = f"{whose} did not return within {seconds:g} s: does a loop in it never end?"
        raise MinivllmError(message) from None


@contextmanager
def _stopped_after(seconds: float) -> Iterator[None]:
    thread, left, told, now = threading.get_ident(), threading.Event(), threading.Event(), _clock()
    over = now() + seconds

    def watch() -> None:
        while not left.wait(AGAIN):
            if now() >= over:
                told.set()
                _raise_in(thread)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        while watcher.is_alive():
            try:
                left.set()
                watcher.join()
            except _Over:  # it was on its way already
                continue
        if told.is_set():
            _take_what_is_on_its_way()


def _raise_in(thread: int) -> None:
    """Raise `_Over` in a thread as soon as it runs Python; only one can be pending at a time."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Over))


def _take_what_is_on_its_way() -> None:
    """Raise this thread's pending exception now, and drop it.

    If it were only withdrawn, the interpreter would keep checking for it in every thread: all code
    would run slower, and CPython 3.11 would hang under `sys.settrace`.
    """
    try:
        _raise_in(threading.get_ident())
        while True:
            pass
    except _Over:
        return


def _clock() -> Callable[[], float]:
    """Return a clock of this thread's CPU time, or of wall-clock time on systems without one."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic
    clock = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: time.clock_gettime(clock)

"""An event loop on virtual time, for a learner's coroutines: it never waits, and says why one never
ends.

    run_virtual(lambda: check(), "your get")

Where nothing is ready, the clock jumps to the next timer. So a second costs nothing, every run is
the same, and a task that will never be woken is noticed at once. The loop runs in a thread of its
own, since JupyterLab's own loop runs in the main one, and so that a blocking call can be abandoned.
A browser has no threads: there, it runs inside the page's loop, and the page ends what blocks.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar
from unittest import mock

from minivllm.errors import MinivllmError
from minivllm_lab.checks.bounded import bounded

Result = TypeVar("Result")
CPU_SECONDS, SECONDS = 0.5, 20.0
"""Limits of a run: of CPU time, and of wall-clock time, which a blocking call takes."""
MOST_TURNS = 20_000
BLOCKS = "{} blocks the event loop, and no other client is served meanwhile: wait with `await`"


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time, without files. `turns` counts how often it has looked for ready
    callbacks.
    """

    def __init__(self, whose: str) -> None:
        self.now, self.turns = 0.0, 0
        super().__init__()
        self._selector = _Clock(self, whose)

    def time(self) -> float:
        """Return the virtual seconds since the start."""
        return self.now

    def _process_events(self, _events: object) -> None:
        """Handle what the selector has found, which is nothing."""

    def _write_to_self(self) -> None:
        """Wake the selector, which never sleeps."""


class _Clock:
    """A selector that advances the virtual clock instead of waiting."""

    def __init__(self, loop: VirtualLoop, whose: str) -> None:
        self._loop, self._whose = loop, whose

    def select(self, timeout: float | None) -> tuple:
        self._loop.turns += 1
        if timeout is None:
            raise AssertionError(f"{self._whose} waits, and nothing will ever wake it: was a wake-up lost?")
        if self._loop.turns > MOST_TURNS:
            raise AssertionError(f"{self._whose} does not end: does it check again and again, and never wait?")
        self._loop.now += timeout
        return ()


def turns() -> int:
    """Return how often the running virtual loop has looked for ready callbacks so far."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop.turns


def run_virtual(work: Callable[[], Coroutine[Any, Any, Result]], whose: str) -> Result:
    """Return the result of `work()` in a virtual loop. What it raises is raised here.

    Raises:
        AssertionError: it never ends: it waits for an event that never comes, spins for ever, or
            blocks the loop.
    """
    ended: list[Result | BaseException] = []

    def run() -> None:
        try:
            with bounded(CPU_SECONDS, whose), _no_sleep(whose):
                ended.append(_run(work, whose))
        except MinivllmError as error:
            ended.append(AssertionError(str(error)))
        except BaseException as error:
            ended.append(error)

    if sys.platform == "emscripten":
        _inside_the_running_loop(run)
    else:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(SECONDS)
    if not ended:
        raise AssertionError(BLOCKS.format(whose))
    if isinstance(ended[0], BaseException):
        raise ended[0]
    return ended[0]


def _inside_the_running_loop(run: Callable[[], None]) -> None:
    """Run another loop in a callback of the page's: asyncio refuses that unless it knows none."""
    pages = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    try:
        run()
    finally:
        asyncio._set_running_loop(pages)


def _run(work: Callable[[], Coroutine[Any, Any, Result]], whose: str) -> Result:
    loop = VirtualLoop(whose)
    loop.set_exception_handler(lambda *_: None)  # errors of abandoned tasks are not news
    try:
        return loop.run_until_complete(work())
    finally:
        _end(loop)


def _end(loop: VirtualLoop) -> None:
    """Cancel the remaining tasks. A task that refuses is left behind."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.turns = 0
    with suppress(AssertionError):
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=1))
    loop.close()


def _no_sleep(whose: str):
    """Refuse `time.sleep` in this thread: in an event loop it is a mistake."""
    here, sleep = threading.current_thread(), time.sleep

    def instead(seconds: float) -> None:
        if threading.current_thread() is here:
            raise AssertionError(BLOCKS.format(f"time.sleep in {whose}"))
        sleep(seconds)

    return mock.patch.object(time, "sleep", instead)

"""Let an engine serve one call at a time, in the process that made it."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from minivllm.errors import MinivllmError
from minivllm.platforms.interrupts import InterruptsHeld


class CallLock:
    """A lock that rejects a second caller: another thread, a signal handler during a call, or a
    forked process.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()

    @contextmanager
    def held(self) -> Iterator[InterruptsHeld]:
        """Hold the lock for the duration of one call, and hold back Ctrl-C, so that no call is left
        half done.

        Raises:
            MinivllmError: another call is in progress, or this is another process.
        """
        if os.getpid() != self._process:
            raise MinivllmError(
                f"this LLM belongs to process {self._process}, of which this one is a fork: threads and devices do not "
                'survive a fork. Make an LLM in each process, or start processes with the method "spawn"'
            )
        with InterruptsHeld() as interrupts:
            # Do not wait: a signal handler that calls the engine would wait for itself.
            if not self._lock.acquire(blocking=False):
                raise MinivllmError(
                    "this LLM is in the middle of another call: it serves one at a time. Give it all prompts in one "
                    "call, let threads take turns with a lock, or make one LLM for each"
                )
            try:
                yield interrupts
            finally:
                self._lock.release()

"""Delay Ctrl-C until the end of a block that must not be interrupted."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar


class InterruptsHeld:
    """A `with` block that SIGINT does not cut in two: it is delivered at the end. A second one is let through at once.

    Blocks may be nested: the outermost one holds. Only the main thread is ever interrupted, so in other threads nothing
    is done, and neither is where a program ignores SIGINT.
    """

    _outermost: "ClassVar[InterruptsHeld | None]" = None

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._held: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> "InterruptsHeld":
        if InterruptsHeld._outermost is not None or threading.get_ident() != threading.main_thread().ident:
            return self
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            self._handler, InterruptsHeld._outermost = handler, self
            signal.signal(signal.SIGINT, self._hold)
        return self

    def deliver(self) -> None:
        """Lets a held SIGINT through now: a loop that holds them as a whole calls it between its turns."""
        if self._held and self._handler is not None:
            self._handler(*self._held.pop(0))

    def __exit__(self, *_: object) -> None:
        if self._handler is None:
            return
        InterruptsHeld._outermost = None
        signal.signal(signal.SIGINT, self._handler)
        if len(self._held) == 1:
            self._handler(*self._held[0])

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._held.append((number, frame))
        if len(self._held) > 1 and self._handler is not None:
            self._handler(number, frame)

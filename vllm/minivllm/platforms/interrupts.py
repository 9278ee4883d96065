"""Delay Ctrl-C until the end of a block that must not be interrupted."""

import signal
import threading
from collections.abc import Callable
from importlib import import_module
from types import FrameType
from typing import Any, ClassVar

# The module that `signal` wraps. Its wrappers try to make an enum of every handler, which takes 12
# of 15 µs a block.
_signal: Any = import_module("_signal")


class InterruptsHeld:
    """A `with` block that SIGINT does not interrupt: the signal is delivered at the end. A second
    SIGINT is let through at once.

    Once one has been let through, all further ones are held until the end: they would interrupt the
    clean-up that the first has caused. With `clean_up`, every signal is held, even a second one,
    because a clean-up for any other reason must not be cut short either.

    Blocks may be nested: the outermost one holds the signals. Python interrupts only the main
    thread, so in other threads the block does nothing; nor does it where a program ignores SIGINT.
    """

    _outermost: "ClassVar[InterruptsHeld | None]" = None

    def __init__(self, *, clean_up: bool = False) -> None:
        self._clean_up = clean_up
        self._num_clean_ups = 0
        self._holder: InterruptsHeld | None = None
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._held: list[tuple[int, FrameType | None]] = []
        self._let_through = False
        # In `__enter__` or `__exit__`, where an interrupt would leave signals to a block that is
        # not there.
        self._at_an_edge = True

    def __enter__(self) -> "InterruptsHeld":
        if threading.get_ident() != threading.main_thread().ident:
            return self
        # SIG_IGN and SIG_DFL are not callable: there is nothing to hold.
        if InterruptsHeld._outermost is None and callable(handler := _signal.getsignal(signal.SIGINT)):
            self._handler = handler
            _signal.signal(signal.SIGINT, self._hold)
            InterruptsHeld._outermost = self
        self._holder = InterruptsHeld._outermost
        if self._holder is not None:
            self._holder._num_clean_ups += self._clean_up  # nested blocks count at the outermost one
        self._at_an_edge = False
        return self

    def deliver(self) -> None:
        """Let a held SIGINT through now; a loop inside the block calls this between its iterations."""
        if self._held:
            self._let_one_through(*self._held[0])

    def __exit__(self, *_: object) -> None:
        if self._holder is not None:
            self._holder._num_clean_ups -= self._clean_up
        if self._handler is None:
            return
        self._at_an_edge = True
        InterruptsHeld._outermost = None
        _signal.signal(signal.SIGINT, self._handler)
        if self._held and not self._let_through:
            self._handler(*self._held[0])

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._held.append((number, frame))
        # An inner block that is just being entered or left counts as an edge, too.
        edges = (InterruptsHeld.__enter__.__code__, InterruptsHeld.__exit__.__code__)
        at_an_edge = self._at_an_edge or (frame is not None and frame.f_code in edges)
        if len(self._held) > 1 and not (self._let_through or self._num_clean_ups or at_an_edge):
            self._let_one_through(number, frame)

    def _let_one_through(self, number: int, frame: FrameType | None) -> None:
        """Call the handler. If it does not raise, the held signals are dealt with, and the block
        goes on.
        """
        assert self._handler is not None
        self._let_through = True
        self._handler(number, frame)
        self._let_through = False
        self._held.clear()

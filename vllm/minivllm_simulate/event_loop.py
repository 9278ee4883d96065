"""The event loop behind all simulations: a clock that jumps from one event to the next.

    loop = EventLoop()
    loop.at(2.5, lambda: print("a request arrives"))
    loop.advance(loop.next_time)

A simulation of one engine has arrivals as its events, and moves the clock by the seconds of each
step (`virtual_clock`, `open_load`). A simulation of several engines also has the end of each step
as an event (`minivllm_lab.disaggregation.pools`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Generator
from itertools import count

PAUSE = 1_500
"""Requests times stretches between two pauses: a few milliseconds of work."""


class EventLoop:
    """Events in the order of their times; simultaneous events keep the order in which they were
    added.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()

    @property
    def next_time(self) -> float:
        """The time of the next event; inf if there is none."""
        return self._events[0][0] if self._events else math.inf

    def at(self, when: float, act: Callable[[], object], rank: int | None = None) -> None:
        """Call `act` at this time. Unique ranks order simultaneous events; use them for all events
        or none.
        """
        heapq.heappush(self._events, (when, next(self._order) if rank is None else rank, act))

    def advance(self, to: float) -> None:
        """Move the clock to this time, unless it is already past it, and run all events that are
        due by then.
        """
        self.now = max(self.now, to)
        while self.next_time <= self.now:
            _, _, act = heapq.heappop(self._events)
            act()


def with_pauses(step: Callable[[], int], unfinished: Callable[[], object]) -> Generator[None, None, None]:
    """Call `step` until nothing is unfinished; pause whenever the amounts of work that it returns
    add up to PAUSE.
    """
    work = 0
    while unfinished():
        work += step()
        if work > PAUSE:
            work = 0
            yield

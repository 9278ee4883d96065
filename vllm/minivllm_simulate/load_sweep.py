"""A sweep over the load: runs that can be interrupted and resumed, their results, and where a
system breaks.

Widgets of several lessons use it. A run is a generator that pauses every few milliseconds of work,
so that a page stays responsive while its reader drags the load.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Found = TypeVar("Found")
Span = tuple[float | None, float | None]
"""A range of an axis; None: from or to its end."""


class Runs(Generic[Key, Found]):
    """Runs by key. `found` holds the results; an interrupted run resumes where it paused."""

    def __init__(self, start: Callable[[Key], Generator[None, None, Found]]) -> None:
        """Take `start(key)`, which begins a run: a generator that pauses with `yield` and returns
        its result.
        """
        self._start = start
        self._under_way: dict[Key, Generator[None, None, Found]] = {}
        self.found: dict[Key, Found] = {}

    def run(self, key: Key) -> Iterator[None]:
        """Do a run unless it is done, and pause where it does. A failed run starts over the next
        time.
        """
        while key not in self.found:  # another caller may end it during a pause
            under_way = self._under_way.get(key) or self._under_way.setdefault(key, self._start(key))
            try:
                next(under_way)
            except StopIteration as end:
                self.found[key] = end.value
                del self._under_way[key]
                return
            except BaseException:
                del self._under_way[key]
                raise
            yield


def within(ordered: Sequence[float], share: float) -> float:
    """Return the smallest of the `ordered` values that this share of them does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def share_within(ordered: Sequence[float], limit: float) -> float:
    """Return the share of `ordered` values that are at most `limit`."""
    return bisect_right(ordered, limit) / len(ordered)


def crossing(loads: Sequence[float], values: Sequence[float], limit: float, *, log: bool = False) -> float:
    """Return the load above which `values` stay above `limit`, or inf if they do not.

    It is interpolated between two loads, along the logarithm of the values (and of the loads, with
    `log`). If all values are above the limit, it is the first load. A higher limit never gives a
    lower load.
    """
    if not loads or values[-1] <= limit:
        return math.inf
    for (low, before), (high, after) in reversed(list(pairwise(zip(loads, values, strict=True)))):
        if before <= limit:
            share = math.log(limit / before) / math.log(after / before)
            return low * (high / low) ** share if log else low + (high - low) * share
    return loads[0]


def spans(xs: Sequence[float], ratios: Sequence[float]) -> list[Span]:
    """Return where a curve is above 1; between two points it is a line in the logarithms of both
    coordinates.

    Returns:
        Pairs of ends; None where it is above 1 at the first or at the last value.
    """
    if not xs:
        return []
    above_one: list[Span] = []
    low, above = None, ratios[0] > 1
    for (x, before), (next_x, after) in pairwise(zip(xs, ratios, strict=True)):
        if (after > 1) == above:
            continue
        edge = x * (next_x / x) ** (math.log(max(before, 1e-9)) / math.log(max(before, 1e-9) / max(after, 1e-9)))
        if above:
            above_one.append((low, edge))
        low, above = edge, not above
    return [*above_one, (low, None)] if above else above_one

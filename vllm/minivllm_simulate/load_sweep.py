"""A swept load: runs that can be interrupted and resumed, their results, and where a system breaks.

The widgets of several lessons use it. A run is a generator that pauses every few milliseconds of
work, so that a page stays responsive while its reader drags the load.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Generic, TypeVar

from minivllm.errors import MinivllmError

Key = TypeVar("Key", bound=Hashable)
Found = TypeVar("Found")
Span = tuple[float | None, float | None]
"""A range of an axis; None: from or to its end."""


class Runs(Generic[Key, Found]):
    """Runs by their key. `found` has the results; an interrupted run goes on where it paused."""

    def __init__(self, start: Callable[[Key], Generator[None, None, Found]]) -> None:
        """`start(key)` begins a run: it pauses with `yield`, and returns its result."""
        self._start = start
        self._under_way: dict[Key, Generator[None, None, Found]] = {}
        self.found: dict[Key, Found] = {}

    def run(self, key: Key) -> Iterator[None]:
        """Do a run, unless it is done, and pause where it does. A failed run begins again the
        next time.
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
    """Return the least of `ordered` values that this share of them does not exceed.

    Raises:
        MinivllmError: there are no values.
    """
    if not ordered:
        raise MinivllmError("a share needs at least one value")
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def share_within(ordered: Sequence[float], limit: float) -> float:
    """Return the share of `ordered` values that are at most `limit`."""
    return bisect_right(ordered, limit) / len(ordered)


def crossing(loads: Sequence[float], values: Sequence[float], limit: float, *, log: bool = False) -> float:
    """Return the load from which on `values` stay above `limit`; inf if they do not.

    It lies on the line between two loads, along the logarithm of the values (and of the loads, with
    `log`). Where all values are above, it is the first load. A higher limit never gives a lower
    load.
    """
    if not loads or values[-1] <= limit:
        return math.inf
    for (low, before), (high, after) in reversed(list(pairwise(zip(loads, values, strict=True)))):
        if before <= limit:
            share = math.log(limit / before) / math.log(after / before)
            return low * (high / low) ** share if log else low + (high - low) * share
    return loads[0]


def spans(xs: Sequence[float], ratios: Sequence[float]) -> list[Span]:
    """Return where a curve lies above 1. Between two values it is a line, along the logarithms of
    both.

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

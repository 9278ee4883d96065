"""Sweep one knob over simulated engines: first the reader's value, then the edge where they break,
by bisection, then the other values, nearest first.

Where the reader's code replaces a part, the unchanged engine is run, too, but only at the reader's
value.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Generic, Protocol, TypeVar

from minivllm_lab.checks.bounded import bounded
from minivllm_simulate.levers import KNOWN_ERROR
from minivllm_simulate.load_sweep import Runs, Span
from widgets.shell.advice import Rule
from widgets.shell.spec import Verdict

PATIENCE = 2.0
"""CPU seconds that the reader's code may take between two pauses of a run."""
Point = TypeVar("Point")
Result = TypeVar("Result")


class Experiment(Protocol[Point]):
    """The runs of one setting at any value of the swept knob."""

    runs: Runs[int, Point]

    def refusal(self, value: int, /) -> str | None:
        """Explain why the engine does not start with this value, or return None or ""."""
        ...


@dataclass(frozen=True, kw_only=True)
class SweptState(ABC, Generic[Point]):
    """The results of one engine at every value of the knob that has been run so far."""

    KNOB: ClassVar[str]
    VALUES: ClassVar[tuple[int, ...]]
    """All values of the knob."""

    points: Mapping[int, Point]
    refusals: Mapping[int, str]
    """Why the engine does not start, for the values where it does not."""
    own: bool
    """Whether the reader's code runs in place of a part."""
    twin: Point | None
    """The unchanged engine's result at the reader's value, where the reader's code runs."""
    error: str
    """The cost model's error on published measurements."""

    @property
    def at(self) -> int:
        """Return the knob's value."""
        return getattr(self, self.KNOB)

    @property
    def here(self) -> Point:
        """Return the result at the knob's value."""
        return self.points[self.at]

    @property
    def refused(self) -> bool:
        """Return whether the engine refuses to start at the knob's value."""
        return self.at in self.refusals

    @property
    def known(self) -> bool:
        """Return whether the outcome at the knob's value is known."""
        return self.refused or (self.at in self.points and (self.twin is not None or not self.own))

    @property
    def complete(self) -> bool:
        """Return whether the outcome at every value is known."""
        return self.known and all(value in self.points or value in self.refusals for value in self.VALUES)

    @property
    def like_the_engine(self) -> bool:
        """Return whether the reader's code and the engine gave the same result at the knob's
        value.
        """
        return self.twin is None or self.twin == self.here

    @property
    def run(self) -> list[int]:
        """Return the values that have been run."""
        return sorted(self.points)

    @abstractmethod
    def causes(self, value: int) -> list[str]:
        """Return what is wrong at a value that has been run; "queue" means that the queue grows."""

    def nearest(self, span: Span) -> int | None:
        """Return the knob's value if it has been run and is inside a region, or else the run value at the region's
        edge, if there is one.
        """
        low, high = span
        inside = [value for value in self.run if (low or 0) <= value < (high or math.inf)]
        return self.at if self.at in inside else max(inside, default=None, key=lambda value: value if high else -value)

    def queue_at(self, edge: float | None) -> bool:
        """Return whether the queue grows at the largest value below this edge."""
        below = [value for value in self.run if value < (edge or 0)]
        return bool(below) and "queue" in self.causes(below[-1])

    @property
    @abstractmethod
    def stopped(self) -> list[Span]:
        """Return the values with which the engine does not start."""

    def within_start(self, regions: Sequence[Span]) -> list[Span]:
        """Limit open regions to the values with which the engine starts."""
        least = max((high for low, high in self.stopped if low is None and high), default=None)
        most = min((low for low, _ in self.stopped if low), default=None)
        return [(low or least, high or most) for low, high in regions]

    def not_served(self, where: str, unlike: str, figures: Callable[[Point], str]) -> Verdict | None:
        """Return a verdict if the engine has no result here yet or the reader's code gives a
        different one, else None.

        Args:
            where: The value: "with 8 slots".
            unlike: How the reader's code differs: "Your function picks different victims than the
                engine.".
            figures: Describes a result by the numbers that show the difference.
        """
        if self.refused:
            return Verdict(f"The engine does not start {where}: {self.refusals[self.at]}.", "broken")
        if not self.known:
            return Verdict(f"Still serving the requests {where}.", "tight")
        if self.like_the_engine:
            return None
        assert self.twin
        compared = f"Yours: {figures(self.here)}. The engine's: {figures(self.twin)}"
        return Verdict(f"{unlike} {compared}.", "broken")

    def outcome_rules(self, met: bool, advice: str, if_refused: str) -> list[Rule]:
        """Return a challenge's last rules: the engine starts, its requests are served, and the
        goal is met.
        """
        return [
            (self.refused, if_refused),
            (not self.known, "Wait: the requests are still being served."),
            (not met, advice),
        ]


def patient(run: Generator[None, None, Result], whose: str) -> Generator[None, None, Result]:
    """Run the reader's code, called `whose`, and stop it if it does not return.

    Raises:
        MinivllmError: The code took longer than PATIENCE between two pauses.
    """
    while True:
        try:
            with bounded(PATIENCE, whose):
                next(run)
        except StopIteration as end:
            return end.value
        yield


AnyState = TypeVar("AnyState", bound=SweptState)


@dataclass(frozen=True)
class Sweep(Generic[AnyState]):
    """A sweep over the knob: `runs` has the reader's code, if there is any, and `twin` does not."""

    make: Callable[..., AnyState]
    """Called as `make(allowed, **known)`, with the values that let the engine start, and the
    fields of `SweptState`.
    """
    runs: Experiment
    twin: Experiment | None
    at: int
    values: Sequence[int]

    def states(self) -> Iterator[AnyState]:
        """Yield more and more complete states."""
        state = self._now()
        yield state
        for run in self._pending_runs():
            for _ in run:
                yield state
            if not state.complete:
                state = self._now()
                yield state

    def _pending_runs(self) -> Iterator[Iterator[None]]:
        while (value := self._next()) is not None:
            yield self.runs.runs.run(value)
            if self.twin and value == self.at:
                yield self.twin.runs.run(value)

    def _next(self) -> int | None:
        """Return the value to run next, or None if all are known: the reader's, then both ends, then
        the middle between two values of which one breaks, and at last the nearest.
        """
        state = self._now()
        left = [value for value in sorted({*self.values, self.at}) if value not in state.refusals]
        left = [value for value in left if value not in self.runs.runs.found]
        if self.at in left or not left:
            return self.at if left else None
        for low, high in pairwise(state.run):
            inside = [value for value in left if low < value < high]
            if inside and bool(state.causes(low)) != bool(state.causes(high)):
                return inside[len(inside) // 2]
        outside = [end for end in (left[-1], left[0]) if not state.run or not state.run[0] < end < state.run[-1]]
        return next(iter(outside), min(left, key=lambda other: abs(math.log(other / self.at))))

    def _now(self) -> AnyState:
        refusals = {value: why for value in sorted({*self.values, self.at}) if (why := self.runs.refusal(value))}
        allowed = [value for value in self.values if value not in refusals]
        points = self.runs.runs.found
        known = {
            "points": {value: points[value] for value in allowed if value in points},
            "refusals": refusals,
            "own": self.twin is not None,
            "twin": self.twin.runs.found.get(self.at) if self.twin else None,
            "error": KNOWN_ERROR,
        }
        return self.make(allowed, **known)

"""One knob swept over engines that are run: what is known of its values so far, and in which order the rest is run.

The value where the reader stands comes first, then the others, the nearest before. Where the reader's own code takes a
part's place, the engine as it is runs beside it, at that one value.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from minivllm_lab.bounded import bounded
from minivllm_simulate.lever_checks import known_error, published_checks
from minivllm_simulate.load_sweep import Runs
from widgets.shell.spec import Verdict

PATIENCE = 2.0
"""Seconds of the processor's time that a run may take between two pauses with the reader's own code."""
Point = TypeVar("Point")
Found = TypeVar("Found")


class Experiment(Protocol[Point]):
    """One setting at all values of the knob."""

    runs: Runs[int, Point]

    def refusal(self, value: int, /) -> str | None:
        """Why the engine does not start with this value; nothing where it does."""
        ...


@dataclass(frozen=True, kw_only=True)
class SweptState(ABC, Generic[Point]):
    """One engine at every value of the knob that has been run so far."""

    PLACES: ClassVar[tuple[int, ...]]
    """The values of the knob."""

    points: Mapping[int, Point]
    refusals: Mapping[int, str]
    """Why it does not start; only where it does not."""
    own: bool
    """Whether the reader's code decides."""
    twin: Point | None
    """What the engine's own does at this value, where the reader's decides."""
    error: str | None
    """How far the cost model is off on published measurements; None until it has been asked for."""

    @property
    @abstractmethod
    def at(self) -> int:
        """The value at which the reader stands."""

    @property
    def here(self) -> Point:
        """What became of the requests there."""
        return self.points[self.at]

    @property
    def refused(self) -> bool:
        """Whether the engine does not start there."""
        return self.at in self.refusals

    @property
    def known(self) -> bool:
        """Whether it is known what becomes of the requests there."""
        return self.refused or (self.at in self.points and (self.twin is not None or not self.own))

    @property
    def complete(self) -> bool:
        """Whether every value is known."""
        return self.known and all(one in self.points or one in self.refusals for one in self.PLACES)

    @property
    def like_the_engine(self) -> bool:
        """Whether the reader's code does what the engine's own does, as far as this value shows."""
        return self.twin is None or self.twin == self.here

    @property
    def run(self) -> list[int]:
        """Values that have been run."""
        return sorted(self.points)

    def not_served(self, where: str, unlike: str, figures: Callable[[Point], str]) -> Verdict | None:
        """The verdict where the engine as it is serves nobody yet at this value; nothing where it does.

        Args:
            where: the value: "with 8 slots".
            unlike: what the reader's code does otherwise than the engine: "Your function takes other victims".
            figures: of a point, in words: what shows that it does.
        """
        if self.refused:
            return Verdict(f"The engine does not start {where}: {self.refusals[self.at]}.", "broken")
        if not self.known:
            return Verdict(f"Requests are being served {where}.", "tight")
        if self.like_the_engine:
            return None
        assert self.twin
        compared = f"Yours: {figures(self.here)}. The engine's: {figures(self.twin)}"
        return Verdict(f"{unlike} than the engine. {compared}.", "broken")


def patient(run: Generator[None, None, Found], whose: str) -> Generator[None, None, Found]:
    """A run that stops where the reader's code, called `whose`, does not return.

    Raises:
        MinivllmError: between two pauses it took longer than PATIENCE.
    """
    while True:
        try:
            with bounded(PATIENCE, whose):
                next(run)
        except StopIteration as end:
            return end.value
        yield


AnyState = TypeVar("AnyState", bound=SweptState)


class Sweep(ABC, Generic[AnyState]):
    """A sweep under way: `runs` with the reader's code, if there is any, and then `twin` without it."""

    def __init__(self, runs: Experiment, twin: Experiment | None, at: int, places: Sequence[int]) -> None:
        self.runs, self.twin, self.at = runs, twin, at
        self.places = sorted({*places, at})

    @abstractmethod
    def state(self, allowed: Sequence[int], known: Mapping[str, Any]) -> AnyState:
        """What is known now: `known` are the fields of `SweptState`; with `allowed` values the engine starts."""

    def states(self) -> Iterator[AnyState]:
        """Ever more complete states."""
        state = self._now()
        yield state
        for wanted in self._wanted():
            for _ in wanted:
                yield state
            if not state.complete:
                state = self._now()
                yield state

    def _wanted(self) -> Iterator[Iterator[None]]:
        """Runs that are still to be done, one after another."""
        for other in sorted(self.places, key=lambda other: abs(math.log(other / self.at))):
            if not self.runs.refusal(other):
                yield self.runs.runs.run(other)
                if self.twin and other == self.at:
                    yield self.twin.runs.run(other)
            known_error("decode", "prefill")

    def _now(self) -> AnyState:
        refusals = {one: why for one in self.places if (why := self.runs.refusal(one))}
        allowed = [one for one in self.places if one not in refusals]
        found = self.runs.runs.found
        known = {
            "points": {one: found[one] for one in allowed if one in found},
            "refusals": refusals,
            "own": self.twin is not None,
            "twin": self.twin.runs.found.get(self.at) if self.twin else None,
            "error": known_error("decode", "prefill") if published_checks.cache_info().currsize else None,
        }
        return self.state(allowed, known)

"""Compute each policy's curve over the load, and the state of lesson 04's widget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from minivllm_lab.continuous_batching.learner_policy import Schedule
from minivllm_simulate.workloads import workload
from widgets.continuous_batching.runs import POLICIES, SATURATED, Experiment, Point, Stretch, experiment

LOADS = tuple(round(0.1 * tenths, 1) for tenths in range(1, 16))
SERVICE = 0.95
"""The share of requests that must have their first token in time."""
START = {"load": 0.7, "seats": 8, "limit": 0.5, "spread": 1.0, "burstiness": 1.0, "file": ""}


@dataclass(frozen=True)
class Curve:
    """The results of one policy at every load that has been run so far."""

    name: str
    """"static", "continuous" or "yours"."""
    points: dict[float, Point]
    ceiling: float | None
    """The highest load that its full batches can sustain; None until they have been run."""
    stretch: Stretch
    """The drawn seconds at the reader's load."""
    limit: float

    @property
    def loads(self) -> list[float]:
        """Return the loads that have been run."""
        return sorted(self.points)

    def ttfts(self, share: float) -> list[float]:
        """Return, for each load, the seconds within which this share of the requests has its first
        token.
        """
        return [self.points[load].ttft(share) for load in self.loads]

    def queue_grows(self, load: float) -> bool:
        """Return whether requests arrive faster than the policy can serve them."""
        return self.ceiling is not None and load >= self.ceiling

    def late(self, load: float) -> bool:
        """Return whether the limit is missed at a load that has been run."""
        return self.points[load].goodput(self.limit) < SERVICE

    def broken(self, load: float) -> bool:
        """Return whether the queue keeps growing, or the limit is missed."""
        return self.queue_grows(load) or self.late(load)


@dataclass(frozen=True)
class State:
    """Both policies' results for the same arrivals, as far as they have been run."""

    load: float
    seats: int
    limit: float
    """Seconds within which 95 % of the requests must have their first token."""
    burstiness: float
    curves: tuple[Curve, Curve]
    start: float
    """When a static batch begins that is as full as any: from here on, the seats are drawn."""
    window: float
    """Seconds that are drawn seat by seat."""
    rate: float
    """Requests per second."""
    formula: float
    """The share of its seats that static batching uses: mean length / mean longest of a batch."""
    spread: float
    """The lengths' spread, from the knob or counted in a file."""
    note: str
    """How lengths from a file were changed."""

    @property
    def known(self) -> bool:
        """Return whether both policies have been run at this load and their ceilings are known."""
        return all(curve.ceiling is not None and self.load in curve.points for curve in self.curves)

    @property
    def complete(self) -> bool:
        """Return whether every run is done."""
        return self.known and all(set(LOADS) <= set(curve.points) for curve in self.curves)


def sweep(
    load: float = START["load"],
    seats: int = START["seats"],
    limit: float = START["limit"],
    spread: float = START["spread"],
    burstiness: float = START["burstiness"],
    file: str = START["file"],
    schedule: Schedule | None = None,
) -> Iterator[State]:
    """Serve 400 requests at each load from 0.1 to 1.5 under both policies, and yield more and more
    complete states.

    Args:
        load: Arrivals as a share of what seats that are never empty could serve, at the handle.
        seats: Requests that may run at once.
        limit: Seconds within which 95 % of the requests must have their first token.
        spread: Standard deviation of output lengths over their mean; 0 is all equal, 1 exponential.
        burstiness: 1 makes the arrivals a Poisson process; less means bursts.
        file: A workload's name or the path of a file with lengths, which then replace those of
            `spread`.
        schedule: The reader's function of exercise 04, in place of continuous batching.

    Raises:
        MinivllmError: No workload has this name, or the file has no lengths.
    """
    work = workload(file.strip()) if file.strip() else None
    by_policy = {  # the reader's schedule replaces continuous batching only
        policy: experiment(seats, spread, burstiness, work, None if policy == "static" else schedule)
        for policy in POLICIES
    }
    return _states(by_policy, load, limit, burstiness, spread)


def _states(
    by_policy: dict[str, Experiment], load: float, limit: float, burstiness: float, spread: float
) -> Iterator[State]:
    runs = by_policy["continuous"]
    start = by_policy["static"].full_batch(load)
    stretches = [own.stretch(policy, load, start) for policy, own in by_policy.items()]
    names = ("static", "yours" if runs.schedule else "continuous")

    def now() -> State:
        curves = [
            Curve(name, own.at_loads(policy, (*LOADS, load)), own.ceiling(policy), stretch, limit)
            for (policy, own), name, stretch in zip(by_policy.items(), names, stretches, strict=True)
        ]
        return State(
            load=load,
            seats=runs.seats,
            limit=limit,
            burstiness=burstiness,
            curves=(curves[0], curves[1]),
            start=start,
            window=runs.window,
            rate=runs.rate(load),
            formula=runs.formula,
            spread=runs.spread if runs.note else spread,
            note=runs.note,
        )

    state = now()
    yield state
    for other in (load, SATURATED, *sorted(LOADS, key=lambda value: abs(value - load))):
        for policy, own in by_policy.items():
            for _ in own.run(policy, other):
                yield state
        if not state.complete:
            state = now()
            yield state


def share(value: float) -> str:
    """Format a share in whole percent, except where rounding would hide a missed goal."""
    whole = round(value * 100)
    return f"{value * 100:.5g} %" if whole in (round(SERVICE * 100), 100) else f"{whole} %"


def title(curve: Curve) -> str:
    """Return the policy's name in words."""
    return "your schedule" if curve.name == "yours" else f"{curve.name} batching"

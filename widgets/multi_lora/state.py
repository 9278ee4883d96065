"""Compute the state of lesson 12's widget: waiting times by number of slots, and where they are too
long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm_lab.multi_lora.costs import distinct_adapters
from minivllm_lab.multi_lora.learner_policy import Admit
from minivllm_simulate.cost_model import StepShape
from minivllm_simulate.load_sweep import Span, spans, within
from widgets.multi_lora.runs import ANSWER, PROMPT, Own, Point, Serving, Slots, experiment
from widgets.shell.swept import Sweep, SweptState

MODELS = ("Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B", "Qwen3-14B")
GPUS = ("L4", "A100-80", "H100", "H200", "B200", "MI300X")
SLOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1000)
ADAPTERS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
SKEWS = (0.0, 0.5, 0.8, 1.0, 1.2, 1.5, 2.0)
RANKS = (8, 16, 32, 64, 128, 256)
LOADS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 40.0, 60.0)
"""Requests a second."""
TTFTS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
CLIENTS = 0.9
"""The share of the clients that must have their first token in time."""
START = {
    "slots": 8, "max_rank": 16, "adapters": 1000, "skew": 1.0, "rank": 16, "load": 20.0, "ttft": 0.2,
    "model": "Llama-3.1-8B", "gpu": "H100",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class State(SweptState[Point]):
    """The results of one engine with every number of slots that has been run so far."""

    KNOB = "slots"
    VALUES = SLOTS
    slots: int
    ttft: float
    """Seconds within which nine of ten requests must have their first token."""
    serving: Serving
    long_wait: Mapping[int, float]
    """Seconds within which nine of ten requests have a slot if the load goes on, which a run is
    too short to show.
    """

    def first(self, slots: int) -> float:
        """Return the seconds within which nine in ten requests have their first token."""
        return within(self.points[slots].ttfts, CLIENTS)

    def in_the_end(self, slots: int) -> float:
        """Return the same time if the load continues: a growing queue gets longer than the run
        shows.
        """
        return max(self.first(slots), self.long_wait[slots])

    def cause(self, slots: int) -> str:
        """Return what is wrong with this many slots: "slots" (requests wait for one), "cache",
        "engine" or "".
        """
        point = self.points[slots]
        if self.first(slots) <= self.ttft:
            if self.long_wait[slots] > self.ttft:
                return "slots"
            return "engine" if self.serving.load > self.serving.capacity else ""
        if point.held > point.waiting / 2:
            return "slots"
        return "cache" if point.cache_used > 0.8 else "engine"

    @property
    def late(self) -> list[Span]:
        """Return the numbers of slots with which first tokens come too late, in the run or in the
        long run.
        """
        load = self.serving.load / self.serving.capacity if self.run else 0.0
        return self.within_start(spans(self.run, [max(self.in_the_end(slots) / self.ttft, load) for slots in self.run]))

    def causes(self, value: int) -> list[str]:
        return [cause] if (cause := self.cause(value)) else []

    @property
    def stopped(self) -> list[Span]:
        """Return the numbers of slots with which the engine does not start: all from some number
        up, or all.
        """
        refused = [slots for slots in SLOTS if slots in self.refusals]
        if not refused:
            return []
        return [(None if refused[0] == SLOTS[0] else min(float(refused[0]), self.serving.most_slots), None)]

    @property
    def wanted(self) -> float:
        """Return how many adapters would be in use at once if no request waited for a slot; see
        `distinct_adapters`.
        """
        return distinct_adapters(self.serving.shares, self.serving.at_once)

    @property
    def missing(self) -> int:
        """Return how many more slots would be enough, or 0 if these are or none are."""
        edges = [high for low, high in self.late if low is None and high and self.slots < high < self.run[-1]]
        return math.ceil(edges[0]) - self.slots if edges else 0

    @property
    def batch(self) -> int:
        """Return the number of requests in a mean step if none waited."""
        return max(1, round(self.serving.at_once))

    @property
    def applied(self) -> int:
        """Return the number of adapters in a mean step, at least one."""
        point = self.points.get(self.slots)
        return max(1, min(round(point.distinct if point else min(self.slots, self.wanted)), self.batch))

    @property
    def step_seconds(self) -> tuple[float, float, float]:
        """Return the modelled times of a decode step without adapters, with all of them in one kernel, and with
        one after the other.
        """
        cost, shape = self.serving.cost, StepShape.of([(1, PROMPT + ANSWER // 2)] * self.batch)
        return cost.base.seconds(shape), cost.seconds(shape, self.applied), cost.loop_seconds(shape, self.applied)


def sweep(
    slots: int = START["slots"],
    max_rank: int = START["max_rank"],
    adapters: int = START["adapters"],
    skew: float = START["skew"],
    rank: int = START["rank"],
    load: float = START["load"],
    ttft: float = START["ttft"],
    model: str = START["model"],
    gpu: str = START["gpu"],
    table: Callable[[int], Slots] | None = None,
    admit: Admit | None = None,
) -> Iterator[State]:
    """Serve requests for many adapters with 1 to 1,000 slots, and yield more and more complete
    states.

    Args:
        slots: max_loras, at the handle.
        max_rank: max_lora_rank, how wide a slot is.
        adapters: How many adapters there are.
        skew: Zipf's exponent; 0 uses all adapters equally often.
        rank: The rank of every adapter.
        load: Requests a second.
        ttft: Seconds within which nine of ten requests must have their first token.
        model, gpu: Names in `known_models` and `hardware`.
        table, admit: The reader's parts of exercise 12.

    Raises:
        MinivllmError: The reader's parts return something impossible.
    """
    own: Own = (table, admit)
    setting = model, gpu, adapters, float(skew), rank, max_rank, float(load)
    runs = experiment(*setting, own if any(own) else None)
    twin = experiment(*setting) if any(own) else None

    def make(_allowed: Sequence[int], **known: Any) -> State:
        long_wait = {count: runs.long_wait(count, CLIENTS) for count in known["points"]}
        return State(slots=slots, ttft=ttft, serving=runs.serving, long_wait=long_wait, **known)

    return Sweep(make, runs, twin, slots, SLOTS).states()

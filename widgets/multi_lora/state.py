"""The state of lesson 12's widget: what requests for many adapters wait for over the slots, and where that breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.config.checks import require
from minivllm.memory import weight_bytes
from minivllm_lab.multi_lora.costs import distinct_adapters
from minivllm_lab.multi_lora.learner_policy import Admit
from minivllm_simulate.cost_model import StepShape
from minivllm_simulate.load_sweep import Span, spans, within
from widgets.multi_lora.runs import ANSWER, PROMPT, Experiment, Own, Point, Serving, Slots, experiment
from widgets.shell.spec import require_numbers
from widgets.shell.swept import Sweep, SweptState

MODELS = ("Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B", "Qwen3-14B")
GPUS = ("L4", "A100-80", "H100", "H200", "B200", "MI300X")
SLOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
ADAPTERS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
SKEWS = (0.0, 0.5, 0.8, 1.0, 1.2, 1.5, 2.0)
RANKS = (8, 16, 32, 64, 128, 256)
LOADS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 40.0, 60.0)
"""Requests a second."""
TTFTS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
CLIENTS = 0.9
"""Share of the clients that must have their first token in time."""
MOST = {
    "slots": 512, "adapters": 4000, "skew": 4.0, "rank": 512, "max_rank": 512, "load": 1e3, "ttft": 1e3,
}  # fmt: skip
START = {
    "slots": 8, "max_rank": 16, "adapters": 1000, "skew": 1.0, "rank": 16, "load": 20.0, "ttft": 0.2,
    "model": "Llama-3.1-8B", "gpu": "H100",
}  # fmt: skip
WAYS = ("together", "loop", "merged")


@dataclass(frozen=True, kw_only=True)
class State(SweptState[Point]):
    """One engine at every number of slots that has been run so far."""

    PLACES = SLOTS
    slots: int
    ttft: float
    """Seconds within which nine of ten requests must have their first token."""
    serving: Serving
    long_wait: Mapping[int, float]
    """Seconds that nine of ten requests wait for a slot at most if the load goes on: a run is too short to show it."""

    @property
    def at(self) -> int:
        """The number of slots."""
        return self.slots

    def first(self, slots: int) -> float:
        """Seconds within which nine of ten requests have their first token."""
        return within(self.points[slots].ttfts, CLIENTS)

    def in_the_end(self, slots: int) -> float:
        """The same if the load goes on: a queue that grows for long is longer than the run shows."""
        return max(self.first(slots), self.long_wait[slots])

    def cause(self, slots: int) -> str:
        """What is wrong with so many slots: "slots" (the queue waits for them), "cache", "engine"; or nothing."""
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
        """Where first tokens come too late, in the run or in the long run."""
        load = self.serving.load / self.serving.capacity if self.run else 0.0
        found = spans(self.run, [max(self.in_the_end(one) / self.ttft, load) for one in self.run])
        most = max(self.run, default=0)
        end = self.stopped[0][0] if self.stopped and most else None
        return [(low, high or end) for low, high in found]

    @property
    def stopped(self) -> list[Span]:
        """Where the engine does not start: from some number of slots on, or with any."""
        wrong = [one for one in SLOTS if one in self.refusals]
        if not wrong:
            return []
        return [(None if wrong[0] == SLOTS[0] else float(wrong[0]), None)]

    @property
    def wanted(self) -> float:
        """Adapters at once if nobody waited for a slot, by closed form: see `distinct_adapters`."""
        return distinct_adapters(self.serving.shares, self.serving.at_once)

    @property
    def batch(self) -> int:
        """Requests of the mean step if nobody waited: for the comparison with a loop and with merged copies."""
        return max(1, round(self.serving.at_once))

    @property
    def distinct(self) -> float:
        """Adapters of the mean step here."""
        point = self.points.get(self.slots)
        return point.distinct if point else min(self.slots, self.wanted)

    def rate(self, way: str, distinct: int) -> float:
        """Tokens a second of a decode step with so many adapters in it: one of `WAYS`, modelled."""
        cost = self.serving.cost
        shape = StepShape.of([(1, PROMPT + ANSWER // 2)] * self.batch)
        if way == "together":
            return self.batch / cost.seconds(shape, distinct)
        return self.batch / (cost.loop_seconds if way == "loop" else cost.merged_seconds)(shape, distinct)

    @property
    def merged_bytes(self) -> int:
        """Of a merged copy of the model for each adapter."""
        return self.serving.adapters * weight_bytes(self.serving.model)


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
    """Serve requests for many adapters with 1 to 256 slots; each state knows more of the curves.

    Args:
        slots: max_loras: where the reader stands.
        max_rank: max_lora_rank: how wide a slot is.
        adapters: how many there are.
        skew: Zipf's exponent; 0: all are asked for alike.
        rank: of every adapter.
        load: requests a second.
        ttft: seconds within which nine of ten must have their first token.
        model, gpu: names of `known_models` and `hardware`.
        table, admit: the reader's own, as in exercise 12.

    Raises:
        MinivllmError: a value makes no sense, or the reader's parts give what cannot be carried out.
    """
    require_numbers(MOST, slots=slots, max_rank=max_rank, adapters=adapters, skew=skew, rank=rank, load=load, ttft=ttft)
    require(
        min(slots, max_rank, adapters, rank) >= 1 and min(load, ttft) > 0 and skew >= 0,
        f"slots, max_rank, adapters and rank are 1 or more, load and ttft above 0, skew 0 or more; slots is {slots}, "
        f"max_rank {max_rank}, adapters {adapters}, rank {rank}, load {load}, ttft {ttft}, skew {skew}",
    )
    for name, value, allowed in (("model", model, MODELS), ("gpu", gpu, GPUS)):
        require(isinstance(value, str) and value in allowed, f"{name} is one of {', '.join(allowed)}, not {value!r}")
    own: Own = (table, admit)
    setting = model, gpu, adapters, float(skew), rank, max_rank, float(load)
    runs = experiment(*setting, own if any(own) else None)
    return _Sweep(runs, experiment(*setting) if any(own) else None, slots, ttft).states()


class _Sweep(Sweep[State]):
    def __init__(self, runs: Experiment, twin: Experiment | None, slots: int, ttft: float) -> None:
        super().__init__(runs, twin, slots, SLOTS)
        self.engine, self.ttft = runs, ttft

    def state(self, allowed: Sequence[int], known: Mapping[str, Any]) -> State:
        """See `Sweep`."""
        long_wait = {one: self.engine.long_wait(one, CLIENTS) for one in known["points"]}
        return State(slots=self.at, ttft=self.ttft, serving=self.engine.serving, long_wait=long_wait, **known)

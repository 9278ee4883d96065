"""Compute the state of lesson 08's widget: requests in time by rate, with two pools and with GPUs
that do both.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

from minivllm_lab.disaggregation.goodput import BOUND_BY, SHARE, Colocated, Disaggregated, Objective, Served, Work
from minivllm_lab.disaggregation.tuning import likely_first
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.kv_links import get_link
from minivllm_simulate.load_sweep import Runs
from widgets.disaggregation.connector import CheckedConnector, ConnectorScheduler
from widgets.shell.swept import patient

MODELS = ("Llama-3.2-3B", "Llama-3.1-8B", "Llama-2-13b-hf", "Qwen3-14B", "Qwen3-32B")
GPUS = ("A100-80", "H100", "H200", "B200", "MI300X")
MOST_OF_A_KIND = 3
PROMPTS = (256, 512, 1024, 2048, 4096)
OUTPUTS = (16, 64, 128, 256)
BUDGETS = (256, 512, 1024, 2048, 8192)
TUNED = 0
"""Stands for the best budget of `LADDER`."""
LADDER = (128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 2048, 8192)
RATES = (2.0, 3.0, 4.0, 5.0, 7.0, 10.0, 14.0, 20.0, 28.0, 40.0, 56.0, 80.0, 112.0, 160.0, 224.0, 320.0, 450.0)
"""Requests a second, over all GPUs."""
COUNTED = 60
"""Requests that count in a run."""
START = {
    "rate": 56.0, "prefill": 2, "decode": 2, "link": "400 Gb/s", "layer_wise": False, "ttft": 0.2, "tpot": 0.0075,
    "budget": TUNED, "model": "Llama-3.1-8B", "gpu": "H100", "prompt": 1024, "output": 128,
}  # fmt: skip
LATE_IN = {"queue": "prefill", "prefill": "prefill", "link": "link"}
"""The part of two pools where it goes wrong; all other causes are in decode."""


@dataclass(frozen=True)
class Side:
    """The results of one way to use the GPUs, at every rate that has been run so far."""

    prefill: int
    """GPUs that prefill; 0 means that each GPU does both."""
    gpus: int
    points: Mapping[float, Served]
    objective: Objective
    bounds: Mapping[str, float]
    """The rate at which each part is always busy: "prefill", "link", "decode", or "both"."""
    budget: int = 0
    """Tokens per step, where each GPU does both."""

    @property
    def decode(self) -> int:
        """Return how many GPUs decode, or do both."""
        return self.gpus - self.prefill

    @property
    def name(self) -> str:
        """Return "prefill + decode" in numbers of GPUs, or how many GPUs do both."""
        return f"{self.prefill} + {self.decode}" if self.prefill else f"{self.gpus} that do both"

    @property
    def bound(self) -> float:
        """Return a rate that these GPUs cannot exceed for long."""
        return min(self.bounds.values())

    @property
    def weakest(self) -> str:
        """Return the part that breaks first, if any does."""
        return LATE_IN.get(self.cause, "decode") if self.prefill else "both"

    def most(self, part: str) -> float:
        """Return the highest rate that a part handles in time."""
        found = part == self.weakest and self.is_found and self.cause
        return min(self.bounds[part], self.goodput if found else math.inf)

    @cached_property
    def rates(self) -> list[float]:
        """Return the rates that have been run."""
        return sorted(self.points)

    @cached_property
    def _shares(self) -> dict[float, float]:
        return {rate: self.points[rate].attainment(self.objective) for rate in self.rates}

    def share(self, rate: float) -> float:
        """Return the share of the requests in time at a rate that has been run."""
        return self._shares[rate]

    def breaks(self, rate: float) -> bool:
        """Return whether too few requests are in time at a rate that has been run."""
        return self.share(rate) < SHARE or rate > self.bound

    @cached_property
    def edge(self) -> tuple[float, float]:
        """Return the highest rate that is handled and the next one that has been run; 0 and inf
        stand for none.
        """
        handled = [rate for rate in self.rates if not self.breaks(rate)]
        low = handled[-1] if handled else 0.0
        return low, next((rate for rate in self.rates if rate > low), math.inf)

    @property
    def is_found(self) -> bool:
        """Return whether the breaking point is known to lie between two neighbouring rates."""
        if not self.points:
            return False
        low, high = self.edge
        if low == 0:
            return self.rates[0] == RATES[0]
        return low >= RATES[-1] or high <= next(rate for rate in RATES if rate > low)

    def is_beaten(self, rate: float) -> bool:
        """Return whether these GPUs are known not to handle `rate`."""
        return self.bound < rate or any(self.breaks(lower) for lower in self.rates if lower <= rate)

    @property
    def goodput(self) -> float:
        """Return the requests per second that these GPUs handle, interpolated between the rates of
        `edge` and at most `bound`.
        """
        low, high = self.edge
        if not low:
            return 0.0
        if high == math.inf:
            return low
        before, after = self.share(low), self.share(high)
        if after >= SHARE:  # only the bound rules it out
            return min(max(self.bound, low), high)
        part = (before - SHARE) / (before - after)
        return min(low * (high / low) ** part, max(self.bound, low))

    @property
    def cause(self) -> str:
        """Return what breaks first: "tpot", "ttft", one of `pools.PARTS`, or ""."""
        high = self.edge[1]
        return "" if high == math.inf else self.cause_at(high)

    def cause_at(self, rate: float) -> str:
        """Return why requests are late at a rate that has been run, or will be late in the long
        run.
        """
        if self.share(rate) < SHARE:
            return self.points[rate].cause(self.objective)
        return BOUND_BY[min(self.bounds, key=self.bounds.__getitem__)]


@dataclass(frozen=True)
class Step:
    """A GPU's step: the requests that decode, a chunk's tokens, and the modelled seconds to launch it,
    to read the weights and to compute one token in the linear layers.
    """

    decodes: float
    chunk: float
    launch: float
    weights: float
    token: float

    @property
    def least(self) -> float:
        """Return the seconds of a step with a full chunk, but without its attention."""
        return self.launch + max(self.weights, (self.decodes + self.chunk) * self.token)


@dataclass(frozen=True)
class State:
    """Both ways to use the same GPUs, as far as they have been run."""

    rate: float
    model: str
    gpu: str
    link: str
    layer_wise: bool
    budget: int
    work: Work
    objective: Objective
    mine: Side
    both: Side
    """As many GPUs that do both; with `budget` TUNED, those with the best budget so far."""
    is_tuned: bool
    """Whether no other budget is better than that of `both`."""
    steps: tuple[Step, Step]
    """A step of a GPU that decodes, and of one that does both, at this rate."""

    @property
    def known(self) -> bool:
        """Return whether the outcome at this rate and the breaking points of both ways are known."""
        return self.rate in self.mine.points and self.mine.is_found and self.is_tuned

    @property
    def gain(self) -> float:
        """Return the goodput divided by that of GPUs that do both; inf if theirs is 0."""
        if not self.both.goodput:
            return math.inf if self.mine.goodput else 1.0
        return self.mine.goodput / self.both.goodput


class Experiment:
    """The runs of one way to use the GPUs, at any rate; results are kept, and an interrupted run
    can be resumed.
    """

    def __init__(self, system: Disaggregated | Colocated, work: Work) -> None:
        self.system = system
        self.work = work
        self.runs = Runs(self._run)
        self.prefill, self.budget = (system.prefill, 0) if isinstance(system, Disaggregated) else (0, system.budget)
        self._sides: dict[Objective, Side] = {}

    def _run(self, rate: float) -> Generator[None, None, Served]:
        if isinstance(self.system, Disaggregated) and self.system.connector:
            return patient(self.system.serve(self.work, rate), "your connector")
        return self.system.serve(self.work, rate)

    def step(self, rate: float) -> Step:
        """Return a step of one of the GPUs that decode, at this rate."""
        system, placed = self.system, self.system.placed
        batch = max(1.0, system.steady(self.work).batch(rate / (system.gpus - self.prefill)))
        cost, chunk = placed.cost.step, min(max(0.0, self.budget - batch), self.work.prompt)
        token = cost.roofline.arithmetic_seconds(cost.roofline.flops_per_token) / cost.matmul_rate
        return Step(batch, chunk, cost.roofline.step_overhead, cost.weight_seconds(round(batch + chunk)), token)

    def side(self, objective: Objective) -> Side:
        """Return the results so far."""
        last = self._sides.get(objective)
        searched = self.runs.found
        if last is None:
            last = Side(
                self.prefill, self.system.gpus, {}, objective, self.system.bounds(self.work, objective), self.budget
            )
        if len(last.points) < len(searched):
            last = replace(last, points=dict(searched))
        self._sides[objective] = last
        return last


@lru_cache(maxsize=512)
def experiment(key: tuple[Any, ...], work: Work) -> Experiment:
    """Return the experiment with this configuration; it keeps the results of earlier runs, and
    `key` identifies the system.
    """
    model, gpu, prefill, decode, *rest = key
    if prefill:
        link, layer_wise, *own = rest
        connector = partial(CheckedConnector, make=own[0]) if own else None
        system = Disaggregated(
            known_model(model), get_hardware(gpu), prefill, decode, get_link(link), layer_wise, connector=connector
        )
    else:
        system = Colocated(known_model(model), get_hardware(gpu), decode, rest[0])
    return Experiment(system, work)


def sweep(
    rate: float = START["rate"],
    prefill: int = START["prefill"],
    decode: int = START["decode"],
    link: str = START["link"],
    layer_wise: bool = START["layer_wise"],
    ttft: float = START["ttft"],
    tpot: float = START["tpot"],
    budget: int = START["budget"],
    model: str = START["model"],
    gpu: str = START["gpu"],
    prompt: int = START["prompt"],
    output: int = START["output"],
    connector: ConnectorScheduler | None = None,
) -> Iterator[State]:
    """Serve requests with two pools, and with the same number of GPUs that do both, and yield more
    and more complete states.

    Args:
        rate: Requests per second over all GPUs, at the handle.
        prefill, decode: The numbers of GPUs that prefill and that decode.
        link: Each GPU's link, one of `kv_links.LINKS`.
        layer_wise: Whether each layer is sent as soon as it is computed.
        ttft, tpot: Seconds to the first token, and per token after it, that 90 % of the requests
            must have.
        budget: Tokens per step of the GPUs that do both (chunked prefill); TUNED takes the best of
            LADDER.
        model, gpu: Names in `known_models` and `hardware`.
        prompt, output: Tokens in each prompt and in each answer.
        connector: The reader's scheduler side of exercise 08, for each engine of the two pools.

    Raises:
        MinivllmError: The reader's connector loses a transfer.
    """
    work = Work(prompt, output, counted=COUNTED)
    gpus = (model, gpu)
    linked = (link, layer_wise, connector) if connector else (link, layer_wise)
    mine = experiment((*gpus, prefill, decode, *linked), work)
    pools = [experiment((*gpus, 0, prefill + decode, size), work) for size in ([budget] if budget else LADDER)]
    likely = likely_first(pools[0].system.step_cost, LADDER, Objective(ttft, tpot))
    pools.sort(key=lambda pool: likely.index(pool.budget) if pool.budget in likely else 0)
    first = State(
        rate=rate, model=model, gpu=gpu, link=link, layer_wise=layer_wise, budget=budget, work=work,
        objective=Objective(ttft, tpot), mine=mine.side(Objective(ttft, tpot)),
        both=pools[0].side(Objective(ttft, tpot)), is_tuned=False,
        steps=(mine.step(rate), pools[0].step(rate)),
    )  # fmt: skip
    return _Sweep(first, mine, pools).states()


@dataclass(frozen=True)
class _Sweep:
    """A run at this rate, and a search for where each split and each budget breaks."""

    first: State
    mine: Experiment
    pools: Sequence[Experiment]
    """GPUs that do both, by budget, the likely best first."""

    def states(self) -> Iterator[State]:
        """Yield more and more complete states: first this rate, then where both ways break."""
        state = self._now()
        yield state
        known = self._known()
        for run in self._pending_runs():
            for _ in run:
                yield state
            if self._known() > known:
                known = self._known()
                state = self._now()
                yield state

    def _known(self) -> int:
        return sum(len(runs.runs.found) for runs in (self.mine, *self.pools))

    def _pending_runs(self) -> Iterator[Iterator[None]]:
        rate = self.first.rate
        yield self.mine.runs.run(rate)
        yield self.pools[0].runs.run(rate)
        yield from self._edge(self.mine)
        for runs in self.pools:
            best = self._both().edge[0]
            if best and not self._side(runs).is_beaten(best):
                yield runs.runs.run(best)
            if not self._side(runs).is_beaten(best):
                yield from self._edge(runs)
        both = self._runs_of(self._both())
        yield both.runs.run(rate)

    def _edge(self, runs: Experiment) -> Iterator[Iterator[None]]:
        """Yield runs until the edge is known."""
        while (rate := self._next(runs)) is not None:
            yield runs.runs.run(rate)

    def _both(self) -> Side:
        """Return the best side among the budgets whose edge is known, or that of the first budget."""
        known = [side for runs in self.pools if (side := self._side(runs)).is_found]
        return max(known, key=lambda side: side.goodput, default=self._side(self.pools[0]))

    def _runs_of(self, both: Side) -> Experiment:
        return next(runs for runs in self.pools if runs.budget == both.budget)

    def _is_tuned(self, best: Side) -> bool:
        rate = best.edge[0] or RATES[0]
        return best.is_found and all((side := self._side(runs)).is_found or side.is_beaten(rate) for runs in self.pools)

    def _next(self, runs: Experiment) -> float | None:
        """Return the next rate to try in the search for the edge, or None if the edge is known."""
        side = self._side(runs)
        if side.is_found:
            return None
        low, high = side.edge
        if not side.points or (low == 0 and high == math.inf):
            return max((rate for rate in RATES if rate <= 0.8 * side.bound), default=RATES[0])
        inside = [rate for rate in RATES if low < rate < min(high, max(1.5 * side.bound, low * 1.6))]
        return inside[len(inside) // 2] if inside else next(rate for rate in RATES if rate > low)

    def _side(self, runs: Experiment) -> Side:
        return runs.side(self.first.objective)

    def _now(self) -> State:
        mine, both = self._side(self.mine), self._both()
        steps = self.mine.step(self.first.rate), self._runs_of(both).step(self.first.rate)
        tuned = self._is_tuned(both)
        return replace(self.first, mine=mine, both=both, is_tuned=tuned, steps=steps)

"""Compute the state of lesson 06's widget: latencies by rate, the knee, and the other layouts'
knees.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from minivllm_simulate.layouts import Layout
from minivllm_simulate.levers import KNOWN_ERROR
from minivllm_simulate.load_sweep import crossing
from minivllm_simulate.workloads import workload
from widgets.serving.reader import PAUSES, Collector, Read, read_answer
from widgets.serving.runs import RATES, Experiment, Point, Work, experiment

MODELS = ("Llama-3.2-1B", "Llama-3.1-8B", "Qwen3-14B", "Qwen3-32B", "Meta-Llama-3-70B")
GPUS = ("L4", "A100-80", "H100", "H200", "B200", "MI300X")
TPS = (1, 2, 4, 8)
PPS = (1, 2, 4)
DPS = (1, 2, 4, 8)
PROMPTS = (64, 256, 512, 1024, 2048)
OUTPUTS = (16, 64, 128, 256)
MOST_WAITING = 0.05
"""The share of waiting requests from which the queue counts as growing."""
START = {
    "rate": 50.0, "tp": 1, "dp": 4, "pp": 1, "model": "Llama-3.1-8B", "gpu": "H100", "prompt": 512, "output": 128,
    "file": "", "ttft": 0.5, "tpot": 0.0075,
}  # fmt: skip
CAUSES = ("queue", "ttft", "tpot")


@dataclass(frozen=True)
class Knee:
    """The rate at which a layout breaks, and the cause, one of CAUSES."""

    rate: float
    cause: str


@dataclass(frozen=True)
class Served:
    """The results of a layout at every rate that has been run so far."""

    layout: Layout
    points: Mapping[float, Point]
    refused: str
    """Why the model does not fit, or ""."""
    ttft: float
    tpot: float
    """The limits in seconds, which 99 % of the requests must keep."""

    @cached_property
    def rates(self) -> list[float]:
        """Return the rates that have been run."""
        return sorted(self.points)

    def causes(self, rate: float) -> list[str]:
        """Return what is wrong at a rate that has been run: a list of members of CAUSES."""
        return [cause for cause, over in zip(CAUSES, self._over(self.points[rate]), strict=True) if over > 1]

    @cached_property
    def knee(self) -> Knee | None:
        """Return where the layout breaks, or None if that is not known yet or never happens."""
        if not self.is_found or self.refused:
            return None
        points = [self.points[rate] for rate in self.rates]
        edges = [
            self.queue_grows_from,
            crossing(self.rates, [point.ttft[1] for point in points], self.ttft, log=True),
            crossing(self.rates, [max(point.tpot[1], 1e-6) for point in points], self.tpot, log=True),
        ]
        first = min(edges)
        return Knee(first, CAUSES[edges.index(first)]) if first < math.inf else None

    @cached_property
    def is_found(self) -> bool:
        """Return whether the knee is known to lie between two neighbouring rates."""
        if self.refused or not self.points:
            return bool(self.refused)
        rates = self.rates
        broken = [bool(self.causes(rate)) for rate in rates]
        if all(broken):
            return rates[0] == RATES[0]
        last = max(index for index, is_broken in enumerate(broken) if not is_broken)
        if rates[last] >= RATES[-1]:
            return True
        return last + 1 < len(rates) and rates[last + 1] <= next(rate for rate in RATES if rate > rates[last])

    @property
    def goodput(self) -> float:
        """Return the requests per second that the layout handles within the limits; 0 if the model
        does not fit.
        """
        if self.refused:
            return 0.0
        return knee.rate if (knee := self.knee) else RATES[-1]

    @cached_property
    def queue_grows_from(self) -> float:
        """Return the throughput of a full engine, measured at the first rate at which the queue
        grows; infinity if none has been run.
        """
        short = max((rate for rate in self.rates if "queue" not in self.causes(rate)), default=0.0)
        long = next((rate for rate in self.rates if rate > short), math.inf)
        return min(long, max(short, self.points[long].requests_per_second)) if long in self.points else math.inf

    def _over(self, point: Point) -> tuple[float, float, float]:
        """Return the waiting share, TTFT and TPOT as multiples of their limits."""
        return point.waiting / MOST_WAITING, point.ttft[1] / self.ttft, point.tpot[1] / self.tpot


@dataclass(frozen=True)
class State:
    """One layout's results, and those of all layouts of the same number of GPUs."""

    rate: float
    model: str
    gpu: str
    served: Served
    others: tuple[Served, ...]
    """All layouts of as many GPUs, `served` included."""
    work: Work
    reads: tuple[Read, ...]
    """One answer at this rate, read at several intervals; empty until the rate has been run."""
    own: bool
    """Whether the reader's collector is used."""
    error: str
    """The cost model's error on published measurements."""

    @property
    def layout(self) -> Layout:
        return self.served.layout

    @property
    def known(self) -> bool:
        """Return whether the outcome at this rate and the layout's knee are known."""
        return bool(self.served.refused) or (self.rate in self.served.points and self.served.is_found)

    @property
    def complete(self) -> bool:
        """Return whether every layout's knee is known too."""
        return self.known and all(layout.is_found for layout in self.others)


def sweep(
    rate: float = START["rate"],
    tp: int = START["tp"],
    dp: int = START["dp"],
    pp: int = START["pp"],
    model: str = START["model"],
    gpu: str = START["gpu"],
    prompt: int = START["prompt"],
    output: int = START["output"],
    file: str = START["file"],
    ttft: float = START["ttft"],
    tpot: float = START["tpot"],
    output_collector: Collector | None = None,
) -> Iterator[State]:
    """Serve requests in a layout at rates from 0.5 to 1000 per second, and yield more and more
    complete states.

    Args:
        rate: Requests per second over all GPUs, at the handle.
        tp, dp, pp: GPUs that share a layer, engines side by side, and stages of each engine.
        model, gpu: Names in `known_models` and `hardware`.
        prompt, output: Tokens in each prompt and in each answer.
        file: A workload's name or the path of a file with lengths, which then replace `prompt` and
            `output`.
        ttft, tpot: Seconds to the first token, and per token after it, that 99 % of the requests
            must have.
        output_collector: The reader's class of exercise 06.

    Raises:
        MinivllmError: No workload has this name, or the file has no lengths.
    """
    source = workload(file.strip()) if file.strip() else None
    work = Work(0, 0, source) if source else Work(prompt, output)
    here = Layout(tp, pp, dp)
    runs = [experiment(model, gpu, layout, work) for layout in layouts(here)]
    return _Sweep(rate, model, gpu, work, here, runs, (ttft, tpot), output_collector).states()


def layouts(here: Layout) -> list[Layout]:
    """List the layouts of the same number of GPUs, from the highest TP to the most replicas, `here`
    included.
    """
    layouts = [Layout(tp, 1, here.gpus // tp) for tp in reversed(TPS) if here.gpus % tp == 0]
    return layouts if here in layouts else [*layouts, here]


@dataclass(frozen=True)
class _Sweep:
    """A sweep over the rate that also searches for the knee of every layout."""

    rate: float
    model: str
    gpu: str
    work: Work
    here: Layout
    runs: Sequence[Experiment]
    limits: tuple[float, float]
    collector: Collector | None

    def states(self) -> Iterator[State]:
        """Yield more and more complete states: first this rate, then this layout's knee, the
        others' knees, and then rates to draw: all of them near a layout's knee, every third
        elsewhere, up to where the queue grows.
        """
        state = self._now()
        yield state
        for run in self._pending_runs():
            for _ in run:
                yield state
            if not state.complete or self._is_new(state):
                state = self._now()
                yield state

    def _is_new(self, state: State) -> bool:
        return sum(len(runs.runs.found) for runs in self.runs) > sum(len(served.points) for served in state.others)

    def _pending_runs(self) -> Iterator[Iterator[None]]:
        mine = next(runs for runs in self.runs if runs.layout == self.here)
        if not mine.refused:
            yield mine.run(self.rate)
        for runs in (mine, *self.runs):
            while (rate := self._next(runs)) is not None:
                yield runs.run(rate)
        for runs in (runs for runs in (mine, *self.runs) if not runs.refused):
            goodput = self._served(runs).goodput
            full = runs.steady.capacity() * runs.layout.groups
            near = goodput / 4 if goodput > RATES[0] else full
            for index, rate in enumerate(RATES):
                if rate >= near or index % 3 == 0:
                    yield runs.run(rate)
                if rate in runs.runs.found and "queue" in self._served(runs).causes(rate):
                    break  # beyond it there is nothing more to see

    def _next(self, runs: Experiment) -> float | None:
        """Return the next rate to try in the search for a layout's knee, or None if the knee is
        known.
        """
        served = self._served(runs)
        if served.is_found:
            return None
        if not served.points:
            return self._guess(runs)
        fine = max((rate for rate in served.rates if not served.causes(rate)), default=0.0)
        broken = min((rate for rate in served.rates if rate > fine), default=math.inf)
        low, high = bisect_right(RATES, fine) - 1, bisect_left(RATES, broken)
        next_to_guess = low + 1 if fine else high - 1
        middle = (low + high) // 2 if fine and broken < math.inf else next_to_guess  # the first guess is close
        return next((rate for rate in RATES[max(middle, 0) :] if rate not in served.points), None)

    def _guess(self, runs: Experiment) -> float:
        """Guess the highest rate that the layout handles, from a steady batch."""
        steady = runs.steady
        groups = runs.layout.groups
        batches = ((rate, steady.batch(rate / groups)) for rate in RATES if rate < 0.95 * steady.capacity() * groups)
        fine = [rate for rate, batch in batches if steady.step_seconds(batch) < 0.98 * self.limits[1]]
        return max(fine, default=RATES[0])

    def _served(self, runs: Experiment) -> Served:
        return Served(runs.layout, dict(runs.runs.found), runs.refused, *self.limits)

    def _now(self) -> State:
        others = tuple(self._served(runs) for runs in self.runs)
        served = next(layout for layout in others if layout.layout == self.here)
        return State(
            rate=self.rate, model=self.model, gpu=self.gpu, served=served, others=others, work=self.work,
            reads=self._reads(served), own=self.collector is not None, error=KNOWN_ERROR,
        )  # fmt: skip

    def _reads(self, served: Served) -> tuple[Read, ...]:
        if self.rate not in served.points:
            return ()
        tokens = max(2, round(self.work.mean_output))
        gap = served.points[self.rate].tpot[0]
        return tuple(read_answer(tokens, gap or 1e-3, pause, self.collector) for pause in PAUSES)

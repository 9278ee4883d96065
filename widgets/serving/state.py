"""The state of lesson 06's widget: what clients see over the rate, where it breaks, and what other layouts bear."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from minivllm.config.checks import require
from minivllm_simulate.layouts import Layout
from minivllm_simulate.lever_checks import known_error, published_checks
from minivllm_simulate.load_sweep import crossing
from minivllm_simulate.workloads import workload
from widgets.serving.reader import PAUSES, Collector, Read, read_answer
from widgets.serving.runs import RATES, Experiment, Point, Work, experiment
from widgets.shell.spec import require_numbers

MODELS = ("Llama-3.2-1B", "Llama-3.1-8B", "Qwen3-14B", "Qwen3-32B", "Meta-Llama-3-70B")
GPUS = ("L4", "A100-80", "H100", "H200", "B200", "MI300X")
TPS, PPS, DPS = (1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8)
PROMPTS, OUTPUTS = (64, 256, 512, 1024, 2048), (16, 64, 128, 256)
MOST = {"rate": 1e5, "prompt": 3072, "output": 1024, "ttft": 1000.0, "tpot": 1000.0}
MOST_WAITING = 0.05
"""Of the requests that came in a run. More wait only where more come than can be served."""
START = {
    "rate": 50.0, "tp": 1, "dp": 4, "pp": 1, "model": "Llama-3.1-8B", "gpu": "H100", "prompt": 512, "output": 128,
    "file": "", "ttft": 0.5, "tpot": 0.0075,
}  # fmt: skip
CAUSES = ("queue", "ttft", "tpot")


@dataclass(frozen=True)
class Knee:
    """The rate from which a layout is broken, and by what: one of CAUSES."""

    rate: float
    cause: str


@dataclass(frozen=True)
class Served:
    """A layout at every rate that has been run so far."""

    layout: Layout
    points: Mapping[float, Point]
    refused: str
    """Why the model does not fit so; empty where it does."""
    ttft: float
    tpot: float
    """The service level in seconds: 99 % of the requests must have both."""

    @property
    def rates(self) -> list[float]:
        """The rates that have been run."""
        return sorted(self.points)

    def causes(self, rate: float) -> list[str]:
        """What is wrong at a rate that has been run: some of CAUSES."""
        return [cause for cause, over in zip(CAUSES, self._over(self.points[rate]), strict=True) if over > 1]

    @property
    def knee(self) -> Knee | None:
        """Where it breaks; None until it is known, or where no rate breaks it."""
        if not self.is_found or self.refused:
            return None
        points = [self.points[rate] for rate in self.rates]
        found = [
            self._queue_grows_from,
            crossing(self.rates, [point.ttft[1] for point in points], self.ttft, log=True),
            crossing(self.rates, [max(point.tpot[1], 1e-6) for point in points], self.tpot, log=True),
        ]
        return Knee(min(found), CAUSES[found.index(min(found))]) if min(found) < math.inf else None

    @property
    def is_found(self) -> bool:
        """Whether it is known where it breaks: between two rates that stand next to each other."""
        if self.refused:
            return True
        rates = self.rates
        if not rates:
            return False
        broken = [bool(self.causes(rate)) for rate in rates]
        if all(broken):
            return rates[0] == RATES[0]
        last = max(index for index, one in enumerate(broken) if not one)
        if rates[last] >= RATES[-1]:
            return True
        return last + 1 < len(rates) and rates[last + 1] <= next(rate for rate in RATES if rate > rates[last])

    @property
    def goodput(self) -> float:
        """Requests a second that it bears within the service level; 0 where the model does not fit."""
        if self.refused:
            return 0.0
        knee = self.knee
        return RATES[-1] if knee is None else knee.rate

    @property
    def _queue_grows_from(self) -> float:
        """What is served where somebody always waits: between the last rate without a queue and the first with one."""
        short = max((rate for rate in self.rates if "queue" not in self.causes(rate)), default=0.0)
        long = next((rate for rate in self.rates if rate > short), math.inf)
        return min(long, max(short, self.points[long].requests_per_second)) if long in self.points else math.inf

    def _over(self, point: Point) -> tuple[float, float, float]:
        """How many times what is allowed: the queue, the time to first token, the time per token."""
        return point.waiting / MOST_WAITING, point.ttft[1] / self.ttft, point.tpot[1] / self.tpot


@dataclass(frozen=True)
class State:
    """One layout over the rate, and others with as many GPUs, as far as they have been run."""

    rate: float
    model: str
    gpu: str
    served: Served
    others: tuple[Served, ...]
    """All layouts of as many GPUs, `served` among them."""
    work: Work
    reads: tuple[Read, ...]
    """One answer at this rate, as clients get it that read more and more seldom; empty until the rate has been run."""
    own: bool
    """Whether the reader's own collector hands it over."""
    error: str | None
    """How far the cost model is off on published measurements; None until it has been asked for."""

    @property
    def layout(self) -> Layout:
        """The layout that the knobs ask for."""
        return self.served.layout

    @property
    def known(self) -> bool:
        """Whether it is known what becomes of this rate, and where the layout breaks."""
        return bool(self.served.refused) or (self.rate in self.served.points and self.served.is_found)

    @property
    def complete(self) -> bool:
        """Whether every layout's knee is known too."""
        return self.known and all(one.is_found for one in self.others)

    @property
    def best(self) -> Served:
        """The layout that bears most."""
        return max(self.others, key=lambda one: one.goodput)


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
    """Serve requests in a layout at rates from 0.5 to 1000 a second; each state knows more of the curves.

    Args:
        rate: requests a second over all GPUs: where the reader stands.
        tp, dp, pp: GPUs that share a layer; engines side by side; stages of each engine.
        model, gpu: names of `known_models` and `hardware`.
        prompt, output: tokens of each request.
        file: a workload's name or the path of a file with lengths, which then replace `prompt` and `output`.
        ttft, tpot: seconds to the first token, and per token after it, that 99 % of the requests must have.
        output_collector: the reader's own, as in exercise 06.

    Raises:
        MinivllmError: a value makes no sense.
    """
    require_numbers(MOST, rate=rate, prompt=prompt, output=output, ttft=ttft, tpot=tpot)
    sensible = min(rate, ttft, tpot) > 0 and min(prompt, output) >= 1
    require(sensible, f"rate, prompt, output, ttft and tpot are above 0; rate is {rate}, prompt {prompt}, output "
            f"{output}, ttft {ttft}, tpot {tpot}")  # fmt: skip
    for name, value, allowed in (("tp", tp, TPS), ("pp", pp, PPS), ("dp", dp, DPS)):
        require(not isinstance(value, bool) and value in allowed, f"{name} is one of {allowed}, not {value!r}")
    for name, value in (("model", model), ("gpu", gpu), ("file", file)):
        require(isinstance(value, str), f"{name} is a name, not {value!r}")
    source = workload(file.strip()) if file.strip() else None
    work = Work(0, 0, source) if source else Work(prompt, output)
    here = Layout(int(tp), int(pp), int(dp))
    runs = [experiment(model, gpu, one, work) for one in layouts(here)]
    return _Sweep(rate, model, gpu, work, here, runs, (ttft, tpot), output_collector).states()


def layouts(here: Layout) -> list[Layout]:
    """Those of as many GPUs: cut as far as it goes, then more and more replicas; `here` among them."""
    found = [Layout(tp, 1, here.gpus // tp) for tp in reversed(TPS) if here.gpus % tp == 0]
    return found if here in found else [*found, here]


@dataclass(frozen=True)
class _Sweep:
    """A sweep under way."""

    rate: float
    model: str
    gpu: str
    work: Work
    here: Layout
    runs: Sequence[Experiment]
    limits: tuple[float, float]
    collector: Collector | None

    def states(self) -> Iterator[State]:
        """Ever more complete states: here first, then where this layout breaks, the others, and all other rates."""
        state = self._now()
        yield state
        for wanted in self._wanted():
            for _ in wanted:
                yield state
            if not state.complete or self._is_new(state):
                state = self._now()
                yield state

    def _is_new(self, state: State) -> bool:
        return len(self._mine().runs.found) > len(state.served.points)

    def _mine(self) -> Experiment:
        return next(one for one in self.runs if one.layout == self.here)

    def _wanted(self) -> Iterator[Iterator[None]]:
        """Runs that are still to be done, one after another."""
        mine = self._mine()
        if not mine.refused:
            yield mine.run(self.rate)
        known_error("decode", "prefill")
        for one in (mine, *self.runs):
            while (rate := self._next(one)) is not None:
                yield one.run(rate)
        for rate in sorted(self._drawn(), key=lambda other: abs(math.log(other / self.rate))):
            if not mine.refused and rate <= self._far():
                yield mine.run(rate)

    def _next(self, one: Experiment) -> float | None:
        """The rate to try next in search of a layout's knee; None when it is found."""
        served = self._served(one)
        if served.is_found:
            return None
        broken = [rate for rate in served.rates if served.causes(rate)]
        fine = [rate for rate in served.rates if rate not in broken]
        low = max((RATES.index(rate) for rate in RATES if fine and rate <= max(fine)), default=-1)
        above = [rate for rate in broken if not fine or rate > max(fine)]
        high = min((index for index, rate in enumerate(RATES) if above and rate >= min(above)), default=len(RATES))
        if not served.points:
            return self._guess(one)
        if fine and above:
            middle = (low + high) // 2
        else:  # the first guess is not far off
            middle = low + 1 if fine else high - 1
        middle = min(max(middle, 0), len(RATES) - 1)
        return next((rate for rate in RATES[middle:] if rate not in served.points), None)

    def _guess(self, one: Experiment) -> float:
        """The highest rate that it seems to bear, as the mean step goes."""
        steady, groups = one.steady, one.layout.groups
        batches = ((rate, steady.batch(rate / groups)) for rate in RATES if rate < 0.95 * steady.capacity * groups)
        fine = [rate for rate, batch in batches if steady.step_seconds(batch) < 0.98 * self.limits[1]]
        return max(fine, default=RATES[0])

    def _drawn(self) -> list[float]:
        """The rates that the curves have: all that are near the knee, and every third where little happens."""
        goodput = self._served(self._mine()).goodput
        near = goodput / 4 if goodput > RATES[0] else math.inf
        return [rate for index, rate in enumerate(RATES) if rate >= near or index % 3 == 0]

    def _far(self) -> float:
        """Beyond this rate there is nothing to see: requests wait, and longer and longer."""
        served = self._served(self._mine())
        return min((rate for rate in served.rates if "queue" in served.causes(rate)), default=math.inf)

    def _served(self, one: Experiment) -> Served:
        return Served(one.layout, dict(one.runs.found), one.refused, *self.limits)

    def _now(self) -> State:
        others = tuple(self._served(one) for one in self.runs)
        served = next(one for one in others if one.layout == self.here)
        return State(
            rate=self.rate,
            model=self.model,
            gpu=self.gpu,
            served=served,
            others=others,
            work=self.work,
            reads=self._reads(served),
            own=self.collector is not None,
            error=known_error("decode", "prefill") if published_checks.cache_info().currsize else None,
        )

    def _reads(self, served: Served) -> tuple[Read, ...]:
        if self.rate not in served.points:
            return ()
        tokens, gap = max(2, round(self.work.mean_output)), served.points[self.rate].tpot[0]
        return tuple(read_answer(tokens, gap or 1e-3, pause, self.collector) for pause in PAUSES)

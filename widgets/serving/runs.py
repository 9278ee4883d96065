"""Run lesson 06's load at one rate, on a model in one layout of GPUs.

Only one of a layout's equal groups is run, with its share of the requests: replicas take requests
in turn, which is what vLLM's rule (four times the waiting requests plus the running ones) amounts
to when all replicas are equal.
"""

from __future__ import annotations

import statistics
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from minivllm.errors import MinivllmError
from minivllm_simulate.cost_model import StepShape
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.layouts import MAX_MODEL_LEN, TOKEN_BUDGET, Layout, PlacedModel
from minivllm_simulate.load_sweep import Runs, within
from minivllm_simulate.open_load import OpenLoad, OpenRun, run_open
from minivllm_simulate.steady import Steady
from minivllm_simulate.workloads import RequestLengths, Workload, gamma_arrivals

COUNTED = 120
"""Requests that count in a run; as many more keep up the load until the last of them has ended."""
SHARES = (0.5, 0.99)
RATES = (
    0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0, 50.0, 70.0, 100.0, 150.0, 200.0, 300.0, 500.0,
    700.0, 1000.0,
)  # fmt: skip
"""Requests a second, over all GPUs."""
LONGEST_OUTPUT = 1024


@dataclass(frozen=True)
class Point:
    """The clients' view at one rate; each pair holds the times, in seconds, for half and for 99 %
    of the requests.
    """

    ttft: tuple[float, float]
    tpot: tuple[float, float]
    waiting: float
    """The share of the requests that wait in the end."""
    requests_per_second: float
    """The requests that all output tokens make up: the throughput of an engine whose queue is never
    empty.
    """


@dataclass(frozen=True)
class Work:
    """The load: requests of equal lengths, or those of a workload."""

    prompt: int
    output: int
    source: Workload | None = None

    @cached_property
    def lengths(self) -> list[RequestLengths]:
        """List the lengths of all requests of a run."""
        if self.source is None:
            return [RequestLengths(self.prompt, self.output)] * (2 * COUNTED)
        return [_cut(lengths) for lengths in self.source.sample(2 * COUNTED)]

    @cached_property
    def mean_prompt(self) -> float:
        """Return the mean number of tokens in a prompt."""
        return statistics.mean(request.prompt_tokens for request in self.lengths)

    @cached_property
    def mean_output(self) -> float:
        """Return the mean number of tokens in an answer."""
        return statistics.mean(request.output_tokens for request in self.lengths)

    @property
    def note(self) -> str:
        """Describe how lengths from a file were changed, or return ""."""
        if self.source is None:
            return ""
        means = f"{self.mean_prompt:,.0f} tokens in, {self.mean_output:,.0f} out on average"
        return f"lengths of {self.source.title}: {means}, outputs cut at {LONGEST_OUTPUT:,}"


def _cut(lengths: RequestLengths) -> RequestLengths:
    output = min(lengths.output_tokens, LONGEST_OUTPUT)
    return RequestLengths(min(lengths.prompt_tokens, MAX_MODEL_LEN - output), output)


class Experiment:
    """The runs of a model in one layout, for any request rate; results are kept, and an interrupted
    run can be resumed.
    """

    def __init__(self, placed: PlacedModel, work: Work) -> None:
        self.layout = placed.layout
        self.work = work
        self.runs = Runs(self._run)
        self._placed = placed
        self.refused = ""
        self._kv_tokens = 0
        try:
            self._kv_tokens = placed.kv_tokens()
        except MinivllmError as error:
            self.refused = str(error)

    @cached_property
    def steady(self) -> Steady:
        """Return the steady batch of one group."""
        return self._placed.steady(self.work.mean_prompt, self.work.mean_output, self._kv_tokens)

    def parts(self, rate: float, seconds: float) -> tuple[float, float, float, float]:
        """Split a step that takes this long at this rate into its overhead, reading the weights,
        the exchange between GPUs, and what grows with the batch.

        The tokens that come during a step are computed in the next.
        """
        cost = self._placed.cost
        come = rate / self.layout.groups * (self.work.mean_prompt + self.work.mean_output) * seconds
        shape = StepShape(0, round(min(come, TOKEN_BUDGET)), 0, 0)
        exchange = cost.seconds(shape) - cost.step.seconds(shape) + cost.step.link_seconds(shape)
        known = cost.step.roofline.step_overhead, cost.step.weight_seconds(shape.num_tokens), exchange
        return *known, max(0.0, seconds - sum(known))

    def run(self, rate: float) -> Iterator[None]:
        """Run this rate in parts, unless it has been run already."""
        yield from self.runs.run(rate)

    def served(self, rate: float) -> Generator[None, None, OpenRun]:
        """Serve one group's share of this rate."""
        groups = self.layout.groups
        at_start = round(self.steady.batch(rate / groups))
        arrivals = gamma_arrivals(rate / groups, 2 * COUNTED, burstiness=groups, seed=6)
        load = OpenLoad(self.work.lengths, arrivals, COUNTED, at_start, seed=6)
        longest = max(lengths.total for lengths in self.work.lengths)
        configs = self._placed.configs((longest + 32) * (2 * COUNTED + at_start))
        return run_open(load, *configs, self._placed.cost)

    def _run(self, rate: float) -> Generator[None, None, Point]:
        run = yield from self.served(rate)
        groups = self.layout.groups
        half, most = SHARES
        ttfts, tpots = run.ttfts, run.tpots or [0.0]
        return Point(
            ttft=(within(ttfts, half), within(ttfts, most)),
            tpot=(within(tpots, half), within(tpots, most)),
            waiting=run.queue / run.come,
            requests_per_second=groups * run.tokens / run.end / self.work.mean_output,
        )


@lru_cache(maxsize=128)
def experiment(model: str, gpu: str, layout: Layout, work: Work) -> Experiment:
    """Return the experiment with this configuration; it keeps the results of earlier runs.

    Raises:
        MinivllmError: The model or GPU is unknown.
    """
    return Experiment(PlacedModel(known_model(model), get_hardware(gpu), layout), work)

"""The runs behind lesson 06's widget: a model laid out on GPUs, and requests that come to it at some rate.

One of the equal groups of a layout is run, with its share of the requests: replicas are dealt requests in turn, which
is what vLLM's rule (four times those waiting, plus those running) comes to where all are alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from minivllm.errors import MinivllmError
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.layouts import MAX_MODEL_LEN, Layout, PlacedModel, Steady
from minivllm_simulate.load_sweep import Runs, within
from minivllm_simulate.open_load import OpenLoad, OpenRun, run_open
from minivllm_simulate.workloads import RequestLengths, Workload, gamma_arrivals

COUNTED = 120
"""Requests that are looked at in a run; as many more keep the load up until the last of them has ended."""
SHARES = (0.5, 0.99)
RATES = (
    0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0, 50.0, 70.0, 100.0, 150.0, 200.0, 300.0, 500.0,
    700.0, 1000.0,
)  # fmt: skip
"""Requests a second, over all GPUs."""
LONGEST_OUTPUT = 1024


@dataclass(frozen=True)
class Point:
    """What clients see at one rate. Pairs are for half of the requests, and for 99 % of them; in seconds."""

    ttft: tuple[float, float]
    tpot: tuple[float, float]
    waiting: float
    """Of the requests that came, the share that waits in the end."""
    tokens_per_second: float
    """Output tokens, of all GPUs together."""
    requests_per_second: float
    """As many as those tokens are: what an engine serves that always has somebody waiting."""
    inside: float
    """Requests that are in the system, on average."""


@dataclass(frozen=True)
class Work:
    """Requests of lengths that are alike, or those of a workload."""

    prompt: int
    output: int
    source: Workload | None = None

    @cached_property
    def lengths(self) -> list[RequestLengths]:
        """Of all requests of a run."""
        if self.source is None:
            return [RequestLengths(self.prompt, self.output)] * (2 * COUNTED)
        return [_cut(one) for one in self.source.sample(2 * COUNTED)]

    @property
    def mean_prompt(self) -> float:
        """Tokens of a prompt, on average."""
        return statistics.mean(one.prompt_tokens for one in self.lengths)

    @property
    def mean_output(self) -> float:
        """Tokens of an answer, on average."""
        return statistics.mean(one.output_tokens for one in self.lengths)

    @property
    def note(self) -> str:
        """What was done to lengths from a file; empty without one."""
        if self.source is None:
            return ""
        means = f"{self.mean_prompt:,.0f} tokens in, {self.mean_output:,.0f} out on average"
        return f"lengths of {self.source.title}: {means}, outputs cut at {LONGEST_OUTPUT:,}"


def _cut(one: RequestLengths) -> RequestLengths:
    output = min(one.output_tokens, LONGEST_OUTPUT)
    return RequestLengths(min(one.prompt_tokens, MAX_MODEL_LEN - output), output)


class Experiment:
    """All runs of a model in one layout. What has been run is kept, and a run that was left is taken up again."""

    def __init__(self, placed: PlacedModel, work: Work) -> None:
        self.layout, self.work = placed.layout, work
        self.runs = Runs(self._run)
        self._placed = placed
        self.refused, self._kv_tokens = "", 0
        try:
            self._kv_tokens = placed.kv_tokens()
        except MinivllmError as error:
            self.refused = str(error)

    @cached_property
    def steady(self) -> Steady:
        """What one group comes to on average."""
        return self._placed.steady(self.work.mean_prompt, self.work.mean_output, self._kv_tokens)

    def run(self, rate: float) -> Iterator[None]:
        """Do the run at this rate, with pauses of the caller's; nothing if it is done."""
        yield from self.runs.run(rate)

    def served(self, rate: float) -> Generator[None, None, OpenRun]:
        """What becomes of one group's requests when all groups together get this rate."""
        groups = self.layout.groups
        at_start = round(self.steady.batch(rate / groups))
        arrivals = gamma_arrivals(rate / groups, 2 * COUNTED, burstiness=groups, seed=6)
        load = OpenLoad(self.work.lengths, arrivals, COUNTED, at_start, seed=6)
        longest = max(one.total for one in self.work.lengths)
        configs = self._placed.configs((longest + 32) * (2 * COUNTED + at_start))
        return run_open(load, *configs, self._placed.cost)

    def _run(self, rate: float) -> Generator[None, None, Point]:
        run = yield from self.served(rate)
        groups, (half, most) = self.layout.groups, SHARES
        ttfts, tpots = run.ttfts, run.tpots or [0.0]
        tokens_per_second = groups * run.tokens / run.end
        return Point(
            ttft=(within(ttfts, half), within(ttfts, most)),
            tpot=(within(tpots, half), within(tpots, most)),
            waiting=run.queue / run.come,
            tokens_per_second=tokens_per_second,
            requests_per_second=tokens_per_second / self.work.mean_output,
            inside=groups * run.request_seconds / run.end,
        )


@lru_cache(maxsize=128)
def experiment(model: str, gpu: str, layout: Layout, work: Work) -> Experiment:
    """The runs of this configuration, those done before included.

    Raises:
        MinivllmError: no such model or GPU.
    """
    return Experiment(PlacedModel(known_model(model), get_hardware(gpu), layout), work)

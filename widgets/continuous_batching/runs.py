"""Run 400 requests at each load through the engine's scheduler, under each policy of lesson 04.

Arrivals keep their pattern under both policies and at every load; only their pace changes. The time
of a step is modelled, for Llama-3.1-8B on an H100. Load 1 is what the seats could serve if none
were ever empty.
"""

from __future__ import annotations

import math
import random
import statistics
from array import array
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import groupby

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.policy import DEFAULT_POLICY
from minivllm.core.scheduler import Scheduler
from minivllm.errors import MinivllmError
from minivllm_lab.checks.bounded import bounded
from minivllm_lab.continuous_batching.learner_policy import Schedule, learner_policy
from minivllm_lab.continuous_batching.seats import assign_seats
from minivllm_simulate.cost_model import RooflineCost, StepShape
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.load_sweep import Runs, share_within, within
from minivllm_simulate.virtual_clock import SimulatedRequest, Simulation, StepRecord, simulate, simulate_in_parts
from minivllm_simulate.workloads import RequestLengths, Workload, gamma_arrivals

REQUESTS, MEAN_OUTPUT, PROMPT = 400, 10, 16
"""Answers are short, which makes a run fast: the waste of a static batch depends only on their
spread.
"""
LONGEST, LONGEST_PROMPT = 20 * MEAN_OUTPUT, 128
POLICIES = ("static", "continuous")
IN_WINDOW = 6
"""Mean answers that follow each other in a full seat in the time that is drawn seat by seat."""
PAUSE = 250
"""Steps between two pauses of a run, which take a few milliseconds."""
PATIENCE = 2.0
"""CPU seconds that the reader's code may take for PAUSE steps."""
SATURATED = math.inf
"""The load at which all requests are there from the start."""


@dataclass(frozen=True)
class Point:
    """The results of the requests at one load under one policy."""

    ttfts: Sequence[float]
    """Seconds to the first token, sorted."""
    queue: int
    """Requests that wait when the last one has arrived."""
    most_running: int

    def ttft(self, share: float) -> float:
        """Return the seconds within which this share of the requests has its first token."""
        return within(self.ttfts, share)

    def goodput(self, limit: float) -> float:
        """Return the share of the requests that have their first token within `limit` seconds."""
        return share_within(self.ttfts, limit)


@dataclass(frozen=True)
class Stay:
    """A request's stay in a seat, from the start of its first step to the end of its last, in
    seconds.
    """

    request: int
    seat: int
    start: float
    end: float
    waited: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Moment:
    """The taken seats and the queue during one step."""

    start: float
    end: float
    taken: int
    waiting: int


@dataclass(frozen=True)
class Stretch:
    """The drawn seconds of a run. `rows` counts the seats, or more if the reader's code runs more
    requests.
    """

    stays: tuple[Stay, ...]
    moments: tuple[Moment, ...]
    rows: int

    def at(self, now: float) -> Moment:
        """Return the seats and the queue at `now`; between steps, both are empty."""
        latest = next((moment for moment in reversed(self.moments) if moment.start <= now), None)
        return latest if latest and now <= latest.end else Moment(now, now, 0, 0)

    def missed(self, seats: int) -> list[tuple[float, float]]:
        """Return the time spans in which a seat is empty while a request waits."""
        spans: list[tuple[float, float]] = []
        for moment in self.moments:
            if moment.waiting and moment.taken < seats:
                joins = spans and moment.start - spans[-1][1] < 1e-9
                spans.append((spans.pop()[0] if joins else moment.start, moment.end))
        return spans


class Experiment:
    """The runs of one configuration at any load; results are kept, and an interrupted run can be
    resumed.
    """

    def __init__(
        self, seats: int, spread: float, burstiness: float, work: Workload | None, schedule: Schedule | None
    ) -> None:
        self.seats = seats
        self.lengths, self.note = _lengths(spread, work)
        self.schedule = schedule
        self.outputs = [request.output_tokens for request in self.lengths]
        pattern = gamma_arrivals(1.0, REQUESTS, burstiness, seed=4)
        self.pattern = [time / pattern[-1] for time in pattern]
        """Arrival times as shares of the last one."""
        self.full_step = _cost().seconds(_full_step(self.lengths, seats))
        self.window = IN_WINDOW * statistics.mean(self.outputs) * self.full_step
        """Seconds that are drawn seat by seat."""
        self._at_loads = Runs(self._run_at)
        """Results by policy and load."""
        self._saturated = Runs(self._run_saturated)
        """The highest sustainable load by policy."""
        self._begun: dict[tuple[str, float], list[StepRecord]] = {}

    @property
    def formula(self) -> float:
        """Return the share of its seats that static batching uses: mean length / mean longest of
        a batch.
        """
        batches = [self.outputs[i : i + self.seats] for i in range(0, REQUESTS, self.seats)]
        return sum(self.outputs) / (self.seats * sum(max(batch) for batch in batches))

    @property
    def spread(self) -> float:
        """Return the standard deviation of the output lengths over their mean."""
        return statistics.pstdev(self.outputs) / statistics.mean(self.outputs)

    def rate(self, load: float) -> float:
        """Return the requests per second at this load."""
        return load * self.seats / (statistics.mean(self.outputs) * self.full_step)

    def arrivals(self, load: float) -> list[float]:
        """Return the times, in seconds, at which the requests arrive."""
        last = REQUESTS / self.rate(load)
        return [share * last for share in self.pattern]

    def run(self, policy: str, load: float) -> Iterator[None]:
        """Run this load in parts, unless it has been run already."""
        yield from self._saturated.run(policy) if load == SATURATED else self._at_loads.run((policy, load))

    def ceiling(self, policy: str) -> float | None:
        """Return the highest load that a policy can sustain, or None until it has been run at
        SATURATED.
        """
        return self._saturated.found.get(policy)

    def at_loads(self, policy: str, loads: Sequence[float]) -> dict[float, Point]:
        """Return the results for those of `loads` that have been run."""
        points = self._at_loads.found
        return {load: points[policy, load] for load in loads if (policy, load) in points}

    def full_batch(self, load: float) -> float:
        """Return when the first of the fullest static batches begins, early in the run."""
        steps = self._first_steps("static", load)
        sizes = Counter(stay.start for stay in self._stays(steps, load) if stay.start < 2 * self.window)
        return min(sizes, key=lambda start: (-sizes[start], start))

    def stretch(self, policy: str, load: float, start: float) -> Stretch:
        """Return the seconds of a run that are drawn, after `start`."""
        steps = [step for step in self._first_steps(policy, load) if step.start < start + self.window]
        stays = tuple(stay for stay in self._stays(steps, load) if stay.end > start)
        moments = tuple(
            Moment(step.start, step.start + step.seconds, len(step.scheduled), step.num_waiting)
            for step in steps
            if step.start >= start - step.seconds
        )
        return Stretch(stays, moments, self._rows(steps))

    def _first_steps(self, policy: str, load: float) -> list[StepRecord]:
        key = policy, load
        if key not in self._begun:
            steps = math.ceil(3 * self.window / _cost().seconds(StepShape(1, 1, 1, 1)))
            with self._bound(policy):
                run = simulate(self._work(load), self._scheduler(policy), _cost(), steps)
            self._begun[key] = run.steps
        return self._begun[key]

    def _run_saturated(self, policy: str) -> Generator[None, None, float]:
        run = yield from self._served(policy, SATURATED)
        return self._ceiling(run.steps)

    def _run_at(self, key: tuple[str, float]) -> Generator[None, None, Point]:
        policy, load = key
        run = yield from self._served(policy, load)
        last = self.arrivals(load)[-1]
        queue = next((step.num_waiting for step in reversed(run.steps) if step.start <= last), 0)
        return Point(array("d", sorted(run.ttfts)), queue, max(step.num_running for step in run.steps))

    def _served(self, policy: str, load: float) -> Generator[None, None, Simulation]:
        """Serve all requests under this policy, pausing every few milliseconds of work."""
        parts = simulate_in_parts(self._work(load), self._scheduler(policy), _cost(), steps=PAUSE)
        most = sum(request.total for request in self.lengths)  # each useful step advances a request by a token
        for _ in range(2 + most // PAUSE):
            with self._bound(policy):
                run = next(parts)
            if run is not None:
                return run
            yield
        raise MinivllmError(f"your schedule has not served {REQUESTS} requests after {most:,} steps")

    def _ceiling(self, steps: Sequence[StepRecord]) -> float:
        """Return the token rate while requests wait, as a share of what full seats make, capped at
        1 (more is chance).
        """
        full = [step for step in steps if step.num_waiting]
        rate = sum(step.shape.num_reqs for step in full) / sum(step.seconds for step in full)
        return min(1.0, rate * self.full_step / self.seats)

    def _rows(self, steps: Sequence[StepRecord]) -> int:
        return max([self.seats, *(len(step.scheduled) for step in steps)])

    def _stays(self, steps: Sequence[StepRecord], load: float) -> Iterator[Stay]:
        arrivals = self.arrivals(load)
        for seat, row in enumerate(assign_seats((step.scheduled for step in steps), self._rows(steps))):
            for request, span in groupby(range(len(row)), row.__getitem__):
                if request:
                    yield self._stay(int(request), seat, [steps[index] for index in span], arrivals)

    def _stay(self, request: int, seat: int, steps: Sequence[StepRecord], arrivals: Sequence[float]) -> Stay:
        start, end = steps[0].start, steps[-1].start + steps[-1].seconds
        lengths = self.lengths[request]
        return Stay(request, seat, start, end, start - arrivals[request], lengths.prompt_tokens, lengths.output_tokens)

    def _work(self, load: float) -> list[SimulatedRequest]:
        arrivals = [0.0] * REQUESTS if load == SATURATED else self.arrivals(load)
        return [
            SimulatedRequest(lengths.prompt_tokens, lengths.output_tokens, time)
            for lengths, time in zip(self.lengths, arrivals, strict=True)
        ]

    def _config(self, policy: str) -> SchedulerConfig:
        return SchedulerConfig(
            max_model_len=LONGEST + LONGEST_PROMPT,
            max_num_seqs=self.seats,
            max_num_batched_tokens=8192,  # so large that no prompt is cut
            static_batching=policy == "static",
        )

    def _scheduler(self, policy: str) -> Scheduler:
        own = self.schedule if policy != "static" else None
        return Scheduler(self._config(policy), CACHE, learner_policy(own) if own else DEFAULT_POLICY)

    def _bound(self, policy: str) -> AbstractContextManager[None]:
        own = self.schedule and policy != "static"
        return bounded(PATIENCE, "your schedule") if own else nullcontext()


CACHE = CacheConfig(num_gpu_blocks=REQUESTS + 2, block_size=512, enable_prefix_caching=False)
"""Large enough for one block per request."""


@lru_cache(maxsize=64)
def experiment(
    seats: int, spread: float, burstiness: float, work: Workload | None = None, schedule: Schedule | None = None
) -> Experiment:
    """Return the experiment with this configuration; it keeps the results of earlier runs."""
    return Experiment(seats, spread, burstiness, work, schedule)


@cache
def _cost() -> RooflineCost:
    return RooflineCost.of(known_model("Llama-3.1-8B"), get_hardware("H100"))


def _full_step(lengths: Sequence[RequestLengths], seats: int) -> StepShape:
    """Return the shape of the mean step with all seats taken; a request takes one step per output
    token.
    """
    steps = sum(request.output_tokens for request in lengths)
    tokens = sum(request.total - 1 for request in lengths)
    later = sum(sum(range(request.prompt_tokens + 1, request.total)) for request in lengths)  # decodes' keys
    keys = later + sum(request.prompt_tokens for request in lengths)
    pairs = later + sum(request.prompt_tokens * (request.prompt_tokens + 1) // 2 for request in lengths)
    return StepShape(seats, *(round(seats * count / steps) for count in (tokens, keys, pairs)))


def _lengths(spread: float, work: Workload | None) -> tuple[list[RequestLengths], str]:
    """Draw the lengths of all requests, and describe how a workload's lengths were changed."""
    if work is not None:
        return _scaled(work)
    if spread == 0:
        return [RequestLengths(PROMPT, MEAN_OUTPUT)] * REQUESTS, ""
    draw = random.Random(7)
    shape = 1 / spread**2
    outputs = (round(draw.gammavariate(shape, MEAN_OUTPUT / shape)) for _ in range(REQUESTS))
    return [RequestLengths(PROMPT, min(LONGEST, max(1, output))) for output in outputs], ""


def _scaled(work: Workload) -> tuple[list[RequestLengths], str]:
    drawn = work.sample(REQUESTS)
    factor = statistics.mean(request.output_tokens for request in drawn) / MEAN_OUTPUT
    scaled = [
        RequestLengths(
            min(LONGEST_PROMPT, each.prompt_tokens), min(LONGEST, max(1, round(each.output_tokens / factor)))
        )
        for each in drawn
    ]
    return scaled, f"lengths of {work.title}: outputs divided by {factor:.3g}, prompts cut at {LONGEST_PROMPT}"

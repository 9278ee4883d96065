"""The runs behind lesson 04's widget: 400 requests at each load, through the engine's scheduler, policy by policy.

Arrivals keep their pattern at every load and under both policies, only faster or slower. A step's time is that of
Llama-3.1-8B on an H100, modelled. Load 1 is what the slots could serve if none ever stood empty.
"""

from __future__ import annotations

import math
import random
import statistics
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import groupby

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.policy import DEFAULT_POLICY
from minivllm.core.scheduler import Scheduler
from minivllm.errors import MinivllmError
from minivllm_lab.bounded import bounded
from minivllm_lab.continuous_batching.learner_policy import Schedule, learner_policy
from minivllm_lab.continuous_batching.slots import seat
from minivllm_simulate.cost_model import RooflineCost, StepShape
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.load_sweep import Runs, share_within, within
from minivllm_simulate.virtual_clock import SimulatedRequest, Simulation, StepRecord, simulate, simulate_in_parts
from minivllm_simulate.workloads import RequestLengths, Workload, gamma_arrivals

REQUESTS, MEAN_OUTPUT, PROMPT = 400, 10, 16
"""Answers are short, so that a run is soon computed: what a static batch wastes depends on their spread alone."""
LONGEST, LONGEST_PROMPT = 20 * MEAN_OUTPUT, 128
POLICIES = ("static", "continuous")
IN_WINDOW = 32
"""Requests that full slots serve in the stretch of time that is drawn slot by slot."""
PAUSE = 250
"""Steps of a run between two pauses: a few milliseconds."""
PATIENCE = 2.0
"""Seconds of the processor's time that the reader's own code may take for PAUSE steps."""
SATURATED = math.inf
"""The load under which all requests are there from the beginning."""


@dataclass(frozen=True)
class Point:
    """What became of the requests at one load under one policy."""

    ttfts: Sequence[float]
    """Seconds to the first token, from the shortest."""
    queue: int
    """Requests that wait when the last one has come."""
    most_running: int

    def ttft(self, share: float) -> float:
        """Seconds within which this share of the requests has its first token."""
        return within(self.ttfts, share)

    def goodput(self, limit: float) -> float:
        """Share of the requests that have their first token within `limit` seconds."""
        return share_within(self.ttfts, limit)


@dataclass(frozen=True)
class Stay:
    """A request in a slot, from the start of its first step to the end of its last; times in seconds."""

    request: int
    slot: int
    start: float
    end: float
    waited: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Moment:
    """How things stood in a step."""

    start: float
    end: float
    taken: int
    waiting: int


@dataclass(frozen=True)
class Stretch:
    """The first seconds of a run, slot by slot. `rows` are the slots, more where the reader's code takes more."""

    stays: tuple[Stay, ...]
    moments: tuple[Moment, ...]
    rows: int

    def at(self, now: float) -> Moment:
        """How things stand at `now`; with no step under way, nobody is there."""
        found = next((one for one in reversed(self.moments) if one.start <= now), None)
        return found if found and now <= found.end else Moment(now, now, 0, 0)

    def missed(self, slots: int) -> list[tuple[float, float]]:
        """Spans of time in which a slot is empty though somebody waits."""
        spans: list[tuple[float, float]] = []
        for one in self.moments:
            if one.waiting and one.taken < slots:
                start = spans.pop()[0] if spans and one.start - spans[-1][1] < 1e-9 else one.start
                spans.append((start, one.end))
        return spans

    def used_while_waiting(self, slots: int) -> float:
        """Share of the slots' time in use while somebody waits; 1 where nobody does."""
        waited = [(one.end - one.start, one.taken) for one in self.moments if one.waiting]
        return sum(s * taken for s, taken in waited) / (slots * sum(s for s, _ in waited)) if waited else 1.0


class Experiment:
    """All runs of one configuration. What has been run is kept, and a run that was left is taken up again."""

    def __init__(
        self, slots: int, spread: float, burstiness: float, work: Workload | None, schedule: Schedule | None
    ) -> None:
        self.slots = slots
        self.lengths, self.note = _lengths(spread, work)
        self.schedule = schedule
        self.outputs = [one.output_tokens for one in self.lengths]
        pattern = gamma_arrivals(1.0, REQUESTS, burstiness, seed=4)
        self.pattern = [at / pattern[-1] for at in pattern]
        """When each comes, as a share of the time until the last has come."""
        self.full_step = _cost().seconds(_full_step(self.lengths, slots))
        self.window = IN_WINDOW * statistics.mean(self.outputs) * self.full_step / slots
        """Seconds that are drawn slot by slot."""
        self._at_loads = Runs(self._run_at)
        """By policy and load."""
        self._saturated = Runs(self._run_saturated)
        """By policy: the load that it can carry without end."""
        self._stretches: dict[tuple[str, float], Stretch] = {}

    @property
    def formula(self) -> float:
        """What static batching uses of its slots: mean length / mean longest of a batch."""
        batches = [self.outputs[i : i + self.slots] for i in range(0, REQUESTS, self.slots)]
        return sum(self.outputs) / (self.slots * sum(max(batch) for batch in batches))

    @property
    def spread(self) -> float:
        """Standard deviation of the output lengths over their mean."""
        return statistics.pstdev(self.outputs) / statistics.mean(self.outputs)

    def rate(self, load: float) -> float:
        """Requests per second at this load."""
        return load * self.slots / (statistics.mean(self.outputs) * self.full_step)

    def arrivals(self, load: float) -> list[float]:
        """Seconds at which the requests come."""
        last = REQUESTS / self.rate(load)
        return [share * last for share in self.pattern]

    def run(self, policy: str, load: float) -> Iterator[None]:
        """Do a run, with pauses of the caller's; nothing if it is done."""
        yield from self._saturated.run(policy) if load == SATURATED else self._at_loads.run((policy, load))

    def ceiling(self, policy: str) -> float | None:
        """The load that a policy can carry without end; None until it has run at SATURATED."""
        return self._saturated.found.get(policy)

    def at_loads(self, policy: str, loads: Sequence[float]) -> dict[float, Point]:
        """The runs at these loads that are done."""
        found = self._at_loads.found
        return {load: found[policy, load] for load in loads if (policy, load) in found}

    def stretch(self, policy: str, load: float) -> Stretch:
        """The first seconds of a run."""
        key = policy, load
        if key not in self._stretches:
            steps = math.ceil(self.window / _cost().seconds(StepShape(1, 1, 1, 1)))
            with self._bound(policy):
                run = simulate(
                    self._work(load), self._config(policy), CACHE, _cost(), steps, scheduler=self._scheduler(policy)
                )
            self._stretches[key] = self._cut(run.steps, load)
        return self._stretches[key]

    def _run_saturated(self, policy: str) -> Generator[None, None, float]:
        run = yield from self._served(policy, SATURATED)
        return self._ceiling(run.steps)

    def _run_at(self, key: tuple[str, float]) -> Generator[None, None, Point]:
        run, load = (yield from self._served(*key)), key[1]
        last = self.arrivals(load)[-1]
        queue = next((step.num_waiting for step in reversed(run.steps) if step.start <= last), 0)
        self._stretches.setdefault(key, self._cut(run.steps, load))
        return Point(array("d", sorted(run.ttfts)), queue, max(step.num_running for step in run.steps))

    def _served(self, policy: str, load: float) -> Generator[None, None, Simulation]:
        """All requests under this policy, with a pause every few milliseconds of work."""
        parts = simulate_in_parts(
            self._work(load), self._config(policy), CACHE, _cost(), steps=PAUSE, scheduler=self._scheduler(policy)
        )
        most = sum(one.total for one in self.lengths)  # every step moves somebody on by a token, or it leads nowhere
        for _ in range(2 + most // PAUSE):
            with self._bound(policy):
                run = next(parts)
            if run is not None:
                return run
            yield
        raise MinivllmError(f"your schedule has not served {REQUESTS} requests after {most:,} steps")

    def _ceiling(self, steps: Sequence[StepRecord]) -> float:
        """Tokens per second while somebody waits, as a share of what full slots make; beyond 1 is chance."""
        full = [step for step in steps if step.num_waiting]
        rate = sum(step.shape.num_reqs for step in full) / sum(step.seconds for step in full)
        return min(1.0, rate * self.full_step / self.slots)

    def _cut(self, steps: Sequence[StepRecord], load: float) -> Stretch:
        """What the first seconds of a run look like."""
        first = [step for step in steps if step.start < self.window]
        rows = max([self.slots, *(len(step.scheduled) for step in first)])
        arrivals, stays = self.arrivals(load), []
        for slot, row in enumerate(seat((step.scheduled for step in first), rows)):
            for who, span in groupby(range(len(row)), row.__getitem__):
                if who:
                    stays.append(self._stay(int(who), slot, [first[index] for index in span], arrivals))
        moments = tuple(
            Moment(step.start, step.start + step.seconds, len(step.scheduled), step.num_waiting) for step in first
        )
        return Stretch(tuple(stays), moments, rows)

    def _stay(self, request: int, slot: int, steps: Sequence[StepRecord], arrivals: Sequence[float]) -> Stay:
        start, end, lengths = steps[0].start, steps[-1].start + steps[-1].seconds, self.lengths[request]
        return Stay(request, slot, start, end, start - arrivals[request], lengths.prompt_tokens, lengths.output_tokens)

    def _work(self, load: float) -> list[SimulatedRequest]:
        arrivals = [0.0] * REQUESTS if load == SATURATED else self.arrivals(load)
        return [
            SimulatedRequest(one.prompt_tokens, one.output_tokens, at)
            for one, at in zip(self.lengths, arrivals, strict=True)
        ]

    def _config(self, policy: str) -> SchedulerConfig:
        return SchedulerConfig(
            max_model_len=LONGEST + LONGEST_PROMPT,
            max_num_seqs=self.slots,
            max_num_batched_tokens=8192,  # ample: no prompt is cut
            static_batching=policy == "static",
        )

    def _scheduler(self, policy: str) -> Callable[[SchedulerConfig, CacheConfig], Scheduler]:
        own = self.schedule if policy != "static" else None
        return partial(Scheduler, policy=learner_policy(own) if own else DEFAULT_POLICY)

    def _bound(self, policy: str) -> AbstractContextManager[None]:
        own = self.schedule and policy != "static"
        return bounded(PATIENCE, "your schedule") if own else nullcontext()


CACHE = CacheConfig(num_gpu_blocks=REQUESTS + 2, block_size=512, enable_prefix_caching=False)
"""Ample: a block for each request that there is."""


@lru_cache(maxsize=64)
def experiment(
    slots: int, spread: float, burstiness: float, work: Workload | None = None, schedule: Schedule | None = None
) -> Experiment:
    """The runs of this configuration, those done before included."""
    return Experiment(slots, spread, burstiness, work, schedule)


@cache
def _cost() -> RooflineCost:
    return RooflineCost.of(known_model("Llama-3.1-8B"), get_hardware("H100"))


def _full_step(lengths: Sequence[RequestLengths], slots: int) -> StepShape:
    """The mean step of slots that are always full: a request is there for as many steps as it generates tokens."""
    steps = sum(one.output_tokens for one in lengths)
    tokens = sum(one.total - 1 for one in lengths)
    later = sum(sum(range(one.prompt_tokens + 1, one.total)) for one in lengths)  # keys that decodes read
    keys = later + sum(one.prompt_tokens for one in lengths)
    pairs = later + sum(one.prompt_tokens * (one.prompt_tokens + 1) // 2 for one in lengths)
    return StepShape(slots, *(round(slots * count / steps) for count in (tokens, keys, pairs)))


def _lengths(spread: float, work: Workload | None) -> tuple[list[RequestLengths], str]:
    """Lengths of REQUESTS requests, and what was done to them if they are somebody's own."""
    if work is not None:
        return _scaled(work)
    if spread == 0:
        return [RequestLengths(PROMPT, MEAN_OUTPUT)] * REQUESTS, ""
    draw, shape = random.Random(7), 1 / spread**2
    outputs = (round(draw.gammavariate(shape, MEAN_OUTPUT / shape)) for _ in range(REQUESTS))
    return [RequestLengths(PROMPT, min(LONGEST, max(1, output))) for output in outputs], ""


def _scaled(work: Workload) -> tuple[list[RequestLengths], str]:
    drawn = work.sample(REQUESTS)
    factor = statistics.mean(one.output_tokens for one in drawn) / MEAN_OUTPUT
    scaled = [
        RequestLengths(min(LONGEST_PROMPT, one.prompt_tokens), min(LONGEST, max(1, round(one.output_tokens / factor))))
        for one in drawn
    ]
    return scaled, f"lengths of {work.title}: outputs divided by {factor:.3g}, prompts cut at {LONGEST_PROMPT}"

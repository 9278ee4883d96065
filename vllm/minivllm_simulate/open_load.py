"""An open load on one engine: requests come at their times, and the engine's scheduler decides. *Modelled*.

As `virtual_clock.simulate`, but many similar steps at a time (see `offline`): while a batch only decodes and nobody
comes, its steps are one stretch. And it begins in the middle of things, with as many requests as are there on average,
each somewhere in its answer; else most of a short run would be spent on an engine that fills up.

The first `counted` arrivals are those that are looked at. Those after them only keep the load up, until the last
counted one has ended. An engine that cannot keep up would never end them: it is left when nobody else comes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm_simulate.cost_model import Cost, StepShape
from minivllm_simulate.offline import Stretch, Stretches
from minivllm_simulate.virtual_clock import Acceptance, SimulatedRequest, to_request
from minivllm_simulate.workloads import RequestLengths

Result = TypeVar("Result")
PAUSE = 1_500
"""Requests times stretches between two pauses: a few milliseconds of work."""


@dataclass
class Stay:
    """A counted request, as its client sees it. Times in seconds since the start."""

    arrival: float
    output_tokens: int
    first: float = math.inf
    """When its first token came."""
    last: float = math.inf
    """When its last token came; while it runs, the latest."""
    tokens: int = 0
    ended: bool = False

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None where there is no second one."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass
class OpenRun:
    """What became of the counted requests."""

    stays: list[Stay]
    end: float = 0.0
    """When the run was left."""
    come: int = 0
    """Requests that had come by then."""
    queue: int = 0
    """Those who waited then."""
    tokens: int = 0
    """Output tokens of all requests, those who were there at the start included."""
    request_seconds: float = 0.0
    """Requests inside, integrated over time: divided by `end`, how many are there on average."""

    def ttft(self, one: Stay) -> float:
        """Seconds to its first token; what it has waited, if it has none yet."""
        return min(one.first, self.end) - one.arrival

    @property
    def ttfts(self) -> list[float]:
        """Seconds to first token, from the shortest; of one that has none yet, what it has waited."""
        return sorted(map(self.ttft, self.stays))

    @property
    def tpots(self) -> list[float]:
        """Seconds per output token after the first, from the shortest."""
        return sorted(tpot for one in self.stays if (tpot := one.tpot) is not None)


@dataclass(frozen=True)
class OpenLoad:
    """Requests that come one after another, and how many are there at the start.

    `lengths` and `arrivals` are as long as each other: the counted ones, and those who keep the load up.
    """

    lengths: Sequence[RequestLengths]
    arrivals: Sequence[float]
    counted: int
    at_start: int
    seed: int = 0
    to_the_end: bool = False
    """Serve the counted ones until their last token, also when nobody else comes; else a queue is left as it is."""

    def there_at_start(self, budget: int) -> list[SimulatedRequest]:
        """Requests somewhere in their answers. What they have so far counts as their prompt.

        Their prompts are computed before the clock starts, `budget` tokens a step, and those that are first go on
        meanwhile: so many tokens more they get, and so many less they have so far.
        """
        draw, found, before = random.Random(f"start-{self.seed}"), [], 0
        drawn = [self.lengths[index % len(self.lengths)] for index in range(self.at_start)]
        far = [int(draw.random() * one.output_tokens) for one in drawn]
        steps = sum(one.prompt_tokens + done for one, done in zip(drawn, far, strict=True)) // budget
        for one, done in zip(drawn, far, strict=True):
            meanwhile = steps - before // budget
            prompt, left = one.prompt_tokens + done, one.output_tokens - done
            shift = min(meanwhile, prompt - 1)
            found.append(SimulatedRequest(prompt - shift, left + shift))
            before += prompt
        return found


def run_open(
    load: OpenLoad, scheduler_config: SchedulerConfig, cache_config: CacheConfig, cost: Cost
) -> Generator[None, None, OpenRun]:
    """Serve a load, with a pause every few milliseconds of work; the run is what the generator returns.

    Raises:
        MinivllmError: the scheduler refuses a request.
    """
    return OpenEngine(load, Scheduler(scheduler_config, cache_config), cost).serve()


def finished(run: Generator[None, None, Result]) -> Result:
    """What a run returns, without its pauses."""
    while True:
        try:
            next(run)
        except StopIteration as end:
            return end.value


class OpenEngine(Stretches):
    """An engine under an open load: stretches that end at the next arrival."""

    def __init__(self, load: OpenLoad, scheduler: Scheduler, cost: Cost) -> None:
        start = load.there_at_start(scheduler.config.max_num_batched_tokens)
        super().__init__(start, scheduler, Acceptance(0.0), StepShape.of)
        self.load, self.cost = load, cost
        self.now, self.step_seconds, self.timed = 0.0, 1.0, False
        self.come = 0
        counted = zip(load.arrivals[: load.counted], load.lengths, strict=False)
        self.result = OpenRun([Stay(at, one.output_tokens) for at, one in counted])
        self.unended = load.counted

    def serve(self) -> Generator[None, None, OpenRun]:
        """Run until the last counted request has ended, or nobody else comes (see `OpenLoad.to_the_end`)."""
        work = 0
        for request in self.requests:
            self.scheduler.add_request(request)
        unseen = {request.request_id for request in self.requests}
        while unseen:  # no time passes until all who are there at the start have their caches
            work += self._work()
            unseen -= {one.request_id for one in self.outputs}
            if work > PAUSE:
                work = 0
                yield
        self.timed = True
        while self.unended and (self.load.to_the_end or self.come < len(self.load.arrivals)):
            work += self._step()
            if work > PAUSE:
                work = 0
                yield
        self.result.end, self.result.come, self.result.queue = self.now, self.come, len(self.scheduler.waiting)
        return self.result

    def steps_alike(self, running: Sequence[Request]) -> int:
        """No more steps than begin before the next arrival."""
        steps = super().steps_alike(running)
        if steps == 1 or not self.timed:
            return steps
        # The first token of a request would seem to come late.
        if any(request.num_tokens == request.num_prompt_tokens for request in running):
            return 1
        if self.come == len(self.load.arrivals):
            return steps
        gap = self.load.arrivals[self.come] - self.now
        return max(1, min(steps, math.ceil(gap / self.step_seconds)))

    def seconds_of(self, stretch: Stretch) -> float:
        """Seconds of the stretch that was just taken."""
        return stretch.seconds(self.cost)

    def request(self, index: int, spec: SimulatedRequest) -> Request:
        """Arrival `index`, as the scheduler gets it."""
        return to_request(self.load.at_start + index, spec, spec.arrival)

    def _work(self) -> int:
        self.stretch()
        return len(self.scheduler.running)

    def _step(self) -> int:
        if not self.scheduler.has_unfinished_requests():
            self.now = max(self.now, self.load.arrivals[self.come])
        self._let_in()
        inside = len(self.scheduler.requests)
        stretch = self.stretch()
        seconds = self.seconds_of(stretch)
        self.step_seconds = seconds / stretch.steps
        self.now += seconds
        self.result.request_seconds += inside * seconds
        for one in self.outputs:
            self._note(int(one.request_id) - self.load.at_start, len(one.new_token_ids), bool(one.finish_reason))
        return 8 + len(self.outputs)

    def _let_in(self) -> None:
        arrivals, load = self.load.arrivals, self.load
        while self.come < len(arrivals) and arrivals[self.come] <= self.now:
            at, one = arrivals[self.come], load.lengths[self.come]
            spec = SimulatedRequest(one.prompt_tokens, one.output_tokens, at)
            self.scheduler.add_request(self.request(self.come, spec))
            self.come += 1
            self.settled = False

    def _note(self, index: int, tokens: int, ended: bool) -> None:
        self.result.tokens += tokens
        if 0 <= index < self.load.counted:
            stay = self.result.stays[index]
            stay.first = min(stay.first, self.now)
            stay.last = self.now
            stay.tokens += tokens
            stay.ended = ended
            self.unended -= ended

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
from minivllm_simulate.cost_model import Cost
from minivllm_simulate.event_loop import EventLoop, with_pauses
from minivllm_simulate.simulated_engine import SimulatedEngine, Stretch
from minivllm_simulate.virtual_clock import SimulatedRequest, to_request
from minivllm_simulate.workloads import RequestLengths

Result = TypeVar("Result")


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


class OpenEngine(SimulatedEngine):
    """An engine under an open load: stretches that end at the next arrival."""

    def __init__(self, load: OpenLoad, scheduler: Scheduler, cost: Cost) -> None:
        super().__init__(scheduler)
        self.load = load
        self.cost = cost
        self.loop = EventLoop()
        self.step_seconds = 1.0
        self.timed = False
        self.come = 0
        counted = zip(load.arrivals[: load.counted], load.lengths, strict=False)
        self.result = OpenRun([Stay(at, lengths.output_tokens) for at, lengths in counted])
        self.unended = load.counted
        for at in load.arrivals:
            self.loop.at(at, self._arrive)

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return self.loop.now

    def serve(self) -> Generator[None, None, OpenRun]:
        """Run until the last counted request has ended, or nobody else comes (see `OpenLoad.to_the_end`)."""
        unseen: set[str] = set()
        for index, spec in enumerate(self.load.there_at_start(self.scheduler.config.max_num_batched_tokens)):
            self.add(to_request(index, spec, 0.0))
            unseen.add(str(index))

        def fill() -> int:
            self.stretch()
            unseen.difference_update(output.request_id for output in self.outputs)
            return len(self.scheduler.running)

        yield from with_pauses(fill, lambda: unseen)  # no time passes until these have their caches
        self.timed = True
        yield from with_pauses(self._step, self._goes_on)
        self.result.end = self.now
        self.result.come = self.come
        self.result.queue = len(self.scheduler.waiting)
        return self.result

    def steps_alike(self, running: Sequence[Request]) -> int:
        """Return no more steps than begin before the next arrival."""
        steps = super().steps_alike(running)
        if steps == 1 or not self.timed:
            return steps
        # The first token of a request would seem to come late.
        if any(request.num_tokens == request.num_prompt_tokens for request in running):
            return 1
        gap = self.loop.next_time - self.now
        return max(1, min(steps, math.ceil(gap / self.step_seconds))) if gap < math.inf else steps

    def seconds_of(self, stretch: Stretch) -> float:
        """Return the seconds of the stretch that was just taken."""
        return stretch.seconds(self.cost)

    def request(self, index: int, spec: SimulatedRequest) -> Request:
        """Make the scheduler's request of arrival `index`."""
        return to_request(self.load.at_start + index, spec, spec.arrival)

    def _goes_on(self) -> bool:
        return bool(self.unended) and (self.load.to_the_end or self.come < len(self.load.arrivals))

    def _step(self) -> int:
        loop = self.loop
        loop.advance(loop.now if self.scheduler.has_unfinished_requests() else loop.next_time)
        inside = len(self.scheduler.requests)
        stretch = self.stretch()
        seconds = self.seconds_of(stretch)
        self.step_seconds = seconds / stretch.steps
        loop.now += seconds
        self.result.request_seconds += inside * seconds
        for output in self.outputs:
            index = int(output.request_id) - self.load.at_start
            self._note(index, len(output.new_token_ids), bool(output.finish_reason))
        return 8 + len(self.outputs)

    def _arrive(self) -> None:
        lengths, at = self.load.lengths[self.come], self.load.arrivals[self.come]
        spec = SimulatedRequest(lengths.prompt_tokens, lengths.output_tokens, at)
        self.add(self.request(self.come, spec))
        self.come += 1

    def _note(self, index: int, tokens: int, ended: bool) -> None:
        self.result.tokens += tokens
        if 0 <= index < self.load.counted:
            stay = self.result.stays[index]
            stay.first = min(stay.first, self.now)
            stay.last = self.now
            stay.tokens += tokens
            stay.ended = ended
            self.unended -= ended

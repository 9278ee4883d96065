"""An open load on one engine: requests arrive at given times, and the real scheduler decides.
*Modelled*.

Unlike `virtual_clock.simulate`, it takes many similar steps at a time: while a batch only decodes
and no request arrives, its steps are one stretch. It begins with the mean number of requests in
progress, each somewhere in its answer; otherwise most of a short run would be spent on filling up
an empty engine.

The first `counted` arrivals are measured. Later ones only keep the load up until the last counted
one has ended. An engine that cannot keep up would never end them, so its run stops when no further
request arrives.
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
    """A counted request as its client sees it, with times in seconds since the start."""

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
        """Time per output token after the first; None if there is no second one."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass
class OpenRun:
    """The counted requests and the figures of the run as a whole."""

    stays: list[Stay]
    end: float = 0.0
    """When the run stopped."""
    come: int = 0
    """Requests that had arrived by then."""
    queue: int = 0
    """Requests that waited then."""
    tokens: int = 0
    """Output tokens of all requests, including those that were there at the start."""
    request_seconds: float = 0.0
    """Requests inside, integrated over time; divided by `end`, their mean number."""

    def ttft(self, stay: Stay) -> float:
        """Return the seconds to a request's first token, or how long it has waited if it has none
        yet.
        """
        return min(stay.first, self.end) - stay.arrival

    def attainment(self, ttft: float, tpot: float) -> float:
        """Return the share of the counted requests that met both objectives, in seconds; those
        that are still running count with their values so far.
        """
        met = sum(self.ttft(stay) <= ttft and (stay.tpot or 0.0) <= tpot for stay in self.stays)
        return met / len(self.stays)

    @property
    def ttfts(self) -> list[float]:
        """Seconds to first token, sorted; a request that has none yet counts with its wait."""
        return sorted(map(self.ttft, self.stays))

    @property
    def tpots(self) -> list[float]:
        """Seconds per output token after the first, sorted."""
        return sorted(tpot for stay in self.stays if (tpot := stay.tpot) is not None)


@dataclass(frozen=True)
class OpenLoad:
    """Requests that arrive one after another, and the number of requests present at the start.

    `lengths` and `arrivals` are equally long: the counted requests come first, then those that keep
    the load up.
    """

    lengths: Sequence[RequestLengths]
    arrivals: Sequence[float]
    counted: int
    at_start: int = 0
    seed: int = 0
    to_the_end: bool = False
    """Serve the counted requests to their last token, even when no further request arrives."""

    def there_at_start(self, budget: int) -> list[SimulatedRequest]:
        """Return the requests present at the start, each somewhere in its answer; the tokens it has
        so far count as its prompt.

        Their prompts are computed before the clock starts, `budget` tokens per step, and the first
        requests already decode meanwhile. So each request starts with as many fewer tokens as it
        will decode before the clock starts.
        """
        draw, requests, before = random.Random(f"start-{self.seed}"), [], 0
        drawn = [self.lengths[index % len(self.lengths)] for index in range(self.at_start)]
        progress = [int(draw.random() * lengths.output_tokens) for lengths in drawn]
        steps = sum(lengths.prompt_tokens + done for lengths, done in zip(drawn, progress, strict=True)) // budget
        for lengths, done in zip(drawn, progress, strict=True):
            prompt, left = lengths.prompt_tokens + done, lengths.output_tokens - done
            shift = min(steps - before // budget, prompt - 1)
            requests.append(SimulatedRequest(prompt - shift, left + shift))
            before += prompt
        return requests


def run_open(
    load: OpenLoad, scheduler_config: SchedulerConfig, cache_config: CacheConfig, cost: Cost
) -> Generator[None, None, OpenRun]:
    """Serve a load, pausing every few milliseconds of work; the generator returns the run.

    Raises:
        MinivllmError: the scheduler refuses a request.
    """
    return OpenEngine(load, Scheduler(scheduler_config, cache_config), cost).serve()


def finished(run: Generator[None, None, Result]) -> Result:
    """Run a generator to its end, ignoring pauses, and return its result."""
    while True:
        try:
            next(run)
        except StopIteration as end:
            return end.value


class OpenEngine(SimulatedEngine):
    """An engine under an open load, whose stretches end at the next arrival."""

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
        """Run until the last counted request has ended, or no further one arrives (see
        `OpenLoad.to_the_end`).
        """
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
        every = len(self.load.arrivals)
        yield from with_pauses(self._step, lambda: self.unended and (self.load.to_the_end or self.come < every))
        self.result.end = self.now
        self.result.come = self.come
        self.result.queue = len(self.scheduler.waiting)
        return self.result

    def steps_alike(self, running: Sequence[Request]) -> int:
        """Return how many steps are alike, but no more than begin before the next arrival."""
        steps = super().steps_alike(running)
        if steps == 1 or not self.timed:
            return steps
        # The first token of a request would seem to come late.
        if any(request.num_tokens == request.num_prompt_tokens for request in running):
            return 1
        gap = self.loop.next_time - self.now
        return max(1, min(steps, math.ceil(gap / self.step_seconds))) if gap < math.inf else steps

    def seconds_of(self, stretch: Stretch) -> float:
        """Return the seconds of the most recent stretch."""
        return stretch.seconds(self.cost)

    def request(self, index: int, spec: SimulatedRequest) -> Request:
        """Make the scheduler's request for arrival `index`."""
        return to_request(self.load.at_start + index, spec, spec.arrival)

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

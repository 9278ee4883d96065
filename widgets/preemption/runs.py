"""Run lesson 11's load with pools of many sizes, through the engine's scheduler.

The same requests arrive at the same times with every pool, so the pool alone explains every
difference. `minivllm_simulate.layouts` models the time of a step; where blocks are swapped, a step
also waits for its copies.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig
from minivllm.core.policy import SchedulingPolicy
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.errors import MinivllmError
from minivllm.memory import kv_bytes_per_token
from minivllm_lab.preemption.costs import LARGE, SMALL, Crossover, Pieces, effective_bandwidth
from minivllm_lab.preemption.learner_policy import Victim, learner_victim
from minivllm_lab.preemption.victims import SwapSpace, victim_rule
from minivllm_simulate.hardware import Hardware, get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.kv_links import Link, get_link
from minivllm_simulate.layouts import Layout, PlacedCost, PlacedModel
from minivllm_simulate.load_sweep import Runs, within
from minivllm_simulate.memory import memory_ledger
from minivllm_simulate.open_load import OpenEngine, OpenLoad
from minivllm_simulate.simulated_engine import Stretch
from minivllm_simulate.steady import Steady
from minivllm_simulate.virtual_clock import SimulatedRequest
from minivllm_simulate.workloads import RequestLengths, gamma_arrivals
from widgets.shell.swept import patient

COUNTED, AFTER = 100, 30
"""Requests that count, and requests that arrive after them."""
SEATS, BUDGET, BLOCK_SIZE = 256, 512, 16
"""max_num_seqs, max_num_batched_tokens, and the tokens of a block."""
SEED = 11
SPREAD = 0.75
"""Lengths are uniform between 1 - SPREAD and 1 + SPREAD times their mean."""
URGENT = 4
"""Every how many-th request has the better priority."""
POLICIES = {"recompute": None, "small": SMALL, "large": LARGE}
"""What happens to a victim: it is recomputed, or swapped in pieces of this size."""
PRIORITY = "worst priority"
RULES = ("last in", PRIORITY, "first in", "most blocks", "fewest left", "least computed")
ADMISSIONS = ("whole", "chunk")
"""What must fit to admit a request: all of its tokens so far, or those of its first step."""
RUNS, OUT, AGAIN = "runs", "preempted", "comes back"


@dataclass(frozen=True)
class Span:
    """A period in a request's life, in seconds: RUNS, OUT (preempted), or AGAIN (back, until its
    next token).
    """

    request: int
    kind: str
    start: float
    end: float
    held: int
    """Computed tokens at its end; for OUT, all tokens."""


@dataclass(frozen=True)
class Point:
    """The results of the requests with one pool."""

    latencies: Sequence[float]
    """Seconds to the last token of each request, sorted."""
    preemptions: int
    computed: int
    """Tokens that went through the model."""
    recomputed: int
    """Computed tokens that had been computed before."""
    copied: int
    """Blocks copied, out and back together."""
    copying: float
    """Seconds that steps waited for copies."""
    seconds: float
    """Seconds until the last counted request ended."""
    spans: tuple[Span, ...]
    peak: int
    """The maximum number of blocks in use after any step."""

    @property
    def wasted(self) -> float:
        """Return the share of the computed tokens that had been computed before."""
        return self.recomputed / self.computed

    @property
    def lost(self) -> float:
        """Return the share of the tokens that are computed twice or, where blocks are swapped, of the
        time that steps wait for copies.
        """
        return self.copying / self.seconds if self.copied else self.wasted

    def latency(self, share: float) -> float:
        """Return the seconds within which this share of the requests finished."""
        return within(self.latencies, share)


class _Watched(OpenEngine):
    """An engine that also records preemptions, repeated work and copies."""

    def __init__(self, serving: Serving, pool: int, own: Victim | None) -> None:
        self.swap = SwapSpace(BLOCK_SIZE)
        super().__init__(serving.work(), serving.scheduler(pool, own, self.swap), serving.cost)
        self.serving = serving
        self.began: dict[int, tuple[str, float]] = {}
        self.spans: list[Span] = []
        self.peak = 0
        self.computed = 0
        self.copied, self.copying = 0, 0.0
        self.start = 0.0

    def request(self, index: int, spec: SimulatedRequest) -> Request:
        return super().request(index, replace(spec, priority=int(index % URGENT != 0)))

    def seconds_of(self, stretch: Stretch) -> float:
        self.start = self.now
        self.computed += stretch.num_tokens
        blocks = sum(self.swap.take_copied_blocks())
        waited = blocks * self.serving.block_seconds
        self.copied += blocks
        self.copying += waited
        return super().seconds_of(stretch) + waited

    def _step(self) -> int:
        work = super()._step()
        assert self.scheduled
        for key in self.scheduled.preempted_req_ids:
            self._turn(int(key), OUT, self.start)
        for new in self.scheduled.scheduled_new_reqs:
            index = int(new.req_id)
            self._turn(index, AGAIN if index in self.began else RUNS, self.start)
        for output in self.outputs:
            index = int(output.request_id)
            if output.finish_reason:
                self._turn(index, "", self.now)
            elif self.began[index][0] == AGAIN:
                self._turn(index, RUNS, self.now)
        pool = self.scheduler.kv_cache_manager.block_pool
        self.peak = max(self.peak, pool.num_usable_blocks - pool.get_num_free_blocks())
        return work

    def _turn(self, index: int, kind: str, now: float) -> None:
        """Record that a request changes to `kind`; "" means that it has finished."""
        if index in self.began:
            before, since = self.began.pop(index)
            self.spans.append(Span(index, before, since, now, self._held(index, kind)))
        if kind:
            self.began[index] = kind, now

    def _held(self, index: int, turns_to: str) -> int:
        """Return the computed tokens of a request that is about to change."""
        request = self.scheduler.requests.get(str(index))
        if request is None:  # it has ended in this step
            return self.serving.lengths[index].total
        return request.num_lost_tokens if turns_to == OUT else request.num_tokens

    def watched(self) -> Generator[None, None, Point]:
        """Serve the load, pausing every few milliseconds of work."""
        result = yield from self.serve()
        for index, (kind, since) in self.began.items():
            self.spans.append(Span(index, kind, since, self.now, self.scheduler.requests[str(index)].num_tokens))
        return Point(
            latencies=sorted(stay.last - stay.arrival for stay in result.stays),
            preemptions=self.scheduler.num_preemptions,
            computed=self.computed,
            recomputed=self.scheduler.num_recomputed_tokens,
            copied=self.copied,
            copying=self.copying,
            seconds=result.end,
            spans=tuple(sorted(self.spans, key=lambda span: span.start)),
            peak=self.peak,
        )


@dataclass(frozen=True)
class Serving:
    """An engine on one GPU and its load: everything but the pool."""

    name: str
    """The model's name."""
    model: ModelConfig
    gpu: Hardware
    load: float
    """Requests a second."""
    prompt: int
    """Mean tokens of a prompt."""
    answer: int
    link: Link
    policy: str
    rule: str
    admission: str

    @cached_property
    def cost(self) -> PlacedCost:
        return PlacedModel(self.model, self.gpu, Layout(1, 1, 1)).cost

    @cached_property
    def lengths(self) -> list[RequestLengths]:
        """Draw the lengths of all requests."""
        draw = random.Random(SEED).random
        means = (self.prompt, self.answer)
        drawn = ([max(1, round(mean * (1 + SPREAD * (2 * draw() - 1)))) for mean in means] for _ in range(self.count))
        return [RequestLengths(prompt, answer) for prompt, answer in drawn]

    @property
    def count(self) -> int:
        return COUNTED + AFTER

    @property
    def longest(self) -> int:
        """Return the maximum number of tokens in a request, max_model_len."""
        return round((1 + SPREAD) * self.prompt) + round((1 + SPREAD) * self.answer)

    @cached_property
    def arrivals(self) -> list[float]:
        """Return the times, in seconds, at which requests arrive."""
        return gamma_arrivals(self.load, self.count, seed=SEED)

    @cached_property
    def crossover(self) -> Crossover:
        """Return what it costs to recompute or to swap a victim's token; in large pieces if the
        policy does not swap.
        """
        return Crossover.of(self.model, self.gpu, self.link, self.pieces, 2, block_size=BLOCK_SIZE)

    @property
    def pieces(self) -> Pieces:
        return POLICIES[self.policy] or LARGE

    @cached_property
    def block_seconds(self) -> float:
        """Return the seconds that it takes to copy one block in one direction."""
        size = self.pieces.bytes_of_copy(self.model, BLOCK_SIZE)
        rate = effective_bandwidth(self.link, size, self.pieces.seconds)
        return BLOCK_SIZE * kv_bytes_per_token(self.model) / rate

    @cached_property
    def most_tokens(self) -> int:
        """Return how many tokens fit into the GPU's memory.

        Raises:
            MinivllmError: Not even one of the longest requests fits.
        """
        ledger = memory_ledger(
            self.model, self.gpu, max_model_len=self.longest, max_num_batched_tokens=BUDGET, max_num_seqs=SEATS,
            block_size=BLOCK_SIZE,
        )  # fmt: skip
        return ledger.usable_blocks * BLOCK_SIZE

    def refusal(self, pool: int) -> str:
        """Explain why an engine with this pool does not start, or return ""."""
        try:
            most = self.most_tokens
        except MinivllmError as error:
            return str(error)
        if pool > most:
            return f"the {self.gpu.name} has room for {most:,} tokens beside {self.name}"
        if pool < -(-self.longest // BLOCK_SIZE) * BLOCK_SIZE:
            return f"one request of {self.longest:,} tokens does not fit"
        return ""

    def capacity(self, pool: int) -> float:
        """Return the maximum request rate, per second, that this pool sustains if nothing is ever
        computed twice.

        The batch is steady, and as large as fits in the pool if each request holds its average.
        """
        return self.steady(pool / self.held).capacity()

    def steady(self, room: float = SEATS) -> Steady:
        """Return a steady batch with room for this many requests."""
        return Steady.within(self.cost, self.prompt, self.answer, seats=min(SEATS, room), budget=BUDGET)

    @cached_property
    def held(self) -> float:
        """Return the mean number of tokens that a running request holds; long answers run longer
        and count more.
        """
        steps = sum(request.output_tokens for request in self.lengths)
        return sum(each.output_tokens * (each.prompt_tokens + each.output_tokens / 2) for each in self.lengths) / steps

    def scheduler(self, pool: int, own: Victim | None, swap: SwapSpace) -> Scheduler:
        """Build the engine's scheduler with this rule or the reader's function, and with `swap` if
        blocks are swapped.
        """
        priority = self.rule == PRIORITY
        config = SchedulerConfig(
            max_model_len=self.longest,
            max_num_seqs=SEATS,
            max_num_batched_tokens=BUDGET,
            policy="priority" if priority else "fcfs",
            scheduler_reserve_full_isl=self.admission == "whole",
        )
        cache = CacheConfig(num_gpu_blocks=1 + pool // BLOCK_SIZE, block_size=BLOCK_SIZE, enable_prefix_caching=False)
        victim = learner_victim(own) if own else victim_rule("" if priority else self.rule)
        recompute = self.policy == "recompute"
        return Scheduler(config, cache, SchedulingPolicy(victim=victim) if recompute else swap.policy(victim))

    def work(self) -> OpenLoad:
        return OpenLoad(self.lengths, self.arrivals, COUNTED, 0, to_the_end=True)


class Experiment:
    """The runs of one setting with any pool; results are kept, and an interrupted run can be
    resumed.
    """

    def __init__(self, serving: Serving, own: Victim | None) -> None:
        self.serving = serving
        self.own = own
        self.runs = Runs(self._run)
        """Results by the pool's tokens."""
        self.capacity = lru_cache(maxsize=64)(serving.capacity)
        self.refusal = lru_cache(maxsize=64)(serving.refusal)

    def _run(self, pool: int) -> Generator[None, None, Point]:
        if point := self._like_a_smaller_pool(pool):
            return point
        run = _Watched(self.serving, pool, self.own).watched()
        return (yield from (patient(run, "your function") if self.own else run))

    def _like_a_smaller_pool(self, pool: int) -> Point | None:
        """Return the result of a smaller pool that never ran out of blocks, since more blocks
        change nothing; None if there is none.
        """
        longest = -(-self.serving.longest // BLOCK_SIZE)
        for other, point in self.runs.found.items():
            if other <= pool and not point.preemptions and point.peak + longest <= other // BLOCK_SIZE:
                return point
        return None


@lru_cache(maxsize=48)
def experiment(
    model: str, gpu: str, load: float, prompt: int, answer: int, link: str, policy: str, rule: str,
    admission: str, own: Victim | None = None,
) -> Experiment:  # fmt: skip
    """Return the experiment with this setting; it keeps the results of earlier runs.

    Raises:
        MinivllmError: The model, GPU or link is unknown.
    """
    placed = model, known_model(model), get_hardware(gpu)
    return Experiment(Serving(*placed, load, prompt, answer, get_link(link), policy, rule, admission), own)

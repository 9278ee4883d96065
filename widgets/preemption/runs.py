"""The runs behind lesson 11's widget: one load on pools of many sizes, through the engine's scheduler.

The same requests come at the same moments whatever the pool is, so that all differences are the pool's. A step's time
is that of `minivllm_simulate.layouts`, modelled; where blocks are swapped, a step also waits for its copies.
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
from minivllm.memory import kv_bytes_per_token, memory_ledger
from minivllm_lab.preemption.costs import LARGE, SMALL, Crossover, Pieces, effective_bandwidth
from minivllm_lab.preemption.learner_policy import Victim, learner_victim
from minivllm_lab.preemption.victims import SwapSpace, victim_rule
from minivllm_simulate.cost_model import StepShape
from minivllm_simulate.hardware import Hardware, get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.kv_links import Link, get_link
from minivllm_simulate.layouts import Cost, Layout, PlacedModel, Steady
from minivllm_simulate.load_sweep import Runs, within
from minivllm_simulate.open_load import OpenEngine, OpenLoad
from minivllm_simulate.simulated_engine import Stretch
from minivllm_simulate.virtual_clock import SimulatedRequest
from minivllm_simulate.workloads import RequestLengths, gamma_arrivals
from widgets.shell.swept import patient

COUNTED, AFTER = 100, 30
"""Requests that are looked at, and those that come after them."""
PLACES, BUDGET, BLOCK_SIZE = 256, 512, 16
"""max_num_seqs, max_num_batched_tokens, and tokens of a block."""
SEED = 11
SPREAD = 0.75
"""Lengths lie evenly between 1 - SPREAD and 1 + SPREAD times their mean."""
URGENT = 4
"""Every so many-th request goes first, where priorities count."""
POLICIES = {"recompute": None, "small": SMALL, "large": LARGE}
"""What becomes of a victim: computed again, or swapped in pieces of this size."""
PRIORITY = "worst priority"
RULES = ("last in", PRIORITY, "first in", "most blocks", "fewest left", "least computed")
ADMISSIONS = ("whole", "chunk")
"""What must fit for a request to be admitted: all of its tokens so far, or the first step's."""
RUNS, OUT, AGAIN = "runs", "preempted", "comes back"


@dataclass(frozen=True)
class Span:
    """What a request did for a while, times in seconds: RUNS, OUT (it waits), or AGAIN (until its next token)."""

    request: int
    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class Sample:
    """The pool after a step, in blocks."""

    end: float
    used: int
    returned: int
    """Of those who have been preempted before."""
    running: int
    out: int
    """Requests that wait since they were preempted."""


@dataclass(frozen=True)
class Point:
    """What became of the requests with one pool."""

    latencies: Sequence[float]
    """Seconds to the last token of each, from the shortest."""
    preemptions: int
    computed: int
    """Tokens that went through the model."""
    recomputed: int
    """Of these, tokens that had been computed before."""
    copied: int
    """Blocks copied, out and back together."""
    copying: float
    """Seconds that steps waited for copies."""
    tokens: int
    """Of answers."""
    seconds: float
    """From the start until the last counted request had ended."""
    spans: tuple[Span, ...]
    samples: tuple[Sample, ...]

    @property
    def wasted(self) -> float:
        """Share of the computed tokens that had been computed before."""
        return self.recomputed / self.computed

    @property
    def peak(self) -> int:
        """The most blocks that were in use after a step."""
        return max(one.used for one in self.samples)

    def latency(self, share: float) -> float:
        """Seconds within which this share of the requests ended."""
        return within(self.latencies, share)


class _Watched(OpenEngine):
    """Notes who is preempted and comes back, what is computed twice, and what is copied."""

    def __init__(self, serving: Serving, pool: int, own: Victim | None, one_by_one: bool) -> None:
        self.swap = SwapSpace(BLOCK_SIZE)
        super().__init__(serving.work(), serving.scheduler(pool, own, self.swap), serving.cost)
        self.serving, self.one_by_one = serving, one_by_one
        self.began: dict[int, tuple[str, float]] = {}
        self.spans: list[Span] = []
        self.samples: list[Sample] = []
        self.computed, self.copied, self.copying, self.start = 0, 0, 0.0, 0.0

    def steps_alike(self, running: Sequence) -> int:
        """One at a time where a test asks for it."""
        return 1 if self.one_by_one else super().steps_alike(running)

    def request(self, index: int, spec: SimulatedRequest) -> Request:
        """Every so many-th is urgent."""
        return super().request(index, replace(spec, priority=int(index % URGENT != 0)))

    def seconds_of(self, stretch: Stretch) -> float:
        """The steps, and the copies before them."""
        self.start, self.computed = self.now, self.computed + stretch.num_tokens
        blocks = sum(self.swap.take_copied_blocks())
        waited = blocks * self.serving.block_seconds
        self.copied, self.copying = self.copied + blocks, self.copying + waited
        return super().seconds_of(stretch) + waited

    def _step(self) -> int:
        work = super()._step()
        assert self.scheduled
        for key in self.scheduled.preempted_req_ids:
            self._turn(int(key), OUT, self.start)
        for new in self.scheduled.scheduled_new_reqs:
            index = int(new.req_id)
            self._turn(index, AGAIN if index in self.began else RUNS, self.start)
        for one in self.outputs:
            index = int(one.request_id)
            if one.finish_reason:
                self._turn(index, "", self.now)
            elif self.began[index][0] == AGAIN:
                self._turn(index, RUNS, self.now)
        self._sample()
        return work

    def _turn(self, index: int, kind: str, now: float) -> None:
        """A request begins something else; empty: it has ended."""
        if index in self.began:
            before, since = self.began.pop(index)
            self.spans.append(Span(index, before, since, now))
        if kind:
            self.began[index] = kind, now

    def _sample(self) -> None:
        manager, running = self.scheduler.kv_cache_manager, self.scheduler.running
        held, pool = manager.req_to_blocks, manager.block_pool
        returned = sum(len(held[one.request_id]) for one in running if one.num_preemptions)
        out = sum(kind == OUT for kind, _ in self.began.values())
        used = pool.num_usable_blocks - pool.get_num_free_blocks()
        self.samples.append(Sample(self.now, used, returned, len(running), out))

    def watched(self) -> Generator[None, None, Point]:
        """Serve, with a pause every few milliseconds of work."""
        result = yield from self.serve()
        for index, (kind, since) in self.began.items():
            self.spans.append(Span(index, kind, since, self.now))
        return Point(
            latencies=sorted(stay.last - stay.arrival for stay in result.stays),
            preemptions=self.scheduler.num_preemptions,
            computed=self.computed,
            recomputed=self.scheduler.num_recomputed_tokens,
            copied=self.copied,
            copying=self.copying,
            tokens=result.tokens,
            seconds=result.end,
            spans=tuple(sorted(self.spans, key=lambda span: span.start)),
            samples=tuple(self.samples),
        )


@dataclass(frozen=True)
class Serving:
    """An engine on one GPU, and what it is to serve; all but the pool."""

    name: str
    """The model's."""
    model: ModelConfig
    gpu: Hardware
    load: float
    """Requests a second."""
    prompt: int
    """Tokens of a prompt, on average."""
    answer: int
    link: Link
    policy: str
    rule: str
    admission: str

    @cached_property
    def cost(self) -> Cost:
        """What a step takes."""
        return self.placed.cost

    @cached_property
    def placed(self) -> PlacedModel:
        """The model on its GPU."""
        return PlacedModel(self.model, self.gpu, Layout(1, 1, 1))

    @cached_property
    def lengths(self) -> list[RequestLengths]:
        """Of all requests."""
        draw = random.Random(SEED).random
        means = (self.prompt, self.answer)
        drawn = ([max(1, round(mean * (1 + SPREAD * (2 * draw() - 1)))) for mean in means] for _ in range(self.come))
        return [RequestLengths(prompt, answer) for prompt, answer in drawn]

    @property
    def come(self) -> int:
        """Requests in all."""
        return COUNTED + AFTER

    @property
    def longest(self) -> int:
        """Tokens that a request may have: max_model_len."""
        return round((1 + SPREAD) * self.prompt) + round((1 + SPREAD) * self.answer)

    @cached_property
    def arrivals(self) -> list[float]:
        """Seconds at which they come, at random."""
        return gamma_arrivals(self.load, self.come, seed=SEED)

    @cached_property
    def crossover(self) -> Crossover:
        """What a token of a victim costs either way; swapped in large pieces where it is not swapped."""
        return self.crossover_of(self.link)

    def crossover_of(self, link: Link) -> Crossover:
        """The same with another link."""
        return Crossover.of(self.model, self.gpu, link, self.pieces, 2, block_size=BLOCK_SIZE)

    @property
    def pieces(self) -> Pieces:
        """Of a swap."""
        return POLICIES[self.policy] or LARGE

    @cached_property
    def block_seconds(self) -> float:
        """Of copying one block, one way."""
        size = self.pieces.bytes_of_copy(self.model, BLOCK_SIZE)
        rate = effective_bandwidth(self.link, size, self.pieces.seconds)
        return BLOCK_SIZE * kv_bytes_per_token(self.model) / rate

    @cached_property
    def most_tokens(self) -> int:
        """How many tokens fit into the GPU's memory.

        Raises:
            MinivllmError: not even one of the longest requests.
        """
        ledger = memory_ledger(
            self.model, self.gpu, max_model_len=self.longest, max_num_batched_tokens=BUDGET, max_num_seqs=PLACES,
            block_size=BLOCK_SIZE,
        )  # fmt: skip
        return ledger.usable_blocks * BLOCK_SIZE

    @cached_property
    def step_alone(self) -> float:
        """Seconds of a step with one request that has half its answer."""
        return self.cost.seconds(StepShape.of([(1, self.prompt + self.answer // 2)]))

    @property
    def demand(self) -> float:
        """Tokens a second that come, prompts and answers."""
        return self.load * (self.prompt + self.answer)

    def refusal(self, pool: int) -> str:
        """Why an engine with this pool does not start; empty where it does."""
        try:
            most = self.most_tokens
        except MinivllmError as error:
            return str(error)
        if pool > most:
            return f"{self.gpu.name} has room for {most:,} tokens beside {self.name}"
        if pool < -(-self.longest // BLOCK_SIZE) * BLOCK_SIZE:
            return f"one request of {self.longest:,} tokens does not fit"
        return ""

    def capacity(self, pool: int) -> float:
        """Requests a second that a pool of so many tokens serves at most, were nothing ever computed twice.

        Of a batch that stays as it is, no larger than what such requests hold on average fills the pool.
        """
        return self.steady(pool / self.held).capacity

    def steady(self, room: float = PLACES) -> Steady:
        """A batch that stays as it is, with room for so many requests."""
        most = max(1.0, min(PLACES, room, BUDGET / (1 + self.prompt / self.answer)))
        return Steady(self.cost, self.prompt, self.answer, most)

    @cached_property
    def held(self) -> float:
        """Tokens that a running request holds on average: those with long answers count for longer."""
        steps = sum(one.output_tokens for one in self.lengths)
        return sum(one.output_tokens * (one.prompt_tokens + one.output_tokens / 2) for one in self.lengths) / steps

    def least_block_seconds(self) -> float:
        """Blocks times seconds that a mean request takes at the least: every token of its answer takes a step."""
        step = self.cost.seconds(StepShape.of([(1, 1)]))
        blocks = (
            sum(-(-(one.prompt_tokens + done) // BLOCK_SIZE) for done in range(one.output_tokens))
            for one in self.lengths
        )
        return step * sum(blocks) / len(self.lengths)

    def scheduler(self, pool: int, own: Victim | None, swap: SwapSpace) -> Scheduler:
        """The engine's, with another rule or the reader's function; and with `swap`, where blocks are swapped."""
        priority = self.rule == PRIORITY
        config = SchedulerConfig(
            max_model_len=self.longest,
            max_num_seqs=PLACES,
            max_num_batched_tokens=BUDGET,
            policy="priority" if priority else "fcfs",
            scheduler_reserve_full_isl=self.admission == "whole",
        )
        cache = CacheConfig(num_gpu_blocks=1 + pool // BLOCK_SIZE, block_size=BLOCK_SIZE, enable_prefix_caching=False)
        victim = learner_victim(own) if own else victim_rule("" if priority else self.rule)
        recompute = self.policy == "recompute"
        return Scheduler(config, cache, SchedulingPolicy(victim=victim) if recompute else swap.policy(victim))

    def work(self) -> OpenLoad:
        """What comes."""
        return OpenLoad(self.lengths, self.arrivals, COUNTED, 0, to_the_end=True)


class Experiment:
    """All pools of one setting. What has been run is kept, and a run that was left is taken up again."""

    def __init__(self, serving: Serving, own: Victim | None, one_by_one: bool = False) -> None:
        self.serving, self.own, self.one_by_one = serving, own, one_by_one
        self.runs = Runs(self._run)
        """By pool, in tokens."""
        self.capacity = lru_cache(maxsize=64)(serving.capacity)
        self.refusal = lru_cache(maxsize=64)(serving.refusal)

    def _run(self, pool: int) -> Generator[None, None, Point]:
        if found := self._like_a_smaller_one(pool):
            return found
        run = _Watched(self.serving, pool, self.own, self.one_by_one).watched()
        return (yield from (patient(run, "your function") if self.own else run))

    def _like_a_smaller_one(self, pool: int) -> Point | None:
        """What is known of a pool in which nobody ever lacked a block: more of them change nothing."""
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
    """The runs of this setting, those done before included.

    Raises:
        MinivllmError: no such model, GPU or link.
    """
    placed = model, known_model(model), get_hardware(gpu)
    return Experiment(Serving(*placed, load, prompt, answer, get_link(link), policy, rule, admission), own)

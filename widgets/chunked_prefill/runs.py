"""Run lesson 10's load of chats and long prompts through the engine's scheduler, at one token
budget.

The same requests arrive at the same times with any budget, so the budget alone explains every
difference. `minivllm_simulate.layouts` models the time of a step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from minivllm.config import CacheConfig, ModelConfig, SchedulerConfig
from minivllm.core.policy import DEFAULT_POLICY
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.errors import MinivllmError
from minivllm_lab.chunked_prefill.learner_policy import AdmittedTokens, ChunkLimit, RunningTokens, learner_policy
from minivllm_lab.chunked_prefill.prefill_first import PREFILL_FIRST
from minivllm_simulate.cost_model import Cost, StepShape, chunk_seconds
from minivllm_simulate.hardware import Hardware, get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.layouts import Layout, PlacedModel
from minivllm_simulate.load_sweep import Runs, share_within, within
from minivllm_simulate.memory import memory_ledger
from minivllm_simulate.open_load import OpenEngine, OpenLoad
from minivllm_simulate.workloads import RequestLengths, gamma_arrivals
from widgets.shell.swept import patient

CHAT, ANSWER = 128, 48
"""Tokens of a chat's prompt, and of every answer."""
COUNTED, AFTER = 80, 20
"""Requests that count, and requests that arrive after them."""
SEATS, BLOCK_SIZE = 64, 64
"""max_num_seqs, and the tokens of a block: more than vLLM's 16, because a pool of fewer blocks
is faster to build.
"""
SEED = 10
LEAST_STEP = 64
"""The smallest step, in tokens, in the search for the best rate."""
WINDOW = 3.0
"""The time that is drawn, as a multiple of what a long prompt takes alone in one piece."""
Caps = tuple[ChunkLimit | None, RunningTokens | None, AdmittedTokens | None]
"""The reader's functions of exercise 10; None keeps the engine's."""


@dataclass(frozen=True)
class Step:
    """The tokens that one step was made of; times are in seconds."""

    start: float
    end: float
    long: int
    """Tokens of long prompts."""
    chat: int
    """Tokens of chats' prompts."""
    decodes: int
    """Requests that got a token beyond their first."""
    gap: float
    """The longest wait of these requests."""


@dataclass(frozen=True)
class Point:
    """The results of the requests with one budget."""

    gaps: Sequence[tuple[float, int]]
    """(seconds between two tokens, number of such gaps), sorted."""
    longest: Sequence[float]
    """Each client's longest gap, sorted."""
    long_ttft: Sequence[float]
    """Seconds to the first token of each long prompt, sorted; for a prompt without one, how long
    it has waited.
    """
    chat_ttft: Sequence[float]
    strip: tuple[Step, ...]
    """The steps in the window."""

    def gap(self, share: float) -> float:
        """Return the gap, in seconds, that this share of all gaps does not exceed."""
        left = math.ceil(share * sum(count for _, count in self.gaps))
        for seconds, count in self.gaps:
            left -= count
            if left <= 0:
                return seconds
        return 0.0

    def stalled(self, limit: float) -> float:
        """Return the share of the clients that waited longer than `limit` seconds for a token at
        least once.
        """
        return 1 - share_within(self.longest, limit)

    def longest_gap(self, share: float) -> float:
        """Return the longest gap that this share of the clients does not exceed."""
        return within(self.longest, share)


class _Watched(OpenEngine):
    """An engine that also records every gap, and the steps in a window of time."""

    def __init__(self, load: OpenLoad, scheduler: Scheduler, serving: Serving, one_by_one: bool) -> None:
        super().__init__(load, scheduler, serving.cost)
        self.window = serving.window
        self.one_by_one = one_by_one
        self.latest: dict[int, float] = {}
        """When each request got its latest token."""
        self.gaps: dict[float, int] = {}
        self.longest = [0.0] * COUNTED
        self.computed: dict[int, int] = {}
        """Computed tokens of each request."""
        self.strip: list[Step] = []
        self.longest_now = 0.0
        """The longest gap that ended with the first step of the last stretch."""

    def steps_alike(self, running: Sequence[Request]) -> int:
        return 1 if self.one_by_one else super().steps_alike(running)

    def _step(self) -> int:
        self.longest_now = 0.0
        work = super()._step()
        steps = max((len(output.new_token_ids) for output in self.outputs), default=1)
        self._record_steps(steps)
        return work

    def _record_steps(self, steps: int) -> None:
        """Record the steps of this stretch that lie in the window."""
        assert self.scheduled
        for key in self.scheduled.preempted_req_ids:
            self.computed[int(key)] = 0
        long = chat = decodes = 0
        for key, new in self.scheduled.num_scheduled_tokens.items():
            index = int(key)
            prompt = self.load.lengths[index].prompt_tokens
            before = self.computed.get(index, 0)
            self.computed[index] = before + new
            if before >= prompt:
                decodes += 1
            elif prompt > CHAT:
                long += new
            else:
                chat += new
        first = self.now - steps * self.step_seconds
        for index in range(steps):
            start, end = (first + (index + later) * self.step_seconds for later in (0, 1))
            if end > self.window[0] and start < self.window[1]:
                gap = self.step_seconds if index else self.longest_now
                self.strip.append(Step(start, end, long, chat, decodes, gap))

    def _note(self, index: int, tokens: int, ended: bool) -> None:
        super()._note(index, tokens, ended)
        first = self.now - (tokens - 1) * self.step_seconds
        if index in self.latest:
            self._gap(index, first - self.latest[index], 1)
            self.longest_now = max(self.longest_now, first - self.latest[index])
        if tokens > 1:
            self._gap(index, self.step_seconds, tokens - 1)
        self.latest[index] = self.now

    def _gap(self, index: int, seconds: float, count: int) -> None:
        if index < COUNTED:
            self.gaps[seconds] = self.gaps.get(seconds, 0) + count
            self.longest[index] = max(self.longest[index], seconds)

    def watched(self) -> Generator[None, None, Point]:
        """Serve the load, pausing every few milliseconds of work."""
        result = yield from self.serve()
        waited: dict[bool, list[float]] = {False: [], True: []}
        for stay, lengths in zip(result.stays, self.load.lengths, strict=False):
            if stay.arrival <= result.end:
                waited[lengths.prompt_tokens > CHAT].append(result.ttft(stay))
        came = [gap for gap, stay in zip(self.longest, result.stays, strict=True) if stay.tokens > 1]
        return Point(
            gaps=sorted(self.gaps.items()),
            longest=sorted(came) or [0.0],
            long_ttft=sorted(waited[True]),
            chat_ttft=sorted(waited[False]),
            strip=tuple(self.strip),
        )


@dataclass(frozen=True)
class Serving:
    """An engine on one GPU and its load: everything but the budget."""

    name: str
    """The model's name."""
    model: ModelConfig
    gpu: Hardware
    load: float
    """Requests a second."""
    share: float
    """The share of long requests."""
    longest: int
    """Tokens of a long request, its answer included."""
    threshold: int
    policy: str

    @property
    def prompt(self) -> int:
        """Return the number of tokens in a long prompt."""
        return self.longest - ANSWER

    @cached_property
    def cost(self) -> Cost:
        return PlacedModel(self.model, self.gpu, Layout(1, 1, 1)).cost

    @cached_property
    def lengths(self) -> list[RequestLengths]:
        """List the lengths of all requests; the long ones are evenly spaced."""
        every = round(1 / self.share)
        kinds = (index % every == every // 2 for index in range(COUNTED + AFTER))
        return [RequestLengths(self.prompt if long else CHAT, ANSWER) for long in kinds]

    @cached_property
    def arrivals(self) -> list[float]:
        """Return the times, in seconds, at which requests arrive."""
        return gamma_arrivals(self.load, COUNTED + AFTER, seed=SEED)

    @cached_property
    def window(self) -> tuple[float, float]:
        """Return the time span to draw, which begins just before a long prompt arrives in the
        middle of the run.
        """
        counted = zip(self.arrivals[:COUNTED], self.lengths, strict=False)
        longs = [at for at, request in counted if request.prompt_tokens > CHAT]
        wide = WINDOW * self.alone(self.longest)
        start = max(0.0, longs[len(longs) // 2] - wide / 8)
        return start, start + wide

    @cached_property
    def mean_prompt(self) -> float:
        """Return the mean length of all prompts in tokens."""
        return statistics.mean(request.prompt_tokens for request in self.lengths)

    @cached_property
    def mean_pairs(self) -> float:
        """Return the mean number of (query, key) pairs in a prompt."""
        return statistics.mean(request.prompt_tokens**2 for request in self.lengths) / 2

    def alone(self, budget: int) -> float:
        """Return the seconds that a long prompt takes when it runs alone."""
        return chunk_seconds(self.cost, self.prompt, budget)

    def capacity(self, budget: int) -> float:
        """Return the maximum request rate, per second, that full steps of up to this budget sustain
        before the queue grows.

        Every step is modelled as the mean step.
        """
        steps = [tokens for tokens in (budget >> half for half in range(budget.bit_length())) if tokens >= LEAST_STEP]
        rates = (tokens / self.cost.seconds(self._mean_step(tokens)) for tokens in steps or [budget])
        return max(rates) / (self.mean_prompt + ANSWER)

    def _mean_step(self, tokens: int) -> StepShape:
        """Return the shape of a step of this many tokens, with prompt tokens and decodes in the
        proportion in which they arrive.
        """
        prompt = self.mean_prompt
        whole = prompt + ANSWER
        decodes = tokens * ANSWER / whole
        context = prompt + ANSWER / 2
        pairs = tokens / whole * (self.mean_pairs + ANSWER * context)
        keys = decodes * context + self.mean_pairs / prompt
        return StepShape(round(decodes) + 1, tokens, round(keys), round(pairs))

    def kv_tokens(self, budget: int) -> int:
        """Return how many KV cache tokens fit beside the weights and the activations of a step this
        large.

        Raises:
            MinivllmError: A long request does not fit.
        """
        ledger = memory_ledger(
            self.model, self.gpu, max_model_len=self.longest, max_num_batched_tokens=budget, max_num_seqs=SEATS,
            block_size=BLOCK_SIZE,
        )  # fmt: skip
        return ledger.usable_blocks * BLOCK_SIZE

    def refusal(self, budget: int) -> str:
        """Explain why an engine with this budget does not start, or return ""."""
        if self.policy != "mixed" and budget < self.longest:
            return f"a request of {self.longest:,} tokens is never cut and would wait forever"
        try:
            self.kv_tokens(budget)
        except MinivllmError as error:
            return str(error)
        return ""

    def scheduler(self, budget: int, own: Caps | None) -> Scheduler:
        """Build the scheduler: the engine's, V0's prefill-first one, or the engine's with the
        reader's functions.
        """
        most = sum(request.total + BLOCK_SIZE for request in self.lengths)
        config = SchedulerConfig(
            max_model_len=self.longest,
            max_num_seqs=SEATS,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=min(self.threshold, self.longest),
            enable_chunked_prefill=self.policy == "mixed",
        )
        blocks = min(self.kv_tokens(budget), most) // BLOCK_SIZE
        cache = CacheConfig(num_gpu_blocks=1 + blocks, block_size=BLOCK_SIZE, enable_prefix_caching=False)
        if self.policy == "first":
            return Scheduler(config, cache, PREFILL_FIRST)
        return Scheduler(config, cache, learner_policy(*own) if own else DEFAULT_POLICY)


class Experiment:
    """The runs of one setting at any budget; results are kept, and an interrupted run can be
    resumed.
    """

    def __init__(self, serving: Serving, own: Caps | None, one_by_one: bool) -> None:
        self.serving = serving
        self.own = own
        self.one_by_one = one_by_one
        self.runs = Runs(self._run)
        """Results by budget."""
        self.alone = lru_cache(maxsize=64)(serving.alone)
        self.capacity = lru_cache(maxsize=64)(serving.capacity)
        self.refusal = lru_cache(maxsize=64)(serving.refusal)

    def _run(self, budget: int) -> Generator[None, None, Point]:
        serving = self.serving
        load = OpenLoad(serving.lengths, serving.arrivals, COUNTED, 0)
        scheduler = serving.scheduler(budget, self.own)
        run = _Watched(load, scheduler, serving, self.one_by_one).watched()
        return (yield from (patient(run, "your function") if self.own else run))


@lru_cache(maxsize=64)
def experiment(
    model: str,
    gpu: str,
    load: float,
    share: float,
    longest: int,
    threshold: int,
    policy: str,
    own: Caps | None = None,
    one_by_one: bool = False,
) -> Experiment:
    """Return the experiment with this setting; it keeps the results of earlier runs.

    Raises:
        MinivllmError: The model or GPU is unknown.
    """
    serving = Serving(model, known_model(model), get_hardware(gpu), load, share, longest, threshold, policy)
    return Experiment(serving, own, one_by_one or own is not None)

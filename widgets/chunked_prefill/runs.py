"""The runs behind lesson 10's widget: chats and long prompts at one token budget, through the engine's scheduler.

The same requests come at the same moments whatever the budget is, so that all differences are the budget's. A step's
time is that of `minivllm_simulate.layouts`, modelled.
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
from minivllm.memory import memory_ledger
from minivllm_lab.chunked_prefill.learner_policy import AdmittedTokens, ChunkLimit, RunningTokens, learner_policy
from minivllm_lab.chunked_prefill.prefill_first import PREFILL_FIRST
from minivllm_simulate.cost_model import Cost, StepShape, chunk_seconds
from minivllm_simulate.hardware import Hardware, get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.layouts import Layout, PlacedModel
from minivllm_simulate.load_sweep import Runs, share_within, within
from minivllm_simulate.open_load import OpenEngine, OpenLoad
from minivllm_simulate.workloads import RequestLengths, gamma_arrivals
from widgets.shell.swept import patient

CHAT, ANSWER = 128, 48
"""Tokens of a chat's prompt, and of every answer."""
COUNTED, AFTER = 80, 20
"""Requests that are looked at, and those that come after them."""
PLACES, BLOCK_SIZE = 64, 64
"""Requests at once (max_num_seqs); and tokens of a block, more than vLLM's 16, for a pool is sooner made of few."""
SEED = 10
LEAST_STEP = 64
"""Tokens of the smallest step that is looked at for the best rate."""
WINDOW = 3.0
"""The stretch of time that is drawn step by step, in times what a long prompt takes alone in one piece."""
POLICIES = ("mixed", "whole", "first")
"""Chunks beside decodes; prompts that are not cut; and these alone in a step, before all decodes (vLLM's V0)."""
Caps = tuple[ChunkLimit | None, RunningTokens | None, AdmittedTokens | None]
"""The reader's own functions of exercise 10; None leaves the engine's own."""


@dataclass(frozen=True)
class Step:
    """What a step was made of, in tokens; times in seconds."""

    start: float
    end: float
    long: int
    """Of long prompts."""
    chat: int
    """Of chats' prompts."""
    decodes: int
    """Requests that had a token of it, beyond their first."""
    gap: float
    """The longest that one of them had waited for it."""


@dataclass(frozen=True)
class Point:
    """What became of the requests at one budget."""

    gaps: Sequence[tuple[float, int]]
    """(seconds between two tokens, how many such gaps), from the shortest."""
    longest: Sequence[float]
    """Of each client, the longest gap, from the shortest."""
    long_ttft: Sequence[float]
    """Seconds to the first token of each long prompt, from the shortest; of one that has none yet, what it waited."""
    chat_ttft: Sequence[float]
    strip: tuple[Step, ...]
    """The steps in the window."""

    def gap(self, share: float) -> float:
        """Seconds that this share of all gaps, whosesoever, does not exceed."""
        left = math.ceil(share * sum(count for _, count in self.gaps))
        for seconds, count in self.gaps:
            left -= count
            if left <= 0:
                return seconds
        return 0.0

    def gaps_over(self, limit: float) -> float:
        """Share of all gaps that are longer than `limit` seconds."""
        whole = sum(count for _, count in self.gaps)
        return sum(count for seconds, count in self.gaps if seconds > limit) / whole if whole else 0.0

    def stalled(self, limit: float) -> float:
        """Share of the clients that waited longer than `limit` seconds for a next token, once at least."""
        return 1 - share_within(self.longest, limit)

    def longest_gap(self, share: float) -> float:
        """Seconds that this share of the clients never waited longer than for a next token."""
        return within(self.longest, share)


class _Watched(OpenEngine):
    """Notes every gap, and the steps in a window of time."""

    def __init__(self, load: OpenLoad, scheduler: Scheduler, serving: Serving, one_by_one: bool) -> None:
        super().__init__(load, scheduler, serving.cost)
        self.window, self.one_by_one = serving.window, one_by_one
        self.latest: dict[int, float] = {}
        """When each had its latest token."""
        self.gaps: dict[float, int] = {}
        self.longest = [0.0] * COUNTED
        self.computed: dict[int, int] = {}
        """Tokens of each that have been computed."""
        self.strip: list[Step] = []
        self.longest_now = 0.0
        """The longest gap that ended in the last stretch, with its first step."""

    def steps_alike(self, running: Sequence[Request]) -> int:
        """One at a time where the reader's own code decides on each."""
        return 1 if self.one_by_one else super().steps_alike(running)

    def _step(self) -> int:
        self.longest_now = 0.0
        work = super()._step()
        steps = max((len(one.new_token_ids) for one in self.outputs), default=1)
        self._cut(steps)
        return work

    def _cut(self, steps: int) -> None:
        """Adds the steps of this stretch that lie in the window."""
        assert self.scheduled
        for key in self.scheduled.preempted_req_ids:
            self.computed[int(key)] = 0
        long = chat = decodes = 0
        for key, new in self.scheduled.num_scheduled_tokens.items():
            index, prompt = int(key), self.load.lengths[int(key)].prompt_tokens
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
        """Serve, with a pause every few milliseconds of work."""
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
    """An engine on one GPU, and what it is to serve; all but the budget."""

    name: str
    """The model's."""
    model: ModelConfig
    gpu: Hardware
    load: float
    """Requests a second."""
    share: float
    """Of long ones among them."""
    longest: int
    """Tokens of a long request, its answer included."""
    threshold: int
    policy: str

    @property
    def prompt(self) -> int:
        """Tokens of a long prompt."""
        return self.longest - ANSWER

    @cached_property
    def cost(self) -> Cost:
        """What a step takes."""
        return PlacedModel(self.model, self.gpu, Layout(1, 1, 1)).cost

    @cached_property
    def knee(self) -> float:
        """Tokens of a step from which on arithmetic takes longer than reading the weights."""
        return PlacedModel(self.model, self.gpu, Layout(1, 1, 1)).cost.step.roofline.knee

    @cached_property
    def lengths(self) -> list[RequestLengths]:
        """Of all requests: every so many-th is long."""
        every = round(1 / self.share)
        kinds = (index % every == every // 2 for index in range(COUNTED + AFTER))
        return [RequestLengths(self.prompt if long else CHAT, ANSWER) for long in kinds]

    @cached_property
    def arrivals(self) -> list[float]:
        """Seconds at which they come, at random."""
        return gamma_arrivals(self.load, COUNTED + AFTER, seed=SEED)

    @cached_property
    def window(self) -> tuple[float, float]:
        """The time that is drawn: from a little before a long prompt comes, well into the run."""
        longs = [at for at, one in zip(self.arrivals[:COUNTED], self.lengths, strict=False) if one.prompt_tokens > CHAT]
        wide = WINDOW * self.alone(self.longest)
        start = max(0.0, longs[len(longs) // 2] - wide / 8)
        return start, start + wide

    @cached_property
    def mean_prompt(self) -> float:
        """Tokens of a prompt, long or not."""
        return statistics.mean(one.prompt_tokens for one in self.lengths)

    @cached_property
    def mean_pairs(self) -> float:
        """(query, key) pairs of a prompt, long or not."""
        return statistics.mean(one.prompt_tokens**2 for one in self.lengths) / 2

    @property
    def demand(self) -> float:
        """Tokens a second that come, prompts and answers."""
        return self.load * (self.mean_prompt + ANSWER)

    def alone(self, budget: int) -> float:
        """Seconds of a long prompt that nobody else is there with."""
        return chunk_seconds(self.cost, self.prompt, budget)

    def capacity(self, budget: int) -> float:
        """Requests a second that full steps do, of this budget or of a part of it: if more come, the queue grows.

        A step is taken to have what the mean step has of everything.
        """
        steps = [tokens for tokens in (budget >> half for half in range(budget.bit_length())) if tokens >= LEAST_STEP]
        rates = (tokens / self.cost.seconds(self._mean_step(tokens)) for tokens in steps or [budget])
        return max(rates) / (self.mean_prompt + ANSWER)

    def _mean_step(self, tokens: int) -> StepShape:
        """Of so many tokens, chunks and decodes in the shares in which they come."""
        prompt, whole = self.mean_prompt, self.mean_prompt + ANSWER
        decodes, context = tokens * ANSWER / whole, prompt + ANSWER / 2
        pairs = tokens / whole * (self.mean_pairs + ANSWER * context)
        keys = decodes * context + self.mean_pairs / prompt
        return StepShape(round(decodes) + 1, tokens, round(keys), round(pairs))

    def kv_tokens(self, budget: int) -> int:
        """How many tokens fit beside the weights and the activations of a step so large.

        Raises:
            MinivllmError: a long request does not.
        """
        ledger = memory_ledger(
            self.model, self.gpu, max_model_len=self.longest, max_num_batched_tokens=budget, max_num_seqs=PLACES,
            block_size=BLOCK_SIZE,
        )  # fmt: skip
        return ledger.usable_blocks * BLOCK_SIZE

    def refusal(self, budget: int) -> str:
        """Why an engine with this budget does not start; empty where it does."""
        if self.policy != "mixed" and budget < self.longest:
            return f"a request of {self.longest:,} tokens is never cut, and would wait for ever"
        try:
            self.kv_tokens(budget)
        except MinivllmError as error:
            return str(error)
        return ""

    def scheduler(self, budget: int, own: Caps | None) -> Scheduler:
        """The engine's, the one before it, or the engine's with the reader's own caps."""
        most = sum(one.total + BLOCK_SIZE for one in self.lengths)
        config = SchedulerConfig(
            max_model_len=self.longest,
            max_num_seqs=PLACES,
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
    """All budgets of one setting. What has been run is kept, and a run that was left is taken up again."""

    def __init__(self, serving: Serving, own: Caps | None, one_by_one: bool) -> None:
        self.serving, self.own, self.one_by_one = serving, own, one_by_one
        self.runs = Runs(self._run)
        """By budget."""
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
    """The runs of this setting, those done before included.

    Raises:
        MinivllmError: no such model or GPU.
    """
    serving = Serving(model, known_model(model), get_hardware(gpu), load, share, longest, threshold, policy)
    return Experiment(serving, own, one_by_one or own is not None)

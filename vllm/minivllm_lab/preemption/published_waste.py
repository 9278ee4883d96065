"""What is computed twice, on the engine's scheduler, beside what was published for vLLM (vllm#54644).

    waste(blocks=400, whole=False).share        # 0.78; published: 0.788

Published are pools, requests and shares: 300 requests at once, a model of 0.5B, and 623,948 tokens computed again with
400 blocks, 78.8 % of all, so about 560 tokens a request are not. Not published are the lengths, how many run at once
and a step's budget: here prompts and answers are lognormal with 540 tokens together on average, 64 run at once in steps
of 512 tokens, and blocks have 16.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.policy import SchedulingPolicy
from minivllm.core.scheduler import Scheduler
from minivllm_lab.preemption.victims import victim_rule
from minivllm_simulate.virtual_clock import SimulatedRequest, simulate


@dataclass(frozen=True)
class Published:
    """A row of the table: shares of all computed tokens."""

    wasted: float
    """Computed before."""
    less: float | None
    """By which share of it "least computed" as the victim is better; None where nothing is wasted."""


PUBLISHED = {
    2800: Published(0.0, None), 1600: Published(0.322, 0.59), 800: Published(0.579, 0.40), 400: Published(0.788, 0.43),
}  # fmt: skip
"""By blocks of the pool."""
REQUESTS, AT_ONCE, STEP, SEED = 300, 64, 512, 12345
LONGEST_PROMPT, LONGEST_ANSWER = 2000, 1500


class _OneEach:
    """A step takes one unit of time: only tokens are counted."""

    def seconds(self, shape: object) -> float:
        """One, whatever it has."""
        return 1.0


@dataclass(frozen=True)
class Waste:
    """What a run has computed twice."""

    computed: int
    """Tokens."""
    recomputed: int
    preemptions: int
    steps: int

    @property
    def share(self) -> float:
        """Of all computed tokens, those that were computed before."""
        return self.recomputed / self.computed


def workload(seed: int = SEED, requests: int = REQUESTS) -> list[SimulatedRequest]:
    """The requests, all there at the start; or the first of them."""
    draw = random.Random(seed).lognormvariate
    return [
        SimulatedRequest(min(LONGEST_PROMPT, int(draw(5.2, 1)) + 1), min(LONGEST_ANSWER, int(draw(5, 1)) + 1))
        for _ in range(requests)
    ]


def waste(
    blocks: int,
    whole: bool,
    victim: str = "",
    *,
    caching: bool = False,
    at_once: int = AT_ONCE,
    seed: int = SEED,
    requests: int = REQUESTS,
) -> Waste:
    """Run the requests to their end with a pool of so many blocks.

    Args:
        blocks: of 16 tokens.
        whole: a request is admitted if all its tokens so far fit, as in vLLM now; else if its first chunk does.
        victim: a rule of `minivllm_lab.preemption.victims`; empty: the last one in.
        caching: with the prefix cache, in which a victim may find its own blocks again.
        at_once: requests that run at once, at most.
        seed: of the lengths.
        requests: so many of the workload, from its start.

    Raises:
        MinivllmError: a request does not fit, or there is no such rule.
    """
    work = workload(seed, requests)
    limits = SchedulerConfig(
        max_model_len=LONGEST_PROMPT + LONGEST_ANSWER,
        max_num_seqs=at_once,
        max_num_batched_tokens=STEP,
        scheduler_reserve_full_isl=whole,
    )
    cache = CacheConfig(num_gpu_blocks=blocks + 1, enable_prefix_caching=caching)
    scheduler = Scheduler(limits, cache, SchedulingPolicy(victim=victim_rule(victim)))
    run = simulate(work, limits, cache, _OneEach(), scheduler=lambda *_: scheduler)
    computed = sum(step.shape.num_tokens for step in run.steps)
    return Waste(computed, scheduler.num_recomputed_tokens, run.num_preemptions, len(run.steps))

"""Count recomputed tokens on the engine's scheduler, to compare with the counts published for vLLM
(vllm#54644).

    waste(blocks=400, whole=False).share        # 0.78; published: 0.788

The publication gives the pools, the requests and the shares: 300 requests at once, a model of 0.5B,
and with 400 blocks 623,948 recomputed tokens, 78.8 % of all; so the rest is about 560 tokens per
request. It does not give the lengths, how many requests run at once and the token budget. Here
prompts and answers are lognormal with 540 tokens together on average, 64 requests run at once in
steps of 512 tokens, and blocks have 16 tokens.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.policy import SchedulingPolicy
from minivllm.core.scheduler import Scheduler
from minivllm_lab.preemption.victims import victim_rule
from minivllm_simulate.cost_model import UnitCost
from minivllm_simulate.virtual_clock import SimulatedRequest, simulate


class Published(NamedTuple):
    """A row of the published table."""

    wasted: float
    """The share of recomputed tokens among all computed ones."""
    less: float | None
    """The share of them that the rule "least computed" saves; None where nothing is wasted."""


PUBLISHED = {
    2800: Published(0.0, None), 1600: Published(0.322, 0.59), 800: Published(0.579, 0.40), 400: Published(0.788, 0.43),
}  # fmt: skip
"""Rows by the pool's number of blocks."""
REQUESTS, AT_ONCE, STEP, SEED = 300, 64, 512, 12345
LONGEST_PROMPT, LONGEST_ANSWER = 2000, 1500


class Waste(NamedTuple):
    """Tokens that a run has computed and recomputed."""

    computed: int
    recomputed: int
    preemptions: int
    steps: int

    @property
    def share(self) -> float:
        """The share of recomputed tokens among all computed ones."""
        return self.recomputed / self.computed


def workload(seed: int = SEED, requests: int = REQUESTS) -> list[SimulatedRequest]:
    """Return the first `requests` of the workload; all arrive at the start."""
    draw = random.Random(seed).lognormvariate
    return [
        SimulatedRequest(min(LONGEST_PROMPT, int(draw(5.2, 1)) + 1), min(LONGEST_ANSWER, int(draw(5, 1)) + 1))
        for _ in range(requests)
    ]


def waste(blocks: int, whole: bool, victim: str = "", *, caching: bool = False, requests: int = REQUESTS) -> Waste:
    """Run the requests to completion with a pool of `blocks` blocks.

    Args:
        blocks: the size of the pool, in blocks of 16 tokens.
        whole: admit a request if all its tokens so far fit, as vLLM does now; otherwise if its
            first chunk fits.
        victim: a rule of `minivllm_lab.preemption.victims`; empty for the request admitted last.
        caching: use the prefix cache, in which a victim may find its own blocks again.
        requests: how many requests of the workload to run.

    Raises:
        MinivllmError: a request does not fit, or there is no such rule.
    """
    work = workload(requests=requests)
    limits = SchedulerConfig(
        max_model_len=LONGEST_PROMPT + LONGEST_ANSWER,
        max_num_seqs=AT_ONCE,
        max_num_batched_tokens=STEP,
        scheduler_reserve_full_isl=whole,
    )
    cache = CacheConfig(num_gpu_blocks=blocks + 1, enable_prefix_caching=caching)
    scheduler = Scheduler(limits, cache, SchedulingPolicy(victim=victim_rule(victim)))
    run = simulate(work, scheduler, UnitCost())
    computed = sum(step.shape.num_tokens for step in run.steps)
    return Waste(computed, scheduler.num_recomputed_tokens, run.num_preemptions, len(run.steps))

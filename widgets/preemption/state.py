"""Compute the state of lesson 11's widget: latency by pool size, and where it is too high."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm_lab.preemption.learner_policy import Victim
from minivllm_simulate.load_sweep import Span, spans
from widgets.preemption.runs import Point, Serving, experiment
from widgets.shell.swept import Sweep, SweptState

MODELS = ("Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B", "Qwen3-14B", "Qwen3-32B")
GPUS = ("L4", "A100-80", "H100", "H200", "B200", "MI300X")
HOST_LINKS = ("NVLink 4", "PCIe 5", "PCIe 4", "100 Gb/s", "25 Gb/s", "10 Gb/s")
POOLS = tuple(sorted([*(2**power for power in range(13, 19)), *(3 * 2**power for power in range(12, 17))]))
"""8,192 to 262,144 tokens, two to a doubling."""
LOADS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 20.0, 25.0, 30.0)
"""Requests a second."""
PROMPTS = (128, 256, 512, 1024, 2048)
ANSWERS = (64, 128, 256, 512, 1024)
LIMITS = (2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0, 60.0)
SHARE = 0.99
"""The share of the requests that must finish within the limit."""
WASTE = 0.05
"""The share of repeated work, or of waiting for copies, from which it counts as the cause."""
START = {
    "pool": 32768, "load": 14.0, "limit": 10.0, "prompt": 512, "answer": 512, "policy": "recompute",
    "rule": "last in", "admission": "whole", "link": "PCIe 5", "model": "Llama-3.1-8B", "gpu": "H100",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class State(SweptState[Point]):
    """The results of one engine with every pool that has been run so far."""

    KNOB = "pool"
    VALUES = POOLS
    pool: int
    """Tokens."""
    limit: float
    """Seconds within which 99 % of the requests must finish."""
    serving: Serving
    capacity: Mapping[int, float]
    """The most requests a second that each pool could handle if nothing were computed twice."""

    def latency(self, pool: int) -> float:
        """Return the seconds within which 99 % of the requests finish."""
        return self.points[pool].latency(SHARE)

    def cause(self, pool: int) -> str:
        """Return what is wrong with a pool that has been run: "queue", "thrash", "copies",
        "wait" or "".
        """
        point = self.points[pool]
        if self.serving.load > self.capacity[pool]:
            return "queue"
        if self.latency(pool) <= self.limit:
            return ""
        if point.lost < WASTE:
            return "wait"
        return "copies" if point.copied else "thrash"

    @property
    def late(self) -> list[Span]:
        """Return the pools with which requests take too long, or the queue grows."""
        pools = sorted(self.capacity)
        return self.within_start(spans(pools, [self.strain(pool) for pool in pools]))

    def strain(self, pool: int) -> float:
        """Return how far a pool is over its limits; before it has been run, only whether it handles
        the load.
        """
        latency = self.latency(pool) / self.limit if pool in self.points else 0.0
        return max(latency, self.serving.load / self.capacity[pool])

    def causes(self, value: int) -> list[str]:
        return [cause] if (cause := self.cause(value)) else []

    @property
    def stopped(self) -> list[Span]:
        """Return the pools with which the engine does not start: a request does not fit in the
        pool, or the pool in the GPU.
        """
        allowed = [pool for pool in POOLS if pool not in self.refusals]
        if not allowed:
            return [(None, None)]
        below = [(None, float(self.serving.longest))] if allowed[0] > POOLS[0] else []
        above = [(float(self.serving.most_tokens), None)] if allowed[-1] < POOLS[-1] else []
        return [*below, *above]

    @property
    def saturation(self) -> float:
        """Return how many tokens the load occupies on average, by Little's law; the pool has to
        hold more.
        """
        serving = self.serving
        inside = serving.steady().batch(serving.load)
        return inside * serving.held


def sweep(
    pool: int = START["pool"],
    load: float = START["load"],
    limit: float = START["limit"],
    prompt: int = START["prompt"],
    answer: int = START["answer"],
    policy: str = START["policy"],
    rule: str = START["rule"],
    admission: str = START["admission"],
    link: str = START["link"],
    model: str = START["model"],
    gpu: str = START["gpu"],
    victim: Victim | None = None,
) -> Iterator[State]:
    """Serve one load with pools of 8,192 to 262,144 tokens, and yield more and more complete
    states.

    Args:
        pool: The size of the KV cache in tokens, at the handle.
        load: Requests a second.
        limit: Seconds within which 99 % of them must finish.
        prompt, answer: Mean tokens in a prompt and in an answer.
        policy: What happens to a victim, one of POLICIES.
        rule: Which request is the victim, one of RULES.
        admission: What must fit to admit a request, one of ADMISSIONS.
        link: The link to the host, a name in `kv_links`.
        model, gpu: Names in `known_models` and `hardware`.
        victim: The reader's function of exercise 11, in place of `rule`.

    Raises:
        MinivllmError: The reader's function returns an impossible victim.
    """
    setting = model, gpu, load, prompt, answer, link, policy, rule, admission
    runs = experiment(*setting, victim)
    twin = experiment(*setting) if victim else None

    def make(allowed: Sequence[int], **known: Any) -> State:
        capacity = {size: runs.capacity(size) for size in allowed}
        return State(pool=pool, limit=limit, serving=runs.serving, capacity=capacity, **known)

    return Sweep(make, runs, twin, pool, POOLS).states()

"""Compute the state of lesson 10's widget: waiting times by token budget, and where they are too
long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from minivllm_lab.chunked_prefill.learner_policy import AdmittedTokens, ChunkLimit, RunningTokens
from minivllm_simulate.load_sweep import Span, spans, within
from widgets.chunked_prefill.runs import Point, Serving, experiment
from widgets.shell.swept import Sweep, SweptState

MODELS = ("Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B", "Qwen3-14B", "Qwen3-32B")
GPUS = ("L4", "A100-80", "H100", "H200", "B200", "MI300X")
BUDGETS = tuple(sorted([*(2**power for power in range(6, 15)), *(3 * 2**power for power in range(5, 13))]))
"""64 to 16,384 tokens, two to a doubling."""
THRESHOLDS = (0, 128, 256, 512, 1024, 2048, 4096)
LOADS = (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 15.0, 20.0, 25.0, 30.0, 40.0)
"""Requests a second."""
LONG_SHARES = (0.05, 0.1, 0.2, 0.4)
PROMPTS = (2048, 4096, 8192, 16384, 32768)
GAPS = (0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.2, 0.5)
TTFTS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
CLIENTS, ALL_GAPS = 0.9, 0.99
"""The shares of clients and of long prompts that must be in time; and that of the gaps, where
these are judged.
"""
START = {
    "budget": 2048, "threshold": 0, "policy": "mixed", "load": 10.0, "long": 0.1, "prompt": 8192, "gap": 0.025,
    "ttft": 0.5, "judged": "clients", "model": "Llama-3.1-8B", "gpu": "H100",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class State(SweptState[Point]):
    """The results of one engine at every budget that has been run so far."""

    KNOB = "budget"
    VALUES = BUDGETS
    budget: int
    gap: float
    """Seconds that a client may wait for the next token."""
    ttft: float
    """Seconds within which a long prompt must have its first token."""
    judged: str
    """Which gaps must be short: "clients" or "gaps"."""
    serving: Serving
    capacity: Mapping[int, float]
    """The most requests a second that each budget handles."""
    alone: Mapping[int, float]
    """Seconds of a long prompt that is alone, in steps of each budget."""

    def waited(self, budget: int) -> float:
        """Return the seconds that clients wait for the next token, by the statistic in `judged`."""
        point = self.points[budget]
        return point.longest_gap(CLIENTS) if self.judged == "clients" else point.gap(ALL_GAPS)

    def first(self, budget: int) -> float:
        """Return the seconds within which nine in ten long prompts have their first token."""
        return within(self.points[budget].long_ttft, CLIENTS)

    def causes(self, budget: int) -> list[str]:
        """Return what is wrong with a budget that has been run: "queue", "chunks" or "turn", and
        also "stall".
        """
        causes = []
        if self.serving.load > self.capacity[budget]:
            causes.append("queue")
        elif self.first(budget) > self.ttft:
            causes.append("chunks" if self.alone[budget] > self.ttft else "turn")
        return [*causes, *["stall"] * (self.waited(budget) > self.gap)]

    @property
    def late(self) -> list[Span]:
        """Return the budgets at which long prompts wait too long for their first token, or the
        queue grows.
        """
        budgets = sorted(self.capacity)
        return self.within_start(spans(budgets, [self._strain(budget) for budget in budgets]))

    def _strain(self, budget: int) -> float:
        """Return how far a budget is over its limits; before it has been run, a long prompt takes at
        least the time that it takes alone.
        """
        first = self.first(budget) if budget in self.points else self.alone[budget]
        return max(first / self.ttft, self.serving.load / self.capacity[budget])

    @property
    def stalled(self) -> list[Span]:
        """Return the budgets at which the next token comes too late."""
        return self.within_start(spans(self.run, [self.waited(budget) / self.gap for budget in self.run]))

    @property
    def good(self) -> list[tuple[float, float]]:
        """Return the ranges of budgets at which the engine starts and both limits are met."""
        broken = sorted((low or 0, high or BUDGETS[-1]) for low, high in [*self.stopped, *self.late, *self.stalled])
        lows = [BUDGETS[0], *accumulate((high for _, high in broken), max)]
        highs = [*(low for low, _ in broken), BUDGETS[-1]]
        return [(low, high) for low, high in zip(lows, highs, strict=True) if low < high]

    @property
    def stopped(self) -> list[Span]:
        """Return the budgets at which the engine does not start: the smallest, the largest, or all
        of them.
        """
        allowed = [budget for budget in BUDGETS if budget not in self.refusals]
        if not allowed:
            return [(None, None)]
        below = [(None, float(min(self.serving.longest, allowed[0])))] if allowed[0] > BUDGETS[0] else []
        above = [(float(BUDGETS[BUDGETS.index(allowed[-1]) + 1]), None)] if allowed[-1] < BUDGETS[-1] else []
        return [*below, *above]


def sweep(
    budget: int = START["budget"],
    threshold: int = START["threshold"],
    policy: str = START["policy"],
    load: float = START["load"],
    long: float = START["long"],
    prompt: int = START["prompt"],
    gap: float = START["gap"],
    ttft: float = START["ttft"],
    judged: str = START["judged"],
    model: str = START["model"],
    gpu: str = START["gpu"],
    chunk_limit: ChunkLimit | None = None,
    running_tokens: RunningTokens | None = None,
    admitted_tokens: AdmittedTokens | None = None,
) -> Iterator[State]:
    """Serve chats and long prompts at budgets from 64 to 16,384 tokens, and yield more and more
    complete states.

    Args:
        budget: max_num_batched_tokens, at the handle.
        threshold: long_prefill_token_threshold; 0 is off.
        policy: "mixed", chunks beside decodes; "whole", prompts that are never cut; or "first", prompts alone in a
            step, before all decodes (vLLM's V0).
        load: Requests a second.
        long: The share of long requests.
        prompt: Tokens in a long request, including its answer.
        gap: Seconds that a client may wait for the next token.
        ttft: Seconds within which long prompts must have their first token.
        judged: "clients" for the longest gap of nine in ten clients, "gaps" for 99 % of all gaps.
        model, gpu: Names in `known_models` and `hardware`.
        chunk_limit, running_tokens, admitted_tokens: The reader's functions of exercise 10.

    Raises:
        MinivllmError: The reader's functions return an impossible number of tokens.
    """
    own = (chunk_limit, running_tokens, admitted_tokens)
    setting = model, gpu, load, long, prompt, threshold, policy
    decides = any(own) and policy != "first"
    runs = experiment(*setting, own if decides else None)
    twin = experiment(*setting, one_by_one=True) if decides else None

    def make(allowed: Sequence[int], **known: Any) -> State:
        capacity = {size: runs.capacity(size) for size in allowed}
        alone = {size: runs.alone(size) for size in allowed}
        levels = {"gap": gap, "ttft": ttft, "judged": judged}
        return State(budget=budget, serving=runs.serving, capacity=capacity, alone=alone, **levels, **known)

    return Sweep(make, runs, twin, budget, BUDGETS).states()

"""The state of lesson 10's widget: what clients wait for over the token budget, and where that is too long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.config.checks import require
from minivllm_lab.chunked_prefill.learner_policy import AdmittedTokens, ChunkLimit, RunningTokens
from minivllm_simulate.load_sweep import Span, spans, within
from widgets.chunked_prefill.runs import POLICIES, Experiment, Point, Serving, experiment
from widgets.shell.spec import require_numbers
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
"""Shares: of the clients, and of the long prompts, that must have it in time; and of the gaps, if these are judged."""
JUDGED = ("clients", "gaps")
MOST = {"budget": 2**17, "threshold": 2**17, "load": 1e3, "long": 1.0, "prompt": 2**15, "gap": 1e3, "ttft": 1e3}
START = {
    "budget": 2048, "threshold": 0, "policy": "mixed", "load": 10.0, "long": 0.1, "prompt": 8192, "gap": 0.025,
    "ttft": 0.5, "judged": "clients", "model": "Llama-3.1-8B", "gpu": "H100",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class State(SweptState[Point]):
    """One engine at every budget that has been run so far."""

    PLACES = BUDGETS
    budget: int
    gap: float
    """Seconds that a client may wait for a next token."""
    ttft: float
    """Seconds within which a long prompt must have its first token."""
    judged: str
    """Whose gaps must be short: of JUDGED."""
    serving: Serving
    capacity: Mapping[int, float]
    """Requests a second that each budget does at most."""
    alone: Mapping[int, float]
    """Seconds of a long prompt that nobody else is there with, in steps of each budget."""

    @property
    def at(self) -> int:
        """The budget."""
        return self.budget

    def waited(self, budget: int) -> float:
        """Seconds for a next token, as they are judged."""
        point = self.points[budget]
        return point.longest_gap(CLIENTS) if self.judged == "clients" else point.gap(ALL_GAPS)

    def first(self, budget: int) -> float:
        """Seconds within which nine of ten long prompts have their first token."""
        return within(self.points[budget].long_ttft, CLIENTS)

    def causes(self, budget: int) -> list[str]:
        """What is wrong at a budget that has been run: "queue", "chunks" or "turn"; and "stall"."""
        found = []
        if self.serving.load > self.capacity[budget]:
            found.append("queue")
        elif self.first(budget) > self.ttft:
            found.append("chunks" if self.alone[budget] > self.ttft else "turn")
        return [*found, *["stall"] * (self.waited(budget) > self.gap)]

    @property
    def late(self) -> list[Span]:
        """Where long prompts wait too long for their first token, or the queue grows."""
        budgets = self.run
        ratios = [max(self.first(one) / self.ttft, self.serving.load / self.capacity[one]) for one in budgets]
        return self._allowed(spans(budgets, ratios))

    @property
    def stalled(self) -> list[Span]:
        """Where a next token comes too late."""
        return self._allowed(spans(self.run, [self.waited(one) / self.gap for one in self.run]))

    @property
    def stopped(self) -> list[Span]:
        """Where the engine does not start: with the least budgets of the axis, with the largest ones, or with any."""
        allowed = [one for one in BUDGETS if one not in self.refusals]
        if not allowed:
            return [(None, None)]
        below = [(None, float(min(self.serving.longest, allowed[0])))] if allowed[0] > BUDGETS[0] else []
        above = [(float(BUDGETS[BUDGETS.index(allowed[-1]) + 1]), None)] if allowed[-1] < BUDGETS[-1] else []
        return [*below, *above]

    def _allowed(self, found: list[Span]) -> list[Span]:
        """Spans that end where the engine does not start."""
        least = max((high for low, high in self.stopped if low is None and high), default=None)
        most = min((low for low, _ in self.stopped if low), default=None)
        return [(low or least, high or most) for low, high in found]


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
    """Serve chats and long prompts with budgets from 64 to 16,384 tokens; each state knows more of the curves.

    Args:
        budget: max_num_batched_tokens: where the reader stands.
        threshold: long_prefill_token_threshold; 0 is off.
        policy: one of POLICIES.
        load: requests a second.
        long: the share of long ones among them.
        prompt: tokens of a long request, its answer included.
        gap: seconds that a client may wait for a next token.
        ttft: seconds within which long prompts must have their first token.
        judged: "clients": the longest gap of nine in ten clients; "gaps": 99 % of all gaps, whosesoever.
        model, gpu: names of `known_models` and `hardware`.
        chunk_limit, running_tokens, admitted_tokens: the reader's own, as in exercise 10.

    Raises:
        MinivllmError: a value makes no sense, or the reader's functions give what cannot be carried out.
    """
    require_numbers(MOST, budget=budget, threshold=threshold, load=load, long=long, prompt=prompt, gap=gap, ttft=ttft)
    sensible = min(load, gap, ttft) > 0 and budget >= BUDGETS[0] and threshold >= 0 and prompt >= 1024 and long >= 0.05
    require(
        sensible,
        f"load, gap and ttft are above 0, long is from 0.05, budget from {BUDGETS[0]}, prompt from 1,024; load is "
        f"{load}, gap {gap}, ttft {ttft}, long {long}, budget {budget}, prompt {prompt}, threshold {threshold}",
    )
    for name, value, allowed in (
        ("policy", policy, POLICIES), ("judged", judged, JUDGED), ("model", model, MODELS), ("gpu", gpu, GPUS)
    ):  # fmt: skip
        require(isinstance(value, str) and value in allowed, f"{name} is one of {', '.join(allowed)}, not {value!r}")
    own = (chunk_limit, running_tokens, admitted_tokens)
    setting = model, gpu, load, long, prompt, threshold, policy
    decides = any(own) and policy != "first"
    runs = experiment(*setting, own if decides else None)
    twin = experiment(*setting, one_by_one=True) if decides else None
    return _Sweep(runs, twin, budget, gap, ttft, judged).states()


class _Sweep(Sweep[State]):
    def __init__(
        self, runs: Experiment, twin: Experiment | None, budget: int, gap: float, ttft: float, judged: str
    ) -> None:
        super().__init__(runs, twin, budget, BUDGETS)
        self.engine, self.gap, self.ttft, self.judged = runs, gap, ttft, judged

    def state(self, allowed: Sequence[int], known: Mapping[str, Any]) -> State:
        """See `Sweep`."""
        return State(
            budget=self.at,
            gap=self.gap,
            ttft=self.ttft,
            judged=self.judged,
            serving=self.engine.serving,
            capacity={one: self.engine.capacity(one) for one in allowed},
            alone={one: self.engine.alone(one) for one in allowed},
            **known,
        )

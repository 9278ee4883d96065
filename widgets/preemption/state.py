"""The state of lesson 11's widget: how long requests take over the size of the pool, and from where on too long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.config.checks import require
from minivllm_lab.preemption.learner_policy import Victim
from minivllm_simulate.kv_links import LINKS
from minivllm_simulate.load_sweep import Span, spans
from widgets.preemption.runs import ADMISSIONS, POLICIES, RULES, Experiment, Point, Serving, experiment
from widgets.shell.spec import require_numbers
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
"""Of the requests that must be answered in time."""
WASTE = 0.05
"""From this share of work on that is done twice, or waits for copies, it is the cause."""
MOST = {"pool": 2**22, "load": 1e3, "prompt": 2**15, "answer": 2**13, "limit": 1e4}
START = {
    "pool": 32768, "load": 14.0, "limit": 10.0, "prompt": 512, "answer": 512, "policy": "recompute",
    "rule": "last in", "admission": "whole", "link": "PCIe 5", "model": "Llama-3.1-8B", "gpu": "H100",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class State(SweptState[Point]):
    """One engine with every pool that has been run so far."""

    PLACES = POOLS
    pool: int
    """Tokens."""
    limit: float
    """Seconds within which 99 % of the requests must be answered."""
    serving: Serving
    capacity: Mapping[int, float]
    """Requests a second that each pool serves at most, were nothing done twice."""

    @property
    def at(self) -> int:
        """The pool."""
        return self.pool

    def latency(self, pool: int) -> float:
        """Seconds within which 99 % of the requests are answered."""
        return self.points[pool].latency(SHARE)

    def cause(self, pool: int) -> str:
        """What is wrong with a pool that has been run: "queue", "thrash", "copies", "wait", or nothing."""
        point = self.points[pool]
        if self.serving.load > self.capacity[pool]:
            return "queue"
        if self.latency(pool) <= self.limit:
            return ""
        copies, again = point.copying / point.seconds, point.wasted
        if max(copies, again) < WASTE:
            return "wait"
        return "copies" if copies > again else "thrash"

    @property
    def late(self) -> list[Span]:
        """Where requests take too long, or the queue grows."""
        pools = self.run
        return self.where(
            [max(self.latency(one) / self.limit, self.serving.load / self.capacity[one]) for one in pools]
        )

    def where(self, ratios: Sequence[float]) -> list[Span]:
        """Where a ratio, given for each pool that has been run, is above 1; no farther than the engine starts."""
        stopped = self.stopped
        least = max((high for low, high in stopped if low is None and high), default=None)
        most = min((low for low, _ in stopped if low), default=None)
        return [(low or least, high or most) for low, high in spans(self.run, ratios)]

    @property
    def stopped(self) -> list[Span]:
        """Where the engine does not start: a request does not fit, or the pool does not fit into the GPU."""
        allowed = [one for one in POOLS if one not in self.refusals]
        if not allowed:
            return [(None, None)]
        below = [(None, float(self.serving.longest))] if allowed[0] > POOLS[0] else []
        above = [(float(self.serving.most_tokens), None)] if allowed[-1] < POOLS[-1] else []
        return [*below, *above]

    @property
    def saturation(self) -> float:
        """Tokens of the pool that the load fills on average, by Little's law; the pool must hold more."""
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
    """Serve one load with pools of 8,192 to 262,144 tokens; each state knows more of the curve.

    Args:
        pool: tokens that the KV cache holds: where the reader stands.
        load: requests a second.
        limit: seconds within which 99 % of them must be answered.
        prompt, answer: tokens, on average.
        policy: what becomes of a victim, of POLICIES.
        rule: who is the victim, of RULES.
        admission: what must fit for a request to be admitted, of ADMISSIONS.
        link: to the host, a name of `kv_links`.
        model, gpu: names of `known_models` and `hardware`.
        victim: the reader's own, as in exercise 11; it takes the place of `rule`.

    Raises:
        MinivllmError: a value makes no sense, or the reader's function gives what cannot be carried out.
    """
    require_numbers(MOST, pool=pool, load=load, prompt=prompt, answer=answer, limit=limit)
    sensible = min(load, limit) > 0 and pool >= 1024 and prompt >= 16 and answer >= 16
    require(
        sensible,
        f"load and limit are above 0, prompt and answer from 16, pool from 1,024; load is {load}, limit {limit}, "
        f"prompt {prompt}, answer {answer}, pool {pool}",
    )
    for name, value, allowed in (
        ("policy", policy, tuple(POLICIES)), ("rule", rule, RULES), ("admission", admission, ADMISSIONS),
        ("link", link, tuple(LINKS)), ("model", model, MODELS), ("gpu", gpu, GPUS),
    ):  # fmt: skip
        require(isinstance(value, str) and value in allowed, f"{name} is one of {', '.join(allowed)}, not {value!r}")
    setting = model, gpu, load, prompt, answer, link, policy, rule, admission
    runs = experiment(*setting, victim)
    return _Sweep(runs, experiment(*setting) if victim else None, pool, limit).states()


class _Sweep(Sweep[State]):
    def __init__(self, runs: Experiment, twin: Experiment | None, pool: int, limit: float) -> None:
        super().__init__(runs, twin, pool, POOLS)
        self.engine, self.limit = runs, limit

    def state(self, allowed: Sequence[int], known: Mapping[str, Any]) -> State:
        """See `Sweep`."""
        return State(
            pool=self.at,
            limit=self.limit,
            serving=self.engine.serving,
            capacity={one: self.engine.capacity(one) for one in allowed},
            **known,
        )

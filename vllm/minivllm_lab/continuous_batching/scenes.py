"""Simulated scenarios: overload, and one long prompt among chats."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm_simulate.cost_model import Cost
from minivllm_simulate.virtual_clock import SimulatedRequest, percentile, simulate
from minivllm_simulate.workloads import RequestLengths, poisson_arrivals


@dataclass(frozen=True)
class Overload:
    """Latencies of requests that arrived at a given share of the capacity. Seconds are modelled."""

    load: float
    requests: int
    longest_queue: int
    late_ttft: float
    """Median time to first token of the last quarter to arrive."""


def capacity(lengths: Sequence[RequestLengths], config: SchedulerConfig, cache: CacheConfig, cost: Cost) -> float:
    """Return the requests per second that are served with all seats taken, by Little's law: seats /
    mean time in a seat.
    """
    result = simulate([SimulatedRequest(x.prompt_tokens, x.output_tokens) for x in lengths], config, cache, cost)
    return config.max_num_seqs / statistics.mean(x.token_times[-1] - x.token_times[0] for x in result.requests)


def arrivals_at(
    load: float,
    lengths: Sequence[RequestLengths],
    config: SchedulerConfig,
    cache: CacheConfig,
    cost: Cost,
    requests_per_second: float,
    seed: int = 0,
) -> Overload:
    """Send these requests as a Poisson process at `load` times a capacity of
    `requests_per_second`.
    """
    times = poisson_arrivals(load * requests_per_second, len(lengths), seed)
    work = [SimulatedRequest(x.prompt_tokens, x.output_tokens, at) for x, at in zip(lengths, times, strict=True)]
    result = simulate(work, config, cache, cost)
    late = result.ttfts[-max(1, len(lengths) // 4) :]
    return Overload(load, len(lengths), max(step.num_waiting for step in result.steps), percentile(late, 0.5))


@dataclass(frozen=True)
class LongPrompt:
    """The effect of chats and a long prompt on each other under one token budget. Seconds are
    modelled.
    """

    usual_gap: float
    """Median gap between two tokens of a chat."""
    longest_gap: float
    ttft: float
    """Time to first token of the long prompt."""


def long_prompt(
    budget: int, cache: CacheConfig, cost: Cost, prompt_tokens: int = 4096, chats: int = 16, arrival: float = 0.5
) -> LongPrompt:
    """Let `chats` decode 200 tokens each while a prompt arrives after `arrival` seconds;
    `budget` is in tokens.
    """
    work = [SimulatedRequest(128, 200)] * chats + [SimulatedRequest(prompt_tokens, 16, arrival)]
    config = SchedulerConfig(max_model_len=2 * prompt_tokens, max_num_batched_tokens=budget)
    result = simulate(work, config, cache, cost)
    gaps = [gap for chat in result.requests[:chats] for gap in chat.itls]
    return LongPrompt(statistics.median(gaps), max(gaps), result.requests[chats].ttft)

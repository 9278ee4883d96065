"""Simulated scenarios: overload, and one long prompt among chats. All seconds are modelled."""

import statistics
from collections.abc import Sequence

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm_simulate.cost_model import Cost
from minivllm_simulate.virtual_clock import SimulatedRequest, percentile, simulate
from minivllm_simulate.workloads import RequestLengths, poisson_arrivals


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
) -> dict[str, float]:
    """Send these requests as a Poisson process at `load` times a capacity of
    `requests_per_second`; return the longest queue and the median time to first token of the last
    quarter to arrive.
    """
    times = poisson_arrivals(load * requests_per_second, len(lengths), seed)
    work = [SimulatedRequest(x.prompt_tokens, x.output_tokens, at) for x, at in zip(lengths, times, strict=True)]
    result = simulate(work, config, cache, cost)
    late = result.ttfts[-max(1, len(lengths) // 4) :]
    longest_queue = max(step.num_waiting for step in result.steps)
    return {
        "load": load,
        "requests": len(lengths),
        "longest_queue": longest_queue,
        "late_ttft": percentile(late, 0.5),
    }


def long_prompt(budget: int, cache: CacheConfig, cost: Cost) -> dict[str, float]:
    """Let 16 chats decode 200 tokens each while a prompt of 4,096 arrives after half a second, under
    a budget in tokens; return the median and the longest gap between two tokens of a chat, and the
    prompt's time to first token.
    """
    work = [SimulatedRequest(128, 200)] * 16 + [SimulatedRequest(4096, 16, arrival=0.5)]
    config = SchedulerConfig(max_model_len=8192, max_num_batched_tokens=budget)
    *chats, prompt = simulate(work, config, cache, cost).requests
    gaps = [gap for chat in chats for gap in chat.itls]
    return {"usual_gap": statistics.median(gaps), "longest_gap": max(gaps), "ttft": prompt.ttft}

"""Run a load on a server under the virtual clock, and measure it as `vllm bench serve` does."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from minivllm.core.policy import DEFAULT_POLICY, SchedulingPolicy
from minivllm.core.scheduler import Scheduler
from minivllm_lab.chunked_prefill.prefill_first import prompts_alone
from minivllm_lab.workload.load import Load
from minivllm_lab.workload.server import BLOCK_SIZE, Server
from minivllm_simulate.virtual_clock import Simulation, percentile, simulate


@dataclass(frozen=True)
class Measured:
    """The figures that a client measures; times in seconds."""

    run: Simulation
    first: float
    """The host's part of the time to first token."""
    tokens: int
    """Prompt and output tokens of all requests."""

    @property
    def ttfts(self) -> list[float]:
        """Times to first token."""
        return [ttft + self.first for ttft in self.run.ttfts]

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return self.run.seconds - min(request.arrival for request in self.run.requests) + self.first

    @property
    def batch(self) -> float:
        """Mean requests in a step."""
        return sum(step.shape.num_reqs * step.seconds for step in self.run.steps) / sum(
            s.seconds for s in self.run.steps
        )

    def metric(self, name: str) -> float:
        """Return a metric by its name in `published.toml`, in its unit."""
        tpots = [request.tpot for request in self.run.requests if len(request.token_times) > 1]
        figures = {
            "latency_ms": lambda: 1e3 * statistics.mean(request.latency for request in self.run.requests),
            "tpot_mean_ms": lambda: 1e3 * statistics.mean(tpots),
            "tpot_p50_ms": lambda: 1e3 * statistics.median(tpots),
            "itl_p50_ms": lambda: 1e3 * statistics.median(self.run.itls),
            "itl_p99_ms": lambda: 1e3 * percentile(self.run.itls, 0.99),
            "ttft_mean_ms": lambda: 1e3 * statistics.mean(self.ttfts),
            "ttft_p50_ms": lambda: 1e3 * statistics.median(self.ttfts),
            "ttft_p99_ms": lambda: 1e3 * percentile(self.ttfts, 0.99),
            "decode_tokens_s": lambda: 1 / statistics.median(self.run.itls),
            "output_tokens_s": lambda: self.run.output_tokens / self.seconds,
            "tokens_s": lambda: self.tokens / self.seconds,
            "requests_s": lambda: len(self.run.requests) / self.seconds,
        }
        return figures[name]()


def measure(server: Server, load: Load) -> Measured:
    """Serve a load to its end, and measure it.

    Raises:
        MinivllmError: the model does not fit, or a request is too long for what is left.
    """
    longest = load.longest + BLOCK_SIZE
    tokens = sum(request.prompt_tokens + request.output_tokens for request in load.requests)
    configs = server.configs(longest, tokens + 2 * BLOCK_SIZE * len(load.requests))
    policy = SchedulingPolicy(schedule=prompts_alone) if server.prompts_alone else DEFAULT_POLICY
    run = simulate(load.requests, Scheduler(*configs, policy), server.cost)
    return Measured(run, server.host.first, tokens)

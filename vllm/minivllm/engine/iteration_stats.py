"""The front end's measurements of requests: tokens, latencies, and how each request ended.

Times are differences of `time.monotonic()`, in seconds. The front end observes arrivals and tokens,
the core observes scheduling; both read the same clock.

In vLLM v0.33.0: `vllm/v1/metrics/stats.py` (`IterationStats`, `FinishedRequestStats`).
"""

import time
from dataclasses import dataclass, field
from typing import Any

from minivllm.core.engine_messages import EngineCoreOutput
from minivllm.outputs import RequestMetrics


@dataclass(slots=True)
class FinishedRequestStats:
    """Statistics of one finished completion. It is queued until it is first scheduled, in prefill
    until its first token, then in decode.
    """

    finish_reason: str
    num_prompt_tokens: int
    num_generation_tokens: int
    max_tokens: int
    num_preemptions: int
    e2e_latency: float
    queued_time: float
    prefill_time: float
    decode_time: float

    @property
    def inference_time(self) -> float:
        """The seconds from the first step to the last token."""
        return self.prefill_time + self.decode_time

    @property
    def mean_time_per_output_token(self) -> float | None:
        """Return the mean time of the tokens after the first; None if there are none."""
        return self.decode_time / (self.num_generation_tokens - 1) if self.num_generation_tokens > 1 else None


@dataclass(slots=True)
class IterationStats:
    """Statistics of one step, or of all steps since they were last read.

    `finished_parents`: for each prompt whose completions have all ended, their number.
    """

    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    time_to_first_tokens: list[float] = field(default_factory=list)
    inter_token_latencies: list[float] = field(default_factory=list)
    finished_requests: list[FinishedRequestStats] = field(default_factory=list)
    finished_parents: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """The total number of tokens, prompt and generated."""
        return self.num_prompt_tokens + self.num_generation_tokens

    def observe_tokens(
        self, metrics: RequestMetrics, output: EngineCoreOutput, num_prompt_tokens: int, now: float
    ) -> None:
        """Count the tokens of an output that arrived at time `now`, and record the time in its
        request's metrics.
        """
        self.num_generation_tokens += len(output.new_token_ids)
        if metrics.first_token_time is None:
            # The prompt is counted with the first token, when all of it is computed.
            metrics.first_token_time = now
            self.num_prompt_tokens += num_prompt_tokens
            self.time_to_first_tokens.append(now - metrics.arrival_time)
        else:
            self.inter_token_latencies.append(now - (metrics.last_token_time or now))
        metrics.last_token_time = now

    def observe_finished(self, metrics: RequestMetrics, num_completions: int | None, **counts: Any) -> None:
        """Count a completion that has ended; `num_completions` is its prompt's, if this was the
        prompt's last.

        A request that was aborted early may never have been scheduled or have produced a token:
        those times then count as now.
        """
        now = time.monotonic()
        scheduled = metrics.scheduled_time or now
        first = metrics.first_token_time or max(scheduled, now)
        finished = FinishedRequestStats(
            **counts,
            e2e_latency=now - metrics.arrival_time,
            queued_time=max(0.0, scheduled - metrics.arrival_time),
            prefill_time=max(0.0, first - scheduled),
            decode_time=max(0.0, (metrics.last_token_time or first) - first),
        )
        self.finished_requests.append(finished)
        if num_completions is not None:
            self.finished_parents.append(num_completions)

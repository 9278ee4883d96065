"""What the front end measures of requests: tokens, latencies, and how each of them ended.

Times are differences of `time.monotonic()`, in seconds. Arrival and tokens are seen by the front end, scheduling by the
core; the clock is one.

In vLLM v0.33.0: `vllm/v1/metrics/stats.py` (`IterationStats`, `FinishedRequestStats`).
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class FinishedRequestStats:
    """One completion that has ended. Queued until first scheduled; prefill until the first token; then decode."""

    finish_reason: str
    num_prompt_tokens: int
    num_generation_tokens: int
    max_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    e2e_latency: float
    queued_time: float
    prefill_time: float
    decode_time: float

    @property
    def num_computed_tokens(self) -> int:
        """Return the number of prompt tokens that were not cached."""
        return max(0, self.num_prompt_tokens - self.num_cached_tokens)

    @property
    def inference_time(self) -> float:
        """Return the seconds from the first step to the last token."""
        return self.prefill_time + self.decode_time

    @property
    def mean_time_per_output_token(self) -> float | None:
        """Return the mean time of the tokens after the first; None if there are none."""
        return self.decode_time / (self.num_generation_tokens - 1) if self.num_generation_tokens > 1 else None


@dataclass(slots=True)
class IterationStats:
    """One step, or all since the last look.

    `finished_parents`: for each prompt whose completions have all ended, how many they are, and tokens of the longest.
    """

    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    time_to_first_tokens: list[float] = field(default_factory=list)
    inter_token_latencies: list[float] = field(default_factory=list)
    finished_requests: list[FinishedRequestStats] = field(default_factory=list)
    finished_parents: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Return the number of all tokens, of prompts and generated."""
        return self.num_prompt_tokens + self.num_generation_tokens

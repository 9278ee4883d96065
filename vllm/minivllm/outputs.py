"""What a request gives back.

In vLLM v0.33.0: `vllm/outputs.py` (`RequestOutput`, `CompletionOutput`), `vllm/logprobs.py`.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Logprob:
    """The natural logarithm of a token's probability, its rank in the vocabulary (1: the most likely), and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Logprobs = list[dict[int, Logprob] | None]
"""One entry a position: the chosen token and the most likely ones. None where nothing precedes (a prompt's first)."""


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    - `finish_reason`: "stop", "length", "abort" or "error"; None while it goes on. `error` says why it is "error".
    - `stop_reason`: the stop string, or the id of the stop token; None for the end-of-sequence token and everything
      else.
    - `cumulative_logprob`: sum over the chosen tokens, where log probabilities were asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def finished(self) -> bool:
        """Whether no further token will come."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened, in seconds of `time.monotonic()`. `num_cached_tokens` is counted in `RequestOutput`."""

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt with its `n` completions. `num_cached_tokens`: tokens of the prompt found in the prefix cache."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: Logprobs | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0

"""The outputs of a request.

In vLLM v0.33.0: `vllm/outputs.py` (`RequestOutput`, `CompletionOutput`), `vllm/logprobs.py`.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Logprob:
    """The natural log probability of a token, its rank in the vocabulary (1: the most likely), and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Logprobs = list[dict[int, Logprob] | None]
"""One entry per position: the chosen token and the most likely ones. None for the first token of a prompt."""


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    - `finish_reason`: "stop", "length", "abort" or "error"; None while unfinished. `error`: the message of an "error".
    - `stop_reason`: the stop string or stop token id that ended it; None for the end-of-sequence token and all other
      reasons.
    - `cumulative_logprob`: the sum over the chosen tokens, if log probabilities were requested.
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
        """Whether the completion is finished."""
        return self.finish_reason is not None

    def extend(self, later: "CompletionOutput") -> None:
        """Appends what came after this: `later` is the next delta of the same completion."""
        self.text += later.text
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.cumulative_logprob = later.cumulative_logprob
        self.finish_reason, self.stop_reason, self.error = later.finish_reason, later.stop_reason, later.error


@dataclass(slots=True)
class RequestMetrics:
    """Timestamps in seconds of `time.monotonic()`. `num_cached_tokens` is in `RequestOutput`."""

    arrival_time: float
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt with its `n` completions. `num_cached_tokens`: prompt tokens found in the prefix cache."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: Logprobs | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0

    def add(self, next_output: "RequestOutput") -> None:
        """Joins the next delta of the same request to this one, as if both had come at once."""
        known = {completion.index: completion for completion in self.outputs}
        for completion in next_output.outputs:
            if completion.index in known:
                known[completion.index].extend(completion)
            else:
                self.outputs.append(completion)
        self.finished = next_output.finished
        self.metrics, self.num_cached_tokens = next_output.metrics, next_output.num_cached_tokens
        self.prompt_logprobs = next_output.prompt_logprobs or self.prompt_logprobs

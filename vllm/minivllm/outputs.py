"""The outputs of a request.

In vLLM v0.33.0: `vllm/outputs.py` (`RequestOutput`, `CompletionOutput`), `vllm/logprobs.py`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from minivllm.core.lora_request import LoRARequest


@dataclass(slots=True)
class Logprob:
    """The natural log probability of a token, its rank in the vocabulary (1: the most likely),
    and its text.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Logprobs = list[dict[int, Logprob] | None]
"""One entry per position: the chosen token and the most likely ones. None for the first token of
a prompt.
"""


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    - `finish_reason`: "stop", "length", "abort" or "error"; None while unfinished. `error`: the
      message of an "error"; `invalid_request`: the request is at fault, not the engine.
    - `stop_reason`: the stop string or stop token id that ended it; None for the end-of-sequence
      token and all other reasons.
    - `cumulative_logprob`: the sum over the chosen tokens, if log probabilities were requested.

    Fields of vLLM's that nothing here sets are read as None.
    """

    routed_experts: ClassVar[None] = None
    sampling_mask: ClassVar[None] = None
    spec_decode_metrics: ClassVar[None] = None
    weight_versions: ClassVar[None] = None

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    invalid_request: bool = False
    lora_request: "LoRARequest | None" = None

    def finished(self) -> bool:
        """Return whether the completion is finished."""
        return self.finish_reason is not None

    def extend(self, later: "CompletionOutput") -> None:
        """Append the next delta of the same completion, `later`."""
        self.text += later.text
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.cumulative_logprob = later.cumulative_logprob
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        self.error, self.invalid_request = later.error, later.invalid_request


@dataclass(slots=True)
class RequestMetrics:
    """Timestamps in seconds of `time.monotonic()`. `num_cached_tokens` is in `RequestOutput`."""

    arrival_time: float
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt with its `n` completions. `num_cached_tokens` is the number of prompt tokens found
    in the prefix cache.

    `kv_transfer_params` is what the KV connector tells the client when the request has ended.

    Fields of vLLM's that nothing here sets are read as None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: Logprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    lora_request: "LoRARequest | None" = None
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    num_cache_creation_tokens: ClassVar[None] = None
    prompt_token_id_logprobs: ClassVar[None] = None
    ec_transfer_params: ClassVar[None] = None

    def add(self, next_output: "RequestOutput", aggregate: bool = True) -> None:
        """Merge the next delta of the same request into this one, as if both had arrived at once.

        Without `aggregate`, the next output contains everything so far of its completions, and
        replaces them.
        """
        known = {completion.index: completion for completion in self.outputs}
        for completion in next_output.outputs:
            if completion.index in known and not aggregate:
                self.outputs[self.outputs.index(known[completion.index])] = completion
            elif completion.index in known:
                known[completion.index].extend(completion)
            else:
                self.outputs.append(completion)
        self.finished = next_output.finished
        self.metrics, self.num_cached_tokens = next_output.metrics, next_output.num_cached_tokens
        self.kv_transfer_params = next_output.kv_transfer_params
        self.prompt_logprobs = next_output.prompt_logprobs or self.prompt_logprobs

"""Messages between the front end and the engine core: plain data, whether or not they share a
process.

In vLLM v0.33.0: `vllm/v1/engine/__init__.py` (`EngineCoreRequest`, `EngineCoreOutput`,
`EngineCoreOutputs`, `UtilityOutput`), `vllm/v1/outputs.py` (`LogprobsLists`).
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from minivllm.core.limits import RequestLimits
from minivllm.core.lora_request import LoRARequest
from minivllm.core.request import Request
from minivllm.core.stats import SchedulerStats
from minivllm.memory import MemoryLedger
from minivllm.sampling_params import SamplingParams


@dataclass(slots=True)
class EngineCoreRequest:
    """A request sent to the core: token ids, no text.

    `arrival_time` is in seconds of `time.monotonic()`, a clock that all processes of a machine
    share. `sampling_params` are resolved: one completion, a seed, a maximum number of tokens, and
    the ids of all stop tokens. `data_parallel_rank` is the core that computes it; where it is None,
    the client chooses.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...]
    arrival_time: float
    priority: int = 0
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    """What the KV connector is told about the request; see `core.kv_connector`."""
    lora_request: LoRARequest | None = None

    def to_request(self) -> Request:
        """Convert this message to the scheduler's `Request`."""
        params = self.sampling_params
        assert params.max_tokens is not None
        return Request(
            self.request_id,
            self.prompt_token_ids,
            max_tokens=params.max_tokens,
            arrival_time=self.arrival_time,
            priority=self.priority,
            eos_token_ids=() if params.ignore_eos else self.eos_token_ids,
            stop_token_ids=params.stop_token_ids or (),
            lora_request=self.lora_request,
            cache_salt=self.cache_salt,
            # A prefix hit computes no logits, so prompt log probabilities would be missing.
            skip_reading_prefix_cache=params.prompt_logprobs is not None or bool(params.skip_reading_prefix_cache),
            sampling_params=params,
            kv_transfer_params=self.kv_transfer_params,
        )


class TokenLogprobs(NamedTuple):
    """Log probabilities at one position: token ids (the chosen one first, then the most likely) and
    vocabulary ranks.

    The chosen token appears twice if it is also among the most likely.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


@dataclass(slots=True)
class EngineCoreOutput:
    """The output of one step for one request. `finish_reason`: "stop", "length", "abort", "error";
    None if unfinished.

    `stop_reason` is the id of the stop token that ended the request; `error` says why it ended with
    an error, and `invalid_request` that the request was at fault, not the engine.
    `num_cached_tokens` is the prefix hit at its first admission, in tokens. `new_logprobs` has one
    entry per new token. `num_preemptions` and `kv_transfer_params`, the KV connector's message to
    the client, are set in the last output.
    """

    request_id: str
    new_token_ids: list[int]
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | None = None
    new_logprobs: list[TokenLogprobs] | None = None
    new_prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    invalid_request: bool = False
    num_preemptions: int = 0
    kv_transfer_params: dict[str, Any] | None = None

    @classmethod
    def failed(cls, request_id: str, error: str, invalid_request: bool = False) -> "EngineCoreOutput":
        """Return the output, without tokens, of a request that ends with this error."""
        return cls(request_id, [], finish_reason="error", error=error, invalid_request=invalid_request)


@dataclass(slots=True)
class UtilityOutput:
    """The reply to the `call_utility` with this `call_id`: a result, or an error message.

    `invalid_request`: the caller's arguments were at fault, not the engine.
    """

    call_id: int
    result: Any = None
    error: str | None = None
    invalid_request: bool = False


@dataclass(slots=True)
class EngineCoreOutputs:
    """The outputs of a step and the scheduler's state after it, or only the reply to a utility
    call.

    `scheduled_req_ids`: the requests that the step admitted, at `timestamp`, in seconds of
    `time.monotonic()`. `engine_index`: the index of the core that sent them. `num_received`: how
    many requests that core has received so far.
    """

    outputs: list[EngineCoreOutput]
    scheduler_stats: SchedulerStats | None = None
    utility_output: UtilityOutput | None = None
    scheduled_req_ids: list[str] = field(default_factory=list)
    timestamp: float = 0.0
    engine_index: int = 0
    num_received: int = 0
    step_snapshot: str = ""
    """A line of `engine.step_recorder`, if anything watches the steps."""
    kv_connector_stats: dict[str, Any] | None = None
    """What the KV connector has counted in this step."""


@dataclass(frozen=True, slots=True)
class EngineCoreReady:
    """The message that a core sends once, when it is ready: all that the front end needs to know
    about it.

    `ledger` is the memory ledger of the rank with the fewest blocks; None if the user set the
    number of blocks.
    """

    limits: RequestLimits
    num_gpu_blocks: int
    ledger: MemoryLedger | None
    scheduler_stats: SchedulerStats

"""What crosses between the front end and the engine's core: plain data, whether they share a process or not.

In vLLM v0.33.0: `vllm/v1/engine/__init__.py` (`EngineCoreRequest`, `EngineCoreOutput`, `EngineCoreOutputs`,
`UtilityOutput`), `vllm/v1/outputs.py` (`LogprobsLists`).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from minivllm.core.limits import RequestLimits
from minivllm.core.request import Request
from minivllm.core.stats import SchedulerStats
from minivllm.memory import MemoryLedger
from minivllm.sampling_params import SamplingParams


@dataclass(slots=True)
class EngineCoreRequest:
    """A request on its way to the core: tokens, no text.

    `arrival_time` is in seconds of `time.monotonic()`, one clock for all processes of a machine. `sampling_params` are
    resolved: one completion, a seed, a maximum number of tokens, the ids of everything that stops.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...]
    arrival_time: float
    priority: int = 0
    cache_salt: str | None = None

    def to_request(self) -> Request:
        """The scheduler's view of it."""
        params = self.sampling_params
        assert params.max_tokens is not None
        return Request(
            self.request_id,
            self.prompt_token_ids,
            max_tokens=params.max_tokens,
            arrival_time=self.arrival_time,
            priority=self.priority,
            eos_token_ids=self.eos_token_ids,
            ignore_eos=params.ignore_eos,
            stop_token_ids=params.stop_token_ids or (),
            cache_salt=self.cache_salt,
            # A prefix hit has no logits, so there would be no log probabilities.
            skip_reading_prefix_cache=params.prompt_logprobs is not None,
            sampling_params=params,
        )


class TokenLogprobs(NamedTuple):
    """Log probabilities at one position: token ids, the chosen one first and then the most likely, and their ranks.

    The chosen token may come a second time, where it is among the most likely.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


@dataclass(slots=True)
class EngineCoreOutput:
    """What a step made of one request. `finish_reason` is "stop", "length", "abort", "error", or None: it goes on.

    `stop_reason` is the id of the stop token that ended it; `error` says why it ended with an error.
    `num_cached_tokens` is the prefix hit of its first admission, in tokens. `new_logprobs` has one entry a new token.
    """

    request_id: str
    new_token_ids: list[int]
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | None = None
    new_logprobs: list[TokenLogprobs] | None = None
    new_prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


@dataclass(slots=True)
class UtilityOutput:
    """The answer to `call_utility` number `call_id`: a result, or why there is none."""

    call_id: int
    result: Any = None
    error: str | None = None


@dataclass(slots=True)
class EngineCoreOutputs:
    """What came of a step, and the scheduler's state after it. An answer to a utility call comes without either."""

    outputs: list[EngineCoreOutput]
    scheduler_stats: SchedulerStats | None = None
    utility_output: UtilityOutput | None = None


@dataclass(frozen=True, slots=True)
class EngineCoreReady:
    """What the core says once, when it is ready: all that the front end needs to know of it.

    `ledger` is of the rank with the fewest blocks; None where the blocks were set by hand.
    """

    limits: RequestLimits
    num_gpu_blocks: int
    ledger: MemoryLedger | None
    scheduler_stats: SchedulerStats

"""A request on its way to the core: tokens in, no text.

In vLLM v0.33.0: `vllm/v1/engine/__init__.py` (`EngineCoreRequest`).
"""

from dataclasses import dataclass

from minivllm.core.request import Request
from minivllm.sampling_params import SamplingParams


@dataclass(slots=True)
class EngineCoreRequest:
    """All that the core needs to know, and nothing that could not cross to another process.

    `arrival_time` is in seconds of `time.monotonic()`. `sampling_params` are resolved: one completion, a seed, a
    maximum number of tokens, the ids of everything that stops.
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

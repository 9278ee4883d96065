"""What passes between the scheduler and the worker.

In vLLM v0.33.0: `vllm/v1/core/sched/output.py` (`SchedulerOutput`, `NewRequestData`, `CachedRequestData`),
`vllm/v1/outputs.py` (`ModelRunnerOutput`).
"""

from dataclasses import dataclass, field
from typing import Any

from minivllm.core.request import Request


@dataclass(slots=True)
class NewRequestData:
    """Everything about a request that the worker does not know: it is new, or it comes back after a preemption.

    `prefill_token_ids` are all tokens known so far: the prompt, then what was sampled before a preemption.
    """

    req_id: str
    prompt_token_ids: list[int]
    prefill_token_ids: list[int]
    block_ids: list[int]
    num_computed_tokens: int
    sampling_params: Any

    @classmethod
    def from_request(cls, request: Request, block_ids: list[int]) -> "NewRequestData":
        """The data of a request that is being admitted with these blocks."""
        return cls(
            req_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            prefill_token_ids=list(request.all_token_ids),
            block_ids=block_ids,
            num_computed_tokens=request.num_computed_tokens,
            sampling_params=request.sampling_params,
        )


@dataclass(slots=True)
class CachedRequestData:
    """Differences only, for requests that the worker knows: position i of each list belongs to `req_ids[i]`.

    `new_block_ids` are to be appended to the table (None: no new block). `num_computed_tokens` is where this step's
    tokens start; it is sent because rejected drafts make it jump back.
    """

    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[list[int] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class SchedulerOutput:
    """One step. `num_scheduled_tokens` says how many tokens each request gets, in the order of scheduling.

    `scheduled_spec_decode_tokens` are the drafts among them, the last tokens of their request. The worker forgets
    `preempted_req_ids`, which come back as new, and `finished_req_ids`, finished since the step before.
    """

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]
    preempted_req_ids: set[str]
    finished_req_ids: set[str]


@dataclass(slots=True)
class ModelRunnerOutput:
    """What the worker sampled, by request id: accepted drafts and one token of its own. A chunk of a prompt has none.

    `logprobs`, where asked for, has one entry a token; the scheduler cuts it where it cuts the tokens, unread.
    `prompt_logprobs` come once, with the first sampled token.
    """

    sampled_token_ids: dict[str, list[int]]
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[Any]] = field(default_factory=dict)

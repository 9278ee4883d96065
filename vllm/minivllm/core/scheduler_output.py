"""Messages between the scheduler and the worker.

In vLLM v0.33.0: `vllm/v1/core/sched/output.py` (`SchedulerOutput`, `NewRequestData`,
`CachedRequestData`), `vllm/v1/outputs.py` (`ModelRunnerOutput`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minivllm.core.kv_connector import KVConnectorMetadata, KVConnectorOutput
from minivllm.core.lora_request import LoRARequest
from minivllm.core.request import Request

if TYPE_CHECKING:
    import numpy as np


@dataclass(slots=True)
class NewRequestData:
    """Full data of a request that the worker does not know: a new one, or one that resumes after a
    preemption.

    `prefill_token_ids` are all known tokens: the prompt, then what was sampled before a preemption.
    """

    req_id: str
    prompt_token_ids: list[int]
    prefill_token_ids: list[int]
    block_ids: list[int]
    num_computed_tokens: int
    sampling_params: Any
    lora_request: LoRARequest | None = None

    @classmethod
    def from_request(cls, request: Request, block_ids: list[int]) -> "NewRequestData":
        """Return the data of a request that is being admitted with these blocks."""
        return cls(
            req_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            prefill_token_ids=list(request.all_token_ids),
            block_ids=block_ids,
            num_computed_tokens=request.num_computed_tokens,
            sampling_params=request.sampling_params,
            lora_request=request.lora_request,
        )


@dataclass(slots=True)
class CachedRequestData:
    """Updates for requests that the worker already knows: entry i of each list belongs to
    `req_ids[i]`.

    `new_block_ids` are to be appended to the block table (None: no new block).
    `num_computed_tokens` is the position of this step's first token; it is sent because rejected
    draft tokens move it back. `new_token_ids` are the tokens sampled since the request's last step,
    for stages that did not sample them; with one stage the list is empty.
    """

    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[list[int] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    new_token_ids: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class SchedulerOutput:
    """One step. `num_scheduled_tokens` maps each request to its number of tokens, in scheduling
    order.

    `scheduled_spec_decode_tokens` are the draft tokens among them, always the last of a request's
    tokens; -1 stands for a draft that only the worker knows, if it made one (`AsyncScheduler`). The
    worker forgets `preempted_req_ids`, which will be sent again as new, and `finished_req_ids`,
    which ended since the last step. With `has_structured_output_requests` it waits for a
    `GrammarOutput` before it samples. After the step it makes at most `num_spec_tokens_to_schedule`
    drafts for each request; if that is None, as many as it is configured to make.
    """

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]
    preempted_req_ids: set[str]
    finished_req_ids: set[str]
    has_structured_output_requests: bool = False
    num_spec_tokens_to_schedule: int | None = None
    kv_connector_metadata: KVConnectorMetadata | None = None
    """What a KV connector is to do in this step; None without one."""

    @property
    def changes_worker(self) -> bool:
        """Return whether the worker has anything to compute, to forget or to transfer."""
        forgets = bool(self.preempted_req_ids or self.finished_req_ids)
        return bool(self.num_scheduled_tokens) or forgets or self.kv_connector_metadata is not None


@dataclass(slots=True)
class GrammarOutput:
    """The tokens that fit the grammars of these requests: `grammar_bitmask` [rows, ceil(vocab /
    32)], int32.

    Bit i of word w is token 32 w + i. A request has a row for its next token, then one after each
    of its drafts.
    """

    structured_output_request_ids: list[str]
    grammar_bitmask: "np.ndarray"


@dataclass(slots=True)
class ModelRunnerOutput:
    """Sampled tokens by request id: accepted draft tokens and one more. An unfinished prompt chunk
    has none.

    `logprobs`, if requested, has one entry per token; the scheduler truncates it together with the
    tokens, but does not read it. `prompt_logprobs` come once, with the first sampled token.
    `num_invalid_spec_tokens`: how many of a request's scheduled drafts were only placeholders that
    the worker had no draft for.
    """

    sampled_token_ids: dict[str, list[int]]
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[Any]] = field(default_factory=dict)
    nonfinite_req_ids: list[str] = field(default_factory=list)
    num_invalid_spec_tokens: dict[str, int] = field(default_factory=dict)
    kv_connector_output: KVConnectorOutput | None = None
    lora_slots: list[int | None] = field(default_factory=list)
    """The adapter in each slot, by id, after the step; empty without LoRA."""


@dataclass(slots=True)
class AsyncModelRunnerOutput:
    """The output of a step whose tokens are still on their way to the host.

    In vLLM v0.33.0: `vllm/v1/outputs.py` (`AsyncModelRunnerOutput`).
    """

    output: ModelRunnerOutput
    fill: Callable[[ModelRunnerOutput], None]

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the tokens and return the output with them filled in. Any thread may call this."""
        self.fill(self.output)
        return self.output

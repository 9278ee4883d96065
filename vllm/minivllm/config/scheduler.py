"""Settings of the scheduler. No torch.

In vLLM v0.33.0: `vllm/config/scheduler.py` (`SchedulerConfig`).
"""

from dataclasses import dataclass
from typing import Annotated

from minivllm.config.checks import (
    Count,
    CountOrZero,
    Rule,
    check_fields,
    is_count,
    is_number,
    one_of,
    require,
)
from minivllm.config.speculative import NO_DRAFTS, DraftingConfig

MODEL_LEN = Rule(lambda value: is_count(value, 2), "at least 2: one token of prompt and one of output")
WATERMARK = Rule(lambda value: is_number(value) and 0.0 <= value < 1.0, "a fraction from 0 up to 1, exclusive")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Settings of how requests share the engine's steps. Lengths are in tokens.

    - `max_num_batched_tokens`: the token budget of a step. vLLM rejects a budget below
      `max_num_seqs`; here it is allowed, so that you can see what happens.
    - `long_prefill_token_threshold`: maximum tokens of one request per step, unless it is the only
      request; 0 = off. `long_prefill_token_threshold_adaptive`: this limit is at least a fair share
      of the budget.
    - `policy`: "fcfs" or "priority" (a lower value of `Request.priority` goes first).
    - `enable_chunked_prefill`: if False, a prompt waits until all of it fits into the rest of a
      step's budget.
    - `scheduler_reserve_full_isl`: admit a request only if all its known tokens fit, not just the
      first chunk.
    - `watermark`: fraction of the pool, from 0 up to 1, that admissions leave free while any
      request is running.
    - `max_loras`: how many LoRA adapters may run at once; 0 = no request may name one.
    - `drafting`: the scheduler's part of the speculation settings, if any.
    - `async_scheduling`: schedule a step while the one before it is computed.
    - `static_batching`: admit only into an empty batch, as before continuous batching. Not in vLLM.
    """

    max_model_len: Annotated[int, MODEL_LEN]
    max_num_seqs: Count = 256
    max_num_batched_tokens: Count = 2048
    long_prefill_token_threshold: CountOrZero = 0
    long_prefill_token_threshold_adaptive: bool = False
    policy: Annotated[str, one_of("fcfs", "priority")] = "fcfs"
    enable_chunked_prefill: bool = True
    scheduler_reserve_full_isl: bool = True
    watermark: Annotated[float, WATERMARK] = 0.0
    max_loras: CountOrZero = 0
    drafting: DraftingConfig = NO_DRAFTS
    async_scheduling: bool = False
    static_batching: bool = False

    @property
    def num_extra_tokens(self) -> int:
        """The maximum number of slots that a request may need beyond its tokens: lookahead, and the
        drafts of each step.
        """
        # With two steps in flight, the drafts of both may need slots.
        steps = 2 if self.async_scheduling else 1
        return self.drafting.num_speculative_tokens * steps + self.drafting.num_lookahead_tokens

    def __post_init__(self) -> None:
        check_fields(self)
        require(
            self.long_prefill_token_threshold <= self.max_model_len,
            f"long_prefill_token_threshold ({self.long_prefill_token_threshold}) exceeds max_model_len "
            f"({self.max_model_len}); no chunk can be that long",
        )
        require(
            self.enable_chunked_prefill or self.max_num_batched_tokens >= self.max_model_len,
            f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_model_len ({self.max_model_len}): "
            "without chunked prefill a long prompt would wait for ever. Raise it, or enable chunked prefill",
        )

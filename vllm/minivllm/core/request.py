"""One request, from arrival to its last token: its tokens, how many are computed, and its block
hashes.

In vLLM v0.33.0: `vllm/v1/request.py` (`Request`, `RequestStatus`).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any

from minivllm.core.block_hash import (
    BlockHash,
    HashBlockTokens,
    generate_block_hash_extra_keys,
    hash_block_tokens,
    hash_new_full_blocks,
)
from minivllm.core.grammar import StructuredOutputRequest
from minivllm.core.lora_request import LoRARequest
from minivllm.errors import MinivllmError


class RequestStatus(IntEnum):
    """The state of a request. Every status after PREEMPTED is finished."""

    WAITING = 0
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = 1
    WAITING_FOR_REMOTE_KVS = 2
    RUNNING = 3
    PREEMPTED = 4
    FINISHED_STOPPED = 5
    FINISHED_LENGTH_CAPPED = 6
    FINISHED_ABORTED = 7
    FINISHED_ERROR = 8

    @property
    def is_finished(self) -> bool:
        """Return whether the request will never be scheduled again."""
        return self > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> str | None:
        """Return the reason given to clients: "stop", "length", "abort" or "error"; None while
        unfinished.
        """
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """The scheduler's record of one request. Lengths and positions are in tokens.

    There are no phases. A request has `num_tokens_with_spec` tokens; the keys and values of
    `num_computed_tokens` of them are in the cache or being computed. Each step moves the second
    number towards the first. A prefill, a chunk of one, a decode and a verification of draft tokens
    differ only in the size of the gap. `num_output_placeholders` count tokens that steps in flight
    may sample; they are 0 unless steps are scheduled ahead (`AsyncScheduler`).

    A lower `priority` goes first. The scheduler passes `sampling_params` on unread; the KV
    connector reads and writes `kv_transfer_params`. As in vLLM, the sampler enforces `min_tokens`
    by masking stop tokens. A request for prompt log probabilities sets `skip_reading_prefix_cache`,
    because a prefix hit computes no logits.

    Raises:
        MinivllmError: the prompt is empty.
    """

    request_id: str
    prompt: InitVar[Sequence[int]]
    _: KW_ONLY
    max_tokens: int
    arrival_time: float = 0.0
    priority: int = 0
    eos_token_ids: Collection[int] = ()
    stop_token_ids: Collection[int] = ()
    lora_request: LoRARequest | None = None
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool = False
    sampling_params: Any = None
    kv_transfer_params: dict[str, Any] | None = None

    structured_output_request: StructuredOutputRequest | None = None
    status: RequestStatus = RequestStatus.WAITING
    stop_reason: int | None = None
    error: str | None = None
    """The fault of the request itself that has ended it, if any."""
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    """Stored separately because the scheduler reads it several times per step."""
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    num_cached_tokens: int = 0
    num_external_computed_tokens: int = 0
    num_preemptions: int = 0
    num_lost_tokens: int = 0
    """Tokens that were computed when it was last preempted; 0 once it is admitted again."""
    is_prefill_chunk: bool = True
    spec_token_ids: list[int] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)
    _all_token_ids: list[int] = field(default_factory=list)
    _block_size: int = 0
    _hash_new_full_blocks: Callable[[], None] | None = None

    def __post_init__(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise MinivllmError(f"the prompt of request {self.request_id!r} is empty; it needs at least one token")
        self.eos_token_ids = frozenset(self.eos_token_ids)
        self.stop_token_ids = frozenset(self.stop_token_ids)
        self._all_token_ids = list(prompt)
        self.num_prompt_tokens = self.num_tokens = len(prompt)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, computed {self.num_computed_tokens} of "
            f"{self.num_prompt_tokens} + {self.num_output_tokens} tokens)"
        )

    @property
    def prompt_token_ids(self) -> list[int]:
        """Return a copy of the prompt's token ids."""
        return self._all_token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """Return a copy of the tokens sampled so far, which survive a preemption."""
        return self._all_token_ids[self.num_prompt_tokens :]

    @property
    def all_token_ids(self) -> Sequence[int]:
        """The prompt and output tokens. This is not a copy, so do not modify it."""
        return self._all_token_ids

    @property
    def num_output_tokens(self) -> int:
        """Return the number of tokens sampled so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_tokens_with_spec(self) -> int:
        """Return the number of known tokens plus draft tokens to be verified."""
        return self.num_tokens + len(self.spec_token_ids)

    @property
    def samples_by_grammar(self) -> bool:
        """Return whether the step that was just scheduled samples a token for this request under a
        grammar.
        """
        return self.structured_output_request is not None and not self.is_prefill_chunk

    def append_output_token_id(self, token_id: int) -> None:
        """Append one sampled token and, if it fills a block, that block's hash."""
        self._all_token_ids.append(token_id)
        self.num_tokens += 1
        if self._hash_new_full_blocks is not None and self.num_tokens % self._block_size == 0:
            self._hash_new_full_blocks()

    def enable_block_hashes(self, block_size: int, hash_block: HashBlockTokens = hash_block_tokens) -> None:
        """Hash all full blocks of `block_size` tokens now, and later each block that a new token
        fills.
        """
        self._block_size = block_size
        # The keys of the first block, then those of all others.
        extra_keys = (generate_block_hash_extra_keys(self.lora_request, salt) for salt in (self.cache_salt, None))
        so_far = self.block_hashes, self._all_token_ids  # both lists grow
        self._hash_new_full_blocks = partial(
            hash_new_full_blocks, *so_far, block_size, *extra_keys, hash_block=hash_block
        )
        self.block_hashes.clear()
        self._hash_new_full_blocks()

    def sort_key(self) -> tuple[int, float, str]:
        """Return the key for the priority policy: priority, then arrival time, then id."""
        return self.priority, self.arrival_time, self.request_id

"""Limits that a request must meet to be served. The front end checks them before it sends a
request, the scheduler before it queues one.

In vLLM v0.33.0: `vllm/v1/engine/input_processor.py` (`InputProcessor._validate_model_inputs`).
"""

from dataclasses import dataclass

from minivllm.errors import MinivllmError


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits on a request's size, in tokens and blocks.

    `num_extra_tokens`: slots that a request may need beyond its tokens, for draft tokens and
    lookahead.
    """

    max_model_len: int
    block_size: int
    num_usable_blocks: int
    num_extra_tokens: int = 0

    def check(self, name: str, num_prompt_tokens: int, max_tokens: int) -> None:
        """Reject a request that could never finish.

        Raises:
            MinivllmError: its prompt leaves no room to generate, or it may need more blocks than
                the pool has.
        """
        if num_prompt_tokens >= self.max_model_len:
            raise MinivllmError(
                f"{name} has a prompt of {num_prompt_tokens} tokens; with max_model_len {self.max_model_len} "
                f"a prompt may have {self.max_model_len - 1}, which leaves room to generate one"
            )
        # The last token is sampled but never computed, so it needs no slot.
        longest = min(num_prompt_tokens + max_tokens, self.max_model_len)
        num_blocks = -(-min(longest - 1 + self.num_extra_tokens, self.max_model_len) // self.block_size)
        if num_blocks > self.num_usable_blocks:
            room = self.num_usable_blocks * self.block_size + 1 - self.num_extra_tokens
            raise MinivllmError(
                f"{name} may need {num_blocks} blocks of {self.block_size} tokens, but the cache has "
                f"{self.num_usable_blocks}: prompt and max_tokens may add up to {room} tokens. Lower max_tokens, "
                "or give the cache more blocks"
            )

"""A step under construction: how many tokens of its budget each request gets, and which requests
were preempted for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from minivllm.core.block_pool import KVCacheBlock
from minivllm.core.request import Request


@dataclass(slots=True)
class Step:
    """A step under construction. `position` is the index in `running` of the request being
    scheduled.
    """

    token_budget: int
    """The number of tokens that are left."""
    chunk_limit: int
    """The maximum number of tokens that one request may get."""
    position: int = 0
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    spec_token_ids: dict[str, list[int]] = field(default_factory=dict)
    continued: list[Request] = field(default_factory=list)
    new_block_ids: dict[str, list[int]] = field(default_factory=dict)
    admitted: list[Request] = field(default_factory=list)
    preempted_req_ids: set[str] = field(default_factory=set)

    def continue_running(self, request: Request, num_new_tokens: int, new_blocks: Sequence[KVCacheBlock]) -> None:
        """Schedule a running request whose new blocks are allocated; drop drafts that do not fit
        into the step.
        """
        request_id = request.request_id
        self.num_scheduled_tokens[request_id] = num_new_tokens
        self.token_budget -= num_new_tokens
        self.continued.append(request)
        if new_blocks:
            self.new_block_ids[request_id] = [block.block_id for block in new_blocks]
        if request.spec_token_ids:
            # Known tokens come first; what is left of the chunk is for drafts.
            num_known = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
            num_drafts = num_new_tokens - num_known
            if num_drafts > 0:
                self.spec_token_ids[request_id] = request.spec_token_ids[:num_drafts]
            request.spec_token_ids = []

    def unschedule(self, request: Request) -> bool:
        """Remove a running request from the step and refund its tokens to the budget. Return
        whether it was in the step.
        """
        request_id = request.request_id
        if request_id not in self.num_scheduled_tokens:
            return False
        self.token_budget += self.num_scheduled_tokens.pop(request_id)
        self.continued.remove(request)
        self.spec_token_ids.pop(request_id, None)
        return True

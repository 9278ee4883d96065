"""A scheduler for the engine that leaves its caps to functions: those of exercise 10.

    LLM(model, parts=Parts(scheduler=scheduler_that_caps(chunk_limit, running_tokens, admitted_tokens)))

The functions say how many tokens a request gets in a step; everything else (order, memory, preemption, drafts) stays
the engine's own. No torch.
"""

from collections.abc import Callable

from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.errors import MinivllmError

ChunkLimit = Callable[[int, int, int, bool], int]
"""`chunk_limit(token_budget, threshold, num_requests, adaptive)`: the most tokens of one request in a step."""
RunningTokens = Callable[[int, int, int], int]
"""`running_tokens(missing, limit, budget_left)`: the tokens that a running request gets."""
AdmittedTokens = Callable[[int, int, int, bool], int]
"""`admitted_tokens(missing, limit, budget_left, may_be_cut)`: those of a request that waits; 0 = it waits on."""


def scheduler_that_caps(
    chunk_limit: ChunkLimit | None = None,
    running_tokens: RunningTokens | None = None,
    admitted_tokens: AdmittedTokens | None = None,
) -> type[Scheduler]:
    """The engine's scheduler with these functions in its two loops; None leaves the engine's own.

    An answer that cannot be carried out raises `MinivllmError` in the engine's step; the message says which.
    """

    class CappingScheduler(Scheduler):
        def _chunk_limit(self) -> int:
            if chunk_limit is None:
                return super()._chunk_limit()
            budget, threshold = self.config.max_num_batched_tokens, self.config.long_prefill_token_threshold
            adaptive = self.config.long_prefill_token_threshold_adaptive
            found = chunk_limit(budget, threshold, len(self.requests), adaptive)
            _check("chunk_limit", found, 1, max(budget, threshold))
            return found

        def _cap_num_tokens(self, request: Request, num_new_tokens: int, chunk_limit: int, token_budget: int) -> int:
            if running_tokens is None:
                return super()._cap_num_tokens(request, num_new_tokens, chunk_limit, token_budget)
            found = running_tokens(num_new_tokens, chunk_limit, token_budget)
            _check("running_tokens", found, 0, min(num_new_tokens, token_budget))
            return super()._cap_num_tokens(request, found, found, found)

        def _cap_admitted(self, num_new_tokens: int, chunk_limit: int, token_budget: int) -> int:
            if admitted_tokens is None:
                return super()._cap_admitted(num_new_tokens, chunk_limit, token_budget)
            found = admitted_tokens(num_new_tokens, chunk_limit, token_budget, self.config.enable_chunked_prefill)
            _check("admitted_tokens", found, 0, min(num_new_tokens, token_budget))
            return found

    return CappingScheduler


def _check(name: str, found: object, least: int, most: int) -> None:
    if not isinstance(found, int) or not least <= found <= most:
        raise MinivllmError(f"your {name} says {found!r}, and a whole number from {least} to {most} is possible")

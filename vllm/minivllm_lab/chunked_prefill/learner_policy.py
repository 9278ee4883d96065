"""A scheduling policy that leaves the caps to functions: those of exercise 10.

    LLM(model, parts=Parts(policy=learner_policy(chunk_limit, running_tokens, admitted_tokens)))

The functions say how many tokens a request gets in a step; everything else (order, memory, preemption, drafts) stays
the engine's own. No torch.
"""

from collections.abc import Callable
from functools import partial

from minivllm.core.policy import DEFAULT_POLICY, SchedulingPolicy
from minivllm.errors import MinivllmError

ChunkLimit = Callable[[int, int, int, bool], int]
"""`chunk_limit(token_budget, threshold, num_requests, adaptive)`: the most tokens of one request in a step."""
RunningTokens = Callable[[int, int, int], int]
"""`running_tokens(missing, limit, budget_left)`: the tokens that a running request gets."""
AdmittedTokens = Callable[[int, int, int, bool], int]
"""`admitted_tokens(missing, limit, budget_left, may_be_cut)`: those of a request that waits; 0 = it waits on."""


def learner_policy(
    chunk_limit: ChunkLimit | None = None,
    running_tokens: RunningTokens | None = None,
    admitted_tokens: AdmittedTokens | None = None,
) -> SchedulingPolicy:
    """Return the policy with these caps; None leaves the engine's own.

    An answer that cannot be carried out raises `MinivllmError` in the engine's step; the message says which.
    """
    own = DEFAULT_POLICY
    return SchedulingPolicy(
        chunk_limit=partial(_limit, chunk_limit) if chunk_limit else own.chunk_limit,
        running_tokens=partial(_running, running_tokens) if running_tokens else own.running_tokens,
        admitted_tokens=partial(_admitted, admitted_tokens) if admitted_tokens else own.admitted_tokens,
    )


def _limit(chunk_limit: ChunkLimit, token_budget: int, threshold: int, num_requests: int, adaptive: bool) -> int:
    found = chunk_limit(token_budget, threshold, num_requests, adaptive)
    return _checked("chunk_limit", found, 1, max(token_budget, threshold))


def _running(running_tokens: RunningTokens, missing: int, limit: int, budget_left: int) -> int:
    found = running_tokens(missing, limit, budget_left)
    return _checked("running_tokens", found, 0, min(missing, budget_left))


def _admitted(admitted_tokens: AdmittedTokens, missing: int, limit: int, budget_left: int, may_be_cut: bool) -> int:
    found = admitted_tokens(missing, limit, budget_left, may_be_cut)
    return _checked("admitted_tokens", found, 0, min(missing, budget_left))


def _checked(name: str, found: int, least: int, most: int) -> int:
    if not isinstance(found, int) or not least <= found <= most:
        raise MinivllmError(f"your {name} says {found!r}, and a whole number from {least} to {most} is possible")
    return found

"""A scheduling policy whose token caps are decided by functions: those of exercise 10.

    LLM(model, parts=Parts(policy=learner_policy(chunk_limit, running_tokens, admitted_tokens)))

The functions return how many tokens a request gets in a step; order, memory, preemption and drafts
stay the engine's own. No torch.
"""

from collections.abc import Callable
from functools import partial

from minivllm.core.policy import DEFAULT_POLICY, SchedulingPolicy
from minivllm.errors import MinivllmError

ChunkLimit = Callable[[int, int, int, bool], int]
"""`chunk_limit(token_budget, threshold, num_requests, adaptive)` returns the maximum number of tokens of one
request in a step.
"""
RunningTokens = Callable[[int, int, int], int]
"""`running_tokens(missing, limit, budget_left)` returns the tokens that a running request gets."""
AdmittedTokens = Callable[[int, int, int, bool], int]
"""`admitted_tokens(missing, limit, budget_left, may_be_cut)` returns those of a waiting request;
0 keeps it waiting.
"""


def learner_policy(
    chunk_limit: ChunkLimit | None = None,
    running_tokens: RunningTokens | None = None,
    admitted_tokens: AdmittedTokens | None = None,
) -> SchedulingPolicy:
    """Return the policy with these caps; None keeps the engine's own.

    If a function returns a count that the engine cannot use, its step raises `MinivllmError`; the
    message names the function and the count.
    """
    own = DEFAULT_POLICY
    return SchedulingPolicy(
        chunk_limit=partial(_limit, chunk_limit) if chunk_limit else own.chunk_limit,
        running_tokens=partial(_running, running_tokens) if running_tokens else own.running_tokens,
        admitted_tokens=partial(_admitted, admitted_tokens) if admitted_tokens else own.admitted_tokens,
    )


def _limit(chunk_limit: ChunkLimit, token_budget: int, threshold: int, num_requests: int, adaptive: bool) -> int:
    tokens = chunk_limit(token_budget, threshold, num_requests, adaptive)
    return _checked("chunk_limit", tokens, 1, max(token_budget, threshold))


def _running(running_tokens: RunningTokens, missing: int, limit: int, budget_left: int) -> int:
    tokens = running_tokens(missing, limit, budget_left)
    return _checked("running_tokens", tokens, 0, min(missing, budget_left))


def _admitted(admitted_tokens: AdmittedTokens, missing: int, limit: int, budget_left: int, may_be_cut: bool) -> int:
    tokens = admitted_tokens(missing, limit, budget_left, may_be_cut)
    return _checked("admitted_tokens", tokens, 0, min(missing, budget_left))


def _checked(name: str, tokens: int, least: int, most: int) -> int:
    if not isinstance(tokens, int) or not least <= tokens <= most:
        raise MinivllmError(f"your {name} returns {tokens!r}; it must return a whole number from {least} to {most}")
    return tokens

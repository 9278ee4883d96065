"""A scheduling policy whose token caps are decided by functions: those of exercise 10.

    LLM(model, parts=Parts(policy=learner_policy(chunk_limit, running_tokens, admitted_tokens)))

The functions return how many tokens a request gets in a step; order, memory, preemption and drafts
stay the engine's own. No torch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from minivllm.core.policy import SchedulingPolicy
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


BOUNDS: dict[str, Callable[..., tuple[int, int]]] = {
    "chunk_limit": lambda budget, threshold, *_: (1, max(budget, threshold)),
    "running_tokens": lambda missing, limit, left: (0, min(missing, left)),
    "admitted_tokens": lambda missing, limit, left, _: (0, min(missing, left)),
}
"""The least and the most tokens that each function may return, given its arguments."""


def learner_policy(
    chunk_limit: ChunkLimit | None = None,
    running_tokens: RunningTokens | None = None,
    admitted_tokens: AdmittedTokens | None = None,
) -> SchedulingPolicy:
    """Return the policy with these caps; None keeps the engine's own.

    If a function returns a count that the engine cannot use, its step raises `MinivllmError`; the
    message names the function and the count.
    """
    caps = zip(BOUNDS, (chunk_limit, running_tokens, admitted_tokens), strict=True)
    rules: dict[str, Any] = {name: partial(_checked, name, cap) for name, cap in caps if cap}
    return SchedulingPolicy(**rules)


def _checked(name: str, cap: Callable[..., int], *arguments: int) -> int:
    tokens, (least, most) = cap(*arguments), BOUNDS[name](*arguments)
    if not isinstance(tokens, int) or not least <= tokens <= most:
        raise MinivllmError(f"your {name} returns {tokens!r}; it must return a whole number from {least} to {most}")
    return tokens

"""The scheduler's rules: functions that a caller may replace, each with vLLM's rule as its default.

    Scheduler(scheduler_config, cache_config, SchedulingPolicy(victim=mine))
    LLM(model, parts=Parts(policy=SchedulingPolicy(chunk_limit=mine)))

A rule answers for one request and changes nothing. Only `schedule` acts: it fills a step by calling
the scheduler's public methods (`schedule_running`, `schedule_waiting`, `admit`, `preempt`) and
those of the step. The scheduler does not check the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from minivllm.core.block_hash import HashBlockTokens, hash_block_tokens
from minivllm.core.block_pool import BlockPool
from minivllm.core.kv_cache_manager import KVCacheManager
from minivllm.core.remote_kv import Prefix
from minivllm.core.request import Request
from minivllm.errors import MinivllmError

if TYPE_CHECKING:
    from minivllm.core.scheduler import Scheduler
    from minivllm.core.step import Step


def running_then_waiting(scheduler: Scheduler, step: Step) -> None:
    """Schedule running requests, then admit waiting ones, unless a request was preempted."""
    scheduler.schedule_running(step)
    if not step.preempted_req_ids:
        scheduler.schedule_waiting(step)


def chunk_limit(token_budget: int, threshold: int, num_requests: int, adaptive: bool) -> int:
    """Return the maximum number of tokens that one request may get in a step; `num_requests` counts
    all unfinished requests.
    """
    if threshold == 0 or num_requests <= 1:  # a lone request starves no other
        return token_budget
    return max(threshold, token_budget // num_requests) if adaptive else threshold


def running_tokens(missing: int, limit: int, budget_left: int) -> int:
    """Return how many of its missing tokens a running request gets."""
    return min(missing, limit, budget_left)


def admitted_tokens(missing: int, limit: int, budget_left: int, may_be_cut: bool) -> int:
    """Return how many of its missing tokens a waiting request gets; 0 if it must wait until all of
    them fit into a step.
    """
    chunk = min(missing, limit)
    if chunk > budget_left and not may_be_cut:
        return 0
    return min(chunk, budget_left)


def may_admit(request: Request, running_loras: Collection[int], max_loras: int) -> bool:
    """Return whether a request may be admitted: it needs no adapter, its adapter has a LoRA slot
    already, or a slot is free.
    """
    if request.lora_request is None or request.lora_request.lora_int_id in running_loras:
        return True
    return len(running_loras) < max_loras


def victim(running: Sequence[Request], policy: str, blocks: Mapping[str, Sequence[Any]]) -> Request:
    """Return the last running request (FCFS), or the one with the greatest `sort_key` (priority).

    `running` is in order of admission, `blocks` has the block tables by request id.
    """
    if policy == "fcfs":
        return running[-1]
    # Ids break ties, as in the waiting queue. vLLM v0.33.0 takes the first of equal requests; where
    # a first chunk is enough to be admitted, two of them can then preempt each other forever
    # (tests/core/test_scheduler.py).
    return max(running, key=Request.sort_key)


def find_prefix(request: Request, manager: KVCacheManager) -> Prefix:
    """Return the part of a waiting request that the prefix cache already holds. Not called with a
    KV connector.
    """
    return Prefix(*manager.get_computed_blocks(request))


@dataclass(frozen=True, kw_only=True)
class SchedulingPolicy:
    """The rules of one scheduler; the functions of this module document their arguments.

    `schedule` says in which order a step is filled, `chunk_limit`, `running_tokens` and
    `admitted_tokens` how long a chunk may be, `may_admit` who may be admitted, `victim` who is
    preempted, `find_prefix` what is not computed again, `hash_block_tokens` how a block is hashed,
    and `block_pool` which block is reused next.
    """

    schedule: Callable[[Scheduler, Step], None] = running_then_waiting
    chunk_limit: Callable[[int, int, int, bool], int] = chunk_limit
    running_tokens: Callable[[int, int, int], int] = running_tokens
    admitted_tokens: Callable[[int, int, int, bool], int] = admitted_tokens
    may_admit: Callable[[Request, Collection[int], int], bool] = may_admit
    victim: Callable[[Sequence[Request], str, Mapping[str, Sequence[Any]]], Request] = victim
    find_prefix: Callable[[Request, KVCacheManager], Prefix] = find_prefix
    hash_block_tokens: HashBlockTokens = hash_block_tokens
    block_pool: Callable[[int, bool], BlockPool] = BlockPool

    def __post_init__(self) -> None:
        for name, rule in self.replaced.items():
            if not callable(rule):
                raise MinivllmError(f"the policy's {name} is {rule!r}; it must be a function or a class")

    @property
    def replaced(self) -> dict[str, Callable[..., Any]]:
        """Return the functions that are not the default, by name."""
        rules = ((field, getattr(self, field.name)) for field in fields(self))
        return {field.name: rule for field, rule in rules if rule is not field.default}


DEFAULT_POLICY = SchedulingPolicy()
"""The rules of vLLM."""

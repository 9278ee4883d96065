"""A scheduling policy that lets functions of exercise 11 schedule the running requests and pick the
one to preempt.

    LLM(model, parts=Parts(policy=learner_policy(schedule_running, resume_at)))
    Scheduler(scheduler_config, cache_config, SchedulingPolicy(victim=learner_victim(victim)))

`schedule_running` sees the engine's own requests and waiting queue, and its block tables through
`EngineMemory`. `victim` sees a `RunningRequest` for each request. Admissions, drafts and KV
connectors stay the engine's own. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from minivllm.core.block_pool import KVCacheBlock
from minivllm.core.kv_cache_manager import KVCacheManager
from minivllm.core.policy import SchedulingPolicy, find_prefix, running_then_waiting
from minivllm.core.remote_kv import Prefix
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.step import Step
from minivllm.errors import MinivllmError

ScheduleRunning = Callable[[list, Any, Any, int, str], tuple[dict[str, int], list]]
"""`schedule_running(running, waiting, memory, token_budget, policy)` returns tokens by request,
and the victims.
"""
ResumeAt = Callable[[int, int, int], int]
"""`resume_at(num_tokens, num_hit_blocks, block_size)` returns the first token of a request to
compute.
"""


class RunningRequest(NamedTuple):
    """The part of a request that `victim` sees."""

    request_id: str
    priority: int
    """A smaller number is more urgent."""
    arrival_time: float
    num_tokens: int
    """Tokens of the prompt and of the answer so far."""
    num_computed_tokens: int
    num_blocks: int


Victim = Callable[[list[RunningRequest], str], RunningRequest]
"""`victim(running, policy)` returns one of `running` (in order of admission); `policy` is "fcfs"
or "priority".
"""


class EngineMemory:
    """The engine's block tables during one step, as `schedule_running` sees them."""

    def __init__(self, scheduler: Scheduler, step: Step) -> None:
        self.scheduler, self.step = scheduler, step
        self.new_blocks: dict[str, Sequence[KVCacheBlock]] = {}
        """Blocks that each request was given in this step."""

    def wanted(self, request: Request) -> int:
        """Return how many tokens a request would compute, drafts included, within the limits on a
        single request.
        """
        missing = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
        return self.scheduler.cap_num_tokens(request, missing, self.step)

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Allocate blocks for a request's next tokens; return False and change nothing if they do
        not fit.
        """
        lookahead = self.scheduler.drafting.num_lookahead_tokens
        blocks = self.scheduler.kv_cache_manager.allocate_slots(request, num_tokens, num_lookahead_tokens=lookahead)
        if blocks is not None:
            self.new_blocks[request.request_id] = blocks
        return blocks is not None

    def free(self, name: str) -> None:
        """Free all blocks of a request."""
        scheduler, request = self.scheduler, self.scheduler.requests[name]
        was_scheduled = self.new_blocks.pop(name, None) is not None
        scheduler.kv_cache_manager.free(request, withdraw_uncomputed=was_scheduled)
        request.num_lost_tokens = request.num_computed_tokens


def learner_policy(
    schedule_running: ScheduleRunning | None = None, resume_at: ResumeAt | None = None
) -> SchedulingPolicy:
    """Return a policy that calls these functions; None keeps the engine's own."""
    return SchedulingPolicy(
        schedule=partial(_ask, schedule_running) if schedule_running else running_then_waiting,
        find_prefix=partial(_prefix_by, resume_at) if resume_at else find_prefix,
    )


def learner_victim(victim: Victim) -> Callable[[Sequence[Request], str, Mapping[str, Sequence[Any]]], Request]:
    """Return a victim rule for the policy that calls `victim`.

    A result that is not one of the running requests raises `MinivllmError` in the engine's step.
    """
    return partial(_victim_by, victim)


def _ask(schedule_running: ScheduleRunning, scheduler: Scheduler, step: Step) -> None:
    memory = EngineMemory(scheduler, step)
    scheduled, preempted = schedule_running(
        scheduler.running, scheduler.waiting, memory, step.token_budget, scheduler.config.policy
    )
    for request in preempted:
        scheduler.num_preemptions += 1
        step.preempted_req_ids.add(request.request_id)
    for name, num_tokens in scheduled.items():
        step.continue_running(scheduler.requests[name], num_tokens, memory.new_blocks[name])
    if not preempted:
        scheduler.schedule_waiting(step)


def _prefix_by(resume_at: ResumeAt, request: Request, manager: KVCacheManager) -> Prefix:
    """Return the part of a waiting request's prefix that `resume_at` takes from the prefix cache.

    Raises:
        MinivllmError: `resume_at` returns a token at which no cached block ends.
    """
    if not manager.enable_caching:
        return find_prefix(request, manager)
    pool, size, hits = manager.block_pool, manager.block_size, []
    for block_hash in request.block_hashes:
        if (block := pool.get_cached_block(block_hash)) is None:
            break
        hits.append(block)
    start = resume_at(request.num_tokens, len(hits), size)
    possible = isinstance(start, int) and 0 <= start < request.num_tokens and start % size == 0
    if not possible or start > len(hits) * size:
        raise MinivllmError(
            f"your resume_at returns {start!r} for {request.num_tokens} tokens and {len(hits)} cached blocks of {size}"
        )
    return Prefix(hits[: start // size], start)


def _victim_by(victim: Victim, running: Sequence[Request], policy: str, blocks: Mapping[str, Sequence[Any]]) -> Request:
    seen = [
        RunningRequest(
            request.request_id, request.priority, request.arrival_time, request.num_tokens,
            request.num_computed_tokens, len(blocks.get(request.request_id, ())),
        )
        for request in running
    ]  # fmt: skip
    chosen = victim(list(seen), policy)
    for request, shown in zip(running, seen, strict=True):
        if shown is chosen:
            return request
    names = ", ".join(request.request_id for request in running)
    raise MinivllmError(f"your victim returns {chosen!r}; the running requests are {names}"[:300])

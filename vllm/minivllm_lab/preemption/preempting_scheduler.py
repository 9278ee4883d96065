"""A scheduler for the engine that leaves those that run, and who of them is preempted, to functions of exercise 11.

    LLM(model, parts=Parts(scheduler=scheduler_that_preempts(schedule_running, resume_at)))

The functions see the engine's own requests and its waiting queue; `EngineMemory` is what they know of the block tables.
Admissions, drafts and KV connectors stay the engine's own. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minivllm.core.kv_cache_manager import KVCacheManager
from minivllm.core.remote_kv import Prefix
from minivllm.core.request import Request, RequestStatus
from minivllm.core.scheduler import Scheduler, Step
from minivllm.errors import MinivllmError

ScheduleRunning = Callable[[list, Any, Any, int, str], tuple[dict[str, int], list]]
"""`schedule_running(running, waiting, memory, token_budget, policy)`: tokens by request, and who was preempted."""
ResumeAt = Callable[[int, int, int], int]
"""`resume_at(num_tokens, num_hit_blocks, block_size)`: from which token on a request is computed."""


class EngineMemory:
    """The block tables of the engine, as `schedule_running` sees them, for one step."""

    def __init__(self, scheduler: Scheduler, step: Step, chunk_limit: int) -> None:
        self.scheduler, self.step, self.chunk_limit = scheduler, step, chunk_limit
        self.new_blocks: dict[str, list[int]] = {}
        """Blocks that each request has got in this step."""
        self.freed: list[Request] = []
        self._before = list(scheduler.running)
        self._asks_left = 10 * (1 + len(scheduler.running)) ** 2

    def wanted(self, request: Request) -> int:
        """Tokens of a request that are not computed, drafts among them, under the limits of one request."""
        self._asks_left -= 1
        _require(self._asks_left > 0, "never ends: it asks for the same requests again and again")
        missing = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
        return self.scheduler._cap_num_tokens(request, missing, self.chunk_limit, missing)

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Blocks for a request's next tokens; False, and nothing has changed, if they do not fit."""
        self._asks_left -= 1
        _require(self._asks_left > 0, "never ends: it asks for blocks again and again")
        lookahead = self.scheduler.drafting.num_lookahead_tokens
        found = self.scheduler.kv_cache_manager.allocate_slots(request, num_tokens, num_lookahead_tokens=lookahead)
        if found is not None:
            self.new_blocks[request.request_id] = [block.block_id for block in found]
        return found is not None

    def free(self, name: str) -> None:
        """Takes all blocks of a request away; once, or there is nothing to take.

        Raises:
            MinivllmError: there is no such request.
        """
        scheduler = self.scheduler
        if name not in scheduler.requests:
            raise MinivllmError(
                f"your preempt frees the blocks of {name!r}, and the ids are {sorted(scheduler.requests)}"
            )
        request = scheduler.requests[name]
        if scheduler.remote is not None:
            scheduler.remote.lost_its_blocks(request)
        was_scheduled = self.new_blocks.pop(name, None) is not None
        scheduler.kv_cache_manager.free(request, withdraw_uncomputed=was_scheduled)
        request.num_lost_tokens = request.num_computed_tokens
        self.freed.append(request)

    def check_answer(self, given: dict[str, int], preempted: list[Request]) -> None:
        """Raises `MinivllmError` where an answer of `schedule_running` and what it has done do not go together."""
        scheduler, names = self.scheduler, {request.request_id for request in preempted}
        left = [request for request in self._before if request.request_id not in names]
        _require(scheduler.running == left, "must take those that it preempts out of `running`, and nobody else")
        freed = [request.request_id for request in self.freed]
        _require(sorted(freed) == sorted(names), f"frees the blocks of {freed} and says that it preempts {names}")
        waits = {request.request_id for request in scheduler.waiting}
        for request in preempted:
            right = request.status is RequestStatus.PREEMPTED and request.num_computed_tokens == 0
            _require(right and request.request_id in waits, f"leaves {request!r} half preempted")
        for name, num_tokens in given.items():
            enough = isinstance(num_tokens, int) and num_tokens > 0 and name in self.new_blocks
            _require(enough, f"gives {name!r} {num_tokens!r} tokens without blocks for them")
        _require(sum(given.values()) <= scheduler.config.max_num_batched_tokens, "gives more than the budget")
        nobody = not given and not preempted and any(self.wanted(request) for request in scheduler.running)
        _require(not nobody, "gives nobody a token, though somebody wants one")


def scheduler_that_preempts(
    schedule_running: ScheduleRunning | None = None, resume_at: ResumeAt | None = None
) -> type[Scheduler]:
    """The engine's scheduler with these functions; None leaves the engine's own.

    An answer that cannot be carried out raises `MinivllmError` in the engine's step; the message says which.
    """

    class PreemptingScheduler(Scheduler):
        def _schedule_running(self, step: Step, chunk_limit: int) -> None:
            if schedule_running is None:
                super()._schedule_running(step, chunk_limit)
                return
            memory = EngineMemory(self, step, chunk_limit)
            given, preempted = schedule_running(
                self.running, self.waiting, memory, step.token_budget, self.config.policy
            )
            memory.check_answer(given, preempted)
            for request in preempted:
                self.num_preemptions += 1
                step.preempted_req_ids.add(request.request_id)
            for name, num_tokens in given.items():
                self._carry_out(self.requests[name], num_tokens, step, memory.new_blocks[name])

        def _carry_out(self, request: Request, num_tokens: int, step: Step, new_blocks: list[int]) -> None:
            step.num_scheduled_tokens[request.request_id] = num_tokens
            step.token_budget -= num_tokens
            step.continued.append(request)
            if new_blocks:
                step.new_block_ids[request.request_id] = new_blocks
            if request.spec_token_ids:
                self._schedule_drafts(request, num_tokens, step)

        def _find_prefix(self, request: Request) -> Prefix | None:
            if resume_at is None or self.remote is not None or not self.kv_cache_manager.enable_caching:
                return super()._find_prefix(request)
            return prefix_by(resume_at, request, self.kv_cache_manager)

    return PreemptingScheduler


def prefix_by(resume_at: ResumeAt, request: Request, manager: KVCacheManager) -> Prefix:
    """What a waiting request takes over of the prefix cache, by `resume_at`.

    Raises:
        MinivllmError: `resume_at` names a token that is not a found block's end.
    """
    pool, size, hits = manager.block_pool, manager.block_size, []
    for block_hash in request.block_hashes:
        if (block := pool.get_cached_block(block_hash)) is None:
            break
        hits.append(block)
    start = resume_at(request.num_tokens, len(hits), size)
    possible = isinstance(start, int) and 0 <= start < request.num_tokens and start % size == 0
    if not possible or start > len(hits) * size:
        raise MinivllmError(
            f"your resume_at says {start!r} of {request.num_tokens} tokens, {len(hits)} blocks of {size} found"
        )
    return Prefix(hits[: start // size], start)


def _require(holds: bool, about: str) -> None:
    if not holds:
        raise MinivllmError(f"your schedule_running {about}")

"""A scheduling policy that leaves those that run, and who of them is preempted, to functions of exercise 11.

    LLM(model, parts=Parts(policy=learner_policy(schedule_running, resume_at)))
    Scheduler(scheduler_config, cache_config, SchedulingPolicy(victim=learner_victim(victim)))

`schedule_running` sees the engine's own requests and its waiting queue; `EngineMemory` is what it knows of the block
tables. `victim` sees a `RunningRequest` for each. Admissions, drafts and KV connectors stay the engine's own. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from minivllm.core.block_pool import KVCacheBlock
from minivllm.core.kv_cache_manager import KVCacheManager
from minivllm.core.policy import SchedulingPolicy, find_prefix, running_then_waiting
from minivllm.core.remote_kv import Prefix
from minivllm.core.request import Request, RequestStatus
from minivllm.core.scheduler import Scheduler
from minivllm.core.step import Step
from minivllm.errors import MinivllmError

ScheduleRunning = Callable[[list, Any, Any, int, str], tuple[dict[str, int], list]]
"""`schedule_running(running, waiting, memory, token_budget, policy)`: tokens by request, and who was preempted."""
ResumeAt = Callable[[int, int, int], int]
"""`resume_at(num_tokens, num_hit_blocks, block_size)`: from which token on a request is computed."""


@dataclass(frozen=True)
class RunningRequest:
    """What `victim` sees of a request."""

    request_id: str
    priority: int
    """Less goes first."""
    arrival_time: float
    num_tokens: int
    """Of the prompt and of the answer so far."""
    num_computed_tokens: int
    num_blocks: int


Victim = Callable[[list[RunningRequest], str], RunningRequest]
"""`victim(running, policy)`: the victim, one of `running` (in order of admission); `policy` is "fcfs" or "priority"."""


class EngineMemory:
    """The block tables of the engine, as `schedule_running` sees them, for one step."""

    def __init__(self, scheduler: Scheduler, step: Step) -> None:
        self.scheduler, self.step = scheduler, step
        self.new_blocks: dict[str, Sequence[KVCacheBlock]] = {}
        """Blocks that each request has got in this step."""
        self.freed: list[Request] = []
        self._before = list(scheduler.running)
        self._asks_left = 10 * (1 + len(scheduler.running)) ** 2

    def wanted(self, request: Request) -> int:
        """Tokens of a request that are not computed, drafts among them, under the limits of one request."""
        self._asks_left -= 1
        _require(self._asks_left > 0, "never ends: it asks for the same requests again and again")
        missing = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
        return self.scheduler.cap_num_tokens(request, missing, self.step)

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Blocks for a request's next tokens; False, and nothing has changed, if they do not fit."""
        self._asks_left -= 1
        _require(self._asks_left > 0, "never ends: it asks for blocks again and again")
        lookahead = self.scheduler.drafting.num_lookahead_tokens
        found = self.scheduler.kv_cache_manager.allocate_slots(request, num_tokens, num_lookahead_tokens=lookahead)
        if found is not None:
            self.new_blocks[request.request_id] = found
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


def learner_policy(
    schedule_running: ScheduleRunning | None = None, resume_at: ResumeAt | None = None
) -> SchedulingPolicy:
    """Return the policy with these functions; None leaves the engine's own.

    An answer that cannot be carried out raises `MinivllmError` in the engine's step; the message says which.
    """
    return SchedulingPolicy(
        schedule=partial(_ask, schedule_running) if schedule_running else running_then_waiting,
        find_prefix=partial(_prefix_by, resume_at) if resume_at else find_prefix,
    )


def learner_victim(victim: Victim) -> Callable[[Sequence[Request], str, Mapping[str, Sequence[Any]]], Request]:
    """Return the policy's rule that asks `victim`.

    An answer that is none of those who run raises `MinivllmError` in the engine's step.
    """
    return partial(_victim_by, victim)


def _ask(schedule_running: ScheduleRunning, scheduler: Scheduler, step: Step) -> None:
    memory = EngineMemory(scheduler, step)
    given, preempted = schedule_running(
        scheduler.running, scheduler.waiting, memory, step.token_budget, scheduler.config.policy
    )
    memory.check_answer(given, preempted)
    for request in preempted:
        scheduler.num_preemptions += 1
        step.preempted_req_ids.add(request.request_id)
    for name, num_tokens in given.items():
        step.continue_running(scheduler.requests[name], num_tokens, memory.new_blocks[name])
    if not preempted:
        scheduler.schedule_waiting(step)


def _prefix_by(resume_at: ResumeAt, request: Request, manager: KVCacheManager) -> Prefix:
    """What a waiting request takes over of the prefix cache, by `resume_at`.

    Raises:
        MinivllmError: `resume_at` names a token that is not a found block's end.
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
            f"your resume_at says {start!r} of {request.num_tokens} tokens, {len(hits)} blocks of {size} found"
        )
    return Prefix(hits[: start // size], start)


def _victim_by(victim: Victim, running: Sequence[Request], policy: str, blocks: Mapping[str, Sequence[Any]]) -> Request:
    seen = [
        RunningRequest(
            one.request_id, one.priority, one.arrival_time, one.num_tokens, one.num_computed_tokens,
            len(blocks.get(one.request_id, ())),
        )
        for one in running
    ]  # fmt: skip
    chosen = victim(list(seen), policy)
    for request, shown in zip(running, seen, strict=True):
        if shown is chosen:
            return request
    names = ", ".join(one.request_id for one in running)
    raise MinivllmError(f"your victim says {chosen!r}, and those who run are {names}"[:300])


def _require(holds: bool, about: str) -> None:
    if not holds:
        raise MinivllmError(f"your schedule_running {about}")

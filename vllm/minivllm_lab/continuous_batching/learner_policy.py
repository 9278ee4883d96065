"""A scheduling policy that leaves every decision to one function: the learner's `schedule` of
exercise 04.

    LLM(model, parts=Parts(policy=learner_policy(schedule)), enable_prefix_caching=False)

The function decides on counts (tokens and blocks); this module carries out what it decided on the
engine's requests and block tables. First come, first served, without prefix caching and drafts.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from minivllm.core.policy import SchedulingPolicy
from minivllm.core.request import Request, RequestStatus
from minivllm.core.scheduler import Scheduler
from minivllm.core.step import Step
from minivllm.errors import MinivllmError


@dataclass
class CountedRequest:
    """A request as a scheduling function sees it."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int
    num_blocks: int


@dataclass
class CountedPool:
    """The KV cache as a scheduling function sees it."""

    num_free_blocks: int
    block_size: int


Schedule = Callable[[list, deque, CountedPool, int, int, int], dict[str, int]]
"""`schedule(running, waiting, pool, token_budget, chunk_limit, max_num_seqs)`, as exercise 04
describes it.
"""


def learner_policy(schedule: Schedule) -> SchedulingPolicy:
    """Return the policy whose steps `schedule` decides.

    If a decision cannot be carried out, the engine's step raises `MinivllmError`; the message names
    the decision.
    """
    return SchedulingPolicy(schedule=partial(_ask, schedule))


def _ask(schedule: Schedule, scheduler: Scheduler, step: Step) -> None:
    """Ask `schedule` for the whole step, admissions included, and carry it out."""
    pool = CountedPool(scheduler.kv_cache_manager.block_pool.get_num_free_blocks(), scheduler.cache_config.block_size)
    running = [_counted(scheduler, request) for request in scheduler.running]
    waiting = deque(_counted(scheduler, request) for request in scheduler.waiting)
    decided = schedule(running, waiting, pool, step.token_budget, step.chunk_limit, scheduler.config.max_num_seqs)
    kept = {request.request_id for request in running}
    for request in [x for x in reversed(scheduler.running) if x.request_id not in kept]:
        scheduler.preempt(request, step)
    if scheduler.requests and not decided and not step.preempted_req_ids:  # the next step would be the same
        raise MinivllmError(
            f"your schedule gives no request a token, and {len(scheduler.requests)} requests are unfinished"
        )
    for request_id, num_tokens in decided.items():
        _carry_out(scheduler, request_id, num_tokens, step)


def _counted(scheduler: Scheduler, request: Request) -> CountedRequest:
    held = len(scheduler.kv_cache_manager.get_block_ids(request.request_id))
    return CountedRequest(request.request_id, request.num_tokens, request.num_computed_tokens, held)


def _carry_out(scheduler: Scheduler, request_id: str, num_tokens: int, step: Step) -> None:
    gets = f"your schedule gives request {request_id!r} {num_tokens} tokens"
    request = scheduler.requests.get(request_id)
    if request is None or not 0 < num_tokens <= step.token_budget:
        raise MinivllmError(f"{gets}, but {step.token_budget} are left of the budget")
    if request.status is not RequestStatus.RUNNING:
        step.chunk_limit = num_tokens
        if scheduler.waiting.peek_request() is not request or not scheduler.admit(scheduler.waiting, step):
            raise MinivllmError(f"{gets}, but it is not at the head of the queue, or its tokens do not fit")
        return
    new_blocks = scheduler.kv_cache_manager.allocate_slots(request, num_tokens)
    if new_blocks is None:
        raise MinivllmError(f"{gets}, but no block is free for them")
    step.continue_running(request, num_tokens, new_blocks)

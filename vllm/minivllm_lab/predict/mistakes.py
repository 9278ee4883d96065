"""Scheduling rules that learners of lessons 04, 05, 10 and 11 often expect, and vLLM does not have.

Each is a policy of the scheduler, so what it would have decided can be compared with an answer.
The lines are those of `vllm/v1/core/sched/scheduler.py` at v0.33.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from minivllm.core.policy import DEFAULT_POLICY, SchedulingPolicy, running_then_waiting
from minivllm.core.remote_kv import Prefix
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.step import Step

SCHEDULER = "https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/v1/core/sched/scheduler.py"
PLENTY = 1 << 20


@dataclass(frozen=True)
class Mistake:
    """A wrong rule: what corrects it, where vLLM's own rule stands, and the policy that follows the
    wrong one.

    `settings` are changed in the scheduler's config before the policy is asked.
    """

    says: str
    lines: tuple[int, int]
    lesson: str
    policy: SchedulingPolicy = DEFAULT_POLICY
    settings: tuple[tuple[str, object], ...] = ()

    @property
    def link(self) -> str:
        """Return the address of the lines in vLLM's source."""
        return f"{SCHEDULER}#L{self.lines[0]}-L{self.lines[1]}"

    def apply(self, scheduler: Scheduler) -> None:
        """Let a scheduler decide by the wrong rule."""
        scheduler.policy = self.policy
        scheduler.config = replace(scheduler.config, **dict(self.settings))


def _order(key: Callable[[Request], int]) -> SchedulingPolicy:
    def schedule(scheduler: Scheduler, step: Step) -> None:
        scheduler.running.sort(key=key)
        running_then_waiting(scheduler, step)

    return SchedulingPolicy(schedule=schedule)


def _waiting_first(scheduler: Scheduler, step: Step) -> None:
    running, scheduler.running = scheduler.running, []
    seats = scheduler.config.max_num_seqs
    scheduler.config = replace(scheduler.config, max_num_seqs=max(1, seats - len(running)))
    if seats > len(running):
        scheduler.schedule_waiting(step)
    admitted, scheduler.running = scheduler.running, running
    scheduler.schedule_running(step)
    scheduler.running += admitted


def _admit_always(scheduler: Scheduler, step: Step) -> None:
    scheduler.schedule_running(step)
    scheduler.schedule_waiting(step)


def _overtake(scheduler: Scheduler, step: Step) -> None:
    scheduler.schedule_running(step)
    if step.preempted_req_ids:
        return
    stuck: list[Request] = []
    while scheduler.waiting and step.token_budget > 0 and len(scheduler.running) < scheduler.config.max_num_seqs:
        if not scheduler.admit(scheduler.waiting, step):
            stuck.append(scheduler.waiting.pop_request())
    scheduler.waiting.prepend_requests(stuck)


def _without_drafts(scheduler: Scheduler, step: Step) -> None:
    for request in scheduler.running:
        request.spec_token_ids = []
    running_then_waiting(scheduler, step)


MISTAKES: dict[str, Mistake] = {
    "decodes first": Mistake(
        "A request that decodes does not go before a chunk. vLLM walks the running requests in the order in "
        "which they were admitted.",
        (795, 798),
        "04",
        _order(lambda request: request.num_tokens - request.num_computed_tokens > 1),
    ),
    "shortest first": Mistake(
        "The one that lacks the fewest tokens does not go first. The order is that of admission.",
        (795, 798),
        "04",
        _order(lambda request: request.num_tokens - request.num_computed_tokens),
    ),
    "waiting first": Mistake(
        "A new prompt does not go before the running requests. They are scheduled first, and only what they "
        "leave of the budget admits somebody.",
        (1050, 1062),
        "04",
        SchedulingPolicy(schedule=_waiting_first),
    ),
    "no seats": Mistake(
        "No more than max_num_seqs requests run at once, however much of the budget is left.",
        (1071, 1075),
        "04",
        settings=(("max_num_seqs", PLENTY),),
    ),
    "no budget": Mistake(
        "All requests of a step share one token budget, and the last of them gets what is left of it.",
        (1346, 1347),
        "04",
        settings=(("max_num_batched_tokens", PLENTY),),
    ),
    "small overtakes": Mistake(
        "A request that does not fit blocks those behind it: admission ends at the first that must wait.",
        (1454, 1463),
        "04",
        SchedulingPolicy(schedule=_overtake),
    ),
    "only the chunk must fit": Mistake(
        "The blocks of its first chunk are not enough: a request is admitted only if all tokens that are known "
        "of it would fit.",
        (1449, 1449),
        "04",
        settings=(("scheduler_reserve_full_isl", False),),
    ),
    "no chunk limit": Mistake(
        "long_prefill_token_threshold cuts every chunk while another request runs or waits.",
        (844, 845),
        "10",
        SchedulingPolicy(chunk_limit=lambda budget, *_: budget),
    ),
    "limit although alone": Mistake(
        "The chunk limit is off for a request that is alone: there is nobody whom it could starve.",
        (759, 763),
        "10",
        SchedulingPolicy(chunk_limit=lambda budget, threshold, *_: threshold or budget),
    ),
    "prompts are never cut": Mistake(
        "A prompt that does not fit into the rest of the budget is cut, and the next step goes on with it.",
        (1346, 1347),
        "10",
        SchedulingPolicy(
            admitted_tokens=lambda missing, limit, left, _: 0 if missing > left else min(missing, limit),
            running_tokens=lambda missing, limit, left: 0 if missing > left else min(missing, limit),
        ),
    ),
    "admits after a preemption": Mistake(
        "A step that has preempted a request admits nobody, even if blocks are free again.",
        (1050, 1050),
        "11",
        SchedulingPolicy(schedule=_admit_always),
    ),
    "the first is preempted": Mistake(
        "First come, first served preempts the last running request; priority the one with the greatest number, and of "
        "equal ones the latest arrival.",
        (928, 937),
        "11",
        SchedulingPolicy(victim=lambda running, *_: running[0]),
    ),
    "the longest is preempted": Mistake(
        "How much memory a request holds does not matter: the last running request is preempted, or by priority the "
        "one with the greatest number.",
        (928, 937),
        "11",
        SchedulingPolicy(victim=lambda running, _, blocks: max(running, key=lambda one: len(blocks[one.request_id]))),
    ),
    "the last, whatever its priority": Mistake(
        "With the policy priority, the running request with the greatest number is preempted, and of equal ones "
        "the one that arrived last, wherever it stands.",
        (928, 932),
        "11",
        SchedulingPolicy(victim=lambda running, *_: running[-1]),
    ),
    "priority counts": Mistake(
        "The policy is fcfs: the last running request is preempted, whatever else is known of it.",
        (933, 934),
        "11",
        SchedulingPolicy(victim=lambda running, *_: max(running, key=Request.sort_key)),
    ),
    "drafts are free": Mistake(
        "Drafts are verified in the step, so each of them costs a token of the budget, as a known token does.",
        (839, 848),
        "07",
        SchedulingPolicy(schedule=_without_drafts),
    ),
    "hits are computed again": Mistake(
        "Tokens that the prefix cache holds count as computed when the request is admitted; only the rest costs "
        "budget.",
        (1322, 1333),
        "05",
        SchedulingPolicy(find_prefix=lambda *_: Prefix([], 0)),
    ),
}

"""vLLM's scheduling rules as the game tells them, and the wrong rules that learners often follow
instead (`rules.toml`).

Each wrong rule changes a scheduler, so what it decides can be compared with an answer.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from minivllm.core import policy
from minivllm.core.block_pool import KVCacheBlock
from minivllm.core.kv_cache_manager import KVCacheManager
from minivllm.core.policy import SchedulingPolicy, running_then_waiting
from minivllm.core.remote_kv import Prefix
from minivllm.core.request import Request
from minivllm.core.request_queue import FCFSRequestQueue
from minivllm.core.scheduler import Scheduler
from minivllm.core.step import Step

FILE = "vllm/v1/core/sched/scheduler.py"
SCHEDULER = f"https://github.com/vllm-project/vllm/blob/v0.33.0/{FILE}"
PLENTY = 1 << 20
ENOUGH_BLOCKS = 1000

Change = Callable[[Scheduler], None]


class Rule(NamedTuple):
    """A rule of vLLM's scheduler, the lines where it stands, and the lesson that teaches it."""

    says: str
    lines: tuple[int, int]
    lesson: str

    @property
    def link(self) -> str:
        """Return the address of the lines in vLLM's source."""
        return f"{SCHEDULER}#L{self.lines[0]}-L{self.lines[1]}"


class Mistake(NamedTuple):
    """A wrong rule: the name of the right one, what tells the learner, and how a scheduler follows
    it. `policy`: the only scheduling policy with which a learner would.
    """

    apply: Change
    rule: str
    says: str
    policy: str = ""


def _policy(**rules: Callable[..., Any]) -> Change:
    def apply(scheduler: Scheduler) -> None:
        scheduler.policy = SchedulingPolicy(**rules)

    return apply


def _config(**settings: object) -> Change:
    def apply(scheduler: Scheduler) -> None:
        scheduler.config = replace(scheduler.config, **settings)

    return apply


def _lacks(request: Request) -> int:
    return request.num_tokens_with_spec - request.num_computed_tokens


def _running_by(key: Callable[[Request], Any]) -> Change:
    return lambda scheduler: scheduler.running.sort(key=key)


def _waiting_by(key: Callable[[Request], Any]) -> Change:
    def apply(scheduler: Scheduler) -> None:
        requests = sorted(scheduler.waiting, key=key)
        scheduler.waiting = FCFSRequestQueue()
        scheduler.waiting.prepend_requests(requests)

    return apply


def _add_blocks(scheduler: Scheduler, count: int) -> None:
    queue = scheduler.kv_cache_manager.block_pool.free_block_queue
    queue.append_n([KVCacheBlock(PLENTY) for _ in range(count)])


def _hide_block(scheduler: Scheduler) -> None:
    pool = scheduler.kv_cache_manager.block_pool
    num_free = pool.get_num_free_blocks
    pool.get_num_free_blocks = lambda: num_free() - 1


def _keep_drafts(kept: slice) -> Change:
    def apply(scheduler: Scheduler) -> None:
        for request in scheduler.running:
            request.spec_token_ids = request.spec_token_ids[kept]

    return apply


def _waiting_first(scheduler: Scheduler, step: Step) -> None:
    running, scheduler.running = scheduler.running, []
    seats = scheduler.config.max_num_seqs
    scheduler.config = replace(scheduler.config, max_num_seqs=max(1, seats - len(running)))
    if seats > len(running):
        scheduler.schedule_waiting(step)
    admitted, scheduler.running = scheduler.running, running
    scheduler.schedule_running(step)
    scheduler.running += admitted


def prompts_alone(scheduler: Scheduler, step: Step) -> None:
    """Fill a step with new prompts alone, if any can be admitted, as vLLM's V0 did."""
    scheduler.schedule_waiting(step)
    if not step.admitted:
        scheduler.schedule_running(step)


def _admit_one(scheduler: Scheduler, step: Step) -> None:
    seats = min(scheduler.config.max_num_seqs, len(scheduler.running) + 1)
    scheduler.config = replace(scheduler.config, max_num_seqs=seats)
    running_then_waiting(scheduler, step)


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


def _decodes_are_free(scheduler: Scheduler, step: Step) -> None:
    step.token_budget += sum(_lacks(request) == 1 for request in scheduler.running)
    running_then_waiting(scheduler, step)


def _without_victims(scheduler: Scheduler, step: Step, gives_way: bool) -> None:
    """Let a running request that finds no block wait, or give its own blocks back."""
    for request in list(scheduler.running):
        count = scheduler.cap_num_tokens(request, _lacks(request), step)
        blocks = scheduler.kv_cache_manager.allocate_slots(request, count) if count else ()
        if blocks is None and gives_way:
            scheduler.preempt(request, step)
        elif count and blocks is not None:
            step.continue_running(request, count, blocks)
    if not step.preempted_req_ids:
        scheduler.schedule_waiting(step)


def _one_victim(scheduler: Scheduler) -> None:
    def victim(*args: Any) -> Request:
        _add_blocks(scheduler, ENOUGH_BLOCKS)
        return policy.victim(*args)

    _policy(victim=victim)(scheduler)


def _urgent_displaces(scheduler: Scheduler, step: Step) -> None:
    if scheduler.waiting and scheduler.running:
        worst = max(scheduler.running, key=Request.sort_key)
        if scheduler.waiting.peek_request().priority < worst.priority:
            scheduler.preempt(worst, step)
    _admit_always(scheduler, step)


def _find_to_the_last_token(request: Request, manager: KVCacheManager) -> Prefix:
    blocks, num_found = manager.get_computed_blocks(request)
    hashes = request.block_hashes[len(blocks) :]
    if len(hashes) == 1 and request.num_tokens % manager.block_size == 0:
        last = manager.block_pool.get_cached_block(hashes[0])
        return Prefix(blocks, num_found if last is None else request.num_tokens - 1)
    return Prefix(blocks, num_found)


def _hits_take_no_free_block(scheduler: Scheduler) -> None:
    def find_prefix(request: Request, manager: KVCacheManager) -> Prefix:
        prefix = policy.find_prefix(request, manager)
        _add_blocks(scheduler, sum(block.ref_cnt == 0 for block in prefix.blocks))
        return prefix

    _policy(find_prefix=find_prefix)(scheduler)


CHANGES: dict[str, Change] = {
    "decodes first": _running_by(lambda request: _lacks(request) - len(request.spec_token_ids) > 1),
    "chunks first": _running_by(lambda request: _lacks(request) - len(request.spec_token_ids) == 1),
    "shortest first": _running_by(_lacks),
    "waiting first": _policy(schedule=_waiting_first),
    "prompts alone": _policy(schedule=prompts_alone),
    "one batch after another": _config(static_batching=True),
    "one admission a step": _policy(schedule=_admit_one),
    "no budget": _config(max_num_batched_tokens=PLENTY),
    "the last is not cut": _policy(
        running_tokens=lambda missing, limit, left: min(missing, limit),
        admitted_tokens=lambda missing, limit, *_: min(missing, limit),
    ),
    "decodes are free": _policy(schedule=_decodes_are_free),
    "equal shares": _policy(chunk_limit=lambda budget, _, requests, *rest: max(1, budget // requests)),
    "running means decoding": _policy(running_tokens=lambda missing, limit, left: min(1, left)),
    "prompts are never cut": _policy(
        running_tokens=lambda missing, limit, left: 0 if missing > left else min(missing, limit),
        admitted_tokens=lambda missing, limit, left, _: 0 if missing > left else min(missing, limit),
    ),
    "no seats": _config(max_num_seqs=PLENTY),
    "small overtakes": _policy(schedule=_overtake),
    "shortest prompt first": _waiting_by(lambda request: request.num_tokens),
    "admission by arrival": _waiting_by(lambda request: request.arrival_time),
    "only the chunk must fit": _config(scheduler_reserve_full_isl=False),
    "no memory": lambda scheduler: _add_blocks(scheduler, ENOUGH_BLOCKS),
    "one block too many": lambda scheduler: _add_blocks(scheduler, 1),
    "one block too few": _hide_block,
    "no chunk limit": _policy(chunk_limit=lambda budget, *_: budget),
    "only later chunks are limited": _policy(admitted_tokens=lambda missing, limit, left, _: min(missing, left)),
    "only the first chunk is limited": _policy(running_tokens=lambda missing, limit, left: min(missing, left)),
    "limit although alone": _policy(chunk_limit=lambda budget, threshold, *_: threshold or budget),
    "waits for a block": _policy(schedule=lambda *args: _without_victims(*args, gives_way=False)),
    "gives way itself": _policy(schedule=lambda *args: _without_victims(*args, gives_way=True)),
    "one victim is enough": _one_victim,
    "the urgent displaces": _policy(schedule=_urgent_displaces),
    "the first is preempted": _policy(victim=lambda running, *_: running[0]),
    "the longest is preempted": _policy(
        victim=lambda running, _, blocks: max(running, key=lambda request: len(blocks[request.request_id]))
    ),
    "least progress": _policy(victim=lambda running, *_: min(running, key=lambda each: each.num_computed_tokens)),
    "latest arrival": _policy(victim=lambda running, *_: max(running, key=lambda each: each.arrival_time)),
    "the last, whatever its priority": _policy(victim=lambda running, *_: running[-1]),
    "a larger number is more urgent": _policy(
        victim=lambda running, *_: min(running, key=lambda each: (each.priority, -each.arrival_time))
    ),
    "of equals the earliest": _policy(
        victim=lambda running, *_: max(running, key=lambda each: (each.priority, -each.arrival_time))
    ),
    "admits after a preemption": _policy(schedule=_admit_always),
    "hits are computed again": _policy(find_prefix=lambda *_: Prefix([], 0)),
    "hits to the last token": _policy(find_prefix=_find_to_the_last_token),
    "hits take no free block": _hits_take_no_free_block,
    "drafts are free": _keep_drafts(slice(0)),
    "drafts replace the token": _keep_drafts(slice(0, -1)),
}


def _read() -> tuple[dict[str, Rule], dict[str, Mistake]]:
    texts = tomllib.loads(Path(__file__).with_name("rules.toml").read_text())
    rules = {name: Rule(text["says"], tuple(text["lines"]), text["lesson"]) for name, text in texts["rules"].items()}
    return rules, {name: Mistake(CHANGES[name], **text) for name, text in texts["mistakes"].items()}


RULES, MISTAKES = _read()

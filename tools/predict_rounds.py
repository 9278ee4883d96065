"""Make the game's rounds again from recorded workloads: what vLLM decided, and what each wrong rule
would have decided instead.

    uv run python tools/predict_rounds.py    # writes vllm/minivllm_lab/predict/rounds.json

Each wrong rule of `rules.toml` changes a scheduler, so what it decides can be compared with vLLM's
decision. A new round is one more `source` in `rounds.json`.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from minivllm.core import policy
from minivllm.core.block_pool import KVCacheBlock
from minivllm.core.kv_cache_manager import KVCacheManager
from minivllm.core.policy import SchedulingPolicy, running_then_waiting
from minivllm.core.remote_kv import Prefix
from minivllm.core.request import Request
from minivllm.core.request_queue import FCFSRequestQueue
from minivllm.core.scheduler import Scheduler
from minivllm.core.step import Step
from minivllm_lab.chunked_prefill.prefill_first import prompts_alone
from minivllm_lab.cli import Parser
from minivllm_lab.predict.levels import ROUNDS, load
from minivllm_lab.predict.mistakes import MISTAKES
from minivllm_lab.predict.rounds import Decision, Round, Row
from minivllm_lab.predict.workload import Replay, Trace, configs, recorded

CONFORMANCE = Path(__file__).resolve().parents[1] / "tests" / "conformance"
FOLDERS = CONFORMANCE / "data", CONFORMANCE / "drafts"
PLENTY = 1 << 20
ENOUGH_BLOCKS = 1000

Change = Callable[[Scheduler], None]

# ---- the wrong rules


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


# ---- the rounds


def rounds(workload: Mapping[str, Any], source: str, trace: Trace, keep: Callable[[Round], bool]) -> Iterator[Round]:
    """Yield those steps of a workload as rounds that `keep` accepts, and whose decision follows
    from what a round shows. `trace` is what vLLM decided.

    Pools of more than 200 blocks are too deep to pickle: their free queue is a linked list.
    """
    replay = Replay(dict(workload), Scheduler(*configs(workload)))
    while not replay.has_ended:
        replay.arrive()
        before = _look(replay.scheduler, f"{source}, step {replay.step}")
        # A wrong rule changes the scheduler that follows it: each gets its own.
        asked = b"" if before is None else pickle.dumps(replay)
        step = replay.run()["step"]
        if before is None:
            continue
        names, shown = before
        decision = _decided(trace[step], names)
        puzzle = Round(**shown, decision=decision)
        if keep(puzzle) and _shows_enough(puzzle, replay.scheduler, names):
            yield Round(**shown, decision=decision, mistakes=_mistakes(asked, names, decision))


def _look(scheduler: Scheduler, source: str) -> tuple[dict[str, str], dict[str, Any]] | None:
    """Return the names of all requests and the fields of their round; None if nobody is there, or
    too many.
    """
    config = scheduler.config
    requests = [*scheduler.running, *scheduler.waiting]
    if not 0 < len(requests) <= len(ascii_uppercase):
        return None
    arrived = sorted(requests, key=lambda request: (request.arrival_time, request.request_id))
    names = {request.request_id: letter for request, letter in zip(arrived, ascii_uppercase, strict=False)}
    return names, {
        "source": source, "policy": config.policy, "budget": config.max_num_batched_tokens,
        "threshold": config.long_prefill_token_threshold, "seats": config.max_num_seqs,
        "chunked": config.enable_chunked_prefill, "block_size": scheduler.cache_config.block_size,
        "free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        "running": tuple(_row(request, names, scheduler) for request in scheduler.running),
        "waiting": tuple(_row(request, names, scheduler, waits=True) for request in scheduler.waiting),
    }  # fmt: skip


def _row(request: Request, names: Mapping[str, str], scheduler: Scheduler, *, waits: bool = False) -> Row:
    manager = scheduler.kv_cache_manager
    blocks, hit = manager.get_computed_blocks(request) if waits else ([], 0)
    return Row(
        name=names[request.request_id], known=request.num_tokens, computed=request.num_computed_tokens,
        blocks=len(manager.get_block_ids(request.request_id)), priority=request.priority, hit=hit,
        hit_free=sum(block.ref_cnt == 0 for block in blocks), came_back=request.num_preemptions > 0,
        drafts=len(request.spec_token_ids),
    )  # fmt: skip


def _shows_enough(puzzle: Round, scheduler: Scheduler, names: Mapping[str, str]) -> bool:
    """Return whether the decision follows from the round. A round does not show hits on blocks that
    the same step publishes, nor which blocks are shared, which a preemption would not free.
    """
    held = sum(row.blocks for row in puzzle.running)
    if puzzle.decision.preempted and held + puzzle.free != scheduler.kv_cache_manager.block_pool.num_usable_blocks:
        return False
    waiting = {row.name: row for row in puzzle.waiting}
    ids = {name: request_id for request_id, name in names.items()}
    for name, count in puzzle.decision.tokens.items():
        request = scheduler.requests.get(ids[name])
        if name in waiting and request is not None:
            sampled = request.num_tokens - waiting[name].known
            if request.num_computed_tokens - count != waiting[name].hit and not sampled > 1:
                return False
        elif name in waiting:
            return False
    return True


def _mistakes(asked: bytes, names: Mapping[str, str], decision: Decision) -> dict[str, Decision]:
    """Return what each wrong rule decides in the step before which the replay was pickled, if it
    decides otherwise.
    """
    wrong: dict[str, Decision] = {}
    for name, mistake in MISTAKES.items():
        replay: Replay = pickle.loads(asked)
        if mistake.policy not in ("", replay.scheduler.config.policy):
            continue
        CHANGES[name](replay.scheduler)
        decided = _decided(replay.run(), names)
        if decided != decision:
            wrong[name] = decided
    return wrong


def _decided(row: Mapping[str, Any], names: Mapping[str, str]) -> Decision:
    """Return the decision in a trace's row, with the requests' names in the round."""
    tokens = {names[request_id]: count for request_id, count in row["scheduled"]}
    return Decision(tokens, frozenset(names[request_id] for request_id in row["preempted"]))


def made_again(folders: Iterable[Path] = FOLDERS) -> list[list[Round]]:
    """Return the picked rounds, made again from these folders of recorded workloads."""
    picked = load()
    sources = {puzzle.source for level in picked for puzzle in level}
    made: dict[str, Round] = {}
    for name, workload, trace in (each for folder in folders for each in recorded(folder)):
        if count := sum(source.startswith(f"{name},") for source in sources):
            found = islice(rounds(workload, name, trace, lambda puzzle: puzzle.source in sources), count)
            made |= {puzzle.source: puzzle for puzzle in found}
    return [[made[puzzle.source] for puzzle in level] for level in picked]


def to_json(puzzle: Round) -> dict[str, Any]:
    """Return a round as JSON's types, which `Round.from_json` reads."""
    plain = asdict(puzzle)
    plain["decision"] = _plain(puzzle.decision)
    plain["mistakes"] = {name: _plain(decision) for name, decision in puzzle.mistakes.items()}
    for part in ("running", "waiting"):
        plain[part] = [list(row.values()) for row in plain[part]]
    return plain


def _plain(decision: Decision) -> list[Any]:
    return [dict(decision.tokens), sorted(decision.preempted)]


def main() -> int:
    """Make the rounds again."""
    Parser(description=__doc__).parse_args()
    lines = (",\n".join(json.dumps(to_json(puzzle)) for puzzle in level) for level in made_again())
    ROUNDS.write_text("[\n[" + "],\n[".join(lines) + "]\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

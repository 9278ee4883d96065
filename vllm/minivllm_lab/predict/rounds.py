"""A round of the game: the state in which the scheduler is asked, and what it decided."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from string import ascii_uppercase
from typing import Any

from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm_lab.predict.mistakes import MISTAKES
from minivllm_lab.predict.workload import Replay, Trace


@dataclass(frozen=True)
class Decision:
    """A step's tokens by request, in any order, and the preempted requests."""

    tokens: Mapping[str, int]
    preempted: frozenset[str] = frozenset()

    def renamed(self, names: Mapping[str, str]) -> Decision:
        """Return the same with the requests' names in the round."""
        tokens = {names[request_id]: count for request_id, count in self.tokens.items()}
        return Decision(tokens, frozenset(names[request_id] for request_id in self.preempted))

    @staticmethod
    def of(row: Mapping[str, Any]) -> Decision:
        """Return the decision in a trace's row."""
        return Decision(dict(row["scheduled"]), frozenset(row["preempted"]))


@dataclass(frozen=True)
class Row:
    """A request as the round shows it. `hit` of its tokens are in the prefix cache, in blocks of
    which `hit_free` lie in the free queue.
    """

    name: str
    known: int
    computed: int
    blocks: int
    priority: int
    hit: int = 0
    hit_free: int = 0
    came_back: bool = False
    drafts: int = 0

    @property
    def lacks(self) -> int:
        """Return how many tokens it needs computed to catch up, drafts included."""
        return self.known + self.drafts - self.done

    @property
    def done(self) -> int:
        """Return how many tokens are computed, or found in the prefix cache."""
        return max(self.computed, self.hit)


@dataclass(frozen=True)
class Round:
    """The state before a step, the scheduler's decision, and what each wrong rule would have
    decided where that differs.

    `running` is in order of admission, `waiting` in the order in which requests would be admitted.
    `limit` is what one request may get (0: the whole budget).
    """

    source: str
    policy: str
    budget: int
    threshold: int
    seats: int
    chunked: bool
    block_size: int
    free: int
    running: tuple[Row, ...]
    waiting: tuple[Row, ...]
    decision: Decision
    mistakes: Mapping[str, Decision] = field(default_factory=dict)

    @property
    def requests(self) -> dict[str, Row]:
        """Return all requests, the running ones first."""
        return {row.name: row for row in (*self.running, *self.waiting)}

    @property
    def limit(self) -> int:
        """Return the number of tokens that no request exceeds in this step."""
        alone = len(self.requests) <= 1
        return self.budget if alone or not self.threshold else min(self.threshold, self.budget)

    def to_json(self) -> dict[str, Any]:
        """Return the round as JSON's types."""
        plain = asdict(self)
        plain["decision"] = _plain(self.decision)
        plain["mistakes"] = {name: _plain(decision) for name, decision in self.mistakes.items()}
        for part in ("running", "waiting"):
            plain[part] = [list(row.values()) for row in plain[part]]
        return plain

    @staticmethod
    def from_json(plain: Mapping[str, Any]) -> Round:
        """Return the round that `to_json` wrote."""
        parsed = dict(plain)
        parsed["decision"] = _parsed(plain["decision"])
        parsed["mistakes"] = {name: _parsed(decision) for name, decision in plain["mistakes"].items()}
        for part in ("running", "waiting"):
            parsed[part] = tuple(Row(*row) for row in plain[part])
        return Round(**parsed)


def rounds(workload: Mapping[str, Any], source: str, trace: Trace, keep: Callable[[Round], bool]) -> Iterator[Round]:
    """Yield those steps of a workload as rounds that `keep` accepts, and whose decision follows
    from what a round shows. `trace` is what vLLM decided.

    Pools of more than 200 blocks are too deep to pickle: their free queue is a linked list.
    """
    replay = Replay(dict(workload))
    while not replay.has_ended:
        replay.arrive()
        before = _look(replay.scheduler, f"{source}, step {replay.step}")
        # A wrong rule changes the scheduler that follows it: each gets its own.
        asked = b"" if before is None else pickle.dumps(replay)
        step = replay.run()["step"]
        if before is None:
            continue
        names, shown = before
        decision = Decision.of(trace[step]).renamed(names)
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
        mistake.apply(replay.scheduler)
        decided = Decision.of(replay.run()).renamed(names)
        if decided != decision:
            wrong[name] = decided
    return wrong


def _plain(decision: Decision) -> list[Any]:
    return [dict(decision.tokens), sorted(decision.preempted)]


def _parsed(plain: list[Any]) -> Decision:
    return Decision(plain[0], frozenset(plain[1]))

"""The levels of the game, and how their rounds are picked from recorded workloads.

cd tests/conformance && uv run python -m minivllm_lab.predict.levels data drafts    # writes rounds.json
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from minivllm_lab.predict.rounds import Round, rounds
from minivllm_lab.predict.workload import recorded

ROUNDS = Path(__file__).with_name("rounds.json")
ROUNDS_PER_LEVEL = 11
MOST_REQUESTS = 7
MOST_TOKENS = 120
MOST_OF_A_WORKLOAD = 10
"""Rounds of a level that one workload offers."""


@dataclass(frozen=True)
class Level:
    """A level: its title, the lesson that it follows, and which rounds belong to it."""

    title: str
    lesson: str
    holds: Callable[[Round], bool]


def _preempts(puzzle: Round) -> bool:
    return bool(puzzle.decision.preempted)


def _hits(puzzle: Round) -> bool:
    return any(row.hit for row in puzzle.waiting)


def _drafts(puzzle: Round) -> bool:
    return any(row.drafts for row in puzzle.running)


def _limits(puzzle: Round) -> bool:
    return bool(puzzle.threshold) or not puzzle.chunked


def _lacks_blocks(puzzle: Round) -> bool:
    """Return whether somebody waits though budget and seats are left and nobody was preempted."""
    spent = sum(puzzle.decision.tokens.values())
    runs = len(puzzle.running) + sum(row.name in puzzle.decision.tokens for row in puzzle.waiting)
    waits = any(row.name not in puzzle.decision.tokens for row in puzzle.waiting)
    return waits and puzzle.chunked and spent < puzzle.budget and runs < puzzle.seats and not _preempts(puzzle)


def _plain(puzzle: Round) -> bool:
    return puzzle.policy == "fcfs" and not (_hits(puzzle) or _preempts(puzzle))


LEVELS = (
    Level("one budget", "04", lambda puzzle: _plain(puzzle) and not (_limits(puzzle) or _lacks_blocks(puzzle))),
    Level("chunks", "10", lambda puzzle: _plain(puzzle) and _limits(puzzle) and not _lacks_blocks(puzzle)),
    Level("memory", "04", lambda puzzle: _plain(puzzle) and _lacks_blocks(puzzle)),
    Level("preemption", "11", lambda puzzle: puzzle.policy == "fcfs" and _preempts(puzzle) and not _hits(puzzle)),
    Level("priority", "11", lambda puzzle: puzzle.policy == "priority" and _preempts(puzzle) and not _hits(puzzle)),
    Level("prefix hits", "05", lambda puzzle: _hits(puzzle)),
    Level("drafts", "07", lambda puzzle: _drafts(puzzle)),
)


def level_of(puzzle: Round) -> int | None:
    """Return the index of the level that a round belongs to; None if it is too large or teaches
    nothing.
    """
    rows = puzzle.requests.values()
    if len(puzzle.requests) > MOST_REQUESTS or max(row.known for row in rows) > MOST_TOKENS:
        return None
    if _drafts(puzzle):
        return len(LEVELS) - 1
    return next((index for index, level in enumerate(LEVELS) if level.holds(puzzle)), None)


def pick(offered: Iterable[Round]) -> list[list[Round]]:
    """Return `ROUNDS_PER_LEVEL` rounds for each level, those that tell the most wrong rules apart first.

    Rounds are taken one by one: the next is the one whose mistakes have been shown least so far in
    its level. No two of a level show the same state or come from the same step.
    """
    by_level: list[list[Round]] = [[] for _ in LEVELS]
    for puzzle in offered:
        level = level_of(puzzle)
        if level is not None and puzzle.mistakes:
            by_level[level].append(puzzle)
    return [_spread(puzzles) for puzzles in by_level]


def _spread(offered: list[Round]) -> list[Round]:
    shown: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    picked: list[Round] = []
    left = list(offered)
    while left and len(picked) < ROUNDS_PER_LEVEL:
        best = max(left, key=lambda puzzle: _worth(puzzle, shown, sources))
        picked.append(best)
        shown.update(best.mistakes.keys())
        sources[_workload(best)] += 1
        left = [puzzle for puzzle in left if _shape(puzzle) != _shape(best)]
    return sorted(picked, key=lambda puzzle: (len(puzzle.requests), puzzle.source))


def _worth(puzzle: Round, shown: Counter[str], sources: Counter[str]) -> float:
    new = sum(1 / (1 + shown[name]) for name in puzzle.mistakes)
    return new / (1 + sources[_workload(puzzle)])


def _workload(puzzle: Round) -> str:
    return puzzle.source.split(",")[0]


def _shape(puzzle: Round) -> tuple[object, ...]:
    rows = [(row.lacks, row.drafts, row.blocks, row.priority, row.hit) for row in (*puzzle.running, *puzzle.waiting)]
    return puzzle.budget, puzzle.free, len(puzzle.running), *rows


def candidates(folder: Path) -> Iterator[Round]:
    """Yield the rounds that a folder of recorded workloads offers, a few of each level and workload."""
    for name, workload, trace in recorded(folder):
        seen: Counter[int | None] = Counter()

        def is_wanted(puzzle: Round, seen: Counter[int | None] = seen) -> bool:
            level = level_of(puzzle)
            if not is_rich(puzzle) or seen[level] == MOST_OF_A_WORKLOAD:
                return False
            seen[level] += 1
            return True

        yield from rounds(workload, name, trace, is_wanted)


def is_rich(puzzle: Round) -> bool:
    """Return whether a round has more to decide than one token for each decode."""
    waits = bool(puzzle.waiting) and len(puzzle.running) < puzzle.seats
    return level_of(puzzle) is not None and (waits or _preempts(puzzle) or any(row.lacks > 1 for row in puzzle.running))


def load() -> list[list[Round]]:
    """Return the picked rounds, by level."""
    return [[Round.from_json(plain) for plain in level] for level in json.loads(ROUNDS.read_text())]


def main() -> int:
    """Pick the rounds again."""
    picked = pick(puzzle for folder in sys.argv[1:] for puzzle in candidates(Path(folder)))
    lines = (",\n".join(json.dumps(puzzle.to_json()) for puzzle in level) for level in picked)
    ROUNDS.write_text("[\n[" + "],\n[".join(lines) + "]\n]\n")
    for level, puzzle in zip(LEVELS, picked, strict=True):
        print(f"{level.title}: {len(puzzle)} rounds")
    return 0


if __name__ == "__main__":
    sys.exit(main())

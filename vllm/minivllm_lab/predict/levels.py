"""The levels of the game, and their rounds, which were picked from recorded workloads.

cd tests/conformance && uv run python -m minivllm_lab.predict.levels data drafts    # makes rounds.json again
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from minivllm_lab.predict.rounds import Round, rounds
from minivllm_lab.predict.workload import recorded

ROUNDS = Path(__file__).with_name("rounds.json")


class Level(NamedTuple):
    """A level: its title, and the lesson that it follows."""

    title: str
    lesson: str


LEVELS = (
    Level("one budget", "04"), Level("chunks", "10"), Level("memory", "04"), Level("preemption", "11"),
    Level("priority", "11"), Level("prefix hits", "05"), Level("drafts", "07"),
)  # fmt: skip


def load() -> list[list[Round]]:
    """Return the picked rounds, by level."""
    return [[Round.from_json(plain) for plain in level] for level in json.loads(ROUNDS.read_text())]


def made_again(folders: Iterable[Path]) -> list[list[Round]]:
    """Return the same rounds, made from these folders of recorded workloads."""
    picked = load()
    sources = {puzzle.source for level in picked for puzzle in level}
    made: dict[str, Round] = {}
    for name, workload, trace in (each for folder in folders for each in recorded(folder)):
        if count := sum(source.startswith(f"{name},") for source in sources):
            found = islice(rounds(workload, name, trace, lambda puzzle: puzzle.source in sources), count)
            made |= {puzzle.source: puzzle for puzzle in found}
    return [[made[puzzle.source] for puzzle in level] for level in picked]


def main() -> int:
    """Make the rounds again."""
    levels = made_again(map(Path, sys.argv[1:]))
    lines = (",\n".join(json.dumps(puzzle.to_json()) for puzzle in level) for level in levels)
    ROUNDS.write_text("[\n[" + "],\n[".join(lines) + "]\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

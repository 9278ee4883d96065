"""The levels of the game, and their rounds, which were picked from recorded workloads and made by
`tools/predict_rounds.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from minivllm_lab.predict.rounds import Round

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

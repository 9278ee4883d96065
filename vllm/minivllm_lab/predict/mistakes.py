"""vLLM's scheduling rules as the game tells them, and the wrong rules that learners often follow
instead (`rules.toml`).
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

FILE = "vllm/v1/core/sched/scheduler.py"
SCHEDULER = f"https://github.com/vllm-project/vllm/blob/v0.33.0/{FILE}"


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
    """A wrong rule: the name of the right one, and what tells the learner. `policy`: the only
    scheduling policy with which a learner would follow it.
    """

    rule: str
    says: str
    policy: str = ""


def _read() -> tuple[dict[str, Rule], dict[str, Mistake]]:
    texts = tomllib.loads(Path(__file__).with_name("rules.toml").read_text())
    rules = {name: Rule(text["says"], tuple(text["lines"]), text["lesson"]) for name, text in texts["rules"].items()}
    return rules, {name: Mistake(**text) for name, text in texts["mistakes"].items()}


RULES, MISTAKES = _read()

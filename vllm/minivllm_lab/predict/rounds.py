"""A round of the game: the state in which the scheduler is asked, and what it decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Decision:
    """A step's tokens by request, in any order, and the preempted requests."""

    tokens: Mapping[str, int]
    preempted: frozenset[str] = frozenset()


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

    @staticmethod
    def from_json(plain: Mapping[str, Any]) -> Round:
        """Return the round that `tools/predict_rounds.py` wrote."""
        parsed = dict(plain)
        parsed["decision"] = _parsed(plain["decision"])
        parsed["mistakes"] = {name: _parsed(decision) for name, decision in plain["mistakes"].items()}
        for part in ("running", "waiting"):
            parsed[part] = tuple(Row(*row) for row in plain[part])
        return Round(**parsed)


def _parsed(plain: list[Any]) -> Decision:
    return Decision(plain[0], frozenset(plain[1]))

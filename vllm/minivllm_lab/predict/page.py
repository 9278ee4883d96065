"""The recorded rounds for a page that needs no Python: `game.js` plays them, on the site and in a
notebook (`widgets/predict.py`).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from minivllm_lab.predict.describe import facts, reasons, state_of
from minivllm_lab.predict.levels import LEVELS, load
from minivllm_lab.predict.mistakes import MISTAKES, RULES
from minivllm_lab.predict.rounds import Decision, Round


def rounds() -> list[dict[str, Any]]:
    """Return the levels, each with its rounds, what vLLM decided, and what each wrong rule decides."""
    return [
        {"title": level.title, "lesson": level.lesson, "rounds": [_plain(puzzle) for puzzle in picked]}
        for level, picked in zip(LEVELS, load(), strict=True)
    ]


def rules() -> dict[str, dict[str, str]]:
    """Return the rules by name: their sentence, the lesson, and the address of vLLM's lines."""
    return {name: {"says": rule.says, "lesson": rule.lesson, "link": rule.link} for name, rule in RULES.items()}


def _plain(puzzle: Round) -> dict[str, Any]:
    rows = [
        {"name": row.name, "runs": row in puzzle.running, "known": row.known, "done": row.done, "lacks": row.lacks}
        | {"words": state_of(row, puzzle)}
        for row in puzzle.requests.values()
    ]
    return {
        "source": puzzle.source,
        "facts": facts(puzzle),
        "budget": puzzle.budget,
        "limit": puzzle.limit,
        "seats": puzzle.seats,
        "rows": rows,
        "decision": _decided(puzzle.decision),
        "mistakes": [
            {"says": MISTAKES[name].says, "rule": MISTAKES[name].rule, **_decided(decision)}
            for name, decision in puzzle.mistakes.items()
        ],
        "reasons": [asdict(reason) for reason in reasons(puzzle)],
    }


def _decided(decision: Decision) -> dict[str, Any]:
    return {"tokens": dict(decision.tokens), "preempted": sorted(decision.preempted)}

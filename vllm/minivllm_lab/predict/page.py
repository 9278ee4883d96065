"""The recorded rounds for a page that needs no Python: `game.js` plays them, on the site, in a
notebook (`widgets/predict.py`), and in the page that `make predict` opens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minivllm_lab.predict.describe import facts, reasons, state_of
from minivllm_lab.predict.levels import LEVELS, load
from minivllm_lab.predict.mistakes import MISTAKES, RULES
from minivllm_lab.predict.rounds import Decision, Round

HERE = Path(__file__).parent
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Predict the next step</title>
<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">
<style>body {{ font: 16px system-ui, sans-serif; max-width: 52rem; margin: 1rem auto; padding: 0 1rem; }}
{style}</style></head><body><h1>Predict the next step</h1><div class="predict"></div>
<script>{game}
new Game(document.querySelector(".predict"), {rounds}, {rules});</script></body></html>
"""


def html() -> str:
    """Return the game as a page of its own."""
    style, game = ((HERE / name).read_text(encoding="utf-8") for name in ("game.css", "game.js"))
    return PAGE.format(style=style, game=game, rounds=json.dumps(rounds()), rules=json.dumps(rules()))


def rounds() -> list[dict[str, Any]]:
    """Return the levels, each with its rounds, what vLLM decided, and what each wrong rule decides."""
    return [
        {"title": level.title, "lesson": level.lesson, "rounds": [plain(puzzle) for puzzle in picked]}
        for level, picked in zip(LEVELS, load(), strict=True)
    ]


def rules() -> dict[str, dict[str, str]]:
    """Return the rules by name: their sentence, the lesson, and the address of vLLM's lines."""
    return {name: {"says": rule.says, "lesson": rule.lesson, "link": rule.link} for name, rule in RULES.items()}


def plain(puzzle: Round) -> dict[str, Any]:
    """Return a round as JSON's types, with its words."""
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
        "decision": decided(puzzle.decision),
        "mistakes": [
            {"says": MISTAKES[name].says, "rule": MISTAKES[name].rule, **decided(decision)}
            for name, decision in puzzle.mistakes.items()
        ],
        "reasons": [reason._asdict() for reason in reasons(puzzle)],
    }


def decided(decision: Decision) -> dict[str, Any]:
    """Return a decision as JSON's types."""
    return {"tokens": dict(decision.tokens), "preempted": sorted(decision.preempted)}

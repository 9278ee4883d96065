"""Read a prediction, and say what is right or which rule it missed."""

from __future__ import annotations

import re

from minivllm.errors import MinivllmError
from minivllm_lab.predict.describe import count_of, reasons
from minivllm_lab.predict.mistakes import MISTAKES, RULES, Rule
from minivllm_lab.predict.rounds import Decision, Round

PART = re.compile(
    r"\s*(?:-\s*(?P<victim>[A-Za-z])|(?P<name>[A-Za-z])\s*[:=]?\s*(?P<count>\d+))(?:\s*[,;]|(?![A-Za-z]{2}))"
)
HOW = "write the tokens of each request and a minus before each that is preempted, such as: A 1 C 8 -B"

MOST_RULES = 2
"""Rules that a wrong answer is told, if several explain it."""


def parse(text: str, puzzle: Round) -> Decision:
    """Return the decision that a line names: `A 1 C 8 -B`; `none` schedules nobody.

    Raises:
        MinivllmError: the line cannot be read, or names a request that is not there, or twice.
    """
    if text.strip().lower() == "none":
        return Decision({})
    tokens: dict[str, int] = {}
    victims: list[str] = []
    position = 0
    while position < len(text.rstrip()):
        part = PART.match(text, position)
        if part is None:
            raise MinivllmError(f"{text[position:].strip()!r} cannot be read; {HOW}")
        position = part.end()
        name = (part["victim"] or part["name"]).upper()
        if name not in puzzle.requests:
            raise MinivllmError(f"there is no request {name}; there are {', '.join(sorted(puzzle.requests))}")
        if name in tokens or name in victims:
            raise MinivllmError(f"{name} is named twice; {HOW}")
        if part["victim"]:
            victims.append(name)
        elif int(part["count"]):
            tokens[name] = int(part["count"])
    if not tokens and not victims and position == 0:
        raise MinivllmError(f"the line is empty; {HOW}, or none if nobody gets a token")
    return Decision(tokens, frozenset(victims))


def is_right(answer: Decision, puzzle: Round) -> bool:
    """Return whether an answer names the tokens and the victims; the order does not count."""
    return answer.tokens == puzzle.decision.tokens and answer.preempted == puzzle.decision.preempted


def diagnose(answer: Decision, puzzle: Round) -> list[tuple[str, Rule]]:
    """Return what is wrong with an answer, with the rule that it missed: the one or two wrong rules
    that give it, or else the first thing that does not fit.
    """
    missed: dict[str, tuple[str, Rule]] = {}
    for name, decision in puzzle.mistakes.items():
        if decision.tokens == answer.tokens and decision.preempted == answer.preempted:
            mistake = MISTAKES[name]
            missed.setdefault(mistake.rule, (mistake.says, RULES[mistake.rule]))
    if missed:
        return list(missed.values())[:MOST_RULES]
    says, rule = _impossible(answer, puzzle) or _first_difference(answer, puzzle)
    return [(says, RULES[rule])]


def _impossible(answer: Decision, puzzle: Round) -> tuple[str, str] | None:
    """Return what no order of the requests allows, and the rule's name; None if there is nothing."""
    for name, row in puzzle.requests.items():
        count = answer.tokens.get(name, 0)
        if count > row.lacks:
            return f"{name} lacks {count_of(row.lacks, 'token')}, so it cannot get {count}.", "all it lacks"
        if puzzle.limit < puzzle.budget and count > puzzle.limit:
            return f"{name} gets {count}, but no request may get more than {puzzle.limit} here.", "chunk limit"
    total = sum(answer.tokens.values())
    if total > puzzle.budget:
        return f"Your step has {total} tokens, but its budget is {puzzle.budget}.", "budget"
    waiting = {row.name for row in puzzle.waiting}
    if victims := sorted(answer.preempted & waiting):
        return f"{victims[0]} waits, so it holds no blocks that a preemption could free.", "preemption"
    runs = len(puzzle.running) - len(answer.preempted) + len(waiting & answer.tokens.keys())
    if runs > puzzle.seats:
        return f"After your step {runs} requests run, but there are {count_of(puzzle.seats, 'seat')}.", "seats"
    return None


def _first_difference(answer: Decision, puzzle: Round) -> tuple[str, str]:
    decision = puzzle.decision
    for reason in reasons(puzzle):
        name = reason.name
        if name in answer.preempted - decision.preempted:
            return f"Look at {name}: you preempt it.", "victim" if decision.preempted else "blocks"
        if name in decision.preempted - answer.preempted:
            only_fewer = answer.preempted < decision.preempted
            return f"Look at {name}: you do not preempt it.", "preemption" if only_fewer else reason.rule
        yours = answer.tokens.get(name, 0)
        if yours != decision.tokens.get(name, 0):
            return f"Look at {name}: you give it {yours or 'nothing'}.", reason.rule
    raise AssertionError("the answer is right")

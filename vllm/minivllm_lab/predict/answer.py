"""Read a prediction, and say what is right or which rule it missed."""

from __future__ import annotations

import re

from minivllm.errors import MinivllmError
from minivllm_lab.predict.mistakes import MISTAKES
from minivllm_lab.predict.rounds import Decision, Round

PART = re.compile(
    r"\s*(?:-\s*(?P<victim>[A-Za-z])|(?P<name>[A-Za-z])\s*[:=]?\s*(?P<count>\d+))(?:\s*[,;]|(?![A-Za-z]{2}))"
)
HOW = "write the tokens of each request and a minus before each that is preempted, such as: A 1 C 8 -B"


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


def diagnose(answer: Decision, puzzle: Round) -> list[str]:
    """Return the sentences that correct a wrong answer: the rule that it missed, or what does not
    add up.
    """
    missed = [
        MISTAKES[name]
        for name, decision in puzzle.mistakes.items()
        if decision.tokens == answer.tokens and decision.preempted == answer.preempted
    ]
    if missed:
        return [f"{mistake.says} (lesson {mistake.lesson}; {mistake.link})" for mistake in missed]
    return [_arithmetic(answer, puzzle) or _first_difference(answer, puzzle)]


def _arithmetic(answer: Decision, puzzle: Round) -> str:
    """Return what is impossible in an answer, whatever the rules of order are; empty if nothing is."""
    total = sum(answer.tokens.values())
    for name, count in answer.tokens.items():
        row = puzzle.requests[name]
        if count > row.lacks:
            return f"{name} lacks {row.lacks} tokens, so it cannot get {count}."
        if count > puzzle.limit:
            return f"{name} gets {count}, but no request may get more than {puzzle.limit} in this step."
    if total > puzzle.budget:
        return f"Your step has {total} tokens; its budget is {puzzle.budget}."
    waiting = {row.name for row in puzzle.waiting}
    if victims := sorted(answer.preempted & waiting):
        return f"{victims[0]} waits, so it holds nothing that a preemption could free."
    admitted = [name for name in answer.tokens if name in waiting]
    if len(puzzle.running) - len(answer.preempted) + len(admitted) > puzzle.seats:
        return f"Then more than {puzzle.seats} requests run, and there are {puzzle.seats} seats."
    return ""


def _is_its_own_victim(name: str, puzzle: Round) -> bool:
    """Return whether a preempted request has lost its blocks to nobody: all others fit without
    them.
    """
    free = puzzle.free
    for row in puzzle.running:
        if row.name in puzzle.decision.preempted:
            free += row.blocks if row.name != name else 0
        else:
            computed = row.computed + puzzle.decision.tokens.get(row.name, 0)
            free -= max(0, -(-computed // puzzle.block_size) - row.blocks)
    return free >= 0


def _first_difference(answer: Decision, puzzle: Round) -> str:
    for name in sorted(answer.preempted ^ puzzle.decision.preempted):
        if name in answer.preempted:
            return f"{name} is not preempted. Go through the running requests in order and count the free blocks."
        if _is_its_own_victim(name, puzzle):
            return f"{name} is preempted: it finds no free block for its own tokens, and it is the next victim itself."
        return f"{name} is preempted: another request finds no free block for its tokens."
    for name in puzzle.requests:
        right, yours = puzzle.decision.tokens.get(name, 0), answer.tokens.get(name, 0)
        if right != yours:
            return f"{name} gets {right or 'nothing'}, where you gave it {yours or 'nothing'}."
    return "The answer is right."

"""Put a round and its decision into words, and say which rule decides for each request."""

from __future__ import annotations

from typing import NamedTuple

from minivllm_lab.predict.rounds import Round, Row


class Reason(NamedTuple):
    """The rule that decides what a request gets, and a sentence that says so, empty if one before it
    says it all.
    """

    name: str
    rule: str
    says: str = ""


def facts(puzzle: Round) -> str:
    """Return the line above a round: budget, seats, memory and policy."""
    limit = f", chunk limit {puzzle.threshold}" if puzzle.threshold else ""
    cut = "" if puzzle.chunked else ", chunked prefill off"
    urgent = ": a smaller number is more urgent" if puzzle.policy == "priority" else ""
    return (
        f"budget {puzzle.budget} tokens{limit}{cut} · {count_of(puzzle.seats, 'seat')} · "
        f"{count_of(puzzle.free, 'free block')} of {count_of(puzzle.block_size, 'token')} · "
        f"policy {puzzle.policy}{urgent}"
    )


def state_of(row: Row, puzzle: Round) -> str:
    """Return what a round says of one request."""
    parts = [f"{row.computed} of {row.known} computed"]
    if row.hit:
        free = f", {count_of(row.hit_free, 'block')} of them in the free queue" if row.hit_free else ""
        parts = [f"{row.hit} of {row.known} in the prefix cache{free}"]
    if row.drafts:
        parts.append(count_of(row.drafts, "draft"))
    parts.append(f"lacks {row.lacks}")
    if row.blocks:
        parts.append(f"holds {count_of(row.blocks, 'block')}")
    if puzzle.policy == "priority":
        parts.append(f"priority {row.priority}")
    if row.came_back:
        parts.append("was preempted")
    return ", ".join(parts)


def reasons(puzzle: Round) -> list[Reason]:
    """Return the reason for each request, in the order in which vLLM goes through them."""
    left = puzzle.budget
    found: list[Reason] = []
    for row in puzzle.running:
        if row.name in puzzle.decision.preempted:
            found.append(_preempted(row, puzzle))
            continue
        count = puzzle.decision.tokens.get(row.name, 0)
        rule, got = _got(row, count, left, puzzle)
        found.append(Reason(row.name, rule, f"{row.name} runs: {got}{_taken(row, count, puzzle)}."))
        left -= count
    blocked = ""
    says = ""
    if puzzle.decision.preempted:
        blocked, says = "no admission", "A step that preempts admits no request."
    for row in puzzle.waiting:
        count = puzzle.decision.tokens.get(row.name, 0)
        if blocked:
            found.append(Reason(row.name, blocked, says))
            says = ""
        elif count:
            rule, got = _got(row, count, left, puzzle)
            found.append(Reason(row.name, rule, f"{row.name} is admitted: {got}."))
            left -= count
        else:
            rule, why = _why(row, left, puzzle)
            waits = " waits" if row is puzzle.waiting[-1] else " and those behind it wait"
            found.append(Reason(row.name, rule, f"{row.name}{waits}: {why}."))
            blocked = "queue"
    return found


def count_of(number: int, thing: str) -> str:
    """Return a number and the word for it, in the plural unless there is one."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _preempted(row: Row, puzzle: Round) -> Reason:
    by_priority = "its number is the greatest, or it came last of equal ones"
    why = by_priority if puzzle.policy == "priority" else "it is the last of those that run then"
    says = f"{row.name} is preempted: free blocks run out at its own tokens or before, and {why}."
    return Reason(row.name, "victim", says)


def _taken(row: Row, count: int, puzzle: Round) -> str:
    """Return how many blocks a running request takes, in rounds where blocks decide."""
    blocks = max(0, -(-(row.computed + count) // puzzle.block_size) - row.blocks)
    return f", and takes {count_of(blocks, 'block')}" if blocks and puzzle.decision.preempted else ""


def _got(row: Row, count: int, left: int, puzzle: Round) -> tuple[str, str]:
    """Return the rule that bounds a request's tokens, and the words for it."""
    hit = f" ({row.hit} of {row.known} are in the prefix cache)" if row.hit else ""
    if not count:
        return "budget", f"it lacks {row.lacks}, and nothing is left of the budget"
    own = "hits" if row.hit else "drafts" if row.drafts else "all it lacks"
    # Of equal ones the last is named.
    bounds = {
        left: ("budget", "the rest of the budget"),
        puzzle.limit: ("chunk limit" if puzzle.limit < puzzle.budget else "budget", "the chunk limit"),
        row.lacks: (own, "all it lacks"),
    }
    rule, words = bounds[count]
    alone = puzzle.threshold and len(puzzle.requests) == 1
    return "alone" if alone else rule, f"it lacks {row.lacks}{hit} and gets {count}, {words}"


def _why(row: Row, left: int, puzzle: Round) -> tuple[str, str]:
    """Return the rule that keeps the first request waiting that is not admitted, and the words for
    it.
    """
    admitted = sum(other.name in puzzle.decision.tokens for other in puzzle.waiting)
    if not left:
        return "budget", "the budget is spent"
    if len(puzzle.running) + admitted >= puzzle.seats:
        return "seats", {1: "the only seat is", 2: "both seats are"}.get(
            puzzle.seats, f"all {puzzle.seats} seats are"
        ) + " taken"
    if not puzzle.chunked and min(row.lacks, puzzle.limit) > left:
        return (
            "unchunked",
            f"its {row.lacks} tokens do not fit into the {left} that are left, and chunked prefill is off",
        )
    needed = -(-row.known // puzzle.block_size) - row.hit // puzzle.block_size
    return "admission", f"all tokens known of it need {count_of(needed, 'more block')}, and fewer are free"

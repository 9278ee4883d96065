"""Put a round and its decision into words."""

from __future__ import annotations

from minivllm_lab.predict.rounds import Round, Row


def facts(puzzle: Round) -> str:
    """Return the line above a round: budget, seats, memory and policy."""
    limit = "" if puzzle.limit == puzzle.budget else f", at most {puzzle.limit} for one request"
    cut = "" if puzzle.chunked else ", prompts are not cut"
    return (
        f"budget {puzzle.budget} tokens{limit}{cut} · {puzzle.seats} seats · {puzzle.free} free blocks of "
        f"{puzzle.block_size} tokens · policy {puzzle.policy}"
    )


def state_of(row: Row, puzzle: Round) -> str:
    """Return what a round says of one request."""
    parts = [f"{row.computed} of {row.known} computed"]
    if row.hit:
        free = f", {_count(row.hit_free, 'block')} of them in the free queue" if row.hit_free else ""
        parts = [f"{row.hit} of {row.known} in the prefix cache{free}"]
    if row.drafts:
        parts.append(_count(row.drafts, "draft"))
    parts.append(f"lacks {row.lacks}")
    if row.blocks:
        parts.append(f"holds {_count(row.blocks, 'block')}")
    if puzzle.policy == "priority":
        parts.append(f"priority {row.priority}")
    if row.came_back:
        parts.append("was preempted")
    return ", ".join(parts)


def explain(puzzle: Round) -> list[str]:
    """Return a sentence for each request, in the order in which vLLM goes through them."""
    left = puzzle.budget
    lines: list[str] = []
    tokens = puzzle.decision.tokens
    for row in puzzle.running:
        if row.name in puzzle.decision.preempted:
            lines.append(f"{row.name} is preempted: it gives back its blocks and keeps its tokens.")
            continue
        count = tokens.get(row.name, 0)
        lines.append(f"{row.name} runs: {_got(row, count, left, puzzle)}.")
        left -= count
    if puzzle.decision.preempted:
        return [*lines, "A step that preempts admits nobody."]
    for row in puzzle.waiting:
        count = tokens.get(row.name, 0)
        if not count:
            lines.append(f"{row.name} waits{_why(row, left, puzzle)}, and so do those behind it.")
            break
        lines.append(f"{row.name} is admitted: {_got(row, count, left, puzzle)}.")
        left -= count
    return lines


def _got(row: Row, count: int, left: int, puzzle: Round) -> str:
    hit = f" ({row.hit} of {row.known} are in the prefix cache)" if row.hit else ""
    if not count:
        return f"it lacks {row.lacks}, and nothing is left of the budget"
    # Of equal ones the last is named.
    bounds = {left: "the rest of the budget", puzzle.limit: "the chunk limit", row.lacks: "all it lacks"}
    return f"it lacks {row.lacks}{hit} and gets {count}, {bounds[count]}"


def _why(row: Row, left: int, puzzle: Round) -> str:
    admitted = sum(other.name in puzzle.decision.tokens for other in puzzle.waiting)
    if not left:
        return ": the budget is spent"
    if len(puzzle.running) + admitted >= puzzle.seats:
        return f": all {_count(puzzle.seats, 'seat')} are taken"
    if not puzzle.chunked and min(row.lacks, puzzle.limit) > left:
        return f": its {row.lacks} tokens do not fit into the {left} that are left, and chunked prefill is off"
    needed = -(-row.known // puzzle.block_size) - row.hit // puzzle.block_size
    return f": all tokens known of it need {_count(needed, 'more block')}, and fewer are free"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"

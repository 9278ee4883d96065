"""Slots for drawing a batch: a scheduler has no slots, but a picture needs one row for each place in the batch."""

from collections.abc import Iterable


def seat(steps: Iterable[Iterable[str]], slots: int) -> list[list[str]]:
    """Give every request the lowest free slot when it first appears, and keep it there until it is gone.

    Args:
        steps: the ids of the requests that are in the batch, step by step. A request that was away comes back as new.
        slots: places, at least as many as there are requests in any step.

    Returns:
        For each slot what sat there in each step, "" where nobody did: [slots][steps].
    """
    rows: list[list[str]] = [[] for _ in range(slots)]
    seated: list[str] = [""] * slots
    for step in steps:
        present = list(step)
        seated = [who if who in present else "" for who in seated]
        for who in present:
            if who not in seated:
                seated[seated.index("")] = who
        for row, who in zip(rows, seated, strict=True):
            row.append(who)
    return rows

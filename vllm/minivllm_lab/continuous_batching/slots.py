"""Slots for drawing a batch: a scheduler has no slots, but a picture needs one row for each
place in the batch.
"""

from collections.abc import Iterable


def seat(steps: Iterable[Iterable[str]], slots: int) -> list[list[str]]:
    """Give every request the lowest free slot when it first appears, and keep it there until it
    leaves.

    Args:
        steps: the ids of the requests in the batch, step by step. A request that left comes back as
            a new one.
        slots: at least as many as there are requests in any step.

    Returns:
        For each slot the request of each step, "" if it was empty: [slots][steps].
    """
    rows: list[list[str]] = [[] for _ in range(slots)]
    seated: list[str] = [""] * slots
    for step in steps:
        present = list(step)
        seated = [name if name in present else "" for name in seated]
        for name in present:
            if name not in seated:
                seated[seated.index("")] = name
        for row, name in zip(rows, seated, strict=True):
            row.append(name)
    return rows

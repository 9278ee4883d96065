"""Seats for drawing a batch: a scheduler has no seats, but a picture needs one row for each
place in the batch.
"""

from collections.abc import Iterable


def assign_seats(steps: Iterable[Iterable[str]], seats: int) -> list[list[str]]:
    """Give every request the lowest free seat when it first appears, and keep it there until it
    leaves.

    Args:
        steps: the ids of the requests in the batch, step by step. A request that left comes back as
            a new one.
        seats: at least as many as there are requests in any step.

    Returns:
        For each seat the request of each step, "" if it was empty: [seats][steps].
    """
    rows: list[list[str]] = [[] for _ in range(seats)]
    seated: list[str] = [""] * seats
    for step in steps:
        present = list(step)
        seated = [name if name in present else "" for name in seated]
        for name in present:
            if name not in seated:
                seated[seated.index("")] = name
        for row, name in zip(rows, seated, strict=True):
            row.append(name)
    return rows

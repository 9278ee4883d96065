"""Lesson 06's pictures of the processes that `-tp 4` and `-dp 4` start, by vLLM's own count."""

from __future__ import annotations

from minivllm_lab.pictures.drawing import QUIET, line, rect, svg, text, tint
from minivllm_lab.pictures.palette import PALE, PURPLE, SKY, YELLOW

WIDTH, HEIGHT, LEFT, WIDE, GAP, TALL = 700, 336, 142, 100, 12, 44
TOPS = (56, 150, 244)
ROWS = (
    ("API server", "HTTP, text", tint(SKY, 0.45)),
    ("engine core", "scheduler, blocks", tint(YELLOW, 0.7)),
    ("worker", "one GPU each", tint(PURPLE, 0.5)),
)
"""A kind of process: its name, what it does, its colour."""


def processes(tp: int, dp: int) -> str:
    """Draw the API servers, cores and workers of `tp` × `dp` GPUs, 1 or 4 of each kind."""
    rows = [_boxes(count) for count in (dp, dp, tp * dp)]
    total = sum(map(len, rows)) + (dp > 1)
    flag = f"-tp {tp}" if tp > 1 else f"-dp {dp}"
    parts = [text(16, 28, f"{flag}: {total} processes", size=15, bold=True)]
    parts += [_link(api, 0, core) for api in rows[0] for core in rows[1]]
    parts += [_link(rows[1][index // tp], 1, worker) for index, worker in enumerate(rows[2])]
    for (name, does, colour), top, boxes in zip(ROWS, TOPS, rows, strict=True):
        parts += [text(16, top + 18, name, bold=True), text(16, top + 36, does, size=12, colour=QUIET)]
        for index, x in enumerate(boxes):
            words = f"{name.split()[-1]} {index}"
            parts.append(rect(x, top, WIDE, TALL, colour, stroke=QUIET, radius=4, label=words))
    if dp > 1:
        x = LEFT + 4 * (WIDE + GAP)
        parts.append(rect(x, TOPS[1], 98, TALL, PALE, stroke=QUIET, radius=4, label="coordinator"))
        y = TOPS[1] + TALL + 12
        parts.append(line((rows[1][0] + WIDE / 4, y), (x + WIDE / 2, y), QUIET, dash="3 3"))
        ends = [*(core + WIDE / 4 for core in rows[1]), x + WIDE / 2]
        parts += [line((end, TOPS[1] + TALL), (end, y), QUIET, dash="3 3") for end in ends]
        below = "Each GPU has the whole model; the coordinator counts the engines' requests."
    else:
        y = TOPS[2] + TALL + 10
        parts.append(line((rows[2][0] + WIDE / 2, y), (rows[2][-1] + WIDE / 2, y), PURPLE, width=3))
        below = "Each GPU has a quarter of every layer; twice a layer all sum their results."
    return svg(WIDTH, HEIGHT, *parts, text(16, HEIGHT - 14, below), label=f"{flag}: {total} processes. {below}")


def _boxes(count: int) -> list[float]:
    """Return the left edges of a row's boxes; a single one stands in the middle."""
    first = LEFT + (0 if count == 4 else 1.5 * (WIDE + GAP))
    return [first + index * (WIDE + GAP) for index in range(count)]


def _link(above: float, level: int, below: float) -> str:
    """Connect a box at a level with one below it."""
    return line((above + WIDE / 2, TOPS[level] + TALL), (below + WIDE / 2, TOPS[level + 1]), QUIET, width=1)

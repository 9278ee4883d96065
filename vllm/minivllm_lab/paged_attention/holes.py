"""Lesson 02's picture of memory over time: the same stream of requests in contiguous regions, and
in blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby

from minivllm.core.block_pool import BlockPool
from minivllm_lab.block_tables import BlockTable
from minivllm_lab.paged_attention.allocators import FirstFit, TablesOnDemand
from minivllm_lab.paged_attention.memory_replay import Memory, Running, serve
from minivllm_lab.pictures.drawing import BLANK, BORDER, QUIET, line, rect, svg, swatch, text, tint
from minivllm_lab.pictures.palette import INK, ORANGE, SKY, VERMILLION
from minivllm_simulate.workloads import RequestLengths

LEFT, RIGHT, TOP = 20, 380, 62
SLOTS, BLOCK_SIZE, STEPS = 48, 4, 30
TALL, WIDE = 4, 10
"""Pixels of a slot and of a step."""
STREAM = {
    "A": (0, 4, 12), "B": (0, 4, 4), "C": (0, 6, 10), "D": (0, 4, 4), "E": (5, 6, 6), "F": (10, 4, 8), "G": (11, 8, 8),
    "H": (12, 4, 10), "I": (13, 4, 4), "J": (18, 6, 6), "K": (19, 8, 8), "L": (20, 4, 12), "M": (23, 4, 4),
}  # fmt: skip
"""Request -> the step in which it arrives, its prompt tokens and its output tokens."""
MOMENT, HOLES = 18, ((16, 28), (40, 48))
"""The step in which there is room enough for H, but not in one piece: the first slot of each hole and
the first slot behind it.
"""
NOTES = (
    (LEFT, 292, f"Step {MOMENT}: 20 slots are free, in two holes (marked)."),
    (LEFT, 310, "H needs 14 in a row, so it waits."),
    (RIGHT, 292, f"Step {MOMENT}: H has been running since step 12,"),
    (RIGHT, 310, "because no hole is too small."),
)
"""The event at that moment; a test compares it with the run."""

Lives = dict[tuple[str, int, int], list[tuple[int, int]]]
"""(Request, first slot, slots) of each piece of memory -> the steps in which it is held, and its
tokens in each.
"""


def contiguous() -> Lives:
    """Serve the stream in regions of exactly the length that each request will have."""
    return _serve(FirstFit(SLOTS, lambda lengths: lengths.total), lambda request: [request.home])


def paged() -> Lives:
    """Serve the stream in blocks, which a request takes when a token needs one."""
    pool = BlockPool(1 + SLOTS // BLOCK_SIZE, enable_caching=False)
    memory = TablesOnDemand(SLOTS, BLOCK_SIZE, lambda: BlockTable(pool, BLOCK_SIZE))
    size = BLOCK_SIZE
    return _serve(memory, lambda request: [((block.block_id - 1) * size, size) for block in request.home.blocks])


def _serve(memory: Memory, places: Callable[[Running], Sequence[tuple[int, int]]]) -> Lives:
    """Serve the stream; return the pieces that are held."""
    requests = {name: Running(RequestLengths(*lengths), lengths[0]) for name, (_, *lengths) in STREAM.items()}
    names = {request: name for name, request in requests.items()}
    waiting: deque[Running] = deque()
    serving = serve(memory, waiting)
    lives: Lives = {}
    for step in range(STEPS):
        waiting.extend(requests[name] for name, (arrival, *_) in STREAM.items() if arrival == step)
        for request in next(serving)[0]:
            before = 0
            for first, slots in places(request):
                tokens = min(slots, request.tokens - before)
                lives.setdefault((names[request], first, slots), []).append((step, tokens))
                before += slots
    return lives


def holes() -> str:
    """Draw both memories, time to the right, and what happens in them at one moment."""
    parts = [
        text(LEFT, 30, "Regions of the exact length", size=15, bold=True),
        text(RIGHT, 30, f"Blocks of {BLOCK_SIZE} slots", size=15, bold=True),
        text(LEFT, 50, f"{SLOTS} slots, a letter for each request", size=12, colour=QUIET),
        *_panel(LEFT, contiguous()),
        *_panel(RIGHT, paged()),
        *(text(*note) for note in NOTES),
    ]
    x = LEFT + (MOMENT + 0.5) * WIDE
    parts += [line((x, TOP + TALL * first), (x, TOP + TALL * end), VERMILLION, width=5) for first, end in HOLES]
    keys = ((LEFT, SKY, "holds a token"), (170, tint(SKY, 0.3), "held, no token yet"), (350, BLANK, "free"))
    parts += [swatch(x, 327, fill, words, stroke=BORDER) for x, fill, words in keys]
    return svg(700, 354, *parts, label=" ".join(words for *_, words in NOTES))


def _panel(x: float, lives: Lives) -> list[str]:
    """Draw one memory: slots downwards, steps to the right."""
    bottom, right = TOP + SLOTS * TALL, x + STEPS * WIDE
    parts = [rect(x, TOP, STEPS * WIDE, SLOTS * TALL, BLANK, stroke=BORDER)]
    for (name, first, slots), life in lives.items():
        left, top, width = x + life[0][0] * WIDE, TOP + first * TALL, len(life) * WIDE
        colour = ORANGE if name == "H" else SKY
        parts.append(rect(left, top, width, slots * TALL, tint(colour, 0.3)))
        for tokens, run in groupby(life, key=lambda moment: moment[1]):
            times = [step for step, _ in run]
            parts.append(rect(x + times[0] * WIDE, top, len(times) * WIDE, tokens * TALL, colour))
        parts += [rect(left, top, width, slots * TALL, stroke="#FFFFFF"), text(left + 3, top + 12, name, size=11)]
    moment = x + (MOMENT + 0.5) * WIDE
    parts.append(line((moment, TOP - 4), (moment, bottom + 4), INK, dash="4 3"))
    parts += [text(x + step * WIDE, bottom + 16, str(step), size=11, colour=QUIET) for step in (0, 10, 20)]
    return [*parts, text(right, bottom + 16, "steps", size=11, colour=QUIET, anchor="end")]

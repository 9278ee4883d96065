"""Lesson 03's opening figure: one tile of queries walks over the tiles of keys that it sees, in
fast memory.

It shows the followed request's prompt in one head of the embedded model, with queries and keys
taken four at a time.
"""

from __future__ import annotations

import math

from minivllm_lab.drawing import QUIET, arrow, rect, svg, text, tint
from minivllm_lab.followed import followed
from minivllm_lab.frames import Frames
from minivllm_lab.palette import BLUE, GREEN, INK, ORANGE, VERMILLION

LAYER, HEAD = 2, 6
"""The layer and the head of these scores, counted from 0."""
FIRST, TILE = 4, 4
"""The first query of the tile, and how many queries and keys a tile has."""
SCORES = (
    (10.17, 7.92, 10.50, 6.73, 4.98),
    (9.57, 6.76, 4.78, 4.56, 11.62, 1.49),
    (10.40, 8.32, 8.23, 4.43, 3.32, 3.50, 3.63),
    (8.12, 7.38, 8.01, 5.11, 6.17, 5.14, 9.09, 7.63),
)
"""Each query's scores with the keys that it sees, to two digits."""

WIDTH, HEIGHT = 852, 344
TOP, ROW = 74, 26
"""Where the first row begins, and its height."""
COLUMNS = {"Q": 82, "K": 132, "V": 182, "out": 232}
CELL = 44
CHIP = 300
GRID, SCORE = CHIP + 78, 54
STATE = {
    "factor": GRID + 4 * SCORE + 42,
    "m": GRID + 4 * SCORE + 94,
    "l": GRID + 4 * SCORE + 144,
    "O": GRID + 4 * SCORE + 172,
}

CAPTIONS = (
    "Slow memory holds a query, a key and a value of each of nine tokens. A program on the chip takes four queries.",
    "Its tile of queries comes in, once. Nothing is seen yet: m = −∞, l = 0, O = 0.",
    "The first tile of keys comes in: sixteen scores.",
    "With the tile of values: m is a row's largest score, l the sum of exp(score − m), O that sum times the values.",
    "Keys, values and scores are forgotten, and the second tile comes in. Keys that lie ahead of a query count as −∞.",
    "Two rows found a larger score: what they summed before shrinks by exp(old m − new m). Then the tile is added.",
    "The third tile of keys lies ahead of all four queries and is never read. O / l goes back, a row for each query.",
)


def sums(scores: tuple[float, ...], seen: int) -> tuple[float, float]:
    """Return m and l of a row over its first `seen` keys."""
    m = max(scores[:seen])
    return m, sum(math.exp(score - m) for score in scores[:seen])


def frames() -> Frames:
    """Draw the steps of the figure."""
    return Frames([still(step) for step in range(len(CAPTIONS))], CAPTIONS)


def still(step: int) -> str:
    """Draw one step, counted from 0."""
    tokens = [token.shown for token in followed().request.prompt]
    tile = {2: 0, 3: 0, 4: 1, 5: 1}.get(step)
    parts = [slow_memory(tokens, step, tile), chip(step)]
    if step > 0:
        parts.append(rows_of_the_tile(tokens))
        parts += [state_of(row, step) for row in range(TILE)]
    if tile is not None:
        parts.append(scores_of(tokens, tile, seen_values=step in (3, 5)))
    return svg(WIDTH, HEIGHT, *parts, label=CAPTIONS[step])


def slow_memory(tokens: list[str], step: int, tile: int | None) -> str:
    """Draw queries, keys, values and output, a row per token; copies on the chip are in strong
    colours.
    """
    shapes = [text(16, 28, "slow memory", bold=True)]
    shapes += [text(x + CELL / 2, 58, name, anchor="middle", colour=QUIET) for name, x in COLUMNS.items()]
    queries = range(FIRST, FIRST + TILE)
    values = step in (3, 5)
    for row, token in enumerate(tokens):
        y = TOP + row * ROW + 4 * (row // TILE)
        here = tile is not None and row // TILE == tile
        fills = {
            "Q": shade(BLUE, row in queries and 0 < step < 6),
            "K": shade(ORANGE, here),
            "V": shade(GREEN, here and values),
            "out": shade(VERMILLION, True) if step == 6 and row in queries else "#F1F3F4",
        }
        shapes.append(text(74, y + 17, token, anchor="end", mono=True))
        shapes += [rect(x, y, CELL, ROW - 2, fills[name], radius=2) for name, x in COLUMNS.items()]
    if step == 6:
        y = TOP + 2 * TILE * ROW + 8
        shapes.append(text(COLUMNS["K"] - 4, y + 42, "never read by this tile", size=11, colour=QUIET))
    return "".join(shapes)


def shade(colour: str, strong: bool) -> str:
    """Return `colour` itself, or a pale form of it."""
    return colour if strong else tint(colour, 0.22)


def chip(step: int) -> str:
    """Draw the frame of fast memory, the traffic of this step, and the rows moved so far."""
    frame = rect(CHIP, 36, WIDTH - CHIP - 14, 250, stroke=INK, radius=8)
    name = text(CHIP, 28, "fast memory, on the chip", bold=True)
    moved = (0, 4, 8, 12, 16, 20, 24)[step]
    scores = 16 if 2 <= step <= 5 else 0
    words = f"moved so far: {moved} rows     scores on the chip: {scores}, of 81 in the whole matrix"
    shapes = [frame, name, text(CHIP, HEIGHT - 30, words, colour=QUIET)]
    coming = {1: "Q", 2: "K", 3: "V", 4: "K", 5: "V"}.get(step)
    if coming:
        y = TOP + (6 if step in (1, 4, 5) else 2) * ROW
        shapes.append(arrow((COLUMNS[coming] + CELL + 2, y), (CHIP - 3, y), INK, width=2))
    if step == 6:
        y = TOP + 6 * ROW
        shapes.append(arrow((CHIP, y), (COLUMNS["out"] + CELL + 3, y), INK, width=2))
    return "".join(shapes)


def rows_of_the_tile(tokens: list[str]) -> str:
    """Draw the four queries on the chip, and the headings of their state."""
    shapes = [
        rect(CHIP + 12, row_of(row), 58, ROW + 8, BLUE, label=tokens[FIRST + row], mono=True, radius=2)
        for row in range(TILE)
    ]
    heads = {"factor": "old ×", "m": "m", "l": "l", "O": "O: keys"}
    shapes += [text(STATE[name], 98, words, size=12, colour=QUIET, anchor=side(name)) for name, words in heads.items()]
    return "".join(shapes)


def side(name: str) -> str:
    """Return the text anchor of a column of the state: numbers are right-aligned."""
    return "start" if name == "O" else "end"


def row_of(row: int) -> float:
    """Return the y of the top of a query's row on the chip."""
    return 106 + row * (ROW + 12)


def scores_of(tokens: list[str], tile: int, seen_values: bool) -> str:
    """Draw the scores of the four queries with a tile of keys."""
    shapes = []
    for column in range(TILE):
        key, x = tile * TILE + column, GRID + column * SCORE
        shapes.append(rect(x, 48, SCORE - 4, 22, ORANGE, label=tokens[key], mono=True, radius=2, size=12))
        if seen_values:
            shapes.append(rect(x, 74, SCORE - 4, 14, GREEN, radius=2))
        for row, scores in enumerate(SCORES):
            seen = key < len(scores)
            top = seen and scores[key] == max(scores[: (tile + 1) * TILE])
            fill = tint(VERMILLION, 0.35) if top else "#F1F3F4"
            label = f"{scores[key]:.2f}" if seen else "−∞"
            shapes.append(rect(x, row_of(row), SCORE - 4, ROW + 8, fill, label=label, radius=2))
    return "".join(shapes)


def state_of(row: int, step: int) -> str:
    """Draw m, l and O of one query after this step, and the factor by which its old sums were
    rescaled.
    """
    y, scores = row_of(row) + 22, SCORES[row]
    seen = {1: 0, 2: 0, 3: TILE, 4: TILE}.get(step, len(scores))
    shapes = []
    if seen == 0:
        values = {"m": "−∞", "l": "0", "O": "none"}
    else:
        m, total = sums(scores, seen)
        values = {"m": f"{m:.2f}", "l": f"{total:.2f}", "O": f"0 – {seen - 1}"}
    if step == 5:
        factor = math.exp(sums(scores, TILE)[0] - sums(scores, seen)[0])
        shapes.append(text(STATE["factor"], y, f"{factor:.2f}", colour=VERMILLION, anchor="end", bold=factor < 1))
    shapes += [text(STATE[name], y, words, anchor=side(name)) for name, words in values.items()]
    return "".join(shapes)

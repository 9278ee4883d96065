"""Lesson 03's moving picture: one tile of queries walks over the tiles of keys that it sees.

It shows the followed request's prompt in one head of the embedded model, with queries and keys
taken four at a time.
"""

from __future__ import annotations

import math

from minivllm_lab.flash_attention.still_pictures import stills
from minivllm_lab.pictures.drawing import BLANK, arrow, rect, svg, text, tint
from minivllm_lab.pictures.followed import followed
from minivllm_lab.pictures.frames import Frames
from minivllm_lab.pictures.palette import BLUE, GREEN, INK, ORANGE, VERMILLION

__all__ = ["frames", "stills"]
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

WIDTH, HEIGHT = 760, 384
LEGEND = (
    ("query", BLUE),
    ("key", ORANGE),
    ("value", GREEN),
    ("output", VERMILLION),
    ("largest so far", tint(VERMILLION, 0.35)),
)
TOP, ROW = 74, 26
"""Where the first row begins, and its height."""
COLUMNS = {"Q": 78, "K": 122, "V": 166, "out": 210}
CELL = 40
CHIP, GRID, SCORE = 276, 350, 50
STATE = {"factor": 592, "m": 642, "l": 688, "O": 722}
SUM = (698, 40)
"""x and width of a row's O, a vector as wide as a value."""
LAST = 5
READ = (None, None, 0, 1, 1, 1)
"""The tile of keys and values on the chip, by step."""
MOVED = (0, 4, 12, 20, 20, 24)
"""Rows that have travelled, by step."""

CAPTIONS = (
    "HBM holds a query, a key and a value of nine tokens. One program takes four queries.",
    "Its queries come in, once. No key is seen: m = −∞, l = O = 0.",
    "Sixteen scores. m: a row's largest; l: the sum of exp(score − m); O: the same, times values.",
    "The second tile replaces the first. Keys that lie ahead of a query count as −∞.",
    "Two rows have a larger score now, so both their sums shrink. Then the tile is added.",
    "Two tiles read, the third never; two rows corrected; four rows of output back.",
)


def sums(scores: tuple[float, ...], seen: int) -> tuple[float, float]:
    """Return m and l of a row over its first `seen` keys."""
    m = max(scores[:seen])
    return m, sum(math.exp(score - m) for score in scores[:seen])


def frames() -> Frames:
    """Draw the steps of the figure; the last one sums them up."""
    return Frames([_still(step) for step in range(len(CAPTIONS))], CAPTIONS)


def _still(step: int) -> str:
    """Draw one step, counted from 0."""
    tokens = [token.shown for token in followed().request.prompt]
    parts = [_hbm(tokens, step), _chip(step)]
    if step > 0:
        parts += [_query(row, tokens) for row in range(TILE)]
        parts += [text(STATE[name], 98, name, size=12, anchor="end") for name in STATE]
        parts += [_state_of(row, step) for row in range(TILE)]
    tile = READ[step]
    if tile is not None:
        parts.append(_scores_of(tokens, tile))
    return svg(WIDTH, HEIGHT, *parts, label=CAPTIONS[step])


def _hbm(tokens: list[str], step: int) -> str:
    """Draw queries, keys, values and output, a row per token, in strong colours what is on the
    chip. The last step has what has been there.
    """
    shapes = [text(16, 28, "HBM", bold=True)]
    shapes += [text(x + CELL / 2, 58, name, anchor="middle") for name, x in COLUMNS.items()]
    for row, token in enumerate(tokens):
        y = TOP + row * ROW + 4 * (row // TILE)
        asked = row // TILE == FIRST // TILE
        here = row // TILE == READ[step] or (step == LAST and row < FIRST)
        fills = {
            "Q": BLUE if asked and step > 0 else tint(BLUE),
            "K": ORANGE if here else tint(ORANGE),
            "V": GREEN if here else tint(GREEN),
            "out": VERMILLION if asked and step == LAST else BLANK,
        }
        shapes.append(text(72, y + 17, token, anchor="end", mono=True))
        shapes += [rect(x, y, CELL, ROW - 2, fills[name]) for name, x in COLUMNS.items()]
    if step == LAST:
        shapes.append(text(COLUMNS["K"], 332, "never read", size=12))
    return "".join(shapes)


def _chip(step: int) -> str:
    """Draw the frame of the chip, what comes in or goes out, and the rows moved so far."""
    scores = 0 if READ[step] is None else TILE * TILE
    words = f"moved so far: {MOVED[step]} rows;  on the chip: {scores} of the 81 scores"
    shapes = [
        rect(CHIP, 36, WIDTH - CHIP - 14, 250, stroke=INK, radius=8),
        text(CHIP, 28, "one multiprocessor, on the chip", bold=True),
        text(CHIP, 312, words, size=12),
        text(CHIP, 334, "m: a row's largest score; l, O: its sums; factor: what shrinks both", size=12),
        text(16, 352, "pale: in HBM.  strong: on the chip, or back", size=12),
        *_legend(),
    ]
    y = TOP + (2 if step == 2 else 6) * ROW
    chip, out = (CHIP - 3, y), (COLUMNS["out"] + CELL + 3, y)
    if step in (1, 2, 3):
        start = (COLUMNS["Q" if step == 1 else "V"] + CELL + 2, y)
        shapes.append(arrow(start, chip, INK, width=2))
    if step == LAST:
        shapes.append(arrow(chip, out, INK, width=2))
    return "".join(shapes)


def _legend() -> list[str]:
    """Explain the colours of both sides."""
    parts = []
    for index, (words, fill) in enumerate(LEGEND):
        x = 16 + index * 112
        parts += [rect(x, 363, 18, 14, fill), text(x + 24, 375, words, size=12)]
    return parts


def _query(row: int, tokens: list[str]) -> str:
    """Draw one of the four queries on the chip."""
    return rect(CHIP + 12, _row(row), 54, ROW + 8, BLUE, label=tokens[FIRST + row], mono=True)


def _row(row: int) -> float:
    """Return the y of the top of a query's row on the chip."""
    return 106 + row * (ROW + 12)


def _scores_of(tokens: list[str], tile: int) -> str:
    """Draw the scores of the four queries with a tile of keys; a new maximum is tinted."""
    shapes = []
    for column in range(TILE):
        key, x = tile * TILE + column, GRID + column * SCORE
        shapes.append(rect(x, 48, SCORE - 4, 22, ORANGE, label=tokens[key], mono=True, size=12))
        shapes.append(rect(x, 74, SCORE - 4, 14, GREEN))
        for row, scores in enumerate(SCORES):
            seen = key < len(scores)
            largest = seen and scores[key] == max(scores[: (tile + 1) * TILE])
            fill = tint(VERMILLION, 0.35) if largest else BLANK
            label = f"{scores[key]:.2f}" if seen else "−∞"
            shapes.append(rect(x, _row(row), SCORE - 4, ROW + 8, fill, label=label, size=12))
    return "".join(shapes)


def _state_of(row: int, step: int) -> str:
    """Draw m and the sums of one query after this step, and the factor by which its old sums shrank."""
    y, scores = _row(row) + 22, SCORES[row]
    seen = (0, 0, TILE, TILE, len(scores), len(scores))[step]
    values, parts = {"m": "−∞", "l": "0", "O": "0"}, []
    if seen:
        m, total = sums(scores, seen)
        values = {"m": f"{m:.2f}", "l": f"{total:.2f}"}
        parts.append(rect(SUM[0], y - 18, SUM[1], ROW, GREEN))
    if seen > TILE:
        factor = math.exp(sums(scores, TILE)[0] - m)
        values["factor"] = f"{factor:.2f}"
    for name, words in values.items():
        colour = VERMILLION if name == "factor" else INK
        parts.append(text(STATE[name], y, words, colour=colour, anchor="end"))
    return "".join(parts)

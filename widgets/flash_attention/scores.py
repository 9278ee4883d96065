"""Draw a tile where it lies among all scores, and how often its kind reads keys and values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from minivllm_lab.drawing import QUIET
from minivllm_lab.flash_attention.attention_traffic import flash_programs
from minivllm_lab.palette import BLUE, GREEN, INK, ORANGE, SKY, VERMILLION
from widgets.flash_attention.walk import size
from widgets.shell.plot import counted, tokens
from widgets.shell.svg import HEADING, SMALL, Box, Drawing
from widgets.shell.theme import CARD, IDLE, MID

if TYPE_CHECKING:
    from widgets.flash_attention.state import State

STRIP, SPACE = 9, 4
"""Pixels of Q, K, V and O beside the scores, and between them and the scores."""
LINE, PITCH = 3, 3
"""Pixels of the line for the keys and values that a program reads, and the least ones of its rows."""
LEAST = 2.5
"""The least pixels at which a tile is drawn."""
WHERE = 0.42, 0.72
"""The tile's place among the keys and among the queries, as a part of all."""
LENS, LARGEST = 84, 56
"""Pixels of the lens, and of the tile in it."""


def draw_scores(drawing: Drawing, at: Box, state: State) -> float:
    """Draw the scores of all queries and keys, and the tile among them; return the y below."""
    title = f"{tokens(state.length)} × {tokens(state.length)} scores, one tile"
    drawing.text((at.x, 22), title, size=HEADING, bold=True)
    edge = STRIP + SPACE
    side = Box(at.x + edge, 46 + edge, at.width - 2 * edge, at.width - 2 * edge)
    drawing.rect(side, IDLE, stroke=MID)
    pixels = side.width / state.length
    sizes = state.block_k, min(state.block_q, state.length)
    x, y = (int(part * state.length) // count * count * pixels for part, count in zip(WHERE, sizes, strict=True))
    wide, high = (max(count * pixels, LEAST) for count in sizes)
    tile = Box(side.x + x, side.y + y, wide, min(high, side.height - y))
    _draw_operands(drawing, side, tile)
    _draw_programs(drawing, side, state, tile)
    drawing.rect(tile, ORANGE, stroke=INK)
    _draw_lens(drawing, side, tile, state)
    tip = (
        f"This program keeps {state.block_q} queries and reads the keys and values up to them; all others do the same."
    )
    drawing.rect(side, "transparent", tip=tip)
    full = state.length > state.longest
    words = f"overfill an {state.hardware.name}" if full else f"take {size(state.naive.extra)} a head"
    drawing.text((at.x, side.bottom + 18), f"Stored, they {words}.", size=SMALL, colour=VERMILLION, bold=full)
    words = f"In tiles, K and V are read by {counted(state.programs, 'program')} of {state.block_q:,} queries."
    return drawing.paragraph((at.x, side.bottom + 36), words, at.width, colour=BLUE) + 4


def _draw_programs(drawing: Drawing, side: Box, state: State, tile: Box) -> None:
    """Draw the scores that are not masked, a line below each program's rows where there is room, and
    the keys and values that the tile's program reads.
    """
    corners = [(side.x, side.y), (side.x, side.bottom), (side.right, side.bottom)]
    drawing.polygon(corners, CARD)
    drawing.add('<g opacity="0.35">')
    drawing.polygon(corners, ORANGE)
    drawing.add("</g>")
    high = state.block_q / state.length * side.height
    for row in range(1, state.programs if high >= PITCH else 1):
        drawing.line((side.x, side.y + row * high), (side.x + row * high, side.y + row * high), colour=CARD)
    _, seen = list(flash_programs(state.length, state.block_q, state.block_k))[round((tile.y - side.y) / high)]
    middle = tile.y + tile.height / 2
    drawing.line((side.x, middle), (side.x + seen / state.length * side.width, middle), colour=SKY, width=LINE)
    drawing.text((side.x + 7, side.bottom - 8), "scores", size=SMALL, colour=ORANGE)
    drawing.text((side.right - 6, side.y + LENS + 22), "masked", size=SMALL, colour=QUIET, anchor="end")


def _draw_operands(drawing: Drawing, side: Box, tile: Box) -> None:
    """Draw Q on the left, K and V above and O on the right, with the parts that the tile needs."""
    left, right, above = side.x - SPACE - STRIP, side.right + SPACE, side.y - SPACE - STRIP
    for x, name, colour in ((left, "Q", BLUE), (right, "O", GREEN)):
        drawing.rect(Box(x, side.y, STRIP, side.height), IDLE, stroke=MID)
        drawing.rect(Box(x, tile.y, STRIP, tile.height), colour)
        drawing.text((x + STRIP / 2, side.y - 6), name, size=SMALL, colour=colour, anchor="middle", bold=True)
    drawing.rect(Box(side.x, above, side.width, STRIP), IDLE, stroke=MID)
    drawing.rect(Box(tile.x, above, tile.width, STRIP), SKY)
    drawing.text((side.x, above - 5), "K, V", size=SMALL, colour=SKY, bold=True)


def _draw_lens(drawing: Drawing, side: Box, tile: Box, state: State) -> None:
    """Draw the tile larger, in the corner that causal attention never reads."""
    pixels = side.width / state.length
    zoom = 2 ** math.floor(math.log2(LARGEST / (max(state.block_q, state.block_k) * pixels)))
    wide, high = (count * pixels * zoom for count in (state.block_k, state.block_q))
    lens = Box(side.right - LENS - 6, side.y + 6, LENS, LENS)
    drawing.line((tile.right, tile.y), (lens.x, lens.bottom), colour=QUIET)
    drawing.rect(lens, CARD, stroke=QUIET)
    drawing.rect(Box(lens.x + (LENS - wide) / 2, lens.y + 5 + (LARGEST - high) / 2, wide, high), ORANGE)
    words = f"{state.block_q} × {state.block_k}"
    drawing.text((lens.x + LENS / 2, lens.bottom - 7), words, size=SMALL, anchor="middle")

"""Draw both ways through the scores, stored or in tiles, and the bytes that each moves between HBM and
the chip.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from minivllm_lab.flash_attention.attention_traffic import flash_programs
from minivllm_lab.palette import BLUE, GREEN, INK, ORANGE, SKY, VERMILLION
from widgets.flash_attention.walk import size
from widgets.shell.plot import counted, tokens
from widgets.shell.svg import HEADING, SMALL, Box, Drawing, Segment
from widgets.shell.theme import CARD, IDLE, MID

if TYPE_CHECKING:
    from widgets.flash_attention.state import State

STRIP, SPACE, TOP = 9, 4, 46
"""Pixels of Q, K, V and O beside the scores, between them and the scores, and above them all."""
PITCH = 1.5
"""The least pixels from one program's line to the next; closer lines are drawn as one area."""
LEAST = 2.5
"""The least pixels at which a tile is drawn."""
WHERE = 0.42, 0.72
"""The tile's place among the keys and among the queries, as a part of all."""
LENS = 0.3
"""The lens over the tile, as a part of the scores' side."""
LARGE = 22


def draw_ways(drawing: Drawing, at: Box, gap: float, state: State) -> float:
    """Draw the stored scores and the tiles side by side; return the y below."""
    wide = (at.width - gap) / 2
    stored = _draw_operands(drawing, Box(at.x, at.y, wide, 0), "All scores in HBM")
    tiled = _draw_operands(
        drawing, Box(at.x + wide + gap, at.y, wide, 0), f"Tiles of {state.block_q} × {state.block_k}"
    )
    full = state.length > state.longest
    drawing.rect(stored, VERMILLION if full else ORANGE)
    middle = stored.x + stored.width / 2, stored.y + stored.height / 2 + 4
    drawing.text(
        middle, f"{tokens(state.length)} × {tokens(state.length)}", size=SMALL, colour="#000000", anchor="middle"
    )
    _draw_tiles(drawing, tiled, state)
    words = f"overfill an {state.hardware.name}" if full else "written and read, twice"
    matrix, vectors = state.naive.extra // 2, state.length * state.head_dim * 2
    passes = [
        Segment(arrow, matrix, ORANGE, tip=f"{what}: {size(matrix)}")
        for what, arrow in (
            ("Scores, written", "↑"),
            ("Scores, read", "↓"),
            ("Weights, written", "↑"),
            ("Weights, read", "↓"),
        )
    ]
    inputs = Segment("", 3 * vectors, SKY, tip=f"Q, K and V, read once: {size(3 * vectors)}")
    again = Segment("↓", state.tiled.read, SKY, tip=f"K and V, read by each program, and Q: {size(state.tiled.read)}")
    ends = [
        Segment("", written, GREEN, tip=f"Output, written: {size(written)}")
        for written in (vectors, state.tiled.written)
    ]
    most = max(state.naive.moved, state.tiled.moved)
    below = _draw_bytes(drawing, stored, [inputs, *passes, ends[0]], most, words, VERMILLION, HEADING)
    words = f"K, V read by {counted(state.programs, 'program')}"
    return max(below, _draw_bytes(drawing, tiled, [again, ends[1]], most, words, SKY, LARGE))


def _draw_operands(drawing: Drawing, at: Box, title: str) -> Box:
    """Draw Q on the left, K and V above and O on the right; return the square between them."""
    edge = STRIP + SPACE
    side = Box(at.x + edge, at.y + TOP + edge, at.width - 2 * edge, at.width - 2 * edge)
    drawing.text((at.x, at.y + 22), title, size=HEADING, bold=True)
    for x, name, colour in ((at.x, "Q", BLUE), (side.right + SPACE, "O", GREEN)):
        drawing.rect(Box(x, side.y, STRIP, side.height), colour)
        drawing.text((x + STRIP / 2, side.y - 6), name, size=SMALL, colour=colour, anchor="middle", bold=True)
    drawing.rect(Box(side.x, side.y - edge, side.width, STRIP), SKY)
    drawing.text((side.x, side.y - edge - 5), "K, V", size=SMALL, colour=SKY, bold=True)
    return side


def _draw_tiles(drawing: Drawing, side: Box, state: State) -> None:
    """Draw the scores that are never stored, a line for the keys and values that each program reads,
    and one tile.
    """
    drawing.rect(side, IDLE, stroke=MID, dash="4 3")
    pixels = side.width / state.length
    high = state.block_q * pixels
    if high < PITCH:
        drawing.polygon([(side.x, side.y), (side.x, side.bottom), (side.right, side.bottom)], SKY)
    else:
        programs = enumerate(flash_programs(state.length, state.block_q, state.block_k))
        rows = [((program + 0.5) * high, seen * pixels) for program, (_, seen) in programs]
        lines = "".join(f"M{side.x:g} {side.y + min(y, side.height - 1):.1f}h{wide:.1f}" for y, wide in rows)
        drawing.add(f'<path d="{lines}" stroke="{SKY}" stroke-width="{min(3, 0.6 * high):.2g}"/>')
    sizes = state.block_k, min(state.block_q, state.length)
    x, y = (int(part * state.length) // count * count * pixels for part, count in zip(WHERE, sizes, strict=True))
    wide, high = (max(count * pixels, LEAST) for count in sizes)
    tile = Box(side.x + x, side.y + y, wide, min(high, side.height - y))
    drawing.rect(tile, ORANGE, stroke=INK)
    _draw_lens(drawing, side, tile, state)
    tip = f"A program keeps {state.block_q} queries and reads the keys and values up to them; all others do the same."
    drawing.rect(side, "transparent", tip=tip)


def _draw_lens(drawing: Drawing, side: Box, tile: Box, state: State) -> None:
    """Draw the tile larger, in the corner that causal attention never reads."""
    pixels, most = side.width / state.length, LENS * side.width
    zoom = 2 ** math.floor(math.log2(most / (max(state.block_q, state.block_k) * pixels)))
    wide, high = (count * pixels * zoom for count in (state.block_k, state.block_q))
    lens = Box(side.right - most - 14, side.y + 6, most + 8, most + 8)
    drawing.line((tile.right, tile.y), (lens.x, lens.bottom), colour=INK)
    drawing.rect(lens, CARD, stroke=INK)
    drawing.rect(Box(lens.x + (lens.width - wide) / 2, lens.y + (lens.height - high) / 2, wide, high), ORANGE)


def _draw_bytes(
    drawing: Drawing, side: Box, parts: list[Segment], most: int, words: str, colour: str, large: float
) -> float:
    """Draw the bytes that one way moves, as a bar of which `most` fills the side; return the y below."""
    moved = sum(part.value for part in parts)
    x = side.x
    for part in parts:
        box = Box(x, side.bottom + 8, part.value / most * side.width, 15)
        drawing.rect(box, part.colour, tip=part.tip, stroke=CARD)
        if part.label and box.width > 10:
            drawing.text((x + box.width / 2, box.y + 12), part.label, size=SMALL, colour="#000000", anchor="middle")
        x = box.right
    drawing.text((side.x, side.bottom + 46), size(moved), size=large, colour=colour, bold=True)
    return drawing.paragraph((side.x, side.bottom + 64), words, side.width + STRIP + SPACE)

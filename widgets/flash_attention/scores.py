"""Draw both ways through the scores, stored or in tiles, and the bytes that each moves between HBM and
the chip.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from minivllm_lab.drawing import QUIET
from minivllm_lab.flash_attention.attention_traffic import flash_programs
from minivllm_lab.palette import BLUE, GREEN, INK, ORANGE, SKY, VERMILLION
from widgets.flash_attention.walk import size
from widgets.shell.plot import counted, percent, tokens
from widgets.shell.svg import HEADING, SMALL, Box, Drawing, Segment
from widgets.shell.theme import CARD, IDLE, MID

if TYPE_CHECKING:
    from widgets.flash_attention.state import State

STRIP, SPACE, TOP = 9, 4, 46
"""Pixels of Q, K, V and O beside the scores, between them and the scores, and above them all."""
PITCH = 6
"""The least pixels from one line to the next, and the least height of a tile."""
WHERE = 0.62
"""The place of the program that is drawn, as a part of all."""
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
        middle, f"{tokens(state.length)} × {tokens(state.length)} scores", size=SMALL, colour="#000000", anchor="middle"
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
    part = percent((state.tiled.read / vectors - 1) / 2 / state.programs)
    words = f"Each {state.block_q} queries read K, V: {counted(state.programs, 'time')} {part} of {size(2 * vectors)}"
    with drawing.answer():
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
    """Draw the scores that are never stored, a line for the keys and values that some programs read, and
    one program's tile at the end of its line.
    """
    drawing.rect(side, IDLE, stroke=MID, dash="4 3")
    pixels = side.width / state.length
    each = 2 ** max(0, math.ceil(math.log2(PITCH / (state.block_q * pixels))))
    programs = list(flash_programs(state.length, state.block_q, state.block_k))[each - 1 :: each]
    pitch = each * state.block_q * pixels
    rows = [(min((row + 0.5) * pitch, side.height - 1), seen * pixels) for row, (_, seen) in enumerate(programs)]
    lines = "".join(f"M{side.x:g} {side.y + y:.1f}h{wide:.1f}" for y, wide in rows)
    thick = max(0.8 * pitch * state.queries[0] / state.block_q, 1.5)  # so that the blue area follows the bytes
    drawing.add(f'<path d="{lines}" stroke="{SKY}" stroke-width="{thick:.2g}"/>')
    y, x = rows[int(WHERE * len(rows))]
    wide, high = (max(count * pixels, PITCH) for count in (state.block_k, state.block_q))
    top = max(y - high / 2, 0)
    drawing.rect(Box(side.x + x - wide, side.y + top, wide, min(high, side.height - top)), ORANGE, stroke=INK)
    if x + 34 < side.width:
        drawing.text((side.x + x + 5, side.y + y + 4), "tile", size=SMALL, bold=True)
    for line, words in enumerate((f"1 line: {counted(each, 'read')}", "causal")):
        place = side.right - 4, side.y + 16 + 16 * line
        drawing.text(place, words, size=SMALL, colour=(SKY, QUIET)[line], anchor="end")
    tip = f"A program keeps {state.block_q} queries and reads the keys and values up to them; all others do the same."
    drawing.rect(side, "transparent", tip=tip)


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

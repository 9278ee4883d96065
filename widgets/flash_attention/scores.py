"""Draw both ways through the scores, stored or in tiles, and the bytes that each moves between HBM and
the chip.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from minivllm_lab.flash_attention.attention_traffic import flash_programs
from minivllm_lab.pictures.drawing import text_width
from minivllm_lab.pictures.palette import BLUE, INK, ORANGE, SKY, VERMILLION
from widgets.flash_attention.walk import EDGE, size
from widgets.shell.plot import VALUE, WIDE, counted, tokens
from widgets.shell.svg import BOLD, HEADING, SMALL, Box, Drawing, Segment, stacked_bar
from widgets.shell.theme import IDLE, MID

if TYPE_CHECKING:
    from widgets.flash_attention.state import State

STRIP, SPACE, TOP, GAP = 9, 4, 46, 18
"""Pixels of Q, K and V beside the scores, between them and the scores, above them all, and between two parts."""
PITCH = 6
"""The least pixels from one line to the next, and the least height of a tile."""
WHERE = 0.35
"""The place of the program that is drawn, as a part of all."""


def draw_ways(drawing: Drawing, state: State) -> float:
    """Draw the stored scores and the tiles side by side, with the bytes of both; return the y below."""
    full, beside = drawing.width - 2 * EDGE, drawing.width >= WIDE
    wide = min(190, 0.29 * full) if beside else (full - GAP) / 2
    bottom = max(_draw_stored(drawing, EDGE, wide, state), _draw_tiles(drawing, EDGE + wide + GAP, wide, state))
    left = EDGE + 2 * (wide + GAP)
    if beside:
        return max(bottom, _draw_bytes(drawing, Box(left, 0, drawing.width - EDGE - left, 0), 34, state))
    return _draw_bytes(drawing, Box(EDGE, bottom + 12, full, 0), 8, state)


def _draw_stored(drawing: Drawing, x: float, wide: float, state: State) -> float:
    side, full = _draw_operands(drawing, x, wide, "All scores in HBM"), state.length > state.longest
    drawing.rect(side, VERMILLION if full else ORANGE)
    middle = side.x + side.width / 2, side.y + side.height / 2 + 4
    words = f"{tokens(state.length)} × {tokens(state.length)} scores"
    drawing.text(middle, words, size=SMALL, colour="#000000", anchor="middle")
    drawing.text((side.right - 5, side.y + 17), "later keys, too", size=SMALL, colour="#000000", anchor="end")
    words = f"overfill an {state.hardware.name}" if full else "written and read, twice"
    return drawing.paragraph((side.x, side.bottom + 17), words, side.width + EDGE)


def _draw_operands(drawing: Drawing, x: float, wide: float, title: str) -> Box:
    """Draw Q on the left, and K and V above; return the square between them."""
    edge = STRIP + SPACE
    side = Box(x + edge, TOP + edge, wide - edge, wide - edge)
    drawing.text((x, 22), title, size=HEADING, bold=True)
    drawing.rect(Box(x, side.y, STRIP, side.height), BLUE)
    drawing.text((x, side.y - 6), "Q", size=SMALL, colour=BLUE, bold=True)
    drawing.rect(Box(side.x, side.y - edge, side.width, STRIP), SKY)
    drawing.text((side.x, side.y - edge - 5), "K, V", size=SMALL, colour=SKY, bold=True)
    return side


def _draw_tiles(drawing: Drawing, x: float, wide: float, state: State) -> float:
    """Draw the scores that are never stored, a line for the keys and values that some programs read, and
    one program's tile at the end of its line.
    """
    side = _draw_operands(drawing, x, wide, f"Tiles of {state.block_q} × {state.block_k}")
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
    if x + 76 < side.width:
        drawing.text((side.x + x + 5, side.y + y + 4), "on the chip", size=SMALL, bold=True)
    if rows[len(rows) // 8][1] + 90 < side.width:
        drawing.text((side.right - 5, side.y + 17), "no later keys", size=SMALL, anchor="end")
    tip = f"A program keeps {state.block_q} queries and reads the keys and values up to them; all others do the same."
    drawing.rect(side, "transparent", tip=tip)
    words = f"each line: {counted(each, 'tile')} of {state.block_q}"
    return drawing.paragraph((side.x, side.bottom + 17), words, side.width + EDGE)


def _draw_bytes(drawing: Drawing, at: Box, gap: float, state: State) -> float:
    """Draw the bytes that both ways move, as bars on one scale; return the y below."""
    drawing.heading((at.x, at.y + 22), "HBM traffic", f"per head of {state.head_dim}")
    matrix, most = state.naive.extra // 2, max(state.naive.moved, state.tiled.moved)
    inputs = Segment("", state.naive.moved - 4 * matrix, SKY, tip="Q, K, V and the output, once each")
    passes = 4 * [Segment("", matrix, ORANGE, tip=f"Scores and weights, both written and read: 4 × {size(matrix)}")]
    words = ["all scores", f"≈ 4 passes × {size(matrix)} of scores"]
    y = _draw_way(drawing, replace(at, y=at.y + TOP - 8), [inputs, *passes], most, words, 17)
    a_tile = (state.tiled.read - 2 * state.length * state.head_dim) / state.programs
    words = [f"tiles of {state.block_q}", f"≈ {counted(state.programs, 'tile')} × {size(a_tile)} of K, V"]
    again = Segment("", state.tiled.moved, SKY, tip="K and V, read by each tile of queries; Q and the output, once")
    with drawing.answer():
        if not state.launches:
            words[1] = "no launch: shared memory full"
        return _draw_way(drawing, replace(at, y=y + gap), [again], most, words, VALUE)


def _draw_way(drawing: Drawing, at: Box, parts: list[Segment], most: float, words: list[str], large: float) -> float:
    """Draw the bytes of one way, of which `most` fill the width, its name and what they are; return the y below."""
    moved = sum(part.value for part in parts)
    drawing.text((at.x, at.y + large), size(moved), size=large, colour=parts[-1].colour, bold=True)
    after = at.x + text_width(size(moved), large) * BOLD + 8
    drawing.text((after, at.y + large), words[0], size=SMALL, bold=True)
    stacked_bar(drawing, Box(at.x, at.y + large + 7, at.width, 15), parts, most)
    return drawing.paragraph((at.x, at.y + large + 38), words[1], at.width)

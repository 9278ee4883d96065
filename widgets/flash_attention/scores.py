"""Draw both ways through the scores, stored or in tiles, and the bytes that each moves between HBM and
the chip.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from minivllm_lab.flash_attention.attention_traffic import flash_programs
from minivllm_lab.pictures.drawing import QUIET, Point, text_width
from minivllm_lab.pictures.palette import BLUE, GREEN, INK, ORANGE, SKY, VERMILLION
from widgets.flash_attention.challenges import compared
from widgets.flash_attention.walk import EDGE, size
from widgets.shell.plot import VALUE, WIDE, counted, percent, tokens
from widgets.shell.svg import BOLD, HEADING, SMALL, Box, Drawing, Segment, stacked_bar
from widgets.shell.theme import CARD, IDLE, MID

if TYPE_CHECKING:
    from widgets.flash_attention.state import State

STRIP, SPACE, TOP, GAP = 9, 4, 46, 18
"""Pixels of Q, K and V beside the scores, between them and the scores, above them all, and between two parts."""
ROWS = 16
"""The most tiles of queries that are drawn."""
LEAST = 8
"""The least width of a tile."""
WHERE = 0.35
"""The place of the tile that is marked, as a part of those drawn."""
BAR = 32
"""Pixels of height of a way's bytes."""


def draw_ways(drawing: Drawing, state: State) -> float:
    """Draw the stored scores and the tiles side by side, with the bytes of both; return the y below."""
    full, beside = drawing.width - 2 * EDGE, drawing.width >= WIDE
    wide = min(170, 0.28 * full) if beside else (full - GAP) / 2
    bottom = max(_draw_stored(drawing, EDGE, wide, state), _draw_tiles(drawing, EDGE + wide + GAP, wide, state))
    left = EDGE + 2 * (wide + GAP)
    if beside:
        return max(bottom, _draw_bytes(drawing, Box(left, 0, drawing.width - EDGE - left, 0), state))
    return _draw_bytes(drawing, Box(EDGE, bottom + 12, full, 0), state)


def _draw_stored(drawing: Drawing, x: float, wide: float, state: State) -> float:
    side, full = _draw_operands(drawing, x, wide, "All scores in HBM"), state.length > state.longest
    drawing.rect(Box(x, side.y, STRIP, side.height), BLUE)
    drawing.rect(side, VERMILLION if full else ORANGE)
    drawing.line((side.x, side.y), (side.right, side.bottom), CARD, width=1.5)
    words = f"{tokens(state.length)} × {tokens(state.length)} scores"
    drawing.text((side.x + 8, side.bottom - 7), words, size=SMALL, colour="#000000")
    drawing.text((side.right - 8, side.y + 26), "masked half, too", size=SMALL, colour="#000000", anchor="end")
    notes = f"they overfill an {state.hardware.name}" if full else "scores out and in,", "weights out and in"
    return _write_trips(drawing, side, "moved 4 times", ORANGE, *notes)


def _draw_operands(drawing: Drawing, x: float, wide: float, title: str) -> Box:
    """Name Q on the left, and draw K and V above; return the square between them."""
    edge = STRIP + SPACE
    side = Box(x + edge, TOP + edge, wide - edge, wide - edge)
    drawing.text((x, 22), title, size=HEADING, bold=True)
    drawing.text((x, side.y - 6), "Q", size=SMALL, colour=BLUE, bold=True)
    drawing.rect(Box(side.x, side.y - edge, side.width, STRIP), SKY)
    drawing.text((side.x, side.y - edge - 5), "K, V", size=SMALL, colour=SKY, bold=True)
    return side


def _write_trips(drawing: Drawing, side: Box, words: str, colour: str, *notes: str) -> float:
    """Write what moves how often below a square, with notes; return the y of the last baseline."""
    drawing.text((side.x, side.bottom + 18), words, size=SMALL + 1, colour=colour, bold=True)
    for line, note in enumerate(notes):
        drawing.text((side.x, side.bottom + 35 + 16 * line), note, size=SMALL, colour=QUIET)
    return side.bottom + 51


def _draw_tiles(drawing: Drawing, x: float, wide: float, state: State) -> float:
    """Draw the scores that are never stored, a tile of queries with the keys and values that it reads in
    each line, and the scores that one tile has on the chip at the end of its line.
    """
    side = _draw_operands(drawing, x, wide, f"Tiles of {state.block_q} queries")
    drawing.rect(side, IDLE, stroke=MID, dash="4 3")
    pixels = side.width / state.length
    each = 2 ** max(0, math.ceil(math.log2(state.programs / ROWS)))
    every = list(flash_programs(state.length, state.block_q, state.block_k))
    programs = every[each - 1 :: each]
    pitch = side.height / len(programs)
    high = pitch - 3
    rows = [(side.y + (row + 0.5) * pitch, seen * pixels) for row, (_, seen) in enumerate(programs)]
    for left, lengths, colour in ((x, [STRIP] * len(rows), BLUE), (side.x, [wide for _, wide in rows], SKY)):
        path = "".join(f"M{left:g} {y:.1f}h{wide:.1f}" for (y, _), wide in zip(rows, lengths, strict=True))
        drawing.add(f'<path d="{path}" stroke="{colour}" stroke-width="{high:.3g}"/>')
    y, end = rows[int(WHERE * len(rows))]
    wide = min(max(state.block_k * pixels, LEAST), end)
    drawing.rect(Box(side.x + end - wide, y - high / 2, wide, high), ORANGE, stroke=INK)
    if side.x + end + 76 < side.right:
        for line, words in enumerate(("scores stay", "on the chip")):
            drawing.text((side.x + end + 6, y - 10 + 14 * line), words, size=SMALL)
    tip = f"A program keeps {state.block_q} queries and reads the keys and values up to them; all others do the same."
    drawing.rect(side, "transparent", tip=tip)
    if each > 1:
        words = f"1 in {each} is drawn"
        drawing.text((side.right - 6, side.y + 15), words, size=SMALL, colour=QUIET, anchor="end")
    words = f"{counted(state.programs, 'tile')} read{'s' * (state.programs == 1)} K, V"
    read = sum(seen for _, seen in every) / state.programs / state.length
    return _write_trips(drawing, side, words, SKY, "each up to its own query:", f"{percent(read)} on average")


def _draw_bytes(drawing: Drawing, at: Box, state: State) -> float:
    """Draw the bytes that both ways move, as bars on one scale, and mark where the first ends; return the y below."""
    drawing.heading((at.x, at.y + 22), "HBM traffic", "of one head")
    matrix, naive, tiled = state.naive.extra // 2, state.naive.moved, state.tiled.moved
    inputs = Segment("", naive - 4 * matrix, SKY, tip="Q, K, V and the output, once each")
    passes = 4 * [Segment("", matrix, ORANGE, tip=f"Scores and weights, both written and read: 4 × {size(matrix)}")]
    again = Segment("", tiled, SKY, tip="K and V, read by each tile of queries; Q and the output, once")
    first = Box(at.x, at.y + TOP + STRIP + SPACE, at.width, BAR)
    second = replace(first, y=first.bottom + 6)
    below = second.bottom + 28
    least, most = sorted((naive, tiled))
    _write_bytes(drawing, (at.x, first.y - 8), size(naive, least), "all scores", ORANGE, 17)
    stacked_bar(drawing, first, [inputs, *passes], most)
    with drawing.answer():
        stacked_bar(drawing, second, [again], most)
        limit, end = (at.x + moved / most * at.width for moved in (naive, tiled))
        drawing.hatch(replace(second, x=limit, width=max(end - limit, 0)), VERMILLION)
        drawing.line((limit, first.y), (limit, second.bottom + 4), colour=INK, width=1.5, dash="4 3")
        colour = GREEN if state.launches and state.less > 1 else VERMILLION
        _write_bytes(drawing, (at.x, below), size(tiled, least), f"tiles of {state.block_q}", colour, VALUE)
        words = compared(state.less).rsplit(maxsplit=1)[0] if state.launches else "no launch: shared memory full"
        drawing.text((at.x, below + 21), words, size=SMALL + 1, colour=colour, bold=True)
    return below + 26


def _write_bytes(drawing: Drawing, place: Point, moved: str, name: str, colour: str, large: float) -> None:
    """Write how many bytes one way moves, and its name."""
    drawing.text(place, moved, size=large, colour=colour, bold=True)
    after = place[0] + text_width(moved, large) * BOLD + 8
    drawing.text((after, place[1]), name, size=SMALL, bold=True)

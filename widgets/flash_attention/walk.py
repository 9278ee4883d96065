"""Draw the walk of lesson 03's picture frame by frame: the map of tiles, and the row of scores."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from minivllm_lab.drawing import QUIET, text_width
from minivllm_lab.palette import BLUE, INK, ORANGE, PALE, SKY, VERMILLION
from widgets.shell.plot import Axes, Scale, figures
from widgets.shell.svg import HEADING, SMALL, Box, Drawing
from widgets.shell.theme import BROKEN, CARD, MID, NOT_OURS

if TYPE_CHECKING:
    from widgets.flash_attention.row import Step
    from widgets.flash_attention.state import State

LIMITS = {"float16": math.log(65504), "float32": math.log(3.4028e38)}
"""Scores whose exponential is the largest number of each dtype."""
MOST_COLUMNS = 12
"""The most columns in the map of tiles; more tiles of keys share a column."""


def size(count: float) -> str:
    """Format a number of bytes."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}" if count < 1000 * unit else f"{count / unit:,.0f} {name}"
    return f"{count:.0f} B"


# ---- frames


def _frame_of(state: State, tile: int) -> int:
    """Return the frame in which this tile of the row (counted from 0) is read."""
    return len(state.bands) + tile


def _last(state: State) -> int:
    return _frame_of(state, len(state.steps) - 1)


def _keys_of(state: State, tile: int) -> int:
    """Return how many keys the last program has read by this tile of the row (counted from 0), in
    whole tiles.
    """
    share = (tile + 1) / len(state.steps)
    return min(state.length, math.ceil(state.length * share / state.block_k - 1e-9) * state.block_k)


def captions(state: State) -> list[str]:
    """Write a caption for each frame: first for each band, then for each tile of the last program."""
    total = state.bands[-1].read
    words = [f"Nothing is loaded yet. {state.programs:,} programs wait, one per tile of {state.block_q} queries."]
    for band in state.bands[:-1]:
        words.append(
            f"Programs up to {band.programs:,} are done: each loaded its Q once, and all earlier K and V again. "
            f"{size(band.read)} of {size(total)}."
        )
    for tile, step in enumerate(state.steps):
        keys = _keys_of(state, tile)
        read = total - 4 * state.head_dim * (state.length - keys)
        words.append(
            f"The last program: {keys:,} of {state.length:,} keys are read, {size(read)} of {size(total)}. "
            f"Its last row: {_what_happens(state, tile, step)}"
        )
    return words


def _what_happens(state: State, tile: int, step: Step) -> str:
    if step.wrong:
        return f"{', '.join(step.wrong)} wrong."
    if tile == 0:
        return f"m is {step.got.m:.2f}."
    if step.right_factor < 1:
        return f"m rises to {step.got.m:.2f}, so the old l and O shrink × {step.right_factor:.3f}."
    return "no new maximum, so the old sums stay."


def draw_tiles(drawing: Drawing, at: Box, state: State) -> None:
    """Draw the map of queries × keys: which program reads which tile of keys, how often, and the
    bytes loaded so far.
    """
    drawing.text((at.x, at.y + 18), "Who loads which K, V", size=14.5, bold=True)
    side = Box(at.x + 20, at.y + 46, at.width - 22, at.height - 90)
    columns = min(math.ceil(state.length / state.block_k), MOST_COLUMNS)
    drawing.rect(side, NOT_OURS, stroke=MID)
    _draw_reads(drawing, side, state, columns)
    last = _last(state)
    for index, band in enumerate(state.bands):
        before = state.bands[index - 1].queries if index else 0
        y, high = (side.y + part / state.length * side.height for part in (before, band.queries))
        seen = [c for c in range(columns) if c * state.length / columns < band.queries]
        _draw_band(drawing, Box(side.x, y, side.width, high - y), state, index, columns, len(seen))
        tip = f"Programs up to {band.programs:,}: each reads K and V up to its own queries (key {band.queries:,})."
        drawing.rect(Box(side.x, y, side.width, high - y), "transparent", tip=tip)
        frame = index + 1
        tip = f"Q of programs up to {band.programs:,}: loaded once."
        drawing.rect(Box(at.x + 2, y + 1, 12, max(high - y - 2, 1)), BLUE, at=f"{frame} {last}", tip=tip)
    drawing.line((side.x, side.y), (side.right, side.bottom), colour=INK, width=1.5)
    place = (side.right - 4, side.y + 16)
    drawing.text(place, "later keys: never read", size=SMALL, colour=QUIET, anchor="end")
    drawing.text((at.x + 8, side.y - 6), "Q", size=SMALL, colour=BLUE, anchor="middle", bold=True)
    _draw_loaded(drawing, Box(at.x, side.bottom + 8, at.width, 10), state)


def _draw_reads(drawing: Drawing, side: Box, state: State, columns: int) -> None:
    """Write above the map how often the first and the last tile of keys are read."""
    drawing.text((side.x, side.y - 6), f"read {state.programs:,} ×", size=SMALL, colour=QUIET)
    last = (math.ceil(state.length / state.block_k) - 1) * state.block_k
    times = state.programs - last // state.block_q
    drawing.text((side.right, side.y - 6), f"read {times:,} ×", size=SMALL, colour=QUIET, anchor="end")
    for column in range(columns):
        key = int(column * state.length / columns)
        tip = f"K and V from key {key:,} are read by {state.programs - key // state.block_q:,} programs."
        cell = Box(side.x + column * side.width / columns, side.y - 4, side.width / columns - 1, 4)
        drawing.rect(cell, SKY, tip=tip)


def _draw_band(drawing: Drawing, at: Box, state: State, index: int, columns: int, seen: int) -> None:
    """Draw the tiles that a band reads, highlighted while it reads them; the last band goes tile by
    tile.
    """
    last = _last(state)
    frame = index + 1
    wide = at.width / columns
    final = index == len(state.bands) - 1
    for column in range(seen):
        cell = Box(at.x + column * wide + 0.5, at.y + 0.5, wide - 1, at.height - 1)
        first = frame
        if final:  # the tile of the row with which the last program reaches this column
            first = _frame_of(state, min(column * len(state.steps) // columns, len(state.steps) - 1))
        drawing.rect(cell, ORANGE, at=f"{first} {first}")
        if first < last:
            drawing.rect(cell, SKY, at=f"{first + 1} {last}")


def _draw_loaded(drawing: Drawing, at: Box, state: State) -> None:
    """Draw the bytes loaded so far, band by band."""
    total = state.bands[-1].read
    last = _last(state)
    drawing.rect(at, NOT_OURS, stroke=MID)
    before = 0
    for index, band in enumerate(state.bands):
        part = Box(at.x + before / total * at.width, at.y, (band.read - before) / total * at.width, at.height)
        tip = f"{size(band.read)} loaded when programs up to {band.programs:,} are done."
        drawing.rect(part, SKY, stroke=CARD, at=f"{index + 1} {last}", tip=tip)
        before = band.read
    once = 4 * state.head_dim * state.length
    again = total - once // 2
    words = f"loaded: {size(total)}; K, V {figures(again / once)} times"
    drawing.text((at.x, at.bottom + 15), words, size=SMALL, colour=QUIET)


# ---- the row


def draw_row(drawing: Drawing, at: Box, state: State) -> None:
    """Draw the scores of one query, their running maximum, and m, l and O after each tile."""
    row = state.row
    drawing.text((at.x, at.y + 18), "One row's scores, tile by tile", size=HEADING, bold=True)
    after = at.x + text_width("One row's scores, tile by tile", HEADING) * 1.06 + 10
    note = f"layer {row.layer}, head {row.head}"
    if after + text_width(note, SMALL) <= at.right:
        drawing.text((after, at.y + 18), note, size=SMALL, colour=QUIET)
    box = Box(at.x + 72, at.y + 30, at.width - 74, at.height - 30 - 92)
    low, high = min(0.0, *row.scores), max(0.1, *row.scores)
    axes = Axes(drawing, box, Scale(0, len(row.scores)), Scale(low * 1.1, high * 1.18))
    axes.frame("", "", x_ticks=[], y_format=lambda value: f"{value:.3g}", y_ticks=axes.y.ticks(4))
    _draw_bars(axes, state)
    passed = [dtype for dtype, limit in LIMITS.items() if limit < axes.y.high]
    for dtype in passed:
        words = f"exp overflows {dtype} above" if dtype == passed[-1] else ""
        axes.mark_y(LIMITS[dtype], words, QUIET, dash="2 3")
    _draw_maximum(axes, state)
    _draw_numbers(drawing, at, box, state)


def _draw_bars(axes: Axes, state: State) -> None:
    row = state.row
    last = _last(state)
    wide = axes.box.width / len(row.scores)
    zero = axes.at(0, 0)[1]
    for tile, step in enumerate(state.steps):
        frame = _frame_of(state, tile)
        for index in range(step.first, step.end):
            x, top = axes.at(index, row.scores[index])
            bar = Box(x + 1, min(top, zero), wide - 2, max(abs(zero - top), 1))
            axes.drawing.rect(bar, PALE, tip=f"{row.tokens[index]!r}: score {row.scores[index]:.2f}")
            axes.drawing.rect(bar, ORANGE, at=f"{frame} {frame}")
            if frame < last:
                axes.drawing.rect(bar, SKY, at=f"{frame + 1} {last}")
            axes.drawing.rect(bar, "transparent", tip=f"{row.tokens[index]!r}: score {row.scores[index]:.2f}")


def _draw_maximum(axes: Axes, state: State) -> None:
    """Draw the running maximum as a staircase that grows with the frames."""
    last = _last(state)
    before = -math.inf
    for tile, step in enumerate(state.steps):
        if not math.isfinite(step.got.m):
            continue
        left, right = axes.at(step.first, step.got.m), axes.at(step.end, step.got.m)
        start = [axes.at(step.first, before)] if math.isfinite(before) else []
        tip = f"m after tile {tile + 1}: {step.got.m:.3f}"
        axes.drawing.polyline(
            [*start, left, right], VERMILLION, width=2, at=f"{_frame_of(state, tile)} {last}", tip=tip
        )
        before = step.got.m


def _draw_numbers(drawing: Drawing, at: Box, box: Box, state: State) -> None:
    """Write m, the factor of the old sums, l and O / l below each tile."""
    names = (("max m", VERMILLION), ("old sums ×", QUIET), ("sum l", BLUE), ("O / l", BLUE))
    for line, (name, colour) in enumerate(names):
        place = (box.x - 7, box.bottom + 17 + 16 * line)
        drawing.text(place, name, size=SMALL, colour=colour, anchor="end", bold=colour != QUIET)
    last = _last(state)
    for tile, step in enumerate(state.steps):
        left = box.x + step.first / len(state.row.scores) * box.width
        room = (step.end - step.first) / len(state.row.scores) * box.width
        with drawing.layer(at=f"{_frame_of(state, tile)} {last}"):
            if step.wrong:
                drawing.rect(Box(left, box.bottom + 4, room, 66), BROKEN, tip=_wrong_tip(tile, step))
            _draw_column(drawing, left + room / 2, box.bottom + 17, room, step)
    right, got = state.steps[-1].right.output[0], state.steps[-1].got.output[0]
    words = f"softmax of the whole row: {right:+.3f}"
    if state.own:
        words = f"{words}; yours: {_short(got, 60, '+')} {'✕' if state.steps[-1].wrong else '✓'}"
    colour = VERMILLION if state.steps[-1].wrong else QUIET
    drawing.text((at.right, box.bottom + 86), words, size=SMALL, colour=colour, anchor="end")


def _draw_column(drawing: Drawing, middle: float, y: float, room: float, step: Step) -> None:
    rows = (
        (step.got.m, "", VERMILLION, "m" in step.wrong),
        (step.factor, "", QUIET, False),
        (step.got.l, "", BLUE, "l" in step.wrong),
        (step.got.output[0], "+", BLUE, "O" in step.wrong or "l" in step.wrong),
    )
    for line, (value, sign, colour, wrong) in enumerate(rows):
        mark = "✕" if wrong and room > 44 else ""
        words = _short(value, room - 2 - 12 * bool(mark), sign if room > 40 else "") + mark
        shown = VERMILLION if wrong else colour
        drawing.text((middle, y + 16 * line), words, size=SMALL, colour=shown, anchor="middle", bold=wrong)


def _wrong_tip(tile: int, step: Step) -> str:
    got, right = step.got, step.right
    return (
        f"Tile {tile + 1}, yours: m {got.m:.3f}, l {got.l:.3f}, O {got.o[0]:+.3f}. "
        f"Right: m {right.m:.3f}, l {right.l:.3f}, O {right.o[0]:+.3f}; the old sums × {step.right_factor:.3f}."
    )


def _short(value: float, room: float, sign: str = "") -> str:
    """Format a value with up to 3 decimals, as many as fit into `room` pixels."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    for digits in (3, 2, 1):
        words = f"{value:{sign}.{digits}f}"
        if text_width(words, SMALL) <= room:
            return words
    return f"{value:{sign}.0f}" if abs(value) < 1e4 else f"{value:.0e}"

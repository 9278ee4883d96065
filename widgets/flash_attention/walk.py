"""Draw one row of scores frame by frame, tile by tile."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from minivllm_lab.drawing import QUIET, text_width
from minivllm_lab.palette import BLUE, ORANGE, PALE, SKY, VERMILLION
from widgets.shell.plot import Axes, Scale
from widgets.shell.svg import HEADING, SMALL, Box, Drawing
from widgets.shell.theme import BROKEN

if TYPE_CHECKING:
    from widgets.flash_attention.row import Step
    from widgets.flash_attention.state import State

LIMITS = {"float16": math.log(65504), "float32": math.log(3.4028e38)}
"""Scores whose exponential is the largest number of each dtype."""


def size(count: float) -> str:
    """Format a number of bytes."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}" if count < 1000 * unit else f"{count / unit:,.0f} {name}"
    return f"{count:.0f} B"


# ---- frames


def _last(state: State) -> int:
    """Return the last frame; frame k is tile k of the row, and frame 0 is before the first."""
    return len(state.steps)


def captions(state: State) -> list[str]:
    """Write a caption for each frame: before the first tile of keys, and after each."""
    words = ["No key is read yet: m is −∞, and the sums l and O are 0."]
    for tile, step in enumerate(state.steps):
        words.append(f"{step.end} of {len(state.row.scores)} keys are read: {_what_happens(state, tile, step)}")
    return words


def _what_happens(state: State, tile: int, step: Step) -> str:
    if step.wrong:
        return f"{', '.join(step.wrong)} wrong."
    if tile == 0:
        return f"m is {step.got.m:.2f}."
    if step.right_factor < 1:
        return f"m rises to {step.got.m:.2f}, so the old l and O shrink × {step.right_factor:.3f}."
    return "no new maximum, so the old sums stay."


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
    for frame, step in enumerate(state.steps, start=1):
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
        axes.drawing.polyline([*start, left, right], VERMILLION, width=2, at=f"{tile + 1} {last}", tip=tip)
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
        if room < 26:  # room for every other column, up to the last
            if tile % 2 == len(state.steps) % 2:
                continue
            left, room = left - room / 2, 2 * room
        with drawing.layer(at=f"{tile + 1} {last}"):
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

"""Draw one row of scores frame by frame, tile by tile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from minivllm_lab.pictures.drawing import QUIET, text_width
from minivllm_lab.pictures.palette import BLUE, GREEN, INK, PALE, SKY, VERMILLION
from widgets.shell.plot import Axes, Scale, figures
from widgets.shell.svg import BOLD, HEADING, SMALL, Box, Drawing, Segment, legend
from widgets.shell.theme import BROKEN

if TYPE_CHECKING:
    from widgets.flash_attention.row import Step
    from widgets.flash_attention.state import State

EDGE, NAMES = 14, 56
"""Pixels around the picture, and left of the rows for their names."""
UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def size(count: float, like: float = 0) -> str:
    """Format a number of bytes, in the unit of `like` if there is one."""
    unit, name = next(pair for pair in UNITS if (like or count) >= pair[0])
    return f"{figures(count / unit)} {name}"


# ---- frames; frame k is tile k of the row, and frame 0 is before the first


def captions(state: State) -> list[str]:
    """Write a caption for each frame: before the first tile of keys, and after each."""
    first = "No key is read yet: m is −∞, and sum and output are 0."
    return [first, *(_caption(state, tile, step) for tile, step in enumerate(state.steps))]


def _caption(state: State, tile: int, step: Step) -> str:
    read = f"{step.end} of {len(state.row.scores)} keys are read:"
    if step.wrong:
        return f"{read} {', '.join(step.wrong)} wrong."
    if tile == 0:
        return f"{read} m is {step.got.m:.2f}."
    if step.right_factor < 1:
        return f"{read} m rises to {step.got.m:.2f}, so the old sum and output shrink × {step.right_factor:.3f}."
    return f"{read} no new maximum, so the old sum stays."


# ---- the row


def draw_row(drawing: Drawing, state: State) -> None:
    """Draw the scores of one query with their running maximum, and below each tile the sum, in which
    what was summed before shrinks where the maximum rises.
    """
    scores = state.row.scores
    drawing.text((EDGE, 18), f"One query's scores, {state.steps[0].end} keys a tile", size=HEADING, bold=True)
    box = Box(EDGE + NAMES, 28, drawing.width - 2 * EDGE - NAMES, 132)
    low, high = min(0.0, *scores), max(0.1, *scores)
    axes = Axes(drawing, box, Scale(0, len(scores)), Scale(low * 1.1, high * 1.2))
    _draw_bars(axes, state)
    _draw_maximum(axes, state)
    keys = [("old sum", INK, "3 2"), ("shrunk", BLUE, ""), ("added: exp(score − m)", SKY, "")]
    parts = [Segment(name, 0, colour, dash=dash) for name, colour, dash in keys]
    y = legend(drawing, (EDGE, box.bottom + 24), parts, drawing.width - 2 * EDGE)
    most = max((step.got.l for step in state.steps if math.isfinite(step.got.l)), default=1.0)
    sums = Box(box.x, y, box.width, 90)
    _draw_sums(Axes(drawing, sums, axes.x, Scale(0, 1.25 * most)), state)
    drawing.height = sums.bottom + 73


def _draw_name(axes: Axes, y: float, name: str, colour: str) -> None:
    axes.drawing.text((axes.box.x - 8, y), name, size=SMALL, colour=colour, anchor="end", bold=True)


def _draw_bars(axes: Axes, state: State) -> None:
    row = state.row
    last = len(state.steps)
    wide = axes.box.width / len(row.scores)
    zero = axes.at(0, 0)[1]
    _draw_name(axes, zero, "scores", QUIET)
    axes.drawing.line((axes.box.x, zero), (axes.box.right, zero), colour=QUIET)
    for frame, step in enumerate(state.steps, start=1):
        for index in range(step.first, step.end):
            x, top = axes.at(index, row.scores[index])
            middle = axes.at((step.first + step.end) / 2, 0)[0]
            x += (middle - x - wide / 2) * 0.1  # closer to their tile's middle
            bar = Box(x + 1, min(top, zero), wide - 2, max(abs(zero - top), 1))
            for colour, at in ((PALE, ""), (SKY, f"{frame} {last}")):
                axes.drawing.rect(bar, colour, tip=f"{row.tokens[index]!r}: score {row.scores[index]:.2f}", at=at)


def _draw_maximum(axes: Axes, state: State) -> None:
    """Draw the running maximum as a staircase that grows with the frames."""
    last = len(state.steps)
    before = -math.inf
    for tile, step in enumerate(state.steps):
        if not math.isfinite(step.got.m):
            continue
        (x, y), right = axes.at(step.first, step.got.m), axes.at(step.end, step.got.m)
        start = [axes.at(step.first, before)] if math.isfinite(before) else []
        tip = f"m after tile {tile + 1}: {step.got.m:.3f}"
        with axes.drawing.layer(at=f"{tile + 1} {last}"):
            axes.drawing.polyline([*start, (x, y), right], VERMILLION, width=2.5, tip=tip)
            words = f"{step.got.m:.2f}"
            if step.got.m > before and text_width(words, SMALL) * BOLD + 3 < right[0] - x:
                axes.drawing.text((x + 2, y - 5), words, size=SMALL, colour=VERMILLION, bold=True, halo=True)
        if tile == 0:
            _draw_name(axes, y + 4, "max m", VERMILLION)
        before = step.got.m


def _draw_sums(axes: Axes, state: State) -> None:
    """Draw the sum after each tile: the old part, which may have shrunk, and the tile's own."""
    drawing, box = axes.drawing, axes.box
    _draw_name(axes, box.bottom + 17, "sum", BLUE)
    _draw_name(axes, box.bottom + 37, "output", INK)
    _draw_name(axes, box.bottom + 51, "so far", INK)
    drawing.text((box.x - 8, box.bottom + 65), "1 number", size=SMALL, colour=QUIET, anchor="end")
    drawing.line((box.x, box.bottom), (box.right, box.bottom), colour=QUIET)
    before, last = 0.0, len(state.steps)
    steepest = min(range(1, last), key=lambda tile: state.steps[tile].right_factor)
    for tile, step in enumerate(state.steps):
        (left, bottom), (right, _) = axes.at(step.first, 0), axes.at(step.end, 0)
        with drawing.layer(at=f"{tile + 1} {last}"):
            if step.wrong:
                drawing.rect(Box(left, box.y, right - left, box.height + 22), BROKEN)
            tops = [axes.at(0, value)[1] for value in (before, step.factor * before, step.got.l)]
            if all(map(math.isfinite, tops)):
                _draw_sum(drawing, Box(left, bottom, right - left, 0), tops, step, tile)
            if tile == steepest and step.factor < 0.995 and not step.wrong:
                words = f"old sum × {step.factor:.2f}"
                room = text_width(words, SMALL) * BOLD / 2
                middle = min(max((left + right) / 2, box.x + room), box.right - room)
                drawing.text((middle, tops[0] - 6), words, size=SMALL, colour=VERMILLION, anchor="middle", bold=True)
            every = math.ceil(26 / (right - left))  # numbers for as many columns as have room, and the last
            if (len(state.steps) - 1 - tile) % every == 0:
                _draw_column(drawing, (left + right) / 2, bottom + 17, every * (right - left), step, state)
        before = step.got.l


def _draw_sum(drawing: Drawing, at: Box, tops: Sequence[float], step: Step, tile: int) -> None:
    """Draw the old part, the tile's own part on it, and a dashed outline of the old part as it was."""
    old, shrunk, new = tops
    x, wide = at.x + at.width / 4, at.width / 2
    tip = f"sum after tile {tile + 1}: {step.got.l:.3f}"
    drawing.rect(Box(x, shrunk, wide, at.y - shrunk), BLUE, tip=f"{tip}; the old part × {step.factor:.3f}")
    drawing.rect(Box(x, new, wide, shrunk - new), SKY, tip=f"{tip}; the tile's own part")
    if step.factor < 0.995 and tile:
        drawing.rect(Box(x, old, wide, at.y - old), "none", stroke=INK, dash="3 2")


def _draw_column(drawing: Drawing, middle: float, y: float, room: float, step: Step, state: State) -> None:
    """Write the sum and the output after a tile, and what is wrong with them; after the last, also
    write what attention over the whole row at once gives.
    """
    last = step is state.steps[-1]
    rows = [(step.got.l, "l", 0, BLUE, ""), (step.got.output[0], "O", 20, GREEN if last else INK, "+")]
    if last:
        rows += [(step.right.output[0], "", 42, GREEN, "+")]
        drawing.text((middle - 30, y + 42), "the whole row at once", size=SMALL, colour=GREEN, anchor="end", bold=True)
        if not step.wrong:  # both are the same
            drawing.rect(Box(middle - 22, y + 6, 44, 42), "none", stroke=GREEN, radius=6)
    for value, name, down, colour, sign in rows:
        wrong = name in step.wrong
        words = _short(value, room - 2 - 12 * wrong, sign) + "✕" * wrong
        colour = VERMILLION if wrong else colour
        drawing.text((middle, y + down), words, size=SMALL, colour=colour, anchor="middle", bold=wrong or last)


def _short(value: float, room: float, sign: str = "") -> str:
    """Format a value with up to 2 decimals, as many as fit into `room` pixels."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    decimals = (f"{value:{sign}.{digits}f}" for digits in (2, 1))
    whole = f"{value:{sign}.0f}" if abs(value) < 1e4 else f"{value:.0e}"
    return next((words for words in decimals if text_width(words, SMALL) <= room), whole).replace("-", "−")

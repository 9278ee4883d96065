"""Draw lesson 03's pictures: stored scores beside tiles, and bytes by queries per tile; and one row,
tile by tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from minivllm_lab.flash_attention.attention_traffic import KIB
from minivllm_lab.pictures.drawing import text_width
from minivllm_lab.pictures.palette import GREY, ORANGE, SKY, VERMILLION
from widgets.flash_attention.challenges import NAIVE, compared
from widgets.flash_attention.scores import draw_ways
from widgets.flash_attention.walk import EDGE, captions, draw_row, size
from widgets.shell.plot import WIDE, Axes, Scale, hidden_note
from widgets.shell.svg import SMALL, Box, Drawing

if TYPE_CHECKING:
    from widgets.flash_attention.state import State

HEIGHT = 470
"""The height of a wide picture."""
TOO_SMALL = "too small"
"""Tiles that read K and V so often that stored scores move fewer bytes."""


def figure(state: State, width: float = 640, pinned: State | None = None) -> str:
    """Draw stored scores beside tiles, and bytes by queries per tile."""
    moved, naive = size(state.tiled.moved), size(state.naive.moved)
    words = f"Tiles of {state.block_q} queries × {state.block_k} keys move {moved} per head; {NAIVE} move {naive}"
    drawing = Drawing(width, 0, "Attention in tiles", words)
    top = draw_ways(drawing, state) + 40
    box = Box(EDGE + 52, top, width - 2 * EDGE - 56, HEIGHT - 42 - top if width >= WIDE else 150)
    _draw_sweep(drawing, box, state, pinned)
    drawing.height = box.bottom + 42
    return drawing.render()


def detail(state: State, width: float = 640, pinned: State | None = None) -> str:
    """Draw one row of scores, tile by tile."""
    drawing = Drawing(width, 0, "Tile by tile", captions(state)[-1])
    drawing.play(captions(state))
    draw_row(drawing, state)
    return drawing.render()


# ---- the swept axis


def _draw_sweep(drawing: Drawing, box: Box, state: State, pinned: State | None) -> None:
    moved = [traffic.moved for traffic in state.by_queries]
    before = [traffic.moved for traffic in pinned.by_queries] if pinned else []
    curves = [*moved, *before, state.naive.moved]
    y = Scale(min(curves) * 0.7, max(curves) * 1.7, log=True)  # room for words above and below
    axes = Axes(drawing, box, Scale(state.queries[0] / 1.4, state.queries[-1] * 1.4, log=True), y)
    count, ticks = "{:,.0f}".format, axes.x.doublings()[::2]
    axes.frame("queries per tile", "", y_format=size, y_ticks=y.doublings(99)[::-2], x_ticks=ticks, x_format=count)
    _draw_too_large(axes, state)
    with drawing.answer():
        if state.queries[0] < state.few < state.launched:  # otherwise the whole axis is broken already
            axes.shade(None, state.few, TOO_SMALL)
            _name_zone(axes, axes.x.low, state.few, TOO_SMALL)
        axes.mark_y(state.naive.moved, "all scores", ORANGE)
    if pinned:
        axes.pinned(pinned.queries, before, pinned.block_q)
    with drawing.answer():
        _draw_curve(axes, state, moved)
    hidden_note(drawing, box)
    axes.here(state.block_q, "block_q")


def _draw_too_large(axes: Axes, state: State) -> None:
    """Shade where registers spill, and where the kernel does not launch."""
    first, last = state.queries[0], state.queries[-1]
    kept, launched = (min(max(most, first), last) for most in (state.kept, state.launched))
    if kept < launched:
        tip = f"Above {state.kept} queries, O and the scores outgrow the registers; bytes of spills are not counted."
        axes.tint(kept, launched, "", GREY, tip)
    if launched < last:
        axes.shade(launched, None, "no launch: shared memory full")
    if min(kept, launched) < last:
        _name_zone(axes, min(kept, launched), axes.x.high, "too large for the chip")


def _name_zone(axes: Axes, low: float, high: float, words: str) -> None:
    """Write the name of a part of the axis above it."""
    left, right = (axes.at(edge, axes.y.low)[0] for edge in (low, high))
    middle = min((left + right) / 2, axes.drawing.width - EDGE - text_width(words, SMALL) / 2)
    axes.drawing.text((middle, axes.box.y - 6), words, size=SMALL, colour=VERMILLION, anchor="middle")


def _draw_curve(axes: Axes, state: State, moved: Sequence[int]) -> None:
    """Draw the bytes moved, up to the last tile that launches."""
    end = sum(queries <= state.launched for queries in state.queries)
    axes.line(state.queries[:end], moved[:end], SKY, width=3, tips=[_tip(state, index) for index in range(end)])
    if end:
        axes.name(state.queries[2:5], moved[2:5], "tiles", SKY)
    if state.launches:
        axes.points([state.block_q], [state.tiled.moved], SKY, radius=5.5)


def _tip(state: State, index: int) -> str:
    queries, traffic = state.queries[index], state.by_queries[index]
    words = (
        f"{queries:,} queries per tile: {size(traffic.moved)}, {compared(state.naive.moved / traffic.moved)} {NAIVE}; "
        f"{traffic.intensity:.0f} operations per byte, {state.launched_at(queries) / KIB:.0f} KiB of shared memory"
    )
    return f"{words}; registers spill." if queries > state.kept else f"{words}."

"""Draw lesson 03's pictures: stored scores beside tiles, and bytes by queries per tile; and one row,
tile by tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from minivllm_lab.pictures.palette import INK, ORANGE, SKY
from widgets.flash_attention.challenges import NAIVE
from widgets.flash_attention.scores import draw_ways
from widgets.flash_attention.walk import EDGE, captions, draw_row, size
from widgets.shell.plot import WIDE, Axes, Scale, hidden_note
from widgets.shell.svg import SMALL, Box, Drawing

if TYPE_CHECKING:
    from widgets.flash_attention.state import State

HEIGHT = 470
"""The height of a wide picture."""


def figure(state: State, width: float = 640, pinned: State | None = None) -> str:
    """Draw stored scores beside tiles, and bytes by queries per tile."""
    least = min(state.tiled.moved, state.naive.moved)
    moved, naive = size(state.tiled.moved, least), size(state.naive.moved, least)
    words = f"Tiles of {state.block_q} queries × {state.block_k} keys move {moved} per head; {NAIVE} move {naive}"
    drawing = Drawing(width, 0, "Attention in tiles", words)
    top = draw_ways(drawing, state) + 38
    box = Box(EDGE + 52, top, width - 2 * EDGE - 52, HEIGHT - 42 - top if width >= WIDE else 150)
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
    moves = Scale(min(curves) * 0.7, max(curves) * 1.7, log=True)  # room for words above and below
    axes = Axes(drawing, box, Scale(state.queries[0] / 1.4, state.queries[-1] * 1.8, log=True), moves)
    count, xs, ys = "{:,.0f}".format, axes.x.doublings()[::2], moves.doublings(99)[::-2]
    axes.frame("queries per tile", "HBM traffic", y_format=size, y_ticks=ys, x_ticks=xs, x_format=count)
    if state.launched < state.queries[-1]:
        axes.broken(state.launched, None, "too large for the chip")
    with drawing.answer():
        if state.queries[0] < state.few < state.launched:  # otherwise the whole axis is broken already
            axes.broken(None, state.few, "too small")
            x, y = axes.at(state.few, state.naive.moved)
            drawing.text((x + 7, y - 6), f"{state.few:.0f}", size=SMALL, bold=True)
            drawing.last(lambda: drawing.circle((x, y), 4.5, INK))
        axes.mark_y(state.naive.moved, "all scores", ORANGE)
    if pinned:
        axes.pinned(pinned.queries, before, pinned.block_q)
    with drawing.answer():
        _draw_curve(axes, state, moved)
    hidden_note(drawing, box)
    axes.here(state.block_q, "block_q", "registers spill" * (state.kept < state.block_q <= state.launched))


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
    words = f"{queries:,} queries per tile: {size(traffic.moved)}, {traffic.intensity:.0f} operations per byte"
    return f"{words}; registers spill." if queries > state.kept else f"{words}."

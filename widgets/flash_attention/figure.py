"""Draw lesson 03's pictures: stored scores beside tiles, and bytes by queries per tile; and one row,
tile by tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from minivllm_lab.flash_attention.attention_traffic import KIB
from minivllm_lab.pictures.drawing import wrapped
from minivllm_lab.pictures.palette import GREEN, GREY, ORANGE, SKY, VERMILLION
from widgets.flash_attention.challenges import NAIVE, compared
from widgets.flash_attention.scores import draw_ways
from widgets.flash_attention.walk import EDGE, captions, draw_row, size
from widgets.shell.plot import WIDE, Axes, Scale, hidden_note
from widgets.shell.svg import SMALL, Box, Drawing, text_box

if TYPE_CHECKING:
    from widgets.flash_attention.state import State

HEIGHT = 470
"""The height of a wide picture."""
OWN_TILES = {
    "H100": {64: (192, 128), 128: (128, 128), 256: (128, 80)},
    "A100-80": {64: (128, 112), 128: (128, 64), 256: (128, 96)},
    "RTX 4090": {64: (128, 112), 128: (128, 128), 256: (128, 64)},
}
"""Queries and keys of FlashAttention's tiles (causal, 16 bits) by GPU and head dim, from
hopper/tile_size.h.
"""
SAME_CHIP = {"H200": "H100", "L4": "RTX 4090"}


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
    _draw_limits(axes, state)
    with drawing.answer():
        if state.queries[0] < state.few < state.launched:  # otherwise the whole axis is broken already
            _draw_zone(axes, None, state.few, "K, V read too often")
        axes.mark_y(state.naive.moved, "all scores", ORANGE)
    if pinned:
        axes.pinned(pinned.queries, before, pinned.block_q)
    with drawing.answer():
        _draw_curve(axes, state, moved)
    hidden_note(drawing, box)
    axes.here(state.block_q, "block_q")


def _draw_limits(axes: Axes, state: State) -> None:
    """Shade where registers spill, and where the kernel does not launch."""
    first, last = state.queries[0], state.queries[-1]
    kept, launched = max(state.kept, first), max(state.launched, first)
    if launched < last:
        _draw_zone(axes, launched, None, "no launch")
    if kept < min(launched, last):
        tip = f"Above {state.kept} queries, O and the scores outgrow the registers; bytes of spills are not counted."
        _draw_zone(axes, kept, min(launched, last), "registers spill", tip)


def _draw_zone(axes: Axes, low: float | None, high: float | None, words: str, tip: str = "") -> None:
    """Shade a part of the axis that breaks or, with a `tip`, runs at a loss, and write its name above it unless
    another name stands there.
    """
    if tip:
        axes.tint(low, high, "", GREY, tip)
    else:
        axes.shade(low, high, words)
    left, right = (axes.at(edge, axes.y.low)[0] for edge in (low or axes.x.low, high or axes.x.high))
    lines, middle = wrapped(words, right - left + 6, SMALL), (left + right) / 2
    places = [(middle, axes.box.y - 6 - 14 * back) for back in reversed(range(len(lines)))]
    boxes = [text_box(place, line, SMALL, "middle") for place, line in zip(places, lines, strict=True)]
    if not any(box.overlaps(other) for box in boxes for other in axes.drawing.words):
        for place, line in zip(places, lines, strict=True):
            axes.drawing.text(place, line, size=SMALL, colour=GREY if tip else VERMILLION, anchor="middle")


def _draw_curve(axes: Axes, state: State, moved: Sequence[int]) -> None:
    """Draw the bytes moved, up to the last tile that launches."""
    end = sum(queries <= state.launched for queries in state.queries)
    axes.line(state.queries[:end], moved[:end], SKY, width=3, tips=[_tip(state, index) for index in range(end)])
    _draw_own_tile(axes, state)
    if end:
        axes.name(state.queries[2:5], moved[2:5], "tiles", SKY)
    if state.launches:
        axes.points([state.block_q], [state.tiled.moved], SKY, radius=5.5)


def _draw_own_tile(axes: Axes, state: State) -> None:
    """Mark the tile that FlashAttention itself uses."""
    gpu = SAME_CHIP.get(state.hardware.name, state.hardware.name)
    block_q, block_k = OWN_TILES.get(gpu, {}).get(state.head_dim, (0, 0))
    if block_q in state.queries:
        tip = f"FlashAttention's own tile here: {block_q} queries × {block_k} keys (hopper/tile_size.h)."
        moved = state.by_queries[state.queries.index(block_q)].moved
        axes.points([block_q], [moved], GREEN, tips=[tip])
        x, y = axes.at(block_q, moved)
        axes.label((x - 14, y + 4), "FlashAttention", GREEN, bold=False)


def _tip(state: State, index: int) -> str:
    queries, traffic = state.queries[index], state.by_queries[index]
    words = (
        f"{queries:,} queries per tile: {size(traffic.moved)}, {compared(state.naive.moved / traffic.moved)} {NAIVE}; "
        f"{traffic.intensity:.0f} operations per byte, {state.launched_at(queries) / KIB:.0f} KiB of shared memory"
    )
    return f"{words}; registers spill." if queries > state.kept else f"{words}."

"""Draw lesson 03's pictures: the tile, bytes by queries per tile and what the chip holds; and one
row, tile by tile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from minivllm_lab.drawing import text_width
from minivllm_lab.flash_attention.attention_traffic import KIB, REGISTER_FILE
from minivllm_lab.palette import BLUE, GREEN, INK, ORANGE, PALE, PURPLE, SKY, VERMILLION
from widgets.flash_attention.challenges import NAIVE, compared
from widgets.flash_attention.scores import draw_scores
from widgets.flash_attention.walk import captions, draw_row, size
from widgets.shell.plot import ROW, WIDE, Axes, Scale, hidden_note
from widgets.shell.svg import BOLD, HEADING, SMALL, Box, Drawing, Segment, legend, stacked_bar, without_room
from widgets.shell.theme import CARD, MID, NOT_OURS

if TYPE_CHECKING:
    from widgets.flash_attention.state import State

EDGE, GAP = 14, 22
PART_NAMES = {"m, l": "max, sum", "others": "other"}
PART_COLOURS = {"Q": BLUE, "K, V": SKY, "scores": ORANGE, "O": GREEN, "m, l": PURPLE, "others": PALE}
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
    """Draw the tile in the matrix of scores, bytes by queries per tile, and what the chip holds."""
    moved, naive = size(state.tiled.moved), size(state.naive.moved)
    words = f"Tiles of {state.block_q} queries × {state.block_k} keys move {moved} per head; {NAIVE} move {naive}"
    full = width - 2 * EDGE
    beside = width >= WIDE
    scores = Box(EDGE, 0, min(round(full * (0.37 if beside else 0.65)), 260), 0)
    drawing = Drawing(width, 0, "Attention in tiles", words)
    bottom = draw_scores(drawing, scores, state)
    sweep = Box(EDGE, bottom, full, 300)
    if beside:
        sweep = Box(scores.right + GAP, 0, full - scores.width - GAP, bottom)
    _draw_sweep(drawing, sweep, state, pinned)
    y = sweep.bottom + 8
    y = _draw_bar(drawing, y, "Shared memory", state.shared, state.chip.shared_memory, "not launched")
    drawing.height = 2 + _draw_bar(drawing, y, "Registers", state.registers, REGISTER_FILE, "spilled")
    return drawing.render()


def detail(state: State, width: float = 640, pinned: State | None = None) -> str:
    """Draw one row of scores, tile by tile."""
    drawing = Drawing(width, 280, "Tile by tile", captions(state)[-1])
    drawing.play(captions(state))
    draw_row(drawing, Box(EDGE, 0, width - 2 * EDGE, 274), state)
    return drawing.render()


# ---- the swept axis


def _draw_sweep(drawing: Drawing, at: Box, state: State, pinned: State | None) -> None:
    drawing.text((at.x, at.y + 22), "Bytes moved per head", size=HEADING, bold=True)
    box = Box(at.x + 56, at.y + 34, at.width - 60, at.height - 76)
    moved = [traffic.moved for traffic in state.by_queries]
    before = [traffic.moved for traffic in pinned.by_queries] if pinned else []
    curves = [*moved, *before, state.naive.moved]
    y = Scale(min(curves) * 0.13, max(curves) * 14, log=True)  # room for words above and below
    axes = Axes(drawing, box, Scale(state.queries[0] / 1.4, state.queries[-1] * 1.4, log=True), y)
    level = axes.at(1, state.naive.moved)[1]
    seen = [tick for tick in y.doublings(5) if abs(axes.at(1, tick)[1] - level) >= 14]
    count, ticks = "{:,.0f}".format, axes.x.doublings()[::2]
    axes.frame("queries per tile", "", y_format=size, y_ticks=seen, x_ticks=ticks, x_format=count)
    drawing.text((box.x - 7, level + 4), size(state.naive.moved), size=SMALL, colour=VERMILLION, anchor="end")
    with drawing.answer():
        _draw_limits(axes, state)
    if state.few < state.launched:  # otherwise the whole axis is broken already
        axes.broken(None, state.few, "K, V read too often")
    axes.mark_y(state.naive.moved, "scores in HBM", VERMILLION)
    ridge = state.tiled.flops / state.ridge
    axes.mark_y(ridge, "", PURPLE, dash="6 3")
    free = state.few, max(state.few, min(state.kept, state.launched))
    axes.label(axes.at(math.sqrt(math.prod(free)), ridge), "↓ compute-bound", PURPLE, bold=False)
    tip = f"With at most {size(ridge)}, the GPU computes for longer than its memory delivers (without help from L2)."
    drawing.rect(Box(box.x, axes.at(1, ridge)[1] - 5, box.width, 10), "transparent", tip=tip)
    if pinned:
        axes.pinned(pinned.queries, before, pinned.block_q)
    _draw_curve(axes, state, moved)
    axes.here(state.block_q, "block_q")
    words, (x, height) = size(state.tiled.moved), axes.at(state.block_q, state.tiled.moved)
    edge = axes.at(state.few, y.low)[0]
    beyond = x < edge < x + 20 + text_width(words, SMALL) * BOLD  # no room between the handle and the edge
    if state.launches:
        axes.label((edge, height - ROW - 6) if beyond else (x, height), f"← {words}" if beyond else words)


def _draw_limits(axes: Axes, state: State) -> None:
    """Shade where registers spill, and where the kernel does not launch."""
    if state.launched < state.queries[-1]:
        first, words = max(state.launched, state.queries[0]), "shared memory full"
        axes.shade(first, None, words)
        _write_inside(axes, first, axes.x.high, words, VERMILLION)
    left, right = max(state.kept, state.queries[0]), min(state.launched, state.queries[-1])
    if left < right:
        tip = f"Above {state.kept} queries, O and the scores outgrow the registers, so the compiler spills (modelled)."
        axes.tint(left, right, "", ORANGE, f"{tip} The bytes of the spills are not counted here.")
        _write_inside(axes, left, right, "registers full: spills", ORANGE)


def _write_inside(axes: Axes, low: float, high: float, words: str, colour: str) -> None:
    """Write words into a narrow region: a word a line or, if that is too wide, turned; or beside it."""
    left, right = (axes.at(value, axes.y.low)[0] for value in (low, high))
    middle, top, lines = (left + right) / 2, axes.box.y + 6, words.split()
    level = max(text_width(line, SMALL) for line in lines) < right - left - 2

    def draw() -> None:
        for row, line in enumerate(lines if level else []):
            axes.drawing.text((middle, top + 10 + ROW * row), line, size=SMALL, colour=colour, anchor="middle")
        if not level:
            axes.drawing.rect(Box(middle - 8, top - 2, 16, text_width(words, SMALL) + 4), CARD, opacity=0.8)
            axes.drawing.text((middle + 4, top), words, size=SMALL, colour=colour, anchor="end", turn=-90)

    if right - left < 20:
        axes.explain(low, high, words, colour)
    else:
        axes.drawing.last(draw, -1)  # before all words that look for a place


def _draw_curve(axes: Axes, state: State, moved: Sequence[int]) -> None:
    end = sum(queries <= state.launched for queries in state.queries)
    here = min(sum(queries <= state.block_q for queries in state.queries), end)
    _draw_part(axes, state, moved, 0, here)
    with axes.drawing.answer():
        _draw_part(axes, state, moved, max(here - 1, 0), end)
        _draw_own_tile(axes, state)
    if state.launches:
        axes.points([state.block_q], [state.tiled.moved], BLUE)
    start = min(axes.at(state.block_q, axes.y.low)[0], axes.box.right - 150)  # room for the words
    hidden_note(axes.drawing, Box(start, axes.box.y, axes.box.right - start, axes.box.height))


def _draw_part(axes: Axes, state: State, moved: Sequence[int], first: int, end: int) -> None:
    """Draw the curve from index `first` to `end`, dashed where registers spill."""
    kept = sum(queries <= state.kept for queries in state.queries)
    for low, high, dash in ((first, min(end, kept), ""), (max(first, kept - 1), end, "2 5")):
        tips = ["" if index == low > 0 else _tip(state, index) for index in range(low, high)]
        axes.line(state.queries[low:high], moved[low:high], BLUE, dash=dash, tips=tips)


def _draw_own_tile(axes: Axes, state: State) -> None:
    """Mark the tile that FlashAttention itself uses."""
    gpu = SAME_CHIP.get(state.hardware.name, state.hardware.name)
    block_q, block_k = OWN_TILES.get(gpu, {}).get(state.head_dim, (0, 0))
    if block_q not in state.queries:
        return
    tip = f"FlashAttention's own tile here: {block_q} queries × {block_k} keys (hopper/tile_size.h)."
    axes.points([block_q], [state.by_queries[state.queries.index(block_q)].moved], GREEN, tips=[tip])
    right, y = axes.box.right, axes.box.y - 12  # a key: the plot has no room for the name
    axes.drawing.circle((right - 100, y - 4), 4.5, GREEN)
    axes.drawing.text((right, y), "FlashAttention", size=SMALL, colour=GREEN, anchor="end")


def _tip(state: State, index: int) -> str:
    queries, traffic = state.queries[index], state.by_queries[index]
    words = (
        f"{queries:,} queries per tile: {size(traffic.moved)}, {compared(state.naive.moved / traffic.moved)} {NAIVE}; "
        f"{traffic.intensity:.0f} operations per byte, {state.launched_at(queries) / KIB:.0f} KiB of shared memory"
    )
    return f"{words}; registers spill." if queries > state.kept else f"{words}."


# ---- what the chip holds


def _draw_bar(drawing: Drawing, y: float, name: str, parts: dict[str, int], limit: int, beyond: str) -> float:
    """Draw what a memory holds, with its legend, and return the y below."""
    at = Box(EDGE, y, drawing.width - 2 * EDGE, 17)
    needed = sum(parts.values())
    over = needed > limit
    words = f"{name}: {needed / KIB:.0f} of {limit / KIB:.0f} KiB" + f", {beyond}" * over
    drawing.text((at.x, at.y + 12), words, size=SMALL, colour=VERMILLION if over else INK, bold=over)
    tips = {part: f"{part}: {count / KIB:.1f} KiB of {name.lower()}" for part, count in parts.items()}
    tips["others"] = "Addresses, masks, and weights for the tensor cores: a quarter of the registers, modelled"
    segments = [
        Segment(PART_NAMES.get(part, part), count, PART_COLOURS[part], tip=tips[part]) for part, count in parts.items()
    ]
    unnamed = segments if over else without_room(segments, limit, at.width)
    keys = [part for part in unnamed if part.value > max(needed, limit) / at.width]  # at least a pixel
    if drawing.width < WIDE and keys:
        y = legend(drawing, (at.x, y + 31), keys, at.width) - 31
    else:
        legend(drawing, (at.x + text_width(words, SMALL) * BOLD + 16, y + 12), keys, at.width)
    bar = Box(at.x, y + 17, at.width, 15)
    drawing.rect(bar, NOT_OURS, stroke=MID)
    shown = [replace(part, label="") for part in segments] if over else segments
    stacked_bar(drawing, bar, shown, max(needed, limit))
    if over:
        edge = bar.x + limit / needed * bar.width
        drawing.hatch(Box(edge, bar.y, bar.right - edge, bar.height), CARD, gap=5)
        drawing.line((edge, bar.y - 4), (edge, bar.bottom + 3), colour=VERMILLION, width=2.5)
    return bar.bottom + 12

"""Draw lesson 03's pictures: bytes by queries per tile with what the chip holds, and the animated
walk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from minivllm_lab.drawing import QUIET, text_width
from minivllm_lab.flash_attention.attention_traffic import KIB, REGISTER_FILE
from minivllm_lab.palette import BLUE, GREEN, INK, ORANGE, PALE, PURPLE, SKY, VERMILLION
from widgets.flash_attention.challenges import NAIVE, compared
from widgets.flash_attention.walk import captions, draw_row, draw_tiles, size
from widgets.shell.plot import WIDE, Axes, Scale, hidden_note, tokens
from widgets.shell.svg import BOLD, HEADING, SMALL, Box, Drawing, Segment, legend, stacked_bar, without_room
from widgets.shell.theme import MID, NOT_OURS

if TYPE_CHECKING:
    from widgets.flash_attention.state import State

EDGE, GAP = 14, 22
PART_NAMES = {"m, l": "max, sum", "others": "addresses, masks"}
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
    """Draw bytes by queries per tile and by T, and what the chip holds."""
    moved, naive = size(state.tiled.moved), size(state.naive.moved)
    words = f"Tiles of {state.block_q} queries × {state.block_k} keys move {moved} per head; {NAIVE} move {naive}"
    full = width - 2 * EDGE
    sweep = Box(EDGE, 0, round(full * 0.63) if width >= WIDE else full, 300)
    lengths = Box(EDGE, sweep.bottom, full, 230)
    if width >= WIDE:
        lengths = Box(sweep.right + GAP, 0, full - sweep.width - GAP, 300)
    drawing = Drawing(width, 0, "Attention in tiles", words)
    _draw_sweep(drawing, sweep, state, pinned)
    _draw_lengths(drawing, lengths, state)
    y = lengths.bottom + 8
    y = _draw_bar(drawing, y, "Shared memory", state.shared, state.chip.shared_memory, "not launched")
    drawing.height = 2 + _draw_bar(drawing, y, "Registers", state.registers, REGISTER_FILE, "spilled")
    return drawing.render()


def detail(state: State, width: float = 640, pinned: State | None = None) -> str:
    """Draw which program loads which tile, and one row of scores, tile by tile."""
    full = width - 2 * EDGE
    tiles = Box(EDGE, 0, round(full * 0.38) if width >= WIDE else full, 290)
    row = Box(EDGE, tiles.bottom + 8, full, 260)
    if width >= WIDE:
        row = Box(tiles.right + GAP, 0, full - tiles.width - GAP, 290)
    drawing = Drawing(width, row.bottom + 6, "Tile by tile", captions(state)[-1])
    drawing.play(captions(state))
    draw_tiles(drawing, tiles, state)
    draw_row(drawing, row, state)
    return drawing.render()


# ---- the swept axis


def _draw_sweep(drawing: Drawing, at: Box, state: State, pinned: State | None) -> None:
    drawing.text((at.x, 22), f"Bytes moved per head, {tokens(state.length)} tokens", size=HEADING, bold=True)
    box = Box(at.x + 56, at.y + 34, at.width - 72, at.height - 76)
    moved = [traffic.moved for traffic in state.by_queries]
    before = [traffic.moved for traffic in pinned.by_queries] if pinned else []
    curves = [*moved, *before, state.naive.moved, state.least]
    y = Scale(min(curves) * 0.13, max(curves) * 14, log=True)  # room for words above and below
    axes = Axes(drawing, box, Scale(state.queries[0], state.queries[-1], log=True), y)
    count, ticks = "{:,.0f}".format, axes.x.doublings()
    axes.frame("queries per tile", "", y_format=size, y_ticks=y.doublings(5), x_ticks=ticks, x_format=count)
    with drawing.answer():
        _draw_limits(axes, state)
    if state.few < state.launched:  # otherwise the whole axis is broken already
        axes.broken(None, state.few, "no gain")
    axes.mark_y(state.naive.moved, f"{NAIVE}: {size(state.naive.moved)}", VERMILLION)
    axes.mark_y(state.tiled.flops / state.ridge, "↓ compute-bound (no L2)", PURPLE, dash="6 3")
    axes.mark_y(state.least, f"each byte once: {size(state.least)}", QUIET, dash="2 3")
    if pinned:
        axes.pinned(pinned.queries, before, pinned.block_q)
    _draw_curve(axes, state, moved)
    words = f"{state.block_q} queries" + f": {size(state.tiled.moved)}" * state.launches
    here, edge = axes.at(state.block_q, y.low)[0], axes.at(state.few, y.low)[0]
    beyond = state.few < state.launched and here < edge < here + 24 + text_width(words, SMALL) * BOLD
    axes.here(state.block_q, "block_q", "" if beyond else words)
    if beyond:  # the words do not fit between the handle and the edge
        axes.label((edge, box.bottom - 18), f"← {size(state.tiled.moved)}")


def _draw_limits(axes: Axes, state: State) -> None:
    """Shade where registers spill, and where the kernel does not launch."""
    if state.launched < state.queries[-1]:
        first, words = max(state.launched, state.queries[0]), "no launch"
        axes.shade(first, None, words)  # too narrow for level words
        place = (axes.box.right - 5, axes.box.y + 6)
        axes.drawing.text(place, words, size=SMALL, colour=VERMILLION, anchor="end", bold=True, turn=-90, halo=True)
    left, right = max(state.kept, state.queries[0]), min(state.launched, state.queries[-1])
    if left < right:
        first, end = axes.at(left, axes.y.low)[0], axes.at(right, axes.y.low)[0]
        tip = f"Above {state.kept} queries, O and the scores outgrow the registers, so the compiler spills (modelled)."
        zone = Box(first, axes.box.y, end - first, axes.box.height)
        axes.drawing.rect(zone, ORANGE, opacity=0.16, tip=tip)
        axes.mark_x(left, ORANGE)
        axes.explain(left, right, "spills: not counted here", ORANGE)


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
    moved = state.by_queries[state.queries.index(block_q)].moved
    tile = f"{block_q} queries × {block_k} keys"
    tip = f"FlashAttention uses {tile} for heads of {state.head_dim} on this chip (hopper/tile_size.h)."
    axes.points([block_q], [moved], GREEN, tips=[tip])
    axes.label(axes.at(block_q, moved), "FlashAttention", GREEN, bold=False)


def _tip(state: State, index: int) -> str:
    queries = state.queries[index]
    traffic = state.by_queries[index]
    less = state.naive.moved / traffic.moved
    words = (
        f"{queries:,} queries per tile move {size(traffic.moved)}, {compared(less)} {NAIVE}; "
        f"{traffic.intensity:.0f} operations per byte, {state.launched_at(queries) / KIB:.0f} KiB of shared memory"
    )
    return f"{words}; registers spill." if queries > state.kept else f"{words}."


# ---- bytes against T


def _draw_lengths(drawing: Drawing, at: Box, state: State) -> None:
    drawing.text((at.x, at.y + 22), "… by length of the text", size=HEADING, bold=True)
    box = Box(at.x + 48, at.y + 34, at.width - 54, at.height - 76)
    y = Scale(2**20, 2.6 * max(state.naive_by_length[-1], state.tiled_by_length[-1]), log=True)
    axes = Axes(drawing, box, Scale(state.lengths[0], state.lengths[-1], log=True), y)
    axes.frame("tokens, T", "", x_format=tokens, x_ticks=state.lengths[::3], y_format=size, y_ticks=y.doublings(5))
    gpu = state.hardware
    edge = axes.at(state.longest, y.low)[0]
    if edge < box.right:
        wall = Box(edge, box.y, box.right - edge, box.height)
        axes.broken(state.longest, None, "scores do not fit")
        tip = (
            f"From {state.longest:,} tokens, scores and weights of 32 heads take more than the "
            f"{size(gpu.memory_bytes)} of an {gpu.name}, so T × T cannot be stored. Tiles keep 4 bytes per token."
        )
        drawing.rect(wall, "transparent", tip=tip)
    naive = [_over_length(state, index, NAIVE, moved) for index, moved in enumerate(state.naive_by_length)]
    tiled = [_over_length(state, index, "tiles", moved) for index, moved in enumerate(state.tiled_by_length)]
    axes.line(state.lengths, state.naive_by_length, VERMILLION, width=6, tips=naive)  # seen where both are equal
    axes.line(state.lengths, state.tiled_by_length, BLUE, width=2, tips=tiled)
    axes.points([state.length], [state.tiled.moved], BLUE)
    for row, (words, colour) in enumerate((("all scores", VERMILLION), ("tiles", BLUE))):
        y = box.y + 16 + 16 * row
        drawing.line((box.x + 5, y - 4), (box.x + 19, y - 4), colour=colour, width=6 - 4 * row)
        drawing.text((box.x + 24, y), words, size=SMALL, colour=colour, halo=True)


def _over_length(state: State, index: int, name: str, moved: int) -> str:
    ratio = state.naive_by_length[index] / state.tiled_by_length[index]
    return f"{state.lengths[index]:,} tokens, {name}: {size(moved)}. The tiles move {compared(ratio)} {NAIVE}."


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
        Segment(PART_NAMES.get(part, part), count, PART_COLOURS[part], tip=tips[part], hatched=part == "others")
        for part, count in parts.items()
    ]
    beside = (at.x + text_width(words, SMALL) * BOLD + 16, y + 12)
    if drawing.width < WIDE:
        y = legend(drawing, (at.x, y + 31), segments, at.width) - 31
    else:
        legend(drawing, beside, without_room(segments, max(needed, limit), at.width), at.width)
    bar = Box(at.x, y + 17, at.width, 15)
    drawing.rect(bar, NOT_OURS, stroke=MID)
    stacked_bar(drawing, bar, segments, max(needed, limit))
    if over:
        edge = bar.x + limit / needed * bar.width
        drawing.line((edge, bar.y - 4), (edge, bar.bottom + 3), colour=VERMILLION, width=2.5)
    return bar.bottom + 12

"""Draw lesson 03's picture: bytes by queries per tile, what the chip holds, and the animated walk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minivllm_lab.drawing import QUIET, text_width
from minivllm_lab.flash_attention.attention_traffic import KIB, REGISTER_FILE
from minivllm_lab.palette import BLUE, GREEN, INK, ORANGE, PALE, PURPLE, SKY, VERMILLION
from widgets.flash_attention.walk import captions, draw_row, draw_tiles, size
from widgets.shell.plot import Axes, Scale, tokens
from widgets.shell.svg import HEADING, SMALL, Box, Drawing, Segment, stacked_bar
from widgets.shell.theme import BROKEN, CARD, MID, NOT_OURS

if TYPE_CHECKING:
    from widgets.flash_attention.state import State

EDGE = 14
PART_COLOURS = {"Q": BLUE, "K, V": SKY, "scores": ORANGE, "O": GREEN, "m, l": PURPLE, "others": PALE}
PAPER = (("T × T stored", 40.3e9), ("tiles", 4.4e9))
"""Dao et al. 2022, figure 2: bytes of 64 sequences × 16 heads of 64 over 1,024 tokens, forward
and backward.
"""
PAPER_HEADS, PAPER_LENGTH = 64 * 16, 1024
OWN_TILES = {
    ("H100", 64): (192, 128),
    ("H100", 128): (128, 128),
    ("H100", 256): (128, 80),
    ("A100-80", 64): (128, 112),
    ("A100-80", 128): (128, 64),
    ("A100-80", 256): (128, 96),
    ("RTX 4090", 64): (128, 112),
    ("RTX 4090", 128): (128, 128),
    ("RTX 4090", 256): (128, 64),
}
"""Queries and keys of FlashAttention's tiles (causal, 16 bits) by GPU and head dim, from
hopper/tile_size.h.
"""
SAME_CHIP = {"H200": "H100", "L4": "RTX 4090"}


@dataclass(frozen=True)
class Places:
    """The boxes of the picture's parts."""

    sweep: Box
    lengths: Box
    shared: Box
    registers: Box
    tiles: Box
    row: Box

    @property
    def height(self) -> float:
        """Return the height of the whole picture."""
        return max(self.tiles.bottom, self.row.bottom)


def places(width: float) -> Places:
    """Place the parts in two columns where there is room, and in one column otherwise."""
    full = width - 2 * EDGE
    if width < 600:
        sweep, lengths = Box(EDGE, 0, full, 236), Box(EDGE, 236, full, 196)
        shared, registers = Box(EDGE, 436, full, 34), Box(EDGE, 476, full, 34)
        return Places(sweep, lengths, shared, registers, Box(EDGE, 522, full, 216), Box(EDGE, 746, full, 214))
    left, gap = round(full * 0.63), 22
    sweep, lengths = Box(EDGE, 0, left, 216), Box(EDGE + left + gap, 0, full - left - gap, 216)
    half = (full - gap) / 2
    shared, registers = Box(EDGE, 218, half, 34), Box(EDGE + half + gap, 218, half, 34)
    tiles, right = Box(EDGE, 260, 196, 208), EDGE + 196 + gap
    return Places(sweep, lengths, shared, registers, tiles, Box(right, 260, width - EDGE - right, 208))


def figure(state: State, width: float = 640, pinned: State | None = None) -> str:
    """Draw bytes by queries per tile and by T, what the chip holds, and the walk."""
    at = places(width)
    moved, naive = size(state.tiled.moved), size(state.naive.moved)
    words = f"Tiles of {state.block_q} queries × {state.block_k} keys move {moved} per head; T × T stored moves {naive}"
    drawing = Drawing(width, at.height, "Attention in tiles", words)
    _draw_sweep(drawing, at.sweep, state, pinned)
    _draw_lengths(drawing, at.lengths, state)
    _draw_chip(drawing, at, state)
    drawing.play(captions(state))
    draw_tiles(drawing, at.tiles, state)
    draw_row(drawing, at.row, state)
    return drawing.render()


# ---- the swept axis


def _draw_sweep(drawing: Drawing, at: Box, state: State, pinned: State | None) -> None:
    drawing.text((at.x, 22), "Bytes moved per head", size=HEADING, bold=True)
    box = Box(at.x + 56, at.y + 34, at.width - 72, at.height - 76)
    moved = [traffic.moved for traffic in state.by_queries]
    curves = [
        *moved,
        state.naive.moved,
        state.least,
        *([traffic.moved for traffic in pinned.by_queries] if pinned else []),
    ]
    y = Scale(min(curves) * 0.25, max(curves) * 14, log=True)  # room for words above and below
    axes = Axes(drawing, box, Scale(state.queries[0], state.queries[-1], log=True), y)
    count, ticks = "{:,.0f}".format, axes.x.doublings()
    axes.frame("queries per tile", "", y_format=size, y_ticks=y.doublings(5), x_ticks=ticks, x_format=count)
    with drawing.answer():
        _draw_limits(axes, state)
    if state.few < state.launched:  # otherwise the whole axis is broken already
        axes.broken(None, state.few, "more than T × T")
    axes.mark_y(state.naive.moved, f"T × T stored: {size(state.naive.moved)}", VERMILLION, below=True)
    axes.mark_y(state.least, "", QUIET, dash="2 3")
    place = (box.x + box.width / 5, axes.at(1, state.least)[1] - 5)
    drawing.text(place, f"each byte once: {size(state.least)}", size=SMALL, colour=QUIET, halo=True)
    if pinned:
        axes.pinned(pinned.queries, [traffic.moved for traffic in pinned.by_queries])
    _draw_curve(axes, state, moved)
    axes.here(state.block_q, "block_q", f"{state.block_q} queries: {size(state.tiled.moved)}")


def _draw_limits(axes: Axes, state: State) -> None:
    """Shade where registers spill, and where the kernel does not launch."""
    if state.launched < state.queries[-1]:
        first = next(queries for queries in state.queries if queries > state.launched)
        needed = state.launched_at(first) / KIB
        limit = state.chip.shared_memory / KIB
        words = f"not launched: {needed:.0f} of {limit:.0f} KiB"
        axes.broken(max(state.launched, state.queries[0]), None, words)
    left, right = max(state.kept, state.queries[0]), min(state.launched, state.queries[-1])
    if left < right:
        first, end = axes.at(left, axes.y.low)[0], axes.at(right, axes.y.low)[0]
        tip = f"Above {state.kept} queries, O and the scores outgrow the registers, so the compiler spills (modelled)."
        zone = Box(first, axes.box.y, end - first, axes.box.height)
        axes.drawing.rect(zone, ORANGE, opacity=0.16, tip=tip)
        axes.drawing.line((first, zone.y), (first, zone.bottom), colour=ORANGE, width=1.5, dash="4 3")
        inside = zone.width > text_width("spills", SMALL) + 8
        place = (first + 5, zone.y + 14) if inside else (first - 5, zone.y + 44)
        axes.drawing.text(place, "spills", size=SMALL, colour=ORANGE, anchor="start" if inside else "end", halo=True)


def _draw_curve(axes: Axes, state: State, moved: Sequence[int]) -> None:
    here = sum(queries <= state.block_q for queries in state.queries)
    tips = [_tip(state, index) for index in range(len(moved))]
    axes.line(state.queries[:here], moved[:here], BLUE, tips=tips[:here])
    with axes.drawing.answer():
        axes.line(state.queries[max(here - 1, 0) :], moved[max(here - 1, 0) :], BLUE, tips=["", *tips[here:]])
        _draw_own_tile(axes, state)
    axes.points([state.block_q], [state.tiled.moved], BLUE)


def _draw_own_tile(axes: Axes, state: State) -> None:
    """Mark the tile that FlashAttention itself uses."""
    gpu = SAME_CHIP.get(state.hardware.name, state.hardware.name)
    block_q, block_k = OWN_TILES.get((gpu, state.head_dim), (0, 0))
    if block_q not in state.queries:
        return
    moved = state.by_queries[state.queries.index(block_q)].moved
    tip = (
        f"FlashAttention uses {block_q} queries × {block_k} keys for heads of {state.head_dim} on this "
        "chip (hopper/tile_size.h)."
    )
    axes.points([block_q], [moved], GREEN, tips=[tip])
    x, y = axes.at(block_q, moved)
    below = y + 15 < axes.at(1, state.least)[1] - 20  # otherwise it covers the words there
    place, anchor = ((x - 7, y + 15), "end") if below else ((x + 7, y - 6), "start")
    axes.drawing.text(place, "FlashAttention's", size=SMALL, colour=GREEN, anchor=anchor, halo=True)


def _tip(state: State, index: int) -> str:
    queries = state.queries[index]
    traffic = state.by_queries[index]
    less = state.naive.moved / traffic.moved
    compared = f"{less:.2f} times fewer" if less >= 1 else f"{1 / less:.2f} times more"
    words = (
        f"{queries:,} queries per tile move {size(traffic.moved)}, {compared} than T × T stored; "
        f"{traffic.intensity:.0f} operations per byte, {state.launched_at(queries) / KIB:.0f} KiB of shared memory"
    )
    if queries > state.launched:
        return f"{words}; it does not launch."
    return f"{words}; registers spill." if queries > state.kept else f"{words}."


# ---- bytes against T


def _draw_lengths(drawing: Drawing, at: Box, state: State) -> None:
    drawing.text((at.x, at.y + 22), "… and against T", size=HEADING, bold=True)
    box = Box(at.x + 48, at.y + 34, at.width - 54, at.height - 76)
    y = Scale(2**20, 2.6 * max(state.naive_by_length[-1], state.tiled_by_length[-1]), log=True)
    axes = Axes(drawing, box, Scale(state.lengths[0], state.lengths[-1], log=True), y)
    axes.frame("tokens", "", x_format=tokens, x_ticks=state.lengths[::3], y_format=size, y_ticks=y.doublings(5))
    gpu = state.hardware
    edge = axes.at(state.longest, y.low)[0]
    if edge < box.right:
        wall = Box(edge, box.y, box.right - edge, box.height)
        drawing.rect(wall, BROKEN)
        drawing.line((edge, box.y), (edge, box.bottom), colour=VERMILLION, width=1.5, dash="4 3")
        tip = (
            f"From {state.longest:,} tokens, scores and weights of 32 heads take more than the "
            f"{size(gpu.memory_bytes)} of an {gpu.name}, so T × T cannot be stored. Tiles keep 4 bytes per token."
        )
        drawing.rect(wall, "transparent", tip=tip)
        drawing.paragraph((edge + 4, box.bottom - 40), "T × T does not fit", box.right - edge - 4, colour=VERMILLION)
    naive = [_over_length(state, index, "T × T stored", moved) for index, moved in enumerate(state.naive_by_length)]
    tiled = [_over_length(state, index, "tiles", moved) for index, moved in enumerate(state.tiled_by_length)]
    axes.line(state.lengths, state.naive_by_length, VERMILLION, width=2, dash="6 3", tips=naive)
    axes.line(state.lengths, state.tiled_by_length, BLUE, width=2, tips=tiled)
    axes.points([state.length], [state.tiled.moved], BLUE)
    for (name, moved), colour in zip(PAPER, (VERMILLION, BLUE), strict=True):
        tip = (
            f"Published: {moved / 1e9:.1f} GB for {PAPER_HEADS:,} heads of 64, {name}, forward and backward "
            "(Dao et al. 2022, figure 2). Ours is forward only."
        )
        drawing.circle(axes.at(PAPER_LENGTH, moved / PAPER_HEADS), 4, CARD, stroke=colour, tip=tip)
    drawing.text((box.x + 5, box.y + 12), "T × T stored ╌", size=SMALL, colour=VERMILLION, halo=True)
    drawing.text((box.x + 5, box.y + 27), "tiles —", size=SMALL, colour=BLUE, halo=True)
    drawing.text((box.x + 5, box.y + 42), "○ published", size=SMALL, colour=QUIET, halo=True)


def _over_length(state: State, index: int, name: str, moved: int) -> str:
    ratio = state.naive_by_length[index] / state.tiled_by_length[index]
    return f"{state.lengths[index]:,} tokens, {name}: {size(moved)} per head. The tiles move {ratio:.2f} times fewer."


# ---- what the chip holds


def _draw_chip(drawing: Drawing, at: Places, state: State) -> None:
    _draw_bar(drawing, at.shared, "Shared memory", state.shared, state.chip.shared_memory, "not launched")
    _draw_bar(drawing, at.registers, "Registers", state.registers, REGISTER_FILE, "spilled")


def _draw_bar(drawing: Drawing, at: Box, name: str, parts: dict[str, int], limit: int, beyond: str) -> None:
    needed = sum(parts.values())
    over = needed > limit
    words = f"{name}: {needed / KIB:.0f} of {limit / KIB:.0f} KiB" + f", {beyond}" * over
    drawing.text((at.x, at.y + 12), words, size=SMALL, colour=VERMILLION if over else INK, bold=over)
    bar = Box(at.x, at.y + 17, at.width, 15)
    drawing.rect(bar, NOT_OURS, stroke=MID)
    tips = {part: f"{part}: {count / KIB:.1f} KiB of {name.lower()}" for part, count in parts.items()}
    tips["others"] = (
        "Addresses, masks and weights on their way to the tensor cores: a quarter of the registers, modelled"
    )
    segments = [
        Segment(part, count, PART_COLOURS[part], tip=tips[part], hatched=part == "others")
        for part, count in parts.items()
    ]
    stacked_bar(drawing, bar, segments, max(needed, limit))
    if over:
        edge = bar.x + limit / needed * bar.width
        drawing.line((edge, bar.y - 4), (edge, bar.bottom + 3), colour=VERMILLION, width=2.5)

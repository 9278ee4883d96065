"""Draw lesson 03's pictures: the tile, bytes by queries per tile and what the chip holds; and one
row, tile by tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from minivllm_lab.drawing import QUIET, ink_on, wrapped
from minivllm_lab.flash_attention.attention_traffic import KIB, REGISTER_FILE
from minivllm_lab.palette import BLUE, GREEN, INK, ORANGE, PALE, PURPLE, SKY, VERMILLION
from widgets.flash_attention.challenges import NAIVE, compared
from widgets.flash_attention.scores import draw_ways
from widgets.flash_attention.walk import captions, draw_row, size
from widgets.shell.plot import WIDE, Axes, Scale, hidden_note
from widgets.shell.svg import HEADING, SMALL, Box, Drawing, text_box
from widgets.shell.theme import CARD

if TYPE_CHECKING:
    from widgets.flash_attention.state import State

EDGE, FULL, HEIGHT = 14, 0.78, 470
"""Pixels around the picture, the part of a cup that is full at its limit, and the height of a wide picture."""
TIPS = {"others": "Addresses, masks, and weights for the tensor cores: a quarter of the registers, modelled"}
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
    """Draw stored scores beside tiles, what the chip holds, and bytes by queries per tile."""
    moved, naive = size(state.tiled.moved), size(state.naive.moved)
    words = f"Tiles of {state.block_q} queries × {state.block_k} keys move {moved} per head; {NAIVE} move {naive}"
    beside, full = width >= WIDE, width - 2 * EDGE
    drawing = Drawing(width, 0, "Attention in tiles", words)
    ways = min(round(0.63 * full), 404) if beside else full
    bottom = draw_ways(drawing, Box(EDGE, 0, ways, 0), 20, state)
    left = EDGE + ways + 24
    chip = Box(left, 0, width - EDGE - left, bottom) if beside else Box(EDGE, bottom + 20, full, 186)
    _draw_chip(drawing, chip, state)
    top = max(bottom, chip.bottom) + 36
    box = Box(EDGE + 64, top, full - 68, HEIGHT - 42 - top if beside else 130)
    _draw_sweep(drawing, box, state, pinned)
    drawing.height = box.bottom + 42
    return drawing.render()


def detail(state: State, width: float = 640, pinned: State | None = None) -> str:
    """Draw one row of scores, tile by tile."""
    drawing = Drawing(width, 334, "Tile by tile", captions(state)[-1])
    drawing.play(captions(state))
    draw_row(drawing, Box(EDGE, 0, width - 2 * EDGE, 328), state)
    return drawing.render()


# ---- the swept axis


def _draw_sweep(drawing: Drawing, box: Box, state: State, pinned: State | None) -> None:
    moved = [traffic.moved for traffic in state.by_queries]
    before = [traffic.moved for traffic in pinned.by_queries] if pinned else []
    curves = [*moved, *before, state.naive.moved]
    y = Scale(min(curves) * 0.7, max(curves) * 1.7, log=True)  # room for words above and below
    axes = Axes(drawing, box, Scale(state.queries[0] / 1.4, state.queries[-1] * 1.4, log=True), y)
    level = axes.at(1, state.naive.moved)[1]
    seen = [tick for tick in y.doublings(99)[::-2] if abs(axes.at(1, tick)[1] - level) >= 12]
    count, ticks = "{:,.0f}".format, axes.x.doublings()[::2]
    axes.frame("queries per tile", "", y_format=size, y_ticks=seen, x_ticks=ticks, x_format=count)
    drawing.text((box.x - 7, level + 4), size(state.naive.moved), size=SMALL, colour=VERMILLION, anchor="end")
    ridge = state.tiled.flops / state.ridge
    _draw_limits(axes, state)
    middle = EDGE + 3, box.y + box.height / 2
    drawing.text(middle, "bytes per head", size=SMALL, colour=QUIET, anchor="middle", turn=-90)
    with drawing.answer():
        few = state.few * (state.few < state.launched)  # otherwise the whole axis is broken already
        if few:
            _draw_zone(axes, None, few, "K, V read too often")
        left = max(axes.at(max(few, 1), y.low)[0], box.x)
        for bytes_moved, words, colour, dash in (
            (state.naive.moved, NAIVE, VERMILLION, "4 3"),
            (ridge, "↓ compute-bound", PURPLE, "6 3"),
        ):
            axes.mark_y(bytes_moved, "", colour, dash=dash)
            axes.label((left - 5, axes.at(1, bytes_moved)[1]), words, colour, bold=False)
    tip = f"With at most {size(ridge)}, the GPU computes for longer than its memory delivers (without help from L2)."
    drawing.rect(Box(box.x, axes.at(1, ridge)[1] - 5, box.width, 10), "transparent", tip=tip)
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
        tip = f"Above {state.kept} queries, O and the scores outgrow the registers, so the compiler spills (modelled)."
        tip += " The bytes of the spills are not counted here."
        _draw_zone(axes, kept, min(launched, last), "registers spill", tip)


def _draw_zone(axes: Axes, low: float | None, high: float | None, words: str, tip: str = "") -> None:
    """Shade a part of the axis that breaks or, with a `tip`, runs at a loss, and write its name above it unless
    another name stands there.
    """
    if tip:
        axes.tint(low, high, "", ORANGE, tip)
    else:
        axes.shade(low, high, words)
    left, right = (axes.at(edge, axes.y.low)[0] for edge in (low or axes.x.low, high or axes.x.high))
    _name(axes, (left + right) / 2, wrapped(words, right - left + 6, SMALL), ORANGE if tip else VERMILLION)


def _name(axes: Axes, x: float, lines: Sequence[str], colour: str) -> None:
    """Write a name above the axis at `x` pixels, unless another one stands there."""
    places = [(x, axes.box.y - 6 - 14 * back) for back in reversed(range(len(lines)))]
    boxes = [text_box(place, line, SMALL, "middle") for place, line in zip(places, lines, strict=True)]
    if not any(box.overlaps(other) for box in boxes for other in axes.drawing.words):
        for place, line in zip(places, lines, strict=True):
            axes.drawing.text(place, line, size=SMALL, colour=colour, anchor="middle")


def _draw_curve(axes: Axes, state: State, moved: Sequence[int]) -> None:
    """Draw the bytes moved, dashed where registers spill, up to the last tile that launches."""
    end = sum(queries <= state.launched for queries in state.queries)
    kept = min(sum(queries <= state.kept for queries in state.queries), end)
    for low, high, dash in ((0, kept, ""), (max(kept - 1, 0), end, "2 5")):
        tips = ["" if index == low > 0 else _tip(state, index) for index in range(low, high)]
        axes.line(state.queries[low:high], moved[low:high], BLUE, dash=dash, tips=tips)
    _draw_own_tile(axes, state)
    if end:
        axes.label(axes.at(state.queries[5], moved[5]), "tiles", BLUE)
    if state.launches:
        axes.points([state.block_q], [state.tiled.moved], BLUE)


def _draw_own_tile(axes: Axes, state: State) -> None:
    """Mark the tile that FlashAttention itself uses."""
    gpu = SAME_CHIP.get(state.hardware.name, state.hardware.name)
    block_q, block_k = OWN_TILES.get(gpu, {}).get(state.head_dim, (0, 0))
    if block_q not in state.queries or axes.box.width < 400:  # no room for its name
        return
    tip = f"FlashAttention's own tile here: {block_q} queries × {block_k} keys (hopper/tile_size.h)."
    moved = state.by_queries[state.queries.index(block_q)].moved
    axes.points([block_q], [moved], GREEN, tips=[tip])
    x, y = axes.at(block_q, moved)
    axes.drawing.line((x, axes.box.y), (x, y - 5), GREEN, dash="2 3")
    _name(axes, x, ["FlashAttention"], GREEN)


def _tip(state: State, index: int) -> str:
    queries, traffic = state.queries[index], state.by_queries[index]
    words = (
        f"{queries:,} queries per tile: {size(traffic.moved)}, {compared(state.naive.moved / traffic.moved)} {NAIVE}; "
        f"{traffic.intensity:.0f} operations per byte, {state.launched_at(queries) / KIB:.0f} KiB of shared memory"
    )
    return f"{words}; registers spill." if queries > state.kept else f"{words}."


# ---- what the chip holds


def _draw_chip(drawing: Drawing, at: Box, state: State) -> None:
    """Draw both memories of the chip as cups, with what a tile puts into them."""
    drawing.text((at.x, at.y + 22), "On the chip", size=HEADING, bold=True)
    wide = (at.width - 22) / 2
    cups = (
        ("shared memory", state.shared, state.chip.shared_memory, "no launch"),
        ("registers", state.registers, REGISTER_FILE, "spills"),
    )
    for index, (name, parts, limit, beyond) in enumerate(cups):
        box = Box(at.x + index * (wide + 22), at.y + 46, wide, at.height - 90)
        _draw_cup(drawing, box, name, parts, limit, beyond)


def _draw_cup(drawing: Drawing, at: Box, name: str, parts: dict[str, int], limit: int, beyond: str) -> None:
    """Draw a memory as a cup that overflows where `parts` need more than `limit` bytes."""
    needed, per_byte = sum(parts.values()), FULL * at.height / limit
    rim, y, over = at.bottom - FULL * at.height, at.bottom, needed > limit
    for part, count in reversed(parts.items()):
        box = Box(at.x, max(at.y, y - count * per_byte), at.width, min(count * per_byte, y - at.y))
        tip = TIPS.get(part, f"{part}: {count / KIB:.1f} KiB of {name}")
        drawing.rect(box, PART_COLOURS[part], tip=tip)
        if box.height >= 15:
            colour = INK if part == "others" else ink_on(PART_COLOURS[part])
            middle = box.x + box.width / 2, box.y + box.height / 2 + 4
            drawing.text(middle, PART_NAMES.get(part, part), size=SMALL, colour=colour, anchor="middle")
        y = box.y
    if over:
        spilled = Box(at.x - 4, y, at.width + 8, rim - y)
        drawing.rect(spilled, VERMILLION, tip=f"{(needed - limit) / KIB:.0f} KiB too many")
        drawing.hatch(spilled, CARD, gap=5)
        drawing.text((at.x + at.width / 2, y - 6), beyond, size=SMALL, colour=VERMILLION, anchor="middle", bold=True)
    drawing.polyline([(at.x, rim), (at.x, at.bottom), (at.right, at.bottom), (at.right, rim)], INK)
    words = f"{needed / KIB:.0f} of {limit / KIB:.0f} KiB"
    drawing.text((at.x, at.bottom + 17), name, size=SMALL, colour=QUIET)
    drawing.text((at.x, at.bottom + 33), words, size=SMALL, colour=VERMILLION if over else INK)

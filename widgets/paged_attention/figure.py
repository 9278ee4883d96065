"""Draw lesson 02's picture: the two costs of a block size, and the animated pool with the block
tables that point into it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm_lab.drawing import Point, text_width
from minivllm_lab.paged_attention.played_pool import Frame, Play
from minivllm_lab.palette import BLUE, GREEN, INK, ORANGE, PURPLE, VERMILLION, YELLOW
from widgets.shell.plot import MARGIN, WIDE, Axes, Scale, hidden_note, two_boxes
from widgets.shell.strip import draw_title
from widgets.shell.svg import BOLD, MID, QUIET, RULE, SMALL, Box, Drawing, Segment
from widgets.shell.theme import BROKEN, CARD, RESERVED

if TYPE_CHECKING:
    from widgets.paged_attention import State

DEFAULT = 16
"""vLLM's default block size, which is also the smallest that its kernels take."""
BLOCK, ENTRY, REACH = 46, 18, 30
"""The heights in pixels of a block, of a table's entry, and of the space between a table and the
pool.
"""


def percent(share: float, beside: float | None = None) -> str:
    """Format a share (9.3 %) with enough digits to tell it from `beside`."""
    digits, value, other = 2, 100 * share, 100 * (share if beside is None else beside)
    while value != other and digits < 15 and f"{value:.{digits}g}" == f"{other:.{digits}g}":
        digits += 1
    return f"{float(f'{value:.{digits}g}'):.15g} %"


def slots(size: int) -> str:
    """Format a block size in words."""
    return f"Blocks of {size}" if size > 1 else "Blocks of 1 slot"


def draw(state: State, width: float, pinned: State | None, description: str) -> str:
    """Draw the picture as SVG."""
    drawing = Drawing(width, 0, "What a block size costs", description)
    note = f"{state.title}, {state.samples} answer{'s' if state.samples > 1 else ''} each"
    y = drawing.heading((MARGIN, 22), "What a block size costs", note) + 32
    slots_box, bytes_box = two_boxes(width, y, 114, large=0.6)
    _empty_slots(Axes(drawing, slots_box, _sizes(state), Scale(0, 1)), state, pinned)
    _look_ups(drawing, bytes_box, state, pinned)
    drawing.height = _pool(drawing, state.play, state.empty[state.block_size], bytes_box.bottom + 62, width) + 12
    drawing.play([frame.caption for frame in state.play.frames], still=True)
    return drawing.render()


# ---- the two costs


def _sizes(state: State) -> Scale:
    return Scale(min(state.empty), max(state.empty), log=True)


def _empty_slots(axes: Axes, state: State, pinned: State | None) -> None:
    """Draw the empty share of the held slots by block size, and the sizes that no kernel takes."""
    drawing, sizes = axes.drawing, list(state.empty)
    axes.broken(None, DEFAULT / math.sqrt(2), f"No kernel takes fewer than {DEFAULT}")
    axes.frame("", "empty slots, of those held", x_ticks=sizes, y_ticks=(0, 0.25, 0.5, 0.75, 1), y_format=percent)
    drawing.text((axes.box.x, axes.box.bottom + 35), "block size", size=SMALL, colour=QUIET)
    if pinned:
        axes.pinned(sizes, list(pinned.empty.values()), pinned.block_size)
    with drawing.answer():
        _over(axes, state.empty, state.empty_allowed, "Last blocks are half empty")
        tips = [f"{slots(size)}: {percent(share)} of held slots are empty." for size, share in state.empty.items()]
        axes.line(sizes, list(state.empty.values()), ORANGE, width=3, tips=tips)
        _valley(axes, state)
        _read(axes, state.block_size, state.empty[state.block_size], ORANGE)
    axes.mark_y(state.empty_allowed, f"limit {percent(state.empty_allowed)}")
    hidden_note(drawing, Box(axes.box.x + axes.box.width / 2, axes.box.y, axes.box.width / 2, axes.box.height))
    axes.here(state.block_size, "block_size")


def _look_ups(drawing: Drawing, box: Box, state: State, pinned: State | None) -> None:
    """Draw the bytes that a kernel fetches in vain, by block size."""
    sizes, shares = list(state.extra), list(state.extra.values())
    axes = Axes(drawing, box, _sizes(state), Scale(0, 1.15 * max(state.extra_allowed, *shares)))
    axes.broken(None, DEFAULT / math.sqrt(2), "No kernel here" * (state.over(1) > state.over(DEFAULT)))
    axes.frame("block size", "bytes fetched in vain", x_ticks=(1, 8, 64, 512), y_format=percent)
    if pinned:
        axes.pinned(sizes, list(pinned.extra.values()), pinned.block_size)
    _over(axes, state.extra, state.extra_allowed, "Too many look-ups" * state.over(DEFAULT))
    with drawing.layer(tip=_modelled(state)):
        tips = [f"{slots(size)}: {percent(share)} in vain (modelled)." for size, share in state.extra.items()]
        axes.line(sizes, shares, PURPLE, tips=tips)
    axes.mark_y(state.extra_allowed, f"limit {percent(state.extra_allowed)}")
    _read(axes, state.block_size, state.extra[state.block_size], PURPLE)
    axes.also_here(state.block_size)


def _read(axes: Axes, size: int, share: float, colour: str) -> None:
    """Mark where the handle meets a curve, with the value there."""
    x, y = axes.at(size, share)
    axes.drawing.last(lambda: axes.drawing.circle((x, y), 4.5, colour))
    axes.label((x, y - 18), percent(share), colour)


def _modelled(state: State) -> str:
    return (
        "Modelled, not measured: bytes that warps fetch in whole pieces of memory, for one KV head, without a cache. A "
        "table entry has 4 bytes but fetches a whole piece. Waiting for it does not count. "
        f"Keys take {state.row_bytes} bytes per token, and values as many."
    )


def _over(axes: Axes, costs: Mapping[int, float], allowed: float, words: str) -> None:
    """Shade what lies between a limit and the costs over it, and say what is wrong there."""
    level = axes.at(1, allowed)[1]
    outline = list(_above([axes.at(size, cost) for size, cost in costs.items()], level))
    if outline:
        with axes.drawing.layer(broken=f"{words}: over the limit"):
            axes.drawing.polygon([*outline, (outline[-1][0], level), (outline[0][0], level)], BROKEN)
        over = [size for size, cost in costs.items() if cost > allowed]
        axes.explain(over[0], over[-1], words)


def _above(points: Sequence[Point], level: float) -> Iterator[Point]:
    """Yield the points of a line above a level, and those at which it crosses the level."""
    for (x, y), (to_x, to_y) in pairwise(points):
        if y < level:
            yield x, y
        if (y < level) != (to_y < level):
            yield x + (to_x - x) * (level - y) / (to_y - y), level
    if points[-1][1] < level:
        yield points[-1]


def _valley(axes: Axes, state: State) -> None:
    """Mark the cheapest block size; its tip has those of other requests."""
    valleys = [f"{each.title}: {each.block_size}" for each in (state.valley, *state.others)]
    size = state.valley.block_size
    x, y = axes.at(size, state.empty[size])
    words = f"Held in vain and fetched in vain, both per byte needed, are least here. Cheapest: {'; '.join(valleys)}."
    axes.drawing.circle((x, y), 6.5, GREEN, tip=words)
    axes.drawing.text((x, axes.box.bottom + 35), "cheapest", size=SMALL, colour=GREEN, anchor="middle", bold=True)


# ---- the pool and the tables


def _pool(drawing: Drawing, play: Play, mean: float, y: float, width: float) -> float:
    """Draw the pool and its empty share beside the mean, with the tables of one request above and
    below it; return the y of the lowest mark.
    """
    samples = max((table.sample for frame in play.frames for table in frame.tables), default=1)
    keys = [Segment("tokens", 0, BLUE), Segment("empty slots", 0, ORANGE)]
    keys += [Segment("shared by answers", 0, YELLOW)] * (samples > 1)
    title = "Block pool" + f", lengths ÷ {play.shortened}" * (play.shortened > 1)
    y = draw_title(drawing, title, keys, y) + 30
    with drawing.answer():
        for now, first, last in _runs([_empty_now(frame, play.block_size) for frame in play.frames]):
            words = f"empty now: {now},{' at full length' * (play.shortened > 1)} on average {percent(mean)}"
            drawing.text((MARGIN, y - 12), words, size=SMALL, colour=ORANGE, at=f"{first} {last}")
    room = width - 2 * MARGIN
    rows = math.ceil(play.num_blocks / (room // 29))
    columns = math.ceil(play.num_blocks / rows)
    reach = REACH if rows == 1 or width >= WIDE else 12
    wide, top = min(room / columns, 56), y + ENTRY + reach
    places = [
        Box(MARGIN + at % columns * wide, top + at // columns * (BLOCK + 8), wide - 4, BLOCK)
        for at in range(play.num_blocks)
    ]
    _blocks(drawing, play, places)
    tops = (y, places[-1].bottom + reach)[:samples]
    for (request, tables), first, last in _runs(list(_followed(play.frames))):
        with drawing.layer(group=f"r{request}", at=f"{first} {last}"):
            for sample, (table, top) in enumerate(zip(tables, tops, strict=False), 1):
                name = f"{'Request ' if width >= WIDE else 'R'}{request}"
                name += f", answer {sample}" * (len(tables) > 1)
                _table(drawing, name, table, top, places)
    return tops[-1] + ENTRY if samples > 1 else places[-1].bottom


def _blocks(drawing: Drawing, play: Play, places: Sequence[Box]) -> None:
    """Draw every block as free, and draw its holder and its tokens over it in the frames in which it
    is held.

    There are hundreds of marks, so equal marks in the same frames form one shape.
    """
    seen = [_holdings(frame, play.block_size) for frame in play.frames]
    drawing.rect(places[0], MID, tip="Block 0, the null block: it fills the ends of tables, and no request gets it.")
    for block, place in enumerate(places[1:], 1):
        drawing.rect(place, CARD, stroke=RULE, tip=f"Block {block}: free.")
    owned = _layers(seen, play.num_blocks, lambda holding: (holding.request, holding.entry, holding.fault))
    for request, marks in _layered(drawing, owned):
        _draw_owned(drawing, request, marks, places)
    filled = _layers(seen, play.num_blocks, lambda holding: (holding.request, holding.filled, holding.samples > 1))
    for _, marks in _layered(drawing, filled):
        for colour, shared in ((BLUE, False), (YELLOW, True)):
            bars = [_bar(places[block], value[1] / play.block_size) for block, value in marks if value[2] is shared]
            if bars:
                drawing.add(f'<path d="{"".join(bars)}" fill="{colour}" pointer-events="none"/>')
    drawing.add(f'<g font-size="{SMALL}" pointer-events="none">')
    for block, place in enumerate(places):
        ink = QUIET if block else INK
        drawing.add(f'<text x="{place.x + 3:g}" y="{place.y + 13:g}" fill="{ink}">{block or "null"}</text>')
    drawing.add("</g>")


def _layers(seen: Sequence[Mapping[int, _Holding]], num_blocks: int, mark: Callable[[Any], Any]) -> _Layers:
    """Group the blocks' marks by request and by the first and last frame of an unchanged mark."""
    layers: _Layers = {}
    for block in range(num_blocks):
        held = [frame.get(block) for frame in seen]
        for value, first, last in _runs([holding and mark(holding) for holding in held]):
            layers.setdefault((value[0], first, last), []).append((block, value))
    return layers


def _draw_owned(drawing: Drawing, request: int, marks: Sequence[tuple[int, Any]], places: Sequence[Box]) -> None:
    for block, (_, entry, fault) in marks:
        owner = f"request {request}, entry {entry}" if request else "in no table"
        tip = escape(f"Block {block}: {owner}" + (f". ✕ {fault}" if fault else ""))
        fill = VERMILLION if fault else RESERVED
        drawing.add(f'<path d="{_outline(places[block])}" fill="{fill}" data-tip="{tip}"/>')
    drawing.add(f'<path d="{"".join(_bar(places[block], 1) for block, _ in marks)}" fill="{ORANGE}"/>')
    drawing.add(f'<g font-size="{SMALL}" pointer-events="none">')
    for block, (_, _, fault) in marks:
        x, y = places[block].x + 3, places[block].y + 27
        ink = "#000000" if fault else INK
        drawing.add(f'<text x="{x:g}" y="{y:g}" fill="{ink}">{"!" * bool(fault)}{f"R{request}" * bool(request)}</text>')
    drawing.add("</g>")


def _bar(place: Box, share: float) -> str:
    """Return the outline of the bar at the bottom of a block, of which `share` is filled."""
    high = place.height - 33
    return f"M{place.x + 3:g} {place.bottom - 3:g}v-{high:g}h{(place.width - 6) * share:.1f}v{high:g}z"


_Layers = dict[tuple[int, int, int], list[tuple[int, Any]]]
"""Blocks and their marks, by (request, first frame, last frame)."""


def _layered(drawing: Drawing, layers: _Layers) -> Iterator[tuple[int, list[tuple[int, Any]]]]:
    for (request, first, last), marks in layers.items():
        with drawing.layer(group=f"r{request}", at=f"{first} {last}"):
            yield request, marks


def _outline(place: Box) -> str:
    return f"M{place.x:g} {place.y:g}h{place.width:g}v{place.height:g}h-{place.width:g}z"


class _Holding(NamedTuple):
    """The holder of a block in one frame."""

    request: int
    """The request, or 0 where none holds it although the pool counts a holder."""
    samples: int
    entry: int
    """The entry in the table, from 0."""
    filled: int
    """Slots that hold a token."""
    fault: str


def _holdings(frame: Frame, block_size: int) -> dict[int, _Holding]:
    """Map each block to its holder in one frame."""
    faults = {block: fault.words for fault in reversed(frame.faults) for block in fault.blocks}
    holdings = {block: _Holding(0, 0, 0, 0, words) for block, words in faults.items()}
    for table in frame.tables:
        for entry, block in enumerate(table.blocks):
            filled = min(max(table.tokens - entry * block_size, 0), block_size)
            before = holdings.get(block)
            if before and before.request == table.request:
                holdings[block] = before._replace(samples=before.samples + 1, filled=max(before.filled, filled))
            else:
                holdings[block] = _Holding(table.request, 1, entry, filled, faults.get(block, ""))
    return holdings


def _empty_now(frame: Frame, block_size: int) -> str:
    """Format the empty share of the slots held in one frame, or return "" if none is."""
    filled = [holding.filled for holding in _holdings(frame, block_size).values()]
    return percent(1 - sum(filled) / len(filled) / block_size) if filled else ""


def _runs(values: Sequence[Any]) -> Iterator[tuple[Any, int, int]]:
    """Yield runs of equal, truthy values as (value, first index, last index)."""
    first = 0
    for index, value in enumerate(values):
        if index + 1 == len(values) or values[index + 1] != value:
            if value:
                yield value, first, index
            first = index + 1


_Tables = tuple[int, tuple[tuple[int, ...], ...]]
"""A request and its block tables."""


def _followed(frames: Sequence[Frame]) -> Iterator[_Tables | None]:
    """Yield for each frame the request whose tables are drawn: rather one that shares blocks, then
    one with other blocks than before, then the one before.
    """
    before: dict[int, tuple[tuple[int, ...], ...]] = {}
    latest = 0
    for frame in frames:
        held: dict[int, tuple[tuple[int, ...], ...]] = {}
        for table in frame.tables:
            held[table.request] = (*held.get(table.request, ()), table.blocks)
        ranks = {
            request: (sum(map(len, tables)) > len({*chain(*tables)}), tables != before.get(request), request == latest)
            for request, tables in held.items()
        }
        latest = max(ranks, key=lambda request: ranks[request], default=0)
        before = held
        yield (latest, held[latest]) if latest else None


def _table(drawing: Drawing, name: str, blocks: Sequence[int], top: float, places: Sequence[Box]) -> None:
    """Draw a block table's entries in a row, each with a line to its block."""
    drawing.text((MARGIN, top + 13), name, size=SMALL, bold=True)
    left = MARGIN + text_width(name, SMALL) * BOLD + 10
    each = min(places[0].width + 4, (drawing.width - MARGIN - left) / len(blocks))
    boxes = [Box(left + entry * each, top, each - 3, ENTRY) for entry in range(len(blocks))]
    tip = f"{name}: its block table is {', '.join(map(str, blocks))}"
    drawing.add(f'<path d="{"".join(map(_outline, boxes))}" fill="{RESERVED}" data-tip="{tip}"/>')
    for box, block in zip(boxes, blocks, strict=True):
        if each >= 19:
            drawing.text((box.x + box.width / 2, top + 13), str(block), size=SMALL, anchor="middle")
    marks = [_link(box, places[block], places) for box, block in zip(boxes, blocks, strict=True)]
    if drawing.width < WIDE and places[0].y < places[-1].y:  # more links would run together
        marks = [marks[0], *(_outline(places[block]) for block in blocks)]
    drawing.add(f'<path d="{"".join(marks)}" fill="none" stroke="{INK}" stroke-width="1.5" pointer-events="none"/>')


def _link(box: Box, place: Box, places: Sequence[Box]) -> str:
    """Return the curve from a table's entry to its block, through the gaps between the others."""
    down = box.y < places[0].y
    start, edge = (box.bottom, places[0].y) if down else (box.y, places[-1].bottom)
    end = place.y if down else place.bottom
    x, middle = box.x + box.width / 2, place.x + place.width / 2
    way = middle if end == edge else place.x - 2 if down else place.right + 2
    bend = (start + edge) / 2
    curve = f"M{x:.1f} {start:g}C{x:.1f} {bend:g} {way:.1f} {bend:g} {way:.1f} {edge:g}"
    return curve if end == edge else f"{curve}V{end - 4 if down else end + 4:g}L{middle:.1f} {end:g}"

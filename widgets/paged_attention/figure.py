"""Draw lesson 02's picture: the costs by block size, the sizes at which they break, and the
animated pool.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm_lab.drawing import text_width
from minivllm_lab.paged_attention.played_pool import Frame, Play
from minivllm_lab.palette import BLUE, GREEN, INK, ORANGE, VERMILLION, YELLOW
from widgets.shell.plot import MARGIN, WIDE, Axes, Key, Scale, draw_keys, hidden_note
from widgets.shell.svg import MID, QUIET, RULE, SMALL, Box, Drawing, Segment, legend
from widgets.shell.theme import CARD, RESERVED

if TYPE_CHECKING:
    from widgets.paged_attention import State

LEAST, MOST = 0.0005, 1.6
"""The ends of the logarithmic axis of costs: 0.05 % and 160 %."""
DEFAULT = 16
"""vLLM's default block size, which is also the smallest that its kernels take."""
ROW = 15
"""The height in pixels of a row of the tables."""
KEYS: tuple[Key, ...] = (
    ("empty slots", ORANGE, "", 2.5),
    ("bytes fetched in vain (modelled)", BLUE, "7 3", 2.5),
    ("both added", INK, "", 3),
)


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
    y = _costs(drawing, state, pinned, width)
    drawing.height = _pool(drawing, state.play, y + 22, width) + 10
    drawing.play([frame.caption for frame in state.play.frames], still=True)
    return drawing.render()


def _costs(drawing: Drawing, state: State, pinned: State | None, width: float) -> float:
    """Draw the plot of both costs, and return the y below it."""
    note = f"{state.title}, {state.samples} answer{'s' if state.samples > 1 else ''} each"
    y = drawing.heading((MARGIN, 22), "What a block size costs", note)
    below = draw_keys(drawing, y + 20, KEYS)
    box = Box(MARGIN + 38, below + 28, width - 2 * MARGIN - 48, 140 if width >= WIDE else 190)
    sizes = [float(size) for size in state.empty]
    axes = Axes(drawing, box, Scale(sizes[0], sizes[-1], log=True), Scale(LEAST, MOST, log=True))
    _broken(axes, state)
    axes.frame(
        f"block size in slots (vLLM's default: {DEFAULT})",
        "share of the slots held, or of the bytes needed",
        x_ticks=sizes,
        x_format=lambda value: f"{value:.0f}",
        y_ticks=(0.001, 0.01, 0.1, 1),
        y_format=percent,
    )
    axes.mark_y(state.empty_allowed, f"limit: {percent(state.empty_allowed)}", ORANGE)
    axes.mark_y(state.extra_allowed, f"limit: {percent(state.extra_allowed)}", BLUE)
    if pinned:
        costs = [_shown(cost) for cost in pinned.cost.values()]
        axes.pinned([float(size) for size in pinned.cost], costs, pinned.block_size)
    _curves(axes, state, sizes)
    hidden_note(drawing, Box(box.x + 0.6 * box.width, box.y, 0.4 * box.width, 36 if width >= WIDE else 64))
    axes.here(state.block_size, "block_size")
    return _cpu(drawing, axes, state, width) if state.measured else box.bottom + 35


def _modelled(state: State) -> str:
    return (
        "Modelled, not measured: bytes that warps fetch in whole pieces of memory, for one KV head, without a cache. A "
        "table entry has 4 bytes but fetches a whole piece. Waiting for it does not count. "
        f"Keys take {state.row_bytes} bytes per token, and values as many."
    )


def _shown(share: float) -> float:
    """Move a cost below the logarithmic axis to its lower end."""
    return max(share, LEAST)


def _curves(axes: Axes, state: State, sizes: list[float]) -> None:
    empty, extra, cost = state.empty, state.extra, state.cost
    with axes.drawing.layer(tip=_modelled(state)):
        tips = [f"Blocks of {size}: {percent(extra[size])} more bytes than needed (modelled)." for size in extra]
        axes.line(sizes, [_shown(share) for share in extra.values()], BLUE, dash="7 3", tips=tips)
    with axes.drawing.answer():
        tips = [f"Blocks of {size}: {percent(empty[size])} of the held slots are empty." for size in empty]
        axes.line(sizes, [_shown(share) for share in empty.values()], ORANGE, tips=tips)
        tips = [f"Blocks of {size}: {percent(cost[size])}, both costs added." for size in cost]
        axes.line(sizes, [_shown(share) for share in cost.values()], INK, width=3, tips=tips)
        _valley(axes, state)


def _valley(axes: Axes, state: State) -> None:
    """Mark the cheapest block size; its tip has those of other requests."""
    valleys = [
        f"{each.title}: cheapest with blocks of {each.block_size}, {percent(each.cost)}"
        for each in (state.valley, *state.others)
    ]
    place = axes.at(state.valley.block_size, state.valley.cost)
    axes.drawing.circle(place, 6.5, GREEN, tip=f"Both costs added. {'; '.join(valleys)}.")
    edge = max((x for x in axes.edges if place[0] - 40 < x < place[0]), default=place[0])  # no words across it
    words = "cheapest allowed" if axes.drawing.width >= WIDE else "cheapest"
    axes.label((edge, place[1]), f"{words}: {state.valley.block_size}")


def _broken(axes: Axes, state: State) -> None:
    """Shade where the kernel's cost or the empty share exceeds its limit, and where no kernel takes
    the block size.
    """
    low = _crossing(state.extra, state.extra_allowed, [state.over(size) for size in state.extra])
    least = DEFAULT / math.sqrt(2)  # between the largest size without a kernel and the smallest with one
    emptier = [share > state.empty_allowed for share in state.empty.values()]
    flipped = {size: state.empty[size] for size in reversed(list(state.empty))}
    high = _crossing(flipped, state.empty_allowed, emptier[::-1])
    if high is not None:
        with axes.drawing.answer():
            axes.broken(high, None, f"Last blocks are half empty: over {percent(state.empty_allowed)} of the slots")
    axes.broken(None, least, f"No kernel takes blocks of fewer than {DEFAULT}")
    if low is not None and low > least:  # smaller sizes are out anyway
        axes.broken(None, low, f"Too many look-ups: over {percent(state.extra_allowed)} of the bytes")


def _crossing(costs: Mapping[int, float], allowed: float, over: Sequence[bool]) -> float | None:
    """Return the block size at which a cost that falls along `costs` returns to its limit, or None
    if it never exceeds it.
    """
    sizes = list(costs)
    last = next((index for index, exceeds in enumerate(over) if not exceeds), len(sizes))
    if last == 0:
        return None
    if last == len(sizes):
        return float(sizes[-1])
    above, below = costs[sizes[last - 1]], max(costs[sizes[last]], LEAST / 10)
    share = math.log(above / allowed) / math.log(above / below)
    return sizes[last - 1] * (sizes[last] / sizes[last - 1]) ** min(max(share, 0.02), 0.98)


def _cpu(drawing: Drawing, axes: Axes, state: State, width: float) -> float:
    """Write the CPU's measurement below the plot, and return the y coordinate below it."""
    least, most = min(state.measured.values()), max(state.measured.values())
    words = f"any block size takes {least:.2f} to {most:.2f} × the time without blocks."
    place = (MARGIN, axes.box.bottom + 55)
    return drawing.paragraph(place, f"Measured on a CPU ({state.cpu}): {words}", width - 2 * MARGIN)


def _pool(drawing: Drawing, play: Play, y: float, width: float) -> float:
    """Draw the blocks and the tables of the requests; return the y of the lowest."""
    blocks = play.num_blocks - 1
    note = f"{blocks} blocks of {play.block_size} slot{'s' * (play.block_size > 1)}; R1: of request 1; framed: new"
    note += f"; lengths ÷ {play.shortened}" * (play.shortened > 1)
    y = drawing.heading((MARGIN, y), "The block pool", note)
    keys = [Segment("held", 0, RESERVED), Segment("tokens", 0, BLUE), Segment("empty", 0, CARD, outlined=True)]
    keys.append(Segment("shared by samples", 0, YELLOW))
    seen = [_holdings(frame, play.block_size) for frame in play.frames]
    shares = [1 + any(holding.samples > 1 for holding in frame.values()) for frame in seen]
    side = width >= WIDE
    room = (width - 2 * MARGIN) * (0.6 if side else 1)
    below = 0
    for sharing, first, last in _runs(shares):
        with drawing.layer(at=f"{first} {last}"):
            below = max(below, round(legend(drawing, (MARGIN, y + 19), keys[: 2 + sharing], room)) - 8)
    columns = min(max(-(-play.num_blocks // 3), 5), 8)
    wide, high = int(min(room / columns, 64)), min(60, 130 // -(-play.num_blocks // columns))
    places = [
        Box(MARGIN + at % columns * wide, below + at // columns * high, wide - 2, high - 2)
        for at in range(play.num_blocks)
    ]
    _blocks(drawing, play, seen, places)
    table = (MARGIN + room + 14, y + 19) if side else (MARGIN, places[-1].bottom + 18)
    return max(places[-1].bottom, _tables(drawing, play, shares, table, width - MARGIN - table[0]))


def _blocks(drawing: Drawing, play: Play, seen: Sequence[dict[int, _Holding]], places: Sequence[Box]) -> None:
    """Draw every block as free, and draw its holder and its tokens over it in the frames in which it
    is held.

    There are hundreds of marks, so equal marks in the same frames form one shape.
    """
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
    _new(drawing, seen, places)


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
    drawing.add(f'<path d="{"".join(_bar(places[block], 1) for block, _ in marks)}" fill="{CARD}"/>')
    drawing.add(f'<g text-anchor="end" font-size="{SMALL}" pointer-events="none">')
    for block, (_, _, fault) in marks:
        x, y = places[block].right - 3, places[block].y + 13
        ink = "#000000" if fault else INK
        drawing.add(f'<text x="{x:g}" y="{y:g}" fill="{ink}">{"!" * bool(fault)}{f"R{request}" * bool(request)}</text>')
    drawing.add("</g>")


def _bar(place: Box, share: float) -> str:
    """Return the outline of the bar at the bottom of a block, of which `share` is filled."""
    high = min(place.height - 19, 20)
    return f"M{place.x + 3:g} {place.bottom - 3:g}v-{high:g}h{(place.width - 6) * share:.1f}v{high:g}z"


_Layers = dict[tuple[int, int, int], list[tuple[int, Any]]]
"""Blocks and their marks, by (request, first frame, last frame)."""


def _layered(drawing: Drawing, layers: _Layers) -> Iterator[tuple[int, list[tuple[int, Any]]]]:
    for (request, first, last), marks in layers.items():
        with drawing.layer(group=f"r{request}", at=f"{first} {last}"):
            yield request, marks


def _outline(place: Box) -> str:
    return f"M{place.x:g} {place.y:g}h{place.width:g}v{place.height:g}h-{place.width:g}z"


def _new(drawing: Drawing, seen: Sequence[Mapping[int, _Holding]], places: Sequence[Box]) -> None:
    """Draw an outline around the blocks that each step allocated."""
    for index, (before, after) in enumerate(zip([{}, *seen], seen, strict=False)):
        new = [places[block] for block in after if block not in before]
        path = "".join(map(_outline, new))
        if path:
            style = f'fill="none" stroke="{INK}" stroke-width="2" pointer-events="none"'
            with drawing.layer(at=f"{index} {index}"):
                drawing.add(f'<path d="{path}" {style}/>')


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


def _runs(values: Sequence[Any]) -> Iterator[tuple[Any, int, int]]:
    """Yield runs of equal, truthy values as (value, first index, last index)."""
    first = 0
    for index, value in enumerate(values):
        if index + 1 == len(values) or values[index + 1] != value:
            if value:
                yield value, first, index
            first = index + 1


def _tables(drawing: Drawing, play: Play, shares: Sequence[int], place: tuple[float, float], room: float) -> float:
    """Draw a row for each request, with its block table or its state; return the y of the last
    one.
    """
    x, y = place
    several = any(table.sample > 1 for frame in play.frames for table in frame.tables)
    for sharing, first, last in _runs(shares):
        head = "Tables: shared · sample | sample" if sharing > 1 else "Tables: sample | sample"
        with drawing.layer(at=f"{first} {last}"):
            drawing.text((x, y), head if several else "Block tables", size=SMALL, bold=True)
    rows = list(_rows(play.frames))
    for row, seen in enumerate(zip_longest(*rows), 1):
        base = y + 3 + row * ROW
        for (request, words), first, last in _runs(seen):
            shown = _cut(words, room - 26)
            tip = f"Request {request}, block table: {words}" if shown != words else ""
            with drawing.layer(tip=tip, group=f"r{request}", at=f"{first} {last}"):
                drawing.text((x, base), f"R{request}", size=SMALL, bold=True)
                drawing.text((x + 24, base), shown, size=SMALL, colour=INK if words[0].isdigit() else QUIET)
    return y + 3 + ROW * max(map(len, rows), default=0)


def _rows(frames: Sequence[Frame]) -> Iterator[list[tuple[int, str]]]:
    """Yield for each frame the requests that hold blocks, with their tables, and those preempted or
    next in the queue, with the reason why they wait.
    """
    started: set[int] = set()
    for frame in frames:
        held: dict[int, list[tuple[int, ...]]] = {}
        for table in frame.tables:
            held.setdefault(table.request, []).append(table.blocks)
        rows = {request: _table_words(tables) for request, tables in held.items()}
        started.update(held)
        for place, (request, needed) in enumerate(frame.waiting):
            why = f"needs {needed} blocks, {frame.free} free" if needed > frame.free else "fits, next in line"
            if place == 0 or request in started:
                words = f"behind R{frame.waiting[0][0]}" if place else why
                rows[request] = f"{'preempted' if request in started else 'waiting'}: {words}"
        yield sorted(rows.items())


def _table_words(tables: Sequence[tuple[int, ...]]) -> str:
    if len(tables) == 1:
        return " ".join(map(str, tables[0]))
    shared = next((at for at, entries in enumerate(zip(*tables, strict=False)) if len(set(entries)) > 1), None)
    shared = min(map(len, tables)) if shared is None else shared
    own = " | ".join(" ".join(map(str, table[shared:])) for table in tables)
    common = " ".join(map(str, tables[0][:shared]))
    return f"{common} · {own}" if common and own.strip(" |") else common or own


def _cut(words: str, room: float) -> str:
    """Shorten the words to what fits, and end them with "…"."""
    if text_width(words, SMALL) <= room:
        return words
    kept = words.split(" ")
    while len(kept) > 1 and text_width(" ".join([*kept, "…"]), SMALL) > room:
        kept.pop()
    return " ".join([*kept, "…"])

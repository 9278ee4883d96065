"""Draw lesson 02's picture: a pool of blocks, slot by slot, with the block tables that point into it,
and below it what a block size wastes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm_lab.paged_attention.played_pool import Frame, Play
from minivllm_lab.pictures.drawing import text_width
from minivllm_lab.pictures.palette import BLUE, GREEN, INK, ORANGE, PURPLE, VERMILLION
from widgets.shell.plot import MARGIN, WIDE, Axes, Scale, counted, hidden_note
from widgets.shell.svg import BOLD, SMALL, Box, Drawing, Segment, legend
from widgets.shell.theme import CARD, IDLE, RAMP, RESERVED, WORDS

if TYPE_CHECKING:
    from widgets.paged_attention import State

SMALLEST = 16
"""The smallest block that vLLM's kernels take (FlashAttention, FlashInfer, Triton and FlexAttention), which is also
its default.
"""
COLUMNS, NARROW = 4, 8
"""Slots in a row of a block, whose slots are filled row by row, and pixels below which half as many stand in it."""
NUMBER, SLOTS, ENTRY, REACH = 30, 104, 20, 24
"""The heights in pixels of a block's number and owner, of its slots, of a table's entry, and of the space
between a table and the pool.
"""
SHARED = RAMP[3]
ROOMY = 1.4 * SMALL
"""Pixels above which a block is wide enough for two characters."""
PLAIN = f'fill="{INK}"'
MODELLED = "Modelled for one KV head without a cache: an entry has 4 bytes, but fetches a whole piece of memory."


def percent(share: float, beside: float | None = None) -> str:
    """Format a share (9.3 %) with enough digits to tell it from `beside`."""
    digits, value, other = 2, 100 * share, 100 * (share if beside is None else beside)
    while value != other and digits < 15 and f"{value:.{digits}g}" == f"{other:.{digits}g}":
        digits += 1
    return f"{float(f'{value:.{digits}g}'):.15g} %"


def figure(state: State, width: float = 640, pinned: State | None = None) -> str:
    """Draw the animated pool and its tables, and below them both costs by block size."""
    drawing = Drawing(width, 0, "A pool of blocks", f"Who holds them, and what blocks of {state.block_size} waste")
    top = _pool(drawing, state, width) + 48
    box = Box(56, top, width - 56 - MARGIN, 100 if width >= WIDE else 130)
    across = Scale(min(state.empty), max(state.empty), log=True)
    _wastes(Axes(drawing, box, across, Scale(0.005, 1, log=True)), state, pinned)
    drawing.height = box.bottom + 42
    drawing.play([frame.caption for frame in state.play.frames], still=True)
    return drawing.render()


# ---- what a block size wastes


def _wastes(axes: Axes, state: State, pinned: State | None) -> None:
    """Draw the empty share of the held slots by block size, and what a kernel fetches in vain where it is much."""
    drawing, sizes, share = axes.drawing, list(state.empty), state.empty[state.block_size]
    empty = list(state.empty.values())
    taken = [size for size in sizes if size >= SMALLEST and state.extra[size] > axes.y.low]
    extra = [state.extra[size] for size in taken]
    drawing.number((MARGIN, axes.box.y - 12), percent(share), "of held slots are empty on average", ORANGE)
    axes.shade(SMALLEST, None, words := "too much waste", above=state.allowed)
    axes.broken(None, SMALLEST, f"no kernel takes fewer than {SMALLEST}")
    axes.frame("slots in a block", "", x_ticks=sizes, x_format="{:g}".format, y_ticks=(0.01, 0.1, 1), y_format=percent)
    if pinned:
        axes.pinned(sizes, list(pinned.empty.values()), pinned.block_size)
    with drawing.layer(tip=MODELLED):
        axes.line(taken, extra, PURPLE, width=1.5)
        axes.name(taken[1:], extra[1:], "look-up bytes", PURPLE)
    axes.mark_y(state.allowed, "")
    end, limit = axes.at(sizes[-1], state.allowed)
    axes.label((end + 4, limit - 2), f"limit: {percent(state.allowed)}", bold=False)
    axes.label((end + 4, limit - 26), words, VERMILLION)
    hidden_note(drawing, Box(axes.box.x + axes.box.width / 2, axes.box.y, axes.box.width / 2, axes.box.height))
    axes.here(state.block_size, "block_size")
    with drawing.answer():
        tips = [f"Blocks of {size}: {percent(share)} of held slots are empty." for size, share in state.empty.items()]
        least = sizes.index(SMALLEST)
        for part, dash in ((slice(1, least + 1), "2 6"), (slice(least, None), "")):  # blocks of 1 have no empty slot
            axes.line(sizes[part], empty[part], ORANGE, width=3, dash=dash, tips=tips[part])
        best = axes.at(state.valley, state.empty[state.valley])
        clear = state.block_size if state.valley < state.block_size <= 2 * state.valley else state.valley
        start = axes.at(clear, 1)[0] + 8, min(best[1] + 26, axes.box.bottom - 8)
        drawing.line(best, start, GREEN, width=1.5)
        words = "smallest allowed" if state.valley == SMALLEST else "least waste"
        drawing.text((start[0] + 2, start[1] + 4), words, size=SMALL, colour=GREEN, bold=True, halo=True)
        drawing.last(lambda: drawing.circle(best, 6.5, GREEN))
        axes.points([state.block_size], [max(share, axes.y.low)], ORANGE, radius=6)


# ---- the pool and the tables


def _pool(drawing: Drawing, state: State, width: float) -> float:
    """Draw the pool, with the tables of one request above and below it; return the y of the lowest
    mark.
    """
    play, room = state.play, width - 2 * MARGIN
    title = f"{play.num_blocks - 1} blocks of {counted(play.block_size, 'slot')}"
    shorter = f", lengths ÷ {play.shortened}" * (play.shortened > 1)
    note = f"{counted(state.samples, 'answer')} a request{shorter}"
    y = drawing.heading((MARGIN, 22), title, note) + 22
    keys = [Segment("token", 0, BLUE), Segment("empty", 0, ORANGE), Segment("free", 0, IDLE, outlined=True)]
    keys += [Segment("shared: full prompt blocks", 0, SHARED)] * (state.samples > 1)
    y = legend(drawing, (MARGIN, y), keys, room) - 6
    followed = list(_followed(play.frames))
    wide, top = room / (play.num_blocks - 1), y + ENTRY + REACH
    places = [Box(MARGIN, top, 0, NUMBER + SLOTS)]  # block 0, the null block, which no request gets
    gap = min(3, wide / 9)
    places += [Box(MARGIN + at * wide, top, wide - gap, NUMBER + SLOTS) for at in range(play.num_blocks - 1)]
    _blocks(drawing, play, places)
    tops = (y, places[0].bottom + REACH)
    for (request, tables), first, last in _runs(followed):
        with drawing.layer(group=f"r{request}", at=f"{first} {last}"):
            _draw_followed(drawing, request, tables, places, tops)
    return places[0].bottom + (REACH + ENTRY) * (state.samples > 1)


def _blocks(drawing: Drawing, play: Play, places: Sequence[Box]) -> None:
    """Draw every block as free, and draw its slots over it in the frames in which it is held.

    There are hundreds of marks, so equal marks in the same frames form one shape.
    """
    size = play.block_size
    seen = [_holdings(frame, size) for frame in play.frames]
    for block, place in enumerate(places[1:], 1):
        drawing.rect(place, IDLE, tip=f"Block {block}: free.")
    for request, marks in _layered(drawing, seen, play.num_blocks, lambda holding: holding._replace(filled=0)):
        _draw_owned(drawing, request, marks, places)
    for _, marks in _layered(drawing, seen, play.num_blocks, lambda holding: (holding.request, holding.filled)):
        paths = [_slots(places[block], value[1], size) for block, value in marks]
        drawing.add(f'<path d="{"".join(paths)}" fill="{BLUE}" pointer-events="none"/>')
    drawing.add(f'<path d="{_grid(places, size)}" stroke="{CARD}" stroke-width="1" pointer-events="none"/>')
    _write(drawing, [(place, str(block)) for block, place in enumerate(places) if place.width > ROOMY], 13)


def _write(drawing: Drawing, words: Iterable[tuple[Box, str]], down: float, style: str = PLAIN) -> None:
    """Write words in the middle of their boxes, `down` pixels below the tops, as one group of equal texts."""
    marks = [f'<text x="{box.x + box.width / 2:.1f}" y="{box.y + down:g}">{content}</text>' for box, content in words]
    if marks:
        drawing.add(f'<g font-size="{SMALL}" text-anchor="middle" {style}>{"".join(marks)}</g>')


def _shape(place: Box, size: int) -> tuple[int, float, float]:
    """Return the slots in a row of a block, and a slot's width and height in pixels."""
    columns = min(size, COLUMNS if place.width > NARROW * COLUMNS else COLUMNS // 2)
    return columns, place.width / columns, SLOTS * columns / size


def _slots(place: Box, count: int, size: int) -> str:
    """Return the outline of a block's first slots."""
    columns, wide, high = _shape(place, size)
    whole, rest = divmod(count, columns)
    top = place.y + NUMBER
    parts = [(top, place.width, whole * high), (top + whole * high, rest * wide, high)]
    return "".join(f"M{place.x:.1f} {y:.1f}h{w:.1f}v{h:.1f}h-{w:.1f}z" for y, w, h in parts if w and h)


def _grid(places: Sequence[Box], size: int) -> str:
    """Return the lines between the blocks' slots, where these are large enough."""
    columns, wide, high = _shape(places[1], size)
    top, left, right = places[0].y + NUMBER, places[1].x, places[-1].right
    down = [place.x + column * wide for place in places[1:] for column in range(1, columns) if wide > 3]
    across = [top + row * high for row in range(size // columns) if high > 3 or not row]
    return "".join([f"M{x:.1f} {top:g}v{SLOTS}" for x in down] + [f"M{left:g} {y:g}H{right:g}" for y in across])


def _layered(
    drawing: Drawing, seen: Sequence[Mapping[int, _Holding]], num_blocks: int, mark: Callable[[_Holding], Any]
) -> Iterator[tuple[int, list[tuple[int, Any]]]]:
    """Group the blocks' marks by request and by the first and last frame of an unchanged mark, and yield each
    group inside a layer of the drawing.
    """
    layers: dict[tuple[int, int, int], list[tuple[int, Any]]] = {}
    for block in range(1, num_blocks):
        held = [frame.get(block) for frame in seen]
        for value, first, last in _runs([holding and mark(holding) for holding in held]):
            layers.setdefault((value[0], first, last), []).append((block, value))
    for (request, first, last), marks in layers.items():
        with drawing.layer(group=f"r{request}", at=f"{first} {last}"):
            yield request, marks


def _draw_owned(drawing: Drawing, request: int, marks: Sequence[tuple[int, _Holding]], places: Sequence[Box]) -> None:
    heads: dict[str, str] = {}
    for block, holding in marks:
        owner = f"request {request}, entry {holding.entry}" if request else "in no table"
        drawing.rect(
            places[block], ORANGE, tip=f"Block {block}: {owner}" + f". ✕ {holding.fault}" * bool(holding.fault)
        )
        fill = VERMILLION if holding.fault else SHARED if holding.shared else RESERVED
        heads[fill] = heads.get(fill, "") + _outline(replace(places[block], height=NUMBER))
    for fill, path in heads.items():
        drawing.add(f'<path d="{path}" fill="{fill}" pointer-events="none"/>')
    names = [(places[block], f"R{request}") for block, _ in marks if request and places[block].width > ROOMY]
    _write(drawing, names, 26)
    wrong = [(places[block], "✕") for block, holding in marks if holding.fault]
    _write(drawing, wrong, NUMBER + SLOTS + 13, f'fill="{WORDS[VERMILLION]}" font-weight="600"')


class _Holding(NamedTuple):
    """The holder of a block in one frame."""

    request: int
    """The request, or 0 where none holds it although the pool counts a holder."""
    entry: int
    """The entry in the table, from 0."""
    filled: int
    """Slots that hold a token."""
    fault: str
    shared: bool = False
    """True if several answers hold it."""


def _holdings(frame: Frame, block_size: int) -> dict[int, _Holding]:
    """Map each block to its holder in one frame."""
    faults = {block: fault.words for fault in reversed(frame.faults) for block in fault.blocks}
    holdings = {block: _Holding(0, 0, 0, words) for block, words in faults.items()}
    for table in frame.tables:
        for entry, block in enumerate(table.blocks):
            filled = min(max(table.tokens - entry * block_size, 0), block_size)
            before = holdings.get(block)
            if before and before.request == table.request:
                holdings[block] = before._replace(filled=max(before.filled, filled), shared=True)
            else:
                holdings[block] = _Holding(table.request, entry, filled, faults.get(block, ""))
    return holdings


def _runs(values: Sequence[Any]) -> Iterator[tuple[Any, int, int]]:
    """Yield runs of equal, truthy values as (value, first index, last index)."""
    first = 0
    for index, value in enumerate(values):
        if index + 1 == len(values) or values[index + 1] != value:
            if value:
                yield value, first, index
            first = index + 1


_Followed = tuple[int, list[tuple[int, ...]]]
"""The request whose tables are drawn in a frame, and these tables."""


def _followed(frames: Sequence[Frame]) -> Iterator[_Followed | None]:
    """Yield for each frame the request whose tables are drawn: rather one that shares blocks, then
    the one before.
    """
    latest = 0
    for frame in frames:
        held: dict[int, list[tuple[int, ...]]] = {}
        for table in frame.tables:
            held.setdefault(table.request, []).append(table.blocks)
        ranks = {
            each: (sum(map(len, tables)) > len({*chain(*tables)}), each == latest) for each, tables in held.items()
        }
        latest = max(ranks, key=lambda request: ranks[request], default=0)
        yield (latest, held[latest]) if held else None


def _draw_followed(
    drawing: Drawing, request: int, tables: list[tuple[int, ...]], places: Sequence[Box], tops: Sequence[float]
) -> None:
    """Draw the tables of a request's first and last answer, with arrows to their blocks."""
    shown = tables[:: max(1, len(tables) - 1)]
    shared = {*tables[0]} & {*tables[1]} if len(tables) > 1 else set[int]()
    names = f"Request {request}" + ", answer 1" * (len(tables) > 1), f"answer {len(tables)}"
    for name, table, top in zip(names, shown, tops, strict=False):
        _draw_table(drawing, name, table, shared, top, places)


def _draw_table(
    drawing: Drawing, name: str, blocks: Sequence[int], shared: set[int], top: float, places: Sequence[Box]
) -> None:
    """Draw a block table's entries in a row, about above or below their blocks, with an arrow to
    each.
    """
    beside = text_width(name, SMALL) * BOLD + 10
    each = min(26, (drawing.width - 2 * MARGIN - beside) / len(blocks))
    middle = sum(places[block].x for block in blocks) / len(blocks)
    left = max(MARGIN, min(middle - each * len(blocks) / 2, drawing.width - MARGIN - beside - each * len(blocks)))
    boxes = [Box(left + entry * each, top, each - 2, ENTRY) for entry in range(len(blocks))]
    drawing.text((boxes[-1].right + 8, top + 14), name, size=SMALL, bold=True)
    twice = [box for box, block in zip(boxes, blocks, strict=True) if block in shared]
    for fill, cells in ((RESERVED, boxes), (SHARED, twice)):
        drawing.add(f'<path d="{"".join(map(_outline, cells))}" fill="{fill}" stroke="{INK}"/>')
    _write(drawing, [(box, str(block)) for box, block in zip(boxes, blocks, strict=True) if each >= 19], 14)
    marks = [_link(box, places[block]) for box, block in zip(boxes, blocks, strict=True)]
    marks += [_outline(places[block]) for block in blocks]
    drawing.add(f'<path d="{"".join(marks)}" fill="none" stroke="{INK}" stroke-width="1.5" pointer-events="none"/>')


def _outline(place: Box) -> str:
    return f"M{place.x:.1f} {place.y:g}h{place.width:.1f}v{place.height:g}h-{place.width:.1f}z"


def _link(box: Box, place: Box) -> str:
    """Return the arrow from a table's entry to its block."""
    down = box.y < place.y
    start, end = (box.bottom, place.y) if down else (box.y, place.bottom)
    x, to, bend = box.x + box.width / 2, place.x + place.width / 2, (start + end) / 2
    back = end - 6 if down else end + 6
    head = f"M{to - 3.5:.1f} {back:g}L{to:.1f} {end:g}L{to + 3.5:.1f} {back:g}"
    return f"M{x:.1f} {start:g}C{x:.1f} {bend:g} {to:.1f} {bend:g} {to:.1f} {end:g}{head}"

"""Draw the animated lower part of lesson 12's picture: the adapter in each slot, and the queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from minivllm_lab.drawing import ink_on, text_width
from minivllm_lab.palette import SKY
from widgets.multi_lora.runs import Moment
from widgets.multi_lora.state import State
from widgets.shell.plot import MARGIN, Scale, counted, seconds
from widgets.shell.strip import NAMES, draw_placeholder, draw_times, draw_title, frame_ends, frames_from, pixels
from widgets.shell.svg import QUIET, SMALL, Box, Drawing, Segment
from widgets.shell.theme import IDLE, MID, MISSED, RESERVED

TITLE = "Slot by slot"
ROWS, HIGH = 4, 15
"""How many slots are drawn, and the height of each in pixels."""


@dataclass(frozen=True)
class Stay:
    """The time that an adapter spent in a slot, in use or kept."""

    adapter: int
    start: float
    end: float
    in_use: bool


def draw_strip(drawing: Drawing, state: State, y: float) -> float:
    """Draw the first slots over a time window, and the queue; return the y below."""
    if state.slots not in state.points:
        return draw_placeholder(drawing, TITLE, state.refused, y)
    keys = [
        Segment("adapter in use (1: the most popular)", 0, SKY),
        Segment("idle", 0, RESERVED),
        Segment("waiting for a slot", 0, MISSED, hatched=True),
    ]
    y = draw_title(drawing, TITLE, keys, y)
    strip = state.here.strip
    across = Scale(*state.serving.window)
    rows = min(ROWS, state.slots)
    box = Box(MARGIN + NAMES, y + 12, drawing.width - 2 * MARGIN - NAMES, rows * (HIGH + 2))
    _draw_name(drawing, box, "slots" if rows == state.slots else f"slots 1–{rows}")
    lines = [Box(box.x, box.y + row * (HIGH + 2), box.width, HIGH) for row in range(rows)]
    for line in lines:
        drawing.rect(line, IDLE)
    for row, line in enumerate(lines):
        for stay in _stays(strip, row):
            _draw_stay(drawing, line, stay, across)
    below = Box(box.x, box.bottom + 4, box.width, 24)
    _draw_queue(drawing, below, strip, across)
    drawing.play([_caption(strip, across.low, end) for end in frame_ends(across)])
    return draw_times(drawing, below, across)


def _draw_name(drawing: Drawing, box: Box, words: str) -> None:
    drawing.text((MARGIN, box.y + box.height / 2 + 4), words, size=SMALL, colour=QUIET)


def _stays(strip: Sequence[Moment], row: int) -> Iterator[Stay]:
    """Yield the successive stays in one slot, with equal moments joined."""
    stay: Stay | None = None
    for moment in strip:
        adapter = moment.slots[row]
        in_use = adapter in moment.in_use
        if stay and (adapter, in_use) == (stay.adapter, stay.in_use):
            stay = Stay(stay.adapter, stay.start, moment.end, in_use)
            continue
        if stay:
            yield stay
        stay = Stay(adapter, moment.start, moment.end, in_use) if adapter is not None else None
    if stay:
        yield stay


def _draw_stay(drawing: Drawing, line: Box, stay: Stay, across: Scale) -> None:
    left, right = pixels(line, across, stay.start, stay.end)
    at = frames_from(stay.start, across)
    colour = SKY if stay.in_use else RESERVED
    part = Box(left, line.y, max(right - left - 0.8, 0.6), line.height)
    words = "in use" if stay.in_use else "kept until another adapter takes its slot"
    drawing.rect(part, colour, tip=f"Adapter {stay.adapter}, {words}", at=at, group=f"adapter-{stay.adapter}")
    number = f"{stay.adapter:,}"
    if not stay.in_use:
        return
    if part.width > text_width(number, SMALL) + 6:
        place = (part.x + part.width / 2, part.bottom - 3)
        drawing.text(place, number, size=SMALL, colour=ink_on(colour), anchor="middle", at=at)
    elif left == line.x < right:
        drawing.text((line.x - 5, part.bottom - 3), number, size=SMALL, anchor="end", at=at)


def _draw_queue(drawing: Drawing, box: Box, strip: Sequence[Moment], across: Scale) -> None:
    """Draw how many requests wait only for a slot, and write the longest queue."""
    longest = max((moment.waiting for moment in strip), default=0)
    drawing.rect(box, IDLE)
    _draw_name(drawing, box, f"queue, up to {longest}")
    for group in _alike(strip):
        left, right = pixels(box, across, group[0].start, group[-1].end)
        high = box.height * group[0].held / max(longest, 1)
        area = Box(left, box.bottom - high, max(right - left, 0.6), high)
        with drawing.layer(at=frames_from(group[0].start, across)):
            tip = f"{group[0].waiting} requests wait, {group[0].held} only for a slot"
            drawing.rect(area, MISSED, tip=tip)
            drawing.hatch(area, MID, gap=6)


def _alike(strip: Sequence[Moment]) -> Iterator[list[Moment]]:
    """Group successive moments that have the same queue."""
    group: list[Moment] = []
    for moment in strip:
        if group and (moment.held, moment.waiting) != (group[0].held, group[0].waiting):
            yield group
            group = []
        group.append(moment)
    if group:
        yield group


def _caption(strip: Sequence[Moment], start: float, now: float) -> str:
    done = [moment for moment in strip if moment.start < now]
    if not done:
        return f"{seconds(now - start)}: no request is running"
    last = done[-1]
    held = f", {last.held} only for a slot" if last.held else ""
    adapters = counted(len(last.in_use), "adapter")
    requests = counted(last.waiting, "request")
    return f"{seconds(now - start)}: {adapters} in use, {requests} waiting{held}"

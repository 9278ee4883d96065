"""Draw the animated lower part of lesson 12's picture: the adapter in each slot, and the requests that
wait for a slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from minivllm_lab.drawing import ink_on
from minivllm_lab.palette import INK, SKY, VERMILLION
from widgets.multi_lora.runs import Moment
from widgets.multi_lora.state import State
from widgets.shell.plot import MARGIN, Scale, counted, seconds
from widgets.shell.strip import draw_placeholder, draw_title, frame_ends
from widgets.shell.svg import QUIET, SMALL, Box, Drawing, Segment
from widgets.shell.theme import IDLE, MISSED, RESERVED

TITLE = "Slot by slot"
KEYS = {
    SKY: "adapter in use (1: the most popular)",
    RESERVED: "kept",
    MISSED: "waits for a slot",
    VERMILLION: "more popular than any in a slot",
}
NAMES, WIDE, HIGH, GAP = 42, 34, 20, 4
"""Pixels of a row's name, of a box, and between two."""
Shown = tuple[str, str]
"""The words in a box, and its colour."""


def draw_strip(drawing: Drawing, state: State, y: float) -> float:
    """Draw the slots and the queue as boxes, at successive times; return the y below."""
    if state.slots not in state.points:
        return draw_placeholder(drawing, TITLE, state.refused, y)
    start, end = state.serving.window
    ends = frame_ends(Scale(start, end))
    frames = [_moment_at(state.here.strip, end) for end in ends]
    drawing.play([_caption(frame, end - start) for frame, end in zip(frames, ends, strict=True)], still=True)
    slots = [[_in_slot(frame, adapter) for adapter in frame.slots] for frame in frames]
    queue = [[_in_queue(frame, wanted, state.serving.skew > 0) for wanted in frame.held_for] for frame in frames]
    seen = {colour for items in (*slots, *queue) for _, colour in items}
    keys = [Segment(words, 0, colour) for colour, words in KEYS.items() if colour in seen]
    y = draw_title(drawing, TITLE, keys, y) + 11
    return _draw_boxes(drawing, _draw_boxes(drawing, y, slots, "slots", rows=2) + 6, queue, "queue")


def _moment_at(strip: Sequence[Moment], time: float) -> Moment:
    """Return the last moment that has begun, without requests if it is over."""
    last = next((moment for moment in reversed(strip) if moment.start < time), strip[0])
    return last if last.start < time <= last.end else replace(last, in_use=frozenset(), held_for=(), waiting=0)


def _in_slot(moment: Moment, adapter: int | None) -> Shown:
    if adapter is None:
        return "", IDLE
    return str(adapter), SKY if adapter in moment.in_use else RESERVED


def _in_queue(moment: Moment, wanted: int, popular: bool) -> Shown:
    return str(wanted), VERMILLION if popular and wanted < min(moment.in_use, default=0) else MISSED


def _draw_boxes(drawing: Drawing, y: float, frames: Sequence[Sequence[Shown]], name: str, rows: int = 1) -> float:
    """Draw a box for each item of each frame, or, if they are too many, count the others in the last
    box; return the y below.
    """
    across = int((drawing.width - 2 * MARGIN - NAMES + GAP) // (WIDE + GAP))
    most = across * rows
    shown = [
        items if len(items) <= most else [*items[: most - 1], (f"+{len(items) - most + 1}", "none")] for items in frames
    ]
    longest = max(map(len, shown))
    drawing.text((MARGIN, y + HIGH - 6), name * (longest > 0), size=SMALL, colour=QUIET)
    for index in range(longest):
        box = Box(MARGIN + NAMES + index % across * (WIDE + GAP), y + index // across * (HIGH + GAP), WIDE, HIGH)
        for (words, colour), at in _stays([items[index] if index < len(items) else None for items in shown]):
            drawing.rect(box, colour, at=at, radius=2, group=f"adapter-{words}" * (colour != IDLE))
            place = (box.x + WIDE / 2, box.bottom - 6)
            colour = ink_on(colour) if colour in (SKY, VERMILLION) else INK  # the other boxes turn dark on a dark page
            drawing.text(place, words, size=SMALL, colour=colour, anchor="middle", at=at)
    return y + -(-longest // across) * (HIGH + GAP) - GAP


def _stays(shown: Sequence[Shown | None]) -> Iterator[tuple[Shown, str]]:
    """Yield what a box shows, and the first and the last frame in which it does."""
    end = 0
    for item, stay in groupby(shown):
        start, end = end, end + len(list(stay))
        if item:
            yield item, f"{start} {end - 1}"


def _caption(moment: Moment, time: float) -> str:
    if not moment.in_use:
        return f"{seconds(time)}: no request is running"
    held = f", {len(moment.held_for)} only for a slot" if moment.held_for else ""
    adapters = counted(len(moment.in_use), "adapter")
    return f"{seconds(time)}: {adapters} in use, {counted(moment.waiting, 'request')} waiting{held}"

"""Draw the upper part of lesson 12's picture: the requests that wait for a slot, and the GPU with the
adapter in each slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TypeVar

from minivllm_lab.pictures.drawing import ink_on, wrapped
from minivllm_lab.pictures.palette import GREEN, INK, SKY, VERMILLION
from widgets.multi_lora.runs import Moment
from widgets.multi_lora.state import State
from widgets.shell.plot import MARGIN, Scale, counted
from widgets.shell.strip import frame_ends
from widgets.shell.svg import QUIET, SMALL, Box, Drawing
from widgets.shell.theme import IDLE, MID, MISSED, RESERVED

LEFT, WIDE, HIGH, GAP = MARGIN + 10, 30, 22, 4
"""Pixels left of the rows, of a box, and between two."""
Shown = tuple[str, str]
"""The words in a box, and its colour."""
Item = TypeVar("Item")


def draw_strip(drawing: Drawing, state: State, y: float) -> float:
    """Draw the queue and the slots as boxes, at successive times; return the y below."""
    if state.slots not in state.points:
        words = "Nothing is served." if state.refused else "Still serving the requests."
        drawing.text((LEFT, y + HIGH), words, size=SMALL, colour=QUIET)
        return y + HIGH + 10
    ends = frame_ends(Scale(*state.serving.window))
    frames = [_moment_at(state.here.strip, end) for end in ends]
    queue_words, queue, slot_words, slots = zip(*map(_scene, frames, ends), strict=True)
    drawing.play(queue_words, still=True)
    y = _write(drawing, y + 10, queue_words) + 8
    gate = _draw_boxes(drawing, y, queue) + 10
    bottom = _draw_boxes(drawing, _write(drawing, gate + 20, slot_words) + 8, slots) + 10
    right = max(LEFT + max(map(len, slots)) * (WIDE + GAP) - GAP + 10, MARGIN + 200)
    beside = state.missing and right + 10 + state.missing * (WIDE + GAP) - GAP <= drawing.width - MARGIN
    right = right if beside else drawing.width - MARGIN
    drawing.rect(Box(MARGIN, gate, right - MARGIN, bottom - gate), "none", stroke=MID, radius=6)
    for _, at in _stays([bool(frame.held_for) or None for frame in frames]):
        with drawing.layer(at=at):
            drawing.line((MARGIN, gate), (right, gate), VERMILLION, width=4)
    if not state.missing:
        return bottom
    with drawing.answer():
        return max(bottom, _draw_missing(drawing, *((right + 10, gate) if beside else (LEFT, bottom)), state.missing))


def _draw_missing(drawing: Drawing, x: float, y: float, missing: int) -> float:
    """Outline the slots that are missing, if they fit in a row, and count them; return the y below."""
    drawing.text((x, y + 20), f"{missing} more would do", size=SMALL, colour=GREEN)
    if x + missing * (WIDE + GAP) - GAP > drawing.width - MARGIN:
        return y + 20
    for index in range(missing):
        drawing.rect(Box(x + index * (WIDE + GAP), y + 28, WIDE, HIGH), "none", stroke=GREEN, dash="3 3", radius=2)
    return y + 28 + HIGH


def _moment_at(strip: Sequence[Moment], time: float) -> Moment:
    """Return the last moment that has begun, without requests if it is over."""
    last = next((moment for moment in reversed(strip) if moment.start < time), strip[0])
    return last if last.start < time <= last.end else replace(last, in_use=frozenset(), held_for=(), waiting=0)


def _scene(moment: Moment, time: float) -> tuple[str, list[Shown], str, list[Shown]]:
    """Return the words and boxes of the queue and of the slots at a time, in seconds."""
    many, colours = len(moment.held_for), {None: IDLE} | dict.fromkeys(moment.in_use, SKY)
    queue = f"after {time:.1f} s, {many or 'no request'} wait{'s' * (many < 2)}"
    most, times = next(iter(Counter(moment.held_for).most_common(1)), (None, 0))
    if times > 1:
        queue += f"; those for adapter {most} could share a slot"
    slots = f"GPU: {len(moment.in_use)} of {counted(len(moment.slots), 'slot')} used"
    waiting = [(str(each), VERMILLION if each == most and times > 1 else MISSED) for each in moment.held_for]
    return queue, waiting, slots, [(str(each or ""), colours.get(each, RESERVED)) for each in moment.slots]


def _write(drawing: Drawing, y: float, frames: Sequence[str]) -> float:
    """Write the words of each frame, and return the y of the lowest line."""
    lines = [wrapped(words, drawing.width - 2 * LEFT, SMALL) for words in frames]
    for row in range(max(map(len, lines))):
        for words, at in _stays([each[row] if row < len(each) else None for each in lines]):
            drawing.text((LEFT, y + 16 * row), words, size=SMALL, at=at)
    return y + 16 * (max(map(len, lines)) - 1)


def _draw_boxes(drawing: Drawing, y: float, frames: Sequence[Sequence[Shown]]) -> float:
    """Draw a box for each item of each frame, or, if they are too many, count the others in the last
    box; return the y below.
    """
    across = int((drawing.width - 2 * LEFT + GAP) // (WIDE + GAP))
    most = 2 * across
    shown = [
        items if len(items) <= most else [*items[: most - 1], (f"+{len(items) - most + 1}", "none")] for items in frames
    ]
    longest = max(map(len, shown))
    for index in range(longest):
        box = Box(LEFT + index % across * (WIDE + GAP), y + index // across * (HIGH + GAP), WIDE, HIGH)
        for (words, colour), at in _stays([items[index] if index < len(items) else None for items in shown]):
            drawing.rect(box, colour, at=at, radius=2, group=f"adapter-{words}" * (colour != IDLE))
            place = (box.x + WIDE / 2, box.bottom - 7)
            ink = ink_on(colour) if colour in (SKY, VERMILLION) else INK  # the other boxes turn dark on a dark page
            drawing.text(place, words, size=SMALL, colour=ink, anchor="middle", at=at)
    return y + max(1, -(-longest // across)) * (HIGH + GAP) - GAP


def _stays(shown: Iterable[Item | None]) -> Iterator[tuple[Item, str]]:
    """Yield what a place shows, and the first and the last frame in which it does."""
    end = 0
    for item, stay in groupby(shown):
        start, end = end, end + len(list(stay))
        if item:
            yield item, f"{start} {end - 1}"

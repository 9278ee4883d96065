"""The lower part of lesson 12's picture: which adapter lies in which slot, and who waits for one. It plays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from minivllm_lab.drawing import ink_on, text_width
from minivllm_lab.palette import GREEN, ORANGE, PURPLE, SKY, YELLOW
from widgets.multi_lora.runs import Moment
from widgets.multi_lora.state import State
from widgets.shell.plot import MARGIN, Scale, counted, seconds
from widgets.shell.svg import QUIET, SMALL, Box, Drawing, Segment, legend
from widgets.shell.theme import IDLE, MID, MISSED, RESERVED

NAMES = 104
"""Pixels left of the slots, for what the rows are."""
FRAMES, ROWS, HIGH = 24, 4, 15
"""Frames in which it is played; slots that are drawn, and the pixels of each."""
IN_USE = (ORANGE, SKY, GREEN, YELLOW, PURPLE)
"""Colours of adapters in turn; numbers say which."""


@dataclass(frozen=True)
class Stay:
    """An adapter in a slot for a while, in use or kept."""

    adapter: int
    start: float
    end: float
    in_use: bool


def draw_strip(drawing: Drawing, state: State, y: float) -> float:
    """The first slots over a stretch of time, and the queue; returns the y below."""
    title = "Slots, one by one"
    drawing.text((MARGIN, y), title, size=14.5, bold=True)
    if state.slots not in state.points:
        words = "Nothing is served." if state.refused else "Requests are being served."
        return drawing.paragraph((MARGIN, y + 20), words, drawing.width - 2 * MARGIN)
    keys = [Segment("in use, numbered by popularity", 0, SKY), Segment("kept", 0, RESERVED)]
    keys += [Segment("wait for a slot", 0, MISSED, hatched=True)]
    after, wide = MARGIN + text_width(title, 14.5) * 1.08 + 16, drawing.width - 2 * MARGIN
    room = sum(34 + text_width(key.label, SMALL) for key in keys)
    aside = after + room <= drawing.width
    y = legend(drawing, (after, y) if aside else (MARGIN, y + 20), keys, wide) - 19
    strip, across = state.here.strip, Scale(*state.serving.window)
    rows = min(ROWS, state.slots)
    box = Box(MARGIN + NAMES, y + 12, wide - NAMES, rows * (HIGH + 2))
    _name(drawing, box, "slots" if rows == state.slots else f"{rows} of {state.slots} slots")
    lines = [Box(box.x, box.y + row * (HIGH + 2), box.width, HIGH) for row in range(rows)]
    for line in lines:
        drawing.rect(line, IDLE)
    with drawing.answer():
        for row, line in enumerate(lines):
            for stay in _stays(strip, row):
                _draw_stay(drawing, line, stay, across)
    below = Box(box.x, box.bottom + 4, box.width, 24)
    _draw_queue(drawing, below, strip, across)
    drawing.play([_caption(strip, across, frame) for frame in range(FRAMES)])
    return below.bottom + 2


def _name(drawing: Drawing, box: Box, words: str) -> None:
    drawing.text((MARGIN, box.y + box.height / 2 + 4), words, size=SMALL, colour=QUIET)


def _place(box: Box, across: Scale, start: float, end: float) -> tuple[float, float]:
    """Left and right pixel of a span of time, inside the box."""
    left, right = (box.x + min(max(across.share(at), 0.0), 1.0) * box.width for at in (start, end))
    return left, right


def _frame(at: float, across: Scale) -> int:
    """The frame in which something is seen that happens then."""
    return min(max(math.ceil(across.share(at) * FRAMES - 1e-9) - 1, 0), FRAMES - 1)


def _stays(strip: Sequence[Moment], row: int) -> Iterator[Stay]:
    """Who lies in a slot, moment after moment, those alike in one piece."""
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
    left, right = _place(line, across, stay.start, stay.end)
    at = f"{_frame(stay.start, across)} {FRAMES - 1}"
    colour = IN_USE[(stay.adapter - 1) % len(IN_USE)] if stay.in_use else RESERVED
    part = Box(left, line.y, max(right - left - 0.8, 0.6), line.height)
    words = "in use" if stay.in_use else "kept, until another takes its slot"
    drawing.rect(part, colour, tip=f"Adapter {stay.adapter}, {words}", at=at, group=f"adapter-{stay.adapter}")
    number = f"{stay.adapter:,}"
    if stay.in_use and part.width > text_width(number, SMALL) + 6:
        place = (part.x + part.width / 2, part.bottom - 3)
        drawing.text(place, number, size=SMALL, colour=ink_on(colour), anchor="middle", at=at)


def _draw_queue(drawing: Drawing, box: Box, strip: Sequence[Moment], across: Scale) -> None:
    """How many wait, and how many of them for a slot only."""
    longest = max((moment.waiting for moment in strip), default=0)
    most = max(longest, 1)
    _name(drawing, box, "wait")
    drawing.rect(box, IDLE)
    with drawing.answer():
        place = (box.x - 8, box.y + box.height / 2 + 4)
        drawing.text(place, f"up to {longest}", size=SMALL, colour=QUIET, anchor="end")
        for group in _alike(strip):
            left, right = _place(box, across, group[0].start, group[-1].end)
            high = box.height * group[0].held / most
            at = f"{_frame(group[0].start, across)} {FRAMES - 1}"
            area = Box(left, box.bottom - high, max(right - left, 0.6), high)
            with drawing.layer(at=at):
                said = f"{group[0].waiting} requests wait, {group[0].held} of them for a slot only"
                drawing.rect(area, MISSED, tip=said)
                drawing.hatch(area, MID, gap=6)


def _alike(strip: Sequence[Moment]) -> Iterator[list[Moment]]:
    """Moments in which as many wait, together."""
    group: list[Moment] = []
    for moment in strip:
        if group and (moment.held, moment.waiting) != (group[0].held, group[0].waiting):
            yield group
            group = []
        group.append(moment)
    if group:
        yield group


def _caption(strip: Sequence[Moment], across: Scale, frame: int) -> str:
    now = across.low + (across.high - across.low) * (frame + 1) / FRAMES
    done = [moment for moment in strip if moment.start < now]
    if not done:
        return f"{seconds(now - across.low)}: nobody runs"
    last = done[-1]
    held = f", {last.held} of them for a slot only" if last.held else ""
    adapters, requests = counted(len(last.in_use), "adapter"), counted(last.waiting, "request")
    waits = "waits" if last.waiting == 1 else "wait"
    return f"{seconds(now - across.low)}: {adapters} in use, {requests} {waits}{held}"

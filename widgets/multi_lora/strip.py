"""Draw the upper part of lesson 12's picture: the requests that wait for a slot, and the GPU with the
adapter in each slot and with its memory, to scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from minivllm_lab.drawing import ink_on
from minivllm_lab.palette import BLUE, INK, ORANGE, SKY, VERMILLION
from minivllm_simulate.memory import weight_bytes
from widgets.multi_lora.runs import Moment
from widgets.multi_lora.state import State
from widgets.shell.plot import MARGIN, Scale, counted, percent, seconds
from widgets.shell.strip import frame_ends
from widgets.shell.svg import QUIET, SMALL, Box, Drawing, Segment, legend, stacked_bar, without_room
from widgets.shell.theme import IDLE, MID, MISSED, RESERVED

NAMES, WIDE, HIGH, GAP = 60, 30, 22, 4
"""Pixels of a row's name, of a box, and between two."""
Shown = tuple[str, str]
"""The words in a box, and its colour."""


def draw_strip(drawing: Drawing, state: State, y: float) -> float:
    """Draw the queue and the slots as boxes, at successive times, and the GPU's memory; return the y
    below.
    """
    if state.slots in state.points:
        start, end = state.serving.window
        ends = frame_ends(Scale(start, end))
        frames = [_moment_at(state.here.strip, end) for end in ends]
        drawing.play([_caption(frame, end - start) for frame, end in zip(frames, ends, strict=True)], still=True)
        queue = [_in_queue(frame) or [("none", "none")] for frame in frames]
        _draw_boxes(drawing, y, queue, "queue")
        slots = [[_in_slot(frame, adapter) for adapter in frame.slots] for frame in frames]
        top = y + HIGH + 30
        y = _draw_boxes(drawing, top, slots, "slots", rows=2) + 10
        _draw_gate(drawing, top - 9, frames)
    else:
        top = y + 6
        words = "Nothing is served." if state.refused else "Still serving the requests."
        drawing.text((MARGIN + 6, top + HIGH - 7), words, size=SMALL, colour=QUIET)
        y = top + HIGH
    drawing.text((MARGIN + 6, y + HIGH - 7), "memory", size=SMALL, colour=QUIET)
    bar = Box(MARGIN + NAMES, y, drawing.width - 2 * MARGIN - NAMES - 6, HIGH)
    bottom = _draw_memory(drawing, bar, state)
    gpu = Box(MARGIN, top - 9, drawing.width - 2 * MARGIN, bottom - top + 18)
    drawing.rect(gpu, "none", stroke=MID, radius=6)
    return gpu.bottom


def _moment_at(strip: Sequence[Moment], time: float) -> Moment:
    """Return the last moment that has begun, without requests if it is over."""
    last = next((moment for moment in reversed(strip) if moment.start < time), strip[0])
    return last if last.start < time <= last.end else replace(last, in_use=frozenset(), held_for=(), waiting=0)


def _in_slot(moment: Moment, adapter: int | None) -> Shown:
    return ("", IDLE) if adapter is None else (str(adapter), SKY if adapter in moment.in_use else RESERVED)


def _in_queue(moment: Moment) -> list[Shown]:
    """Return the waiting requests; those that would share an earlier one's slot are pale."""
    queue = moment.held_for
    return [(str(each), MISSED if each in queue[:index] else VERMILLION) for index, each in enumerate(queue)]


def _draw_boxes(drawing: Drawing, y: float, frames: Sequence[Sequence[Shown]], name: str, rows: int = 1) -> float:
    """Draw a box for each item of each frame, or, if they are too many, count the others in the last
    box; return the y below.
    """
    across = int((drawing.width - 2 * MARGIN - NAMES - 6 + GAP) // (WIDE + GAP))
    most = across * rows
    shown = [
        items if len(items) <= most else [*items[: most - 1], (f"+{len(items) - most + 1}", "none")] for items in frames
    ]
    longest = max(map(len, shown))
    drawing.text((MARGIN + 6, y + HIGH - 7), name, size=SMALL, colour=QUIET)
    for index in range(longest):
        box = Box(MARGIN + NAMES + index % across * (WIDE + GAP), y + index // across * (HIGH + GAP), WIDE, HIGH)
        for (words, colour), at in _stays([items[index] if index < len(items) else None for items in shown]):
            drawing.rect(box, colour, at=at, radius=2, group=f"adapter-{words}" * (colour != IDLE))
            place = (box.x + WIDE / 2, box.bottom - 7)
            colour = ink_on(colour) if colour in (SKY, VERMILLION) else INK  # the other boxes turn dark on a dark page
            drawing.text(place, words, size=SMALL, colour=colour, anchor="middle", at=at)
    return y + -(-longest // across) * (HIGH + GAP) - GAP


def _draw_gate(drawing: Drawing, y: float, frames: Sequence[Moment]) -> None:
    """Close the GPU's upper edge while requests wait for a slot."""
    shown = [(_gate_words(frame, drawing.width), "") if frame.held_for else None for frame in frames]
    for (words, _), at in _stays(shown):
        with drawing.layer(at=at):
            drawing.line((MARGIN, y), (drawing.width - MARGIN, y), VERMILLION, width=4)
            drawing.text((MARGIN + NAMES * (drawing.width >= 600), y - 6), words, size=SMALL, colour=VERMILLION)


def _gate_words(moment: Moment, width: float) -> str:
    waiting, different = len(moment.held_for), len(set(moment.held_for))
    pale = "; pale ones share one" * (different < waiting)
    when = f"after {moment.start:.0f} s, " * (width >= 600)
    return f"{when}{waiting} wait for {counted(different, 'other adapter')}{pale}"


def _draw_memory(drawing: Drawing, box: Box, state: State) -> float:
    """Draw the GPU's memory, from which sticks out what does not fit, with its key; return the y below."""
    serving, point = state.serving, state.points.get(state.slots)
    weights, slot = weight_bytes(serving.model), serving.cost.slot_bytes
    slots, cache = state.slots * slot, max(0.0, serving.most_slots - state.slots) * slot
    used = point.cache_used * cache if point else 0.0
    free = f"KV cache: {percent(1 - point.cache_used)} free" if point else "KV cache"
    total = max(serving.gpu.memory_bytes, weights + slots)
    parts = [
        Segment("weights", weights, MID),
        Segment("slots", slots, ORANGE),
        Segment("KV cache in use", used, BLUE),
        Segment(free, cache - used, RESERVED),
        Segment("activations, spare", total - weights - slots - cache, IDLE),
    ]
    stacked_bar(drawing, box, parts, total)
    if total > serving.gpu.memory_bytes:
        x = box.x + serving.gpu.memory_bytes / total * box.width
        drawing.hatch(replace(box, x=x, width=box.right - x), VERMILLION)
        drawing.rect(Box(x, box.y - 5, 3, box.height + 10), VERMILLION, tip="the end of the GPU's memory")
    keys = [key for key in without_room(parts, total, box.width) if key.value]
    return legend(drawing, (box.x, box.bottom + 17), keys, box.width) - 15 if keys else box.bottom


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

"""The lower part of lesson 10's picture: steps one by one, what each was made of, and when tokens came. It plays."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from minivllm_lab.drawing import number, text_width
from minivllm_lab.palette import BLUE, ORANGE, SKY
from widgets.chunked_prefill.runs import Step
from widgets.chunked_prefill.state import State
from widgets.shell.plot import MARGIN, Scale, seconds
from widgets.shell.svg import QUIET, SMALL, Box, Drawing, Segment, legend
from widgets.shell.theme import IDLE, MID, MISSED

NAMES = 104
"""Pixels left of the steps, for what the rows are."""
FRAMES, LEAST_BAR = 24, 5
"""Frames in which the steps are played; pixels of a bar at least: shorter steps are drawn together."""


def draw_steps(drawing: Drawing, state: State, y: float) -> float:
    """What each step of a stretch of time was made of, and when tokens came; returns the y below."""
    title = "Steps, one by one"
    drawing.text((MARGIN, y), title, size=14.5, bold=True)
    if state.budget not in state.points:
        words = "Nothing is served." if state.refused else "Requests are being served."
        return drawing.paragraph((MARGIN, y + 20), words, drawing.width - 2 * MARGIN)
    keys = [Segment("of long prompts", 0, ORANGE), Segment("of chats' prompts", 0, SKY)]
    keys += [Segment(f"over {seconds(state.gap)}", 0, MISSED, hatched=True)]
    after, wide = MARGIN + text_width(title, 14.5) * 1.08 + 16, drawing.width - 2 * MARGIN
    room = sum(34 + text_width(key.label, SMALL) for key in keys)
    aside = after + room <= drawing.width
    y = legend(drawing, (after, y) if aside else (MARGIN, y + 20), keys, wide) - 19
    strip, (start, end) = state.points[state.budget].strip, state.serving.window
    box = Box(MARGIN + NAMES, y + 12, wide - NAMES, 34)
    across = Scale(start, end)
    most = max([1, *(step.long + step.chat for step in strip)])
    _name_row(drawing, box, "prompt tokens", f"up to {most:,}")
    drawing.rect(box, IDLE)
    below = Box(box.x, box.bottom + 5, box.width, 22)
    _name_row(drawing, below, "a token", "for who runs")
    drawing.rect(below, IDLE)
    with drawing.answer():
        _draw_late(drawing, below, strip, across, state)
    for bar in _bars(strip, box, across):
        _draw_bar(drawing, box, bar, across, most)
    _draw_tokens(drawing, below, strip, across)
    drawing.play([_caption(strip, start, start + (end - start) * (frame + 1) / FRAMES) for frame in range(FRAMES)])
    for value in Scale(0, end - start).ticks(6):
        x = box.x + across.share(start + value) * box.width
        drawing.line((x, below.bottom), (x, below.bottom + 4), colour=QUIET)
        drawing.text(
            (x, below.bottom + 17), seconds(value) if value else "0", size=SMALL, colour=QUIET, anchor="middle"
        )
    return below.bottom + 17


def _name_row(drawing: Drawing, box: Box, *lines: str) -> None:
    for row, words in enumerate(lines):
        drawing.text((MARGIN, box.y + box.height / 2 - 3 + 14 * row), words, size=SMALL, colour=QUIET)


def _place(box: Box, across: Scale, start: float, end: float) -> tuple[float, float]:
    """Left and right pixel of a span of time, inside the box."""
    left, right = (box.x + min(max(across.share(at), 0.0), 1.0) * box.width for at in (start, end))
    return left, right


def _frame(end: float, across: Scale) -> int:
    """The frame in which something is seen that ends then."""
    return min(max(math.ceil(across.share(end) * FRAMES - 1e-9) - 1, 0), FRAMES - 1)


def _bars(strip: Sequence[Step], box: Box, across: Scale) -> Iterator[list[Step]]:
    """Steps with prompts, those that are too narrow for a bar of their own together with their neighbours."""
    group: list[Step] = []
    for step in strip:
        if not step.long + step.chat:
            if group:
                yield group
            group = []
            continue
        group.append(step)
        left, right = _place(box, across, group[0].start, step.end)
        if right - left >= LEAST_BAR:
            yield group
            group = []
    if group:
        yield group


def _draw_bar(drawing: Drawing, box: Box, group: Sequence[Step], across: Scale, most: int) -> None:
    left, right = _place(box, across, group[0].start, group[-1].end)
    at, top = f"{_frame(group[-1].end, across)} {FRAMES - 1}", box.bottom
    count, tip = len(group), _step_tip(group)
    for colour, each in ((ORANGE, [step.long for step in group]), (SKY, [step.chat for step in group])):
        high = box.height * sum(each) / count / most
        top -= high
        drawing.rect(Box(left, top, max(right - left - 0.8, 0.6), high), colour, tip=tip, at=at)


def _step_tip(group: Sequence[Step]) -> str:
    one = group[0]
    if len(group) == 1:
        made = f"{one.long:,} tokens of long prompts, {one.chat:,} of chats', {one.decodes} decodes"
        return f"A step of {seconds(one.end - one.start)}: {made}"
    long, chat = (sum(getattr(step, name) for step in group) for name in ("long", "chat"))
    return f"{len(group)} steps of {seconds(one.end - one.start)}: {long:,} tokens of long prompts, {chat:,} of chats'"


def _draw_tokens(drawing: Drawing, box: Box, strip: Sequence[Step], across: Scale) -> None:
    """A tick where tokens come: what lies between two is what everybody waits for."""
    most = max([1, *(step.decodes for step in strip)])
    ticks: list[list[str]] = [[] for _ in range(FRAMES)]
    for step in strip:
        if step.decodes and across.low <= step.end <= across.high:
            x, high = _place(box, across, step.end, step.end)[0], 6 + (box.height - 6) * step.decodes / most
            ticks[_frame(step.end, across)].append(f"M{number(x)} {number(box.bottom)}v-{number(high)}")
    for frame, marks in enumerate(ticks):
        if marks:
            path, at = "".join(marks), f'data-at="{frame} {FRAMES - 1}"'
            drawing.add(f'<path d="{path}" stroke="{BLUE}" stroke-width="1.4" {at}/>')


def _draw_late(drawing: Drawing, box: Box, strip: Sequence[Step], across: Scale, state: State) -> None:
    """Gaps that are longer than allowed."""
    for step in strip:
        if step.gap > state.gap:
            left, right = _place(box, across, step.end - step.gap, step.end)
            area, at = Box(left, box.y, right - left, box.height), f"{_frame(step.end, across)} {FRAMES - 1}"
            with drawing.layer(at=at):
                drawing.rect(area, MISSED, tip=f"{seconds(step.gap)} without a token")
                drawing.hatch(area, MID, gap=6)


def _caption(strip: Sequence[Step], start: float, now: float) -> str:
    ends = [step.end for step in strip]
    done = strip[: bisect_left(ends, now + 1e-12)]
    long, chat = sum(step.long for step in done), sum(step.chat for step in done)
    longest = max((step.end - step.start for step in done if step.decodes), default=0.0)
    said = f"{seconds(now - start)}: {len(done)} steps, {long:,} tokens of long prompts, {chat:,} of chats'"
    return f"{said}; the longest step {seconds(longest)}"

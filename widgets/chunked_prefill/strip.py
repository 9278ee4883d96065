"""Draw the animated lower part of lesson 10's picture: what each step was made of, and when tokens
came.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from minivllm_lab.drawing import number
from minivllm_lab.palette import BLUE, ORANGE, SKY
from widgets.chunked_prefill.runs import Step
from widgets.chunked_prefill.state import State
from widgets.shell.plot import MARGIN, Scale, seconds
from widgets.shell.strip import FRAMES, NAMES, draw_placeholder, draw_times, draw_title, frame_ends, frames_from, pixels
from widgets.shell.svg import QUIET, SMALL, Box, Drawing, Segment
from widgets.shell.theme import IDLE, MID, MISSED

TITLE = "Step by step"
LEAST_BAR = 5
"""The least width of a bar in pixels; shorter steps are drawn together."""


def draw_steps(drawing: Drawing, state: State, y: float) -> float:
    """Draw what each step in a time window was made of, and when tokens came; return the y below."""
    if state.budget not in state.points:
        return draw_placeholder(drawing, TITLE, state.refused, y)
    keys = [
        Segment("long prompts", 0, ORANGE),
        Segment("chats' prompts", 0, SKY),
        Segment(f"gap over {seconds(state.gap)}", 0, MISSED, hatched=True),
    ]
    y = draw_title(drawing, TITLE, keys, y)
    strip = state.points[state.budget].strip
    box = Box(MARGIN + NAMES, y + 12, drawing.width - 2 * MARGIN - NAMES, 34)
    across = Scale(*state.serving.window)
    most = max([1, *(step.long + step.chat for step in strip)])
    _name_row(drawing, box, "prompt tokens", f"0 to {most:,}")
    drawing.rect(box, IDLE)
    below = Box(box.x, box.bottom + 5, box.width, 22)
    _name_row(drawing, below, "decodes", f"0 to {max([0, *(step.decodes for step in strip)])}")
    drawing.rect(below, IDLE)
    with drawing.answer():
        _draw_late(drawing, below, strip, across, state)
    for bar in _bars(strip, box, across):
        _draw_bar(drawing, box, bar, across, most)
    _draw_tokens(drawing, below, strip, across)
    drawing.play([_caption(strip, across.low, end) for end in frame_ends(across)])
    return draw_times(drawing, below, across)


def _name_row(drawing: Drawing, box: Box, *lines: str) -> None:
    for row, words in enumerate(lines):
        drawing.text((MARGIN, box.y + box.height / 2 - 3 + 14 * row), words, size=SMALL, colour=QUIET)


def _bars(strip: Sequence[Step], box: Box, across: Scale) -> Iterator[list[Step]]:
    """Group the steps with prompts into bars that are wide enough to see."""
    group: list[Step] = []
    for step in strip:
        if not step.long + step.chat:
            if group:
                yield group
            group = []
            continue
        group.append(step)
        left, right = pixels(box, across, group[0].start, step.end)
        if right - left >= LEAST_BAR:
            yield group
            group = []
    if group:
        yield group


def _draw_bar(drawing: Drawing, box: Box, group: Sequence[Step], across: Scale, most: int) -> None:
    left, right = pixels(box, across, group[0].start, group[-1].end)
    at = frames_from(group[-1].end, across)
    tip = _step_tip(group)
    top = box.bottom
    for colour, each in ((ORANGE, [step.long for step in group]), (SKY, [step.chat for step in group])):
        high = box.height * sum(each) / len(group) / most
        top -= high
        drawing.rect(Box(left, top, max(right - left - 0.8, 0.6), high), colour, tip=tip, at=at)


def _step_tip(group: Sequence[Step]) -> str:
    first = group[0]
    time = seconds(first.end - first.start)
    long = sum(step.long for step in group)
    chat = sum(step.chat for step in group)
    steps = f"A step of {time}" if len(group) == 1 else f"{len(group)} steps of {time}"
    decodes = f", {first.decodes} decodes" if len(group) == 1 else ""
    return f"{steps}: {long:,} tokens of long prompts, {chat:,} of chats{decodes}"


def _draw_tokens(drawing: Drawing, box: Box, strip: Sequence[Step], across: Scale) -> None:
    """Draw a tick whenever tokens come: every running request waits from one tick to the next."""
    most = max([1, *(step.decodes for step in strip)])
    ticks: dict[str, list[str]] = {f"{frame} {FRAMES - 1}": [] for frame in range(FRAMES)}
    for step in strip:
        if step.decodes and across.low <= step.end <= across.high:
            x, _ = pixels(box, across, step.end, step.end)
            high = 6 + (box.height - 6) * step.decodes / most
            ticks[frames_from(step.end, across)].append(f"M{number(x)} {number(box.bottom)}v-{number(high)}")
    for at, marks in ticks.items():
        if marks:
            drawing.add(f'<path d="{"".join(marks)}" stroke="{BLUE}" stroke-width="1.4" data-at="{at}"/>')


def _draw_late(drawing: Drawing, box: Box, strip: Sequence[Step], across: Scale, state: State) -> None:
    """Hatch the gaps that are longer than the limit."""
    for step in strip:
        if step.gap > state.gap:
            left, right = pixels(box, across, step.end - step.gap, step.end)
            area = Box(left, box.y, right - left, box.height)
            with drawing.layer(at=frames_from(step.end, across)):
                drawing.rect(area, MISSED, tip=f"{seconds(step.gap)} without a token")
                drawing.hatch(area, MID, gap=6)


def _caption(strip: Sequence[Step], start: float, now: float) -> str:
    ends = [step.end for step in strip]
    done = strip[: bisect_left(ends, now + 1e-12)]
    long = sum(step.long for step in done)
    chat = sum(step.chat for step in done)
    longest = max((step.end - step.start for step in done if step.decodes), default=0.0)
    progress = f"{len(done)} steps, {long:,} tokens of long prompts, {chat:,} of chats"
    return f"{seconds(now - start)}: {progress}; the longest step took {seconds(longest)}"

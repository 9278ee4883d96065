"""The lower part of lesson 11's picture: the pool step by step, and the requests that are preempted. It plays."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from minivllm_lab.drawing import text_width
from minivllm_lab.palette import BLUE, ORANGE, SKY
from widgets.preemption.runs import AGAIN, BLOCK_SIZE, OUT, Point, Sample, Span
from widgets.preemption.state import State
from widgets.shell.plot import MARGIN, Scale, seconds
from widgets.shell.svg import QUIET, SMALL, Box, Drawing, Segment, legend
from widgets.shell.theme import IDLE, MID, MISSED

NAMES = 104
"""Pixels left of the rows, for what they are."""
FRAMES, ROWS, ROW = 24, 5, 15
"""Frames in which it plays; requests that have a row, and the pixels of one."""
WINDOW = 0.6
"""The stretch of time that is drawn, in times what a mean answer takes alone."""
KINDS = {OUT: MISSED, AGAIN: ORANGE}


def draw_pool(drawing: Drawing, state: State, y: float) -> float:
    """The pool in a stretch of time, and a row for each of a few requests; returns the y below."""
    title = "The pool, step by step"
    drawing.text((MARGIN, y), title, size=14.5, bold=True)
    wide = drawing.width - 2 * MARGIN
    if state.pool not in state.points:
        words = "Nothing is served." if state.refused else "Requests are being served."
        return drawing.paragraph((MARGIN, y + 20), words, wide)
    swaps = state.serving.policy != "recompute"
    keys = [
        Segment("runs", 0, BLUE), Segment("back", 0, SKY), Segment("preempted", 0, MISSED, hatched=True),
        Segment("copied back" if swaps else "computed again", 0, ORANGE),
    ]  # fmt: skip
    after = MARGIN + text_width(title, 14.5) * 1.08 + 16
    room = sum(34 + text_width(key.label, SMALL) for key in keys)
    aside = after + room <= drawing.width
    y = legend(drawing, (after, y) if aside else (MARGIN, y + 20), keys, wide) - 19
    point = state.points[state.pool]
    start, end = window(state, point)
    across = Scale(start, end)
    box = Box(MARGIN + NAMES, y + 12, wide - NAMES, 36)
    _draw_usage(drawing, box, point, across, state)
    shown = victims(point, start, end)
    below = _draw_rows(drawing, Box(box.x, box.bottom + 5, box.width, ROW), point, shown, across)
    drawing.play([_caption(point, start + (end - start) * (frame + 1) / FRAMES, start) for frame in range(FRAMES)])
    for value in Scale(0, end - start).ticks(6):
        x = box.x + across.share(start + value) * box.width
        drawing.line((x, below), (x, below + 4), colour=QUIET)
        drawing.text((x, below + 17), seconds(value) if value else "0", size=SMALL, colour=QUIET, anchor="middle")
    return below + 17


def window(state: State, point: Point) -> tuple[float, float]:
    """The time that is drawn: around the middle one of the preemptions, or from the middle of the run."""
    out = [span.start for span in point.spans if span.kind == OUT]
    middle = out[len(out) // 2] if out else point.seconds / 2
    wide = WINDOW * state.serving.answer * state.serving.step_alone
    start = max(0.0, middle - wide / 4)
    return start, start + wide


def victims(point: Point, start: float, end: float) -> list[int]:
    """Requests that have a row: those preempted in this time, the first ones first; else those seen longest in it."""
    inside = [span for span in point.spans if span.start < end and span.end > start]
    out = [span.request for span in inside if span.kind == OUT and span.start >= start]
    longest = sorted(inside, key=lambda span: max(span.start, start) - min(span.end, end))
    return sorted(list(dict.fromkeys([*out, *(span.request for span in longest)]))[:ROWS])


def _slices(across: Scale) -> list[tuple[float, float]]:
    """The time of each frame."""
    each = (across.high - across.low) / FRAMES
    return [(across.low + frame * each, across.low + (frame + 1) * each) for frame in range(FRAMES)]


def _at(frame: int) -> str:
    return f"{frame} {FRAMES - 1}"


def _draw_usage(drawing: Drawing, box: Box, point: Point, across: Scale, state: State) -> None:
    """A bar for each frame: how full the pool is at its end, and how much of it those hold who were preempted."""
    drawing.text((MARGIN, box.y + 15), "the pool", size=SMALL, colour=QUIET)
    drawing.text((MARGIN, box.y + 29), f"{state.pool // BLOCK_SIZE:,} blocks", size=SMALL, colour=QUIET)
    drawing.rect(box, IDLE)
    wide, blocks = box.width / FRAMES, state.pool // BLOCK_SIZE
    for frame, (_, end) in enumerate(_slices(across)):
        sample = _sample(point.samples, end)
        tip = (
            f"{sample.used:,} blocks in use, {sample.returned:,} of them by requests that were preempted before; "
            f"{sample.running} run, {sample.out} wait preempted"
        )
        top = box.bottom
        for used, colour in ((sample.used - sample.returned, BLUE), (sample.returned, SKY)):
            high = box.height * min(1.0, used / blocks)
            top -= high
            drawing.rect(Box(box.x + frame * wide, top, wide - 1, high), colour, tip=tip, at=_at(frame))


def _sample(samples: Sequence[Sample], now: float) -> Sample:
    """How it was at some time."""
    ends = [one.end for one in samples]
    return samples[max(0, bisect_right(ends, now) - 1)]


def _draw_rows(drawing: Drawing, row: Box, point: Point, shown: Sequence[int], across: Scale) -> float:
    """What each of these requests does; returns the y below the last."""
    for index, request in enumerate(shown):
        box = Box(row.x, row.y + index * ROW, row.width, ROW - 3)
        drawing.text((MARGIN, box.y + 10), f"request {request + 1}", size=SMALL, colour=QUIET)
        drawing.rect(box, IDLE)
        mine = [span for span in point.spans if span.request == request]
        for span in mine:
            again = any(one.kind == OUT and one.end <= span.start + 1e-9 for one in mine)
            _draw_span(drawing, box, span, KINDS.get(span.kind, SKY if again else BLUE), across)
    return row.y + len(shown) * ROW


def _draw_span(drawing: Drawing, box: Box, span: Span, colour: str, across: Scale) -> None:
    """A span, cut where frames begin, so that it appears as time goes on."""
    tip = f"request {span.request + 1} {span.kind}: {seconds(span.end - span.start)}"
    for frame, (start, end) in enumerate(_slices(across)):
        left, right = max(start, span.start), min(end, span.end)
        if left >= right:
            continue
        x, high = box.x + across.share(left) * box.width, box.x + across.share(right) * box.width
        part = Box(x, box.y, max(high - x, 0.8), box.height)
        with drawing.layer(at=_at(frame)):
            drawing.rect(part, colour, tip=tip)
            if span.kind == OUT:
                drawing.hatch(part, MID, gap=5)


def _caption(point: Point, now: float, start: float) -> str:
    sample = _sample(point.samples, now)
    out = sorted({span.request + 1 for span in point.spans if span.kind == OUT and span.start <= now < span.end})
    who = ", ".join(map(str, out[:6])) + (" and others" if len(out) > 6 else "")
    waits = f"{len(out)} wait preempted ({who})" if out else "nobody waits preempted"
    return f"{seconds(now - start)}: {sample.running} run in {sample.used:,} blocks, {waits}"

"""Draw the animated lower part of lesson 11's picture: the pool step by step, and the preempted
requests.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from minivllm_lab.palette import BLUE, ORANGE, SKY
from widgets.preemption.runs import AGAIN, BLOCK_SIZE, OUT, Point, Sample, Span
from widgets.preemption.state import State
from widgets.shell.plot import MARGIN, Scale, seconds
from widgets.shell.strip import FRAMES, NAMES, draw_placeholder, draw_times, draw_title, frame_ends
from widgets.shell.svg import QUIET, SMALL, Box, Drawing, Segment
from widgets.shell.theme import IDLE, MID, MISSED

TITLE = "The pool, step by step"
ROWS, ROW = 5, 15
"""How many requests have a row, and the pixels of a row."""
WINDOW = 0.6
"""The time that is drawn, as a multiple of what a mean answer takes alone."""
KINDS = {OUT: MISSED, AGAIN: ORANGE}


def draw_pool(drawing: Drawing, state: State, y: float) -> float:
    """Draw the pool over a time window, and a row for each of a few requests; return the y below."""
    if state.pool not in state.points:
        return draw_placeholder(drawing, TITLE, state.refused, y)
    swaps = state.serving.policy != "recompute"
    keys = [
        Segment("running", 0, BLUE),
        Segment("runs again", 0, SKY),
        Segment("preempted", 0, MISSED, hatched=True),
        Segment("copied back" if swaps else "recomputed", 0, ORANGE),
    ]
    y = draw_title(drawing, TITLE, keys, y)
    point = state.points[state.pool]
    start, end = window(state, point)
    across = Scale(start, end)
    box = Box(MARGIN + NAMES, y + 12, drawing.width - 2 * MARGIN - NAMES, 36)
    _draw_usage(drawing, box, point, across, state)
    shown = victims(point, start, end)
    below = _draw_rows(drawing, Box(box.x, box.bottom + 5, box.width, ROW), point, shown, across)
    drawing.play([_caption(point, end, start) for end in frame_ends(across)])
    return draw_times(drawing, Box(box.x, below, box.width, 0), across)


def window(state: State, point: Point) -> tuple[float, float]:
    """Return the time span to draw: around the middle preemption, or from the middle of the run."""
    out = [span.start for span in point.spans if span.kind == OUT]
    middle = out[len(out) // 2] if out else point.seconds / 2
    wide = WINDOW * state.serving.answer * state.serving.step_alone
    start = max(0.0, middle - wide / 4)
    return start, start + wide


def victims(point: Point, start: float, end: float) -> list[int]:
    """Choose the requests that get a row: first those preempted in this time span, then those that
    run longest in it.
    """
    inside = [span for span in point.spans if span.start < end and span.end > start]
    out = [span.request for span in inside if span.kind == OUT and span.start >= start]
    longest = sorted(inside, key=lambda span: max(span.start, start) - min(span.end, end))
    return sorted(list(dict.fromkeys([*out, *(span.request for span in longest)]))[:ROWS])


def _slices(across: Scale) -> list[tuple[float, float]]:
    """Return the start and end of each frame."""
    ends = frame_ends(across)
    return list(zip([across.low, *ends], ends, strict=False))


def _at(frame: int) -> str:
    return f"{frame} {FRAMES - 1}"


def _draw_usage(drawing: Drawing, box: Box, point: Point, across: Scale, state: State) -> None:
    """Draw a bar for each frame: how full the pool is, and how much of it belongs to requests that
    were preempted before.
    """
    drawing.text((MARGIN, box.y + 15), "the pool", size=SMALL, colour=QUIET)
    drawing.text((MARGIN, box.y + 29), f"{state.pool // BLOCK_SIZE:,} blocks", size=SMALL, colour=QUIET)
    drawing.rect(box, IDLE)
    wide = box.width / FRAMES
    blocks = state.pool // BLOCK_SIZE
    for frame, (_, end) in enumerate(_slices(across)):
        sample = _sample(point.samples, end)
        tip = (
            f"{sample.used:,} blocks in use, {sample.returned:,} of them by requests that came back; "
            f"{sample.running} running, {sample.out} preempted"
        )
        top = box.bottom
        for used, colour in ((sample.used - sample.returned, BLUE), (sample.returned, SKY)):
            high = box.height * min(1.0, used / blocks)
            top -= high
            drawing.rect(Box(box.x + frame * wide, top, wide - 1, high), colour, tip=tip, at=_at(frame))


def _sample(samples: Sequence[Sample], now: float) -> Sample:
    """Return the latest sample at this time."""
    ends = [sample.end for sample in samples]
    return samples[max(0, bisect_right(ends, now) - 1)]


def _draw_rows(drawing: Drawing, row: Box, point: Point, shown: Sequence[int], across: Scale) -> float:
    """Draw what each of these requests does, and return the y below the last."""
    for index, request in enumerate(shown):
        box = Box(row.x, row.y + index * ROW, row.width, ROW - 3)
        drawing.text((MARGIN, box.y + 10), f"request {request + 1}", size=SMALL, colour=QUIET)
        drawing.rect(box, IDLE)
        spans = [span for span in point.spans if span.request == request]
        for span in spans:
            again = any(other.kind == OUT and other.end <= span.start + 1e-9 for other in spans)
            _draw_span(drawing, box, span, KINDS.get(span.kind, SKY if again else BLUE), across)
    return row.y + len(shown) * ROW


def _draw_span(drawing: Drawing, box: Box, span: Span, colour: str, across: Scale) -> None:
    """Draw a span in pieces, one per frame, so that it grows over time."""
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
    listed = ", ".join(map(str, out[:6])) + (" and others" if len(out) > 6 else "")
    preempted = f"{len(out)} preempted ({listed})" if out else "none preempted"
    return f"{seconds(now - start)}: {sample.running} running in {sample.used:,} blocks, {preempted}"

"""Draw the upper part of lesson 11's picture: how full the pool is over time, and below it what its
victims hold, until they lose it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise

from minivllm_lab.drawing import number
from minivllm_lab.palette import BLUE, INK, ORANGE, PURPLE, VERMILLION
from widgets.preemption.runs import AGAIN, BLOCK_SIZE, OUT, Point, Span
from widgets.preemption.state import State
from widgets.shell.plot import MARGIN, Scale, seconds, tokens
from widgets.shell.strip import FRAMES, NAMES, draw_times, frame_ends, frames_from, pixels
from widgets.shell.svg import QUIET, SMALL, Box, Drawing, Segment, legend
from widgets.shell.theme import CARD, IDLE, MISSED

ROWS, ROW, LEVEL = 5, 23, 58
"""How many requests have a row, and the heights of a row and of the pool."""
WINDOW, BEFORE = 0.6, 0.35
"""The time that is drawn, as a multiple of what a mean answer takes alone, and the share of it
before the first preemption.
"""


def draw_pool(drawing: Drawing, state: State, y: float) -> float:
    """Draw the pool over a time window, and a row for each of a few requests; return the y below."""
    swaps = state.serving.policy != "recompute"
    away = Segment("waits, copied to the host", 0, PURPLE) if swaps else Segment("waits without blocks", 0, MISSED)
    keys = [Segment("holds tokens", 0, BLUE), away, *[Segment("is recomputed", 0, ORANGE)] * (not swaps)]
    keys.insert(1, Segment("is preempted (open: no row)", 0, INK, draw=lambda at: drawing.circle(at, 4, VERMILLION)))
    y = legend(drawing, (MARGIN, y), keys, drawing.width - 2 * MARGIN)
    level = Box(MARGIN + NAMES, y - 2, drawing.width - 2 * MARGIN - NAMES, LEVEL)
    for words, below in ((f"pool: {tokens(state.pool)}", 4), (f"needed: {state.saturation / 1024:,.0f}K", 20)):
        drawing.text((MARGIN, level.y + below), words, size=SMALL, colour=QUIET)
    drawing.rect(level, IDLE)
    rows = Box(level.x, level.bottom + 14, level.width, ROWS * ROW)
    if point := state.points.get(state.pool):
        across = Scale(*window(state, point))
        _draw_level(drawing, level, point, state.pool, across)
        _draw_rows(drawing, level, rows, state, across)
        drawing.play([_caption(point, end, across.low) for end in frame_ends(across)])
        draw_times(drawing, rows, across)
    else:
        words = "Nothing is served." if state.refused else "Still serving the requests."
        drawing.text((rows.x + rows.width / 2, rows.y + 30), words, size=SMALL, colour=QUIET, anchor="middle")
    return rows.bottom + 17


def window(state: State, point: Point) -> tuple[float, float]:
    """Return the time span to draw: around the first preemption, or around the fullest moment."""
    out = [span.start for span in point.spans if span.kind == OUT]
    event = min(out) if out else max(point.samples, key=lambda sample: sample.used).end
    wide = WINDOW * state.serving.answer * state.serving.step_alone
    start = max(0.0, event - BEFORE * wide)
    return start, start + wide


def victims(point: Point, start: float, end: float) -> tuple[list[int], int]:
    """Choose the requests that get a row, by arrival: those preempted first in this time span, then
    those that run longest in it; and count all that are preempted in it.
    """
    inside = [span for span in point.spans if _overlaps(span, Scale(start, end))]
    out = dict.fromkeys(span.request for span in inside if span.kind == OUT and span.start >= start)
    longest = sorted(inside, key=lambda span: max(span.start, start) - min(span.end, end))
    return sorted([*dict.fromkeys([*out, *(span.request for span in longest)])][:ROWS]), len(out)


def _overlaps(span: Span, across: Scale) -> bool:
    return span.start < across.high and span.end > across.low


def _slices(across: Scale) -> Iterator[tuple[str, float, float]]:
    """Yield each frame: when its marks show, and the time from its start to its end."""
    for frame, (start, end) in enumerate(pairwise([across.low, *frame_ends(across)])):
        yield f"{frame} {FRAMES - 1}", start, end


# ---- the pool


def _draw_level(drawing: Drawing, box: Box, point: Point, pool: int, across: Scale) -> None:
    """Draw the tokens' blocks in use, frame by frame, from as high a level as they never fall below."""
    ends = [sample.end for sample in point.samples]
    first, last = (bisect_right(ends, time) for time in (across.low, across.high))
    least = min(sample.used for sample in point.samples[max(0, first - 1) : last]) * BLOCK_SIZE
    fill = Scale(max(share * pool for share in (0, 0.5, 0.75) if share * pool <= least), pool)
    drawing.text((MARGIN, box.bottom - 2), f"axis from {tokens(fill.low)}", size=SMALL, colour=QUIET)
    for at, start, end in _slices(across):
        x, right = pixels(box, across, start, end)
        path = [f"M{number(x - 1)} {number(box.bottom)}"]  # without a gap to the frame before
        for sample in point.samples[max(0, bisect_right(ends, start) - 1) : bisect_right(ends, end)]:
            when = max(x - 1, pixels(box, across, sample.end, end)[0])
            path.append(f"H{number(when)}V{number(box.bottom - box.height * fill.share(sample.used * BLOCK_SIZE))}")
        path.append(f"H{number(right)}V{number(box.bottom)}z")
        drawing.add(f'<path fill="{BLUE}" d="{"".join(path)}" data-at="{at}"/>')
        tip = _caption(point, end, across.low)
        drawing.rect(Box(x, box.y, right - x, box.height), "transparent", tip=tip, at=at)
    teeth = "l4 -4l4 4" * int(fill.low > 0 and box.width / 8)  # a torn foot
    drawing.add(f'<path fill="{CARD}" d="M{number(box.x)} {number(box.bottom)}{teeth}z"/>')
    drawing.line((box.x, box.y), (box.right, box.y), INK, width=1.5)


# ---- the requests


def _draw_rows(drawing: Drawing, level: Box, rows: Box, state: State, across: Scale) -> None:
    """Draw what each of these requests holds, as a height, and a line from the full pool to each
    loss.
    """
    point, swaps = state.points[state.pool], state.serving.policy != "recompute"
    colours = {OUT: PURPLE, AGAIN: PURPLE} if swaps else {OUT: MISSED, AGAIN: ORANGE}
    shown, count = victims(point, across.low, across.high)
    if count:
        drawing.text((MARGIN, rows.y - 1), f"{min(count, ROWS)} of {count} victims:", size=SMALL, colour=QUIET)
    for span in point.spans:
        if span.kind == OUT and across.low <= span.start < across.high:
            x, at = pixels(level, across, span.start, span.end)[0], frames_from(span.start, across)
            if span.request in shown:
                top = rows.y + shown.index(span.request) * ROW
                # Below the rows, so that it is seen only between them.
                drawing.polyline([(x, level.y), (x, top)], VERMILLION, width=1.2, dash="1 3", at=at)
                with drawing.on_top():
                    drawing.polyline([(x, top), (x, top + ROW - 3)], VERMILLION, width=2, at=at)
            # A hollow dot's request has no row.
            drawing.circle((x, level.y), 3, VERMILLION if span.request in shown else CARD, stroke=VERMILLION, at=at)
    held = [[each for each in _holdings(state, point, index) if _overlaps(each[0], across)] for index in shown]
    most = max((high for spans in held for _, _, high in spans), default=1)
    for index, (request, spans) in enumerate(zip(shown, held, strict=True)):
        row = Box(rows.x, rows.y + index * ROW, rows.width, ROW - 3)
        drawing.text((MARGIN, row.bottom - 1), f"request {request + 1}", size=SMALL, colour=QUIET)
        drawing.rect(Box(row.x, row.bottom - 1, row.width, 1), IDLE)
        for span, low, high in spans:
            _draw_span(drawing, row, span, (low / most, high / most), across, colours.get(span.kind, BLUE))


def _holdings(state: State, point: Point, request: int) -> Iterator[tuple[Span, int, int]]:
    """Yield a request's spans with the tokens whose keys and values exist at both ends of each."""
    held = state.serving.lengths[request].prompt_tokens
    for span in (span for span in point.spans if span.request == request):
        held = held if span.kind != OUT or state.serving.policy != "recompute" else 0
        after = held if span.kind == OUT else span.held
        yield span, min(held, after), after
        held = after


def _draw_span(drawing: Drawing, row: Box, span: Span, shares: tuple[float, float], across: Scale, colour: str) -> None:
    """Draw a span in pieces, one per frame, so that it grows over time."""
    grown = Scale(span.start, span.end)
    for at, start, end in _slices(across):
        times = max(start, span.start), min(end, span.end)
        if times[0] < times[1]:
            (x, right), bottom = pixels(row, across, *times), number(row.bottom)
            highs = [shares[0] + (shares[1] - shares[0]) * grown.share(time) for time in times]
            low, high = (number(row.bottom - max(2.5, row.height * share)) for share in highs)
            x -= start > span.start  # without a gap to the frame before
            corners = f"M{number(x)} {bottom}V{low}L{number(max(right, x + 1))} {high}V{bottom}z"
            drawing.add(f'<path fill="{colour}" d="{corners}" data-at="{at}"/>')
    left, right = pixels(row, across, span.start, span.end)
    tip = f"Request {span.request + 1} {span.kind}: {seconds(span.end - span.start)}"
    tip += f", holding {span.held:,} tokens at its end" * (span.kind != OUT)
    at = frames_from(max(span.start, across.low), across)
    drawing.rect(Box(left, row.y, right - left, row.height), "transparent", tip=tip, at=at)


def _caption(point: Point, now: float, start: float) -> str:
    sample = point.samples[max(0, bisect_right(point.samples, now, key=lambda sample: sample.end) - 1)]
    out = sorted({span.request + 1 for span in point.spans if span.kind == OUT and span.start <= now < span.end})
    listed = ", ".join(map(str, out[:6])) + (" and others" if len(out) > 6 else "")
    preempted = f"{len(out)} preempted ({listed})" if out else "none preempted"
    return f"{seconds(now - start)}: {sample.running} running in {sample.used:,} blocks, {preempted}"

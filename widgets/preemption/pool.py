"""Draw the upper part of lesson 11's picture: the pool and what the load asks of it, both to scale,
and beside it the life of one victim, enlarged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from minivllm_lab.pictures.drawing import ink_on, number, text_width
from minivllm_lab.pictures.palette import BLUE, INK, ORANGE, PURPLE, VERMILLION
from widgets.preemption.runs import AGAIN, BLOCK_SIZE, OUT, RUNS, Point, Span
from widgets.preemption.state import State
from widgets.shell.plot import MARGIN, WIDE, Scale, seconds
from widgets.shell.strip import FRAMES, draw_times, frame_ends, frames_from, pixels
from widgets.shell.svg import BOLD, QUIET, SMALL, Box, Drawing
from widgets.shell.theme import BROKEN, CARD, MISSED, RESERVED, TINT

NAMES, GAUGE, HIGH, ABOVE = 58, 46, 168, 66
"""Pixels left of the pool for its names, the pool's width and height, and the room for words above
the curve.
"""
CYCLE = [RUNS, OUT, AGAIN, RUNS]


class Held(NamedTuple):
    """A period of a request, and how many of its tokens have keys and values at both ends."""

    span: Span
    low: int
    high: int

    def at(self, time: float) -> float:
        """Return the tokens held at a time; a period may have no length, when its request is preempted at once."""
        span = self.span
        return self.low + (self.high - self.low) * ((time - span.start) / (span.end - span.start or 1))


def draw_pool(drawing: Drawing, state: State, y: float) -> float:
    """Draw the pool, and what one of its requests holds over time; return the y below."""
    gauge = Box(MARGIN + NAMES, y, GAUGE, HIGH)
    left = gauge.right + (36 if drawing.width >= WIDE else 14)
    panel = Box(left, y, drawing.width - MARGIN - left, HIGH)
    full = Scale(0, 1.02 * max(state.pool, state.saturation))
    if point := state.points.get(state.pool):
        lives = _lives(state, point)
        life = _clearest(lives)
        moment = next((held.span.start for held in life if held.span.kind == OUT), life[0].span.end)
        _draw_holders(drawing, gauge, panel, full, _holders(lives, life[0].span.request, moment))
        _draw_life(drawing, panel, state, life)
        times = Scale(life[0].span.start, life[-1].span.end)
        drawing.play([_caption(life, end) for end in frame_ends(times)])
    else:
        words = "Nothing is served." if state.refused else "Still serving the requests."
        drawing.text((panel.x + panel.width / 2, y + 60), words, size=SMALL, colour=QUIET, anchor="middle")
    _draw_rim(drawing, gauge, state, full)
    return gauge.bottom + 17


# ---- what requests hold


def _lives(state: State, point: Point) -> list[list[Held]]:
    """Return what each request holds, period by period."""
    lives: dict[int, list[Held]] = defaultdict(list)
    for span in point.spans:
        before = lives[span.request]
        held = before[-1].high if before else state.serving.lengths[span.request].prompt_tokens
        held *= span.kind != OUT or state.serving.policy != "recompute"
        after = held if span.kind == OUT else span.held
        before.append(Held(span, min(held, after), after))
    return list(lives.values())


def _clearest(lives: Sequence[Sequence[Held]]) -> Sequence[Held]:
    """Choose the cycle through preemption that holds closest to the average, rather one whose periods all
    show, or a request's first period if there is no cycle.
    """
    cycles = [life[at : at + 4] for life in lives for at in range(len(life) - 3)]
    cycles = [cycle for cycle in cycles if [held.span.kind for held in cycle] == CYCLE]
    if not cycles:
        return max(lives, key=len)[:1]
    average = fmean(cycle[0].high for cycle in cycles)
    return min(cycles, key=lambda cycle: (_unclear(cycle), abs(cycle[0].high - average)))


def _unclear(cycle: Sequence[Held]) -> bool:
    """Return whether a period before the way back is shorter than it, or the wait much longer."""
    before, wait, back, _ = (held.span.end - held.span.start for held in cycle)
    return not back <= min(before, wait) <= wait <= 3 * back


def _holders(lives: Sequence[Sequence[Held]], shown: int, moment: float) -> list[tuple[float, bool]]:
    """Return the tokens in the blocks of each request in the pool just before a moment, in the order
    of admission, and whether it is the one shown.
    """
    inside = [held for life in lives for held in life if held.span.start < moment <= held.span.end]
    running = sorted((held for held in inside if held.span.kind != OUT), key=lambda held: held.span.start)
    return [(-(-held.at(moment) // BLOCK_SIZE) * BLOCK_SIZE, held.span.request == shown) for held in running]


# ---- the pool


def _draw_holders(drawing: Drawing, box: Box, panel: Box, full: Scale, holders: Sequence[tuple[float, bool]]) -> None:
    """Draw the requests as layers, and a wedge from the one shown to the panel that enlarges it."""
    below = 0.0
    for held, shown in holders:
        bottom, top = (box.bottom - box.height * full.share(level) for level in (below, below + held))
        below += held
        layer = Box(box.x, top, box.width, bottom - top)
        if shown:
            funnel = [(box.right, top), (panel.x, panel.y), (panel.x, panel.bottom), (box.right, bottom)]
            drawing.polygon(funnel, RESERVED)
        drawing.rect(layer, BLUE, opacity=1 if shown else 0.4, tip=f"A request that holds {held:,.0f} tokens")
        drawing.line((layer.x, top), (layer.right, top), BLUE if shown else CARD, width=0.7)
    drawing.text((box.right, box.bottom + 17), f"{len(holders)} running", size=SMALL, colour=BLUE, anchor="end")


def _draw_rim(drawing: Drawing, box: Box, state: State, full: Scale) -> None:
    """Draw the pool's rim, and what the load asks for beyond it, in requests of the mean size."""
    rim, asked = (box.bottom - box.height * full.share(size) for size in (state.pool, state.saturation))
    glass = [(box.x, rim), (box.x, box.bottom), (box.right, box.bottom), (box.right, rim)]
    beyond = Box(box.x, asked, box.width, rim - asked)
    if beyond.height > 0:
        tip = f"The load needs {state.saturation:,.0f} tokens on average"
        drawing.rect(beyond, BROKEN, stroke=VERMILLION, dash="3 3", tip=tip)
        layer = box.height * full.share(state.serving.held)
        for index in range(1, int(beyond.height / layer) + 1) if layer > 2 else ():
            drawing.line((box.x + 1, rim - index * layer), (box.right - 1, rim - index * layer), MISSED)
    drawing.polyline(glass, INK, width=1.5)
    drawing.line((box.x - 5, rim), (box.right + 5, rim), INK, width=3)
    loud = VERMILLION if beyond.height > 0 else QUIET
    words = [(rim, state.pool, "pool", INK), (asked, state.saturation, "needed", loud)]
    drawing.text((box.x - 9, box.y - 9), "tokens", size=SMALL, colour=QUIET, anchor="end")
    free = box.y - 2.0
    for level, size, name, colour in sorted(words):
        top = min(max(level, free), box.bottom - 28)
        drawing.text((box.x - 9, top + 13), f"{size / 1024:,.0f}K", size=15, colour=colour, anchor="end", bold=True)
        drawing.text((box.x - 9, top + 28), name, size=SMALL, colour=colour, anchor="end")
        free = top + 36


# ---- the request shown


def _draw_life(drawing: Drawing, panel: Box, state: State, life: Sequence[Held]) -> None:
    """Draw what a request holds over time, period by period."""
    swaps = state.serving.policy != "recompute"
    colours = {OUT: PURPLE, AGAIN: PURPLE} if swaps else {AGAIN: ORANGE}
    box = Box(panel.x + 1, panel.y + ABOVE, panel.width - 1, panel.height - ABOVE)
    drawing.rect(panel, TINT)
    across = _window(state, life)
    most = max(held.at(min(held.span.end, across.high)) for held in life)
    for held in life:
        _draw_period(drawing, box, held, most, across, colours.get(held.span.kind, BLUE))
    drawing.line((box.x, box.bottom), (box.right, box.bottom), QUIET)
    draw_times(drawing, box, across)
    words = f"tokens that one {'request' if len(life) == 1 else 'victim'} holds"
    drawing.text((panel.x, panel.y - 9), words, size=SMALL, colour=BLUE)
    if len(life) == 1:
        costs = state.serving.crossover
        words = f"a victim's token: recomputed in {micro(costs.recompute)}, swapped in {micro(costs.swap)}"
        drawing.paragraph((box.x + 8, panel.y + 16), words, box.width - 16)
        return
    _, out, again, _ = life
    top = box.bottom - box.height * life[0].high / most
    held_words = f"{life[0].high:,} tokens"
    drawing.text((panel.x + 5, top - 6), held_words, size=SMALL, colour=BLUE, bold=True)
    left, right = pixels(box, across, out.span.start, out.span.end)
    with drawing.layer(at=frames_from(out.span.start, across)):
        drawing.rect(Box(left, top, right - left, box.bottom - top), "none", stroke=VERMILLION, dash="3 3")
        drawing.line((left, top), (left, box.bottom), VERMILLION, width=2.5)
        ink, ground = (ink_on(PURPLE), PURPLE) if swaps else (VERMILLION, TINT)
        for row, line in enumerate(("copied out," if swaps else "preempted,", "waits")):
            place = (left + right) / 2, (top + box.bottom) / 2 - 4 + 16 * row
            if BOLD * text_width(line, SMALL) < right - left:
                drawing.text(place, line, size=SMALL, colour=ink, anchor="middle", bold=True, halo=ground)
    with drawing.layer(at=frames_from(again.span.start, across)):
        _draw_ways_back(drawing, panel, right, box.width / (across.high - across.low), _ways_back(state, life))
        drawing.line((right, panel.y + 8), (right, top), QUIET, dash="2 3")
        words = "all back" if swaps else "all again"
        beside = max(right + 5, panel.x + 13 + BOLD * text_width(held_words, SMALL))
        place = min(beside, panel.right - BOLD * text_width(words, SMALL)), top - 6
        drawing.text(place, words, size=SMALL, colour=PURPLE if swaps else ORANGE, bold=True, halo=TINT)


def _ways_back(state: State, life: Sequence[Held]) -> list[tuple[str, str, float]]:
    """Return the name, the colour and the seconds of both ways to restore what a victim held, its own first."""
    costs, (held, _, again, _) = state.serving.crossover, life
    ways = [("recompute", ORANGE, costs.recompute * held.high), ("swap", PURPLE, costs.swap * held.high)]
    (name, colour, _), other = ways if state.serving.policy == "recompute" else ways[::-1]
    return [(name, colour, again.span.end - again.span.start), other]


def _window(state: State, life: Sequence[Held]) -> Scale:
    """Return the times to show: around the wait and the way back, if the request is a victim."""
    start, end = life[0].span.start, life[-1].span.end
    if len(life) == 1:
        return Scale(start, end)
    back = life[1].span.end
    after = 1.4 * max(seconds for *_, seconds in _ways_back(state, life))
    before = max(1.4 * (back - life[1].span.start), 1.5 * after)
    return Scale(max(start, back - before), min(end, back + after))


def _draw_period(drawing: Drawing, box: Box, held: Held, most: float, across: Scale, colour: str) -> None:
    """Draw a period in pieces, one per frame, so that it grows over time."""
    span = held.span
    pixel = (across.high - across.low) / box.width
    for frame, (start, end) in enumerate(pairwise([across.low, *frame_ends(across)])):
        times = max(start - pixel, span.start), min(end, span.end)  # without a gap to the frame before
        if times[0] < times[1] and held.high:
            x, right = pixels(box, across, *times)
            low, high = (number(box.bottom - box.height * held.at(time) / most) for time in times)
            corners = f"M{number(x)} {number(box.bottom)}V{low}L{number(right)} {high}V{number(box.bottom)}z"
            drawing.add(f'<path fill="{colour}" d="{corners}" data-at="{frame} {FRAMES - 1}"/>')


def _draw_ways_back(
    drawing: Drawing, panel: Box, x: float, each: float, ways: Sequence[tuple[str, str, float]]
) -> None:
    """Draw how long both ways to restore a victim's tokens take, as bars that begin where its wait ends."""
    for row, (name, colour, time) in enumerate(ways):
        y, wide = panel.y + 10 + 20 * row, min(time * each, panel.right - x)
        drawing.rect(Box(x, y, wide, 13), colour)
        words = f"{name}: {seconds(float(f'{time:.2g}'))}"
        end = max(x - 7, panel.x + 4 + text_width(words, SMALL))
        drawing.text((end, y + 11), words, size=SMALL, anchor="end", halo=TINT)


def _caption(life: Sequence[Held], now: float) -> str:
    kind = next((held.span.kind for held in life if now <= held.span.end), RUNS)
    return f"{seconds(now - life[0].span.start)}: {kind}"


def micro(value: float) -> str:
    """Format the time that one token takes."""
    return f"{value * 1e6:.3g} µs" if value < 0.9995e-3 else f"{value * 1e3:.3g} ms"

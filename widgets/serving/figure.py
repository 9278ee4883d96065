"""Draw lesson 06's picture: latencies by rate, and below them each layout of the same number of
GPUs: what one token's time goes to, and the rate that the layout handles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from minivllm_lab.drawing import text_width
from minivllm_lab.palette import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, VERMILLION
from minivllm_simulate.layouts import Layout
from widgets.serving.runs import RATES, Point, experiment
from widgets.serving.state import Knee, Served, State
from widgets.shell.plot import MARGIN, WIDE, Axes, Scale, figures, hidden_note, seconds
from widgets.shell.strip import draw_title
from widgets.shell.svg import BOLD, QUIET, SMALL, Box, Drawing, Segment
from widgets.shell.theme import BROKEN, MID, MISSED, PINNED, RESERVED


@dataclass(frozen=True)
class Times:
    """One of the two latencies that have a limit."""

    name: str
    of: Callable[[Point], tuple[float, float]]
    """Return a point's times for half and for 99 % of the requests."""
    limit: Callable[[Served], float]

    def tip(self, point: Point) -> str:
        """Describe a point's times."""
        half, most = map(seconds, self.of(point))
        return f"Half within {half}, 99 % within {most}, with {figures(point.inside)} requests in the system"


TTFTS = Times("time to first token", attrgetter("ttft"), attrgetter("ttft"))
TPOTS = Times("time per output token", attrgetter("tpot"), attrgetter("tpot"))
RATE = Scale(RATES[0], RATES[-1], log=True)
TICKS, FEW_TICKS = (0.5, 1, 5, 10, 50, 100, 500), (1, 10, 100)
ROW, NAMES, GPU, VALUES, MORE = 24, 92, 12, 54, 36
"""The height of a row, and the widths of its name, of a GPU at most, of a value, and of another."""
PARTS = (
    Segment("overhead", 0, MID, "launches and sampling, the same on any number of GPUs"),
    Segment("weights", 0, SKY, "reading the weights, of which each GPU has its share"),
    Segment("all-reduces", 0, ORANGE, "exchange between the GPUs that share an engine"),
    Segment("batch", 0, PURPLE, "arithmetic, the KV cache and prompts, which grow with the load"),
)
"""The parts of a step, as `Experiment.parts` returns them."""


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw the latency that breaks first by rate with the other one beside it, and below them each
    layout of these GPUs.
    """
    served = f"{state.model} on {state.layout.gpus} {state.gpu}"
    drawing = Drawing(width, 0, served, f"Latencies against the rate as {state.layout}")
    note = f"{served} as {state.layout}, modelled{'; your collector' * state.own}"
    with drawing.layer(tip=f"The model's {state.error} against published runs." if state.error else ""):
        y = drawing.heading((MARGIN, 23), "How long clients wait", note)
    if state.work.note:
        y = drawing.paragraph((MARGIN, y + 17), state.work.note, width - 2 * MARGIN)
    wide = width >= WIDE
    high = min(224, 312 - y - ROW * len(state.others)) if wide else 172
    left = Box(60, y + 37, (0.62 * width if wide else width - MARGIN) - 60, high)
    other = Box(left.right + 66, left.y, width - left.right - 66 - MARGIN, left.height)
    if not wide:
        other = Box(left.x, left.bottom + 66, left.width, 72)
    knee = state.served.knee
    first, second = (TPOTS, TTFTS) if knee and knee.cause == "tpot" else (TTFTS, TPOTS)
    _draw_latency(Axes(drawing, left, RATE, _scale(state, first)), state, first, large=True, pinned=pinned)
    _draw_latency(Axes(drawing, other, RATE, _scale(state, second)), state, second, large=False)
    drawing.height = _draw_layouts(drawing, state, other.bottom + 62) + 10
    return drawing.render()


def _draw_latency(axes: Axes, state: State, times: Times, *, large: bool, pinned: State | None = None) -> None:
    name, ticks = (f"{times.name}, p99 (dashed: median)", TICKS) if large else (times.name, FEW_TICKS)
    y_ticks, form = None if large else axes.y.powers(), "{:g}".format
    axes.frame("requests a second", name, x_ticks=ticks, x_format=form, y_ticks=y_ticks, y_format=seconds)
    served = state.served
    knee = served.knee
    limit = times.limit(served)
    shade = axes.broken if large else axes.shade
    if served.refused:
        shade(None, None, f"{state.model} does not fit: {served.refused}")
    elif knee:
        shade(knee.rate, None, knee_words(knee, served))
    axes.mark_y(limit, f"limit {seconds(limit)}", GREEN)
    if large and pinned and pinned.served.points:
        axes.pinned(drawn_rates(pinned.served), [most for _, most in _values(pinned.served, times.of)], pinned.rate)
    if served.points:
        axes.line(drawn_rates(served), [half for half, _ in _values(served, times.of)], BLUE, width=1.6, dash="5 4")
        _draw_curve(axes, served, times, BLUE, "queue grows" * large)
    with axes.drawing.answer():
        for other in state.others:
            if large and other.layout != state.layout and other.points:
                _draw_curve(axes, other, times, MID)
    if large:
        axes.here(state.rate, "rate", f"{state.rate:g} a second")
    else:
        axes.also_here(state.rate)
    axes.tips(served.rates, lambda rate: f"{rate:g} requests a second. {times.tip(served.points[rate])}.")


def _draw_curve(axes: Axes, served: Served, times: Times, colour: str, words: str = "") -> None:
    """Draw the time of 99 % of the requests, with a mark and these words where the queue begins to grow."""
    rates, values = drawn_rates(served), [most for _, most in _values(served, times.of)]
    axes.line(rates, values, colour, width=1.6 if colour == MID else 2.5)
    if colour == MID:
        x, y = axes.at(rates[0], values[0])
        axes.name((x, y - 3), str(served.layout).rsplit(" × ", 1)[0])
    if served.queue_grows_from <= rates[-1]:
        axes.points(rates[-1:], values[-1:], PINNED if colour == MID else colour, radius=4)
        axes.label(axes.at(rates[-1], values[-1]), words, colour, bold=False)
        if times is TTFTS and colour == BLUE:
            axes.without_end(rates[-1], values[-1])


def knee_words(knee: Knee, served: Served) -> str:
    """Describe where a layout breaks, and why."""
    where = f"at {figures(knee.rate)}" if knee.rate > RATES[0] else f"below {RATES[0]:g}"
    return f"breaks {where}: {cause_words(knee.cause, served)}"


def cause_words(cause: str, served: Served) -> str:
    """Describe what goes wrong beyond the knee."""
    return {
        "queue": "the queue grows without end",
        "ttft": f"first tokens take over {seconds(served.ttft)}",
        "tpot": f"later tokens take over {seconds(served.tpot)}",
    }[cause]


def drawn_rates(served: Served) -> list[float]:
    """Return the rates to draw: those that have been run, up to the one from which the queue grows."""
    end = max([served.queue_grows_from, *served.rates[:1]])
    return [rate for rate in served.rates if rate < end] + [end] * (end < math.inf)


def _between(served: Served, rate: float, of: Callable[[Point], tuple[float, float]]) -> tuple[float, float]:
    """Return the times at a rate between two that have been run."""
    low = max(known for known in served.rates if known <= rate)
    high = min(known for known in served.rates if known >= rate)
    share = (rate - low) / ((high - low) or 1)
    pairs = zip(of(served.points[low]), of(served.points[high]), strict=True)
    half, most = (first + (last - first) * share for first, last in pairs)
    return half, most


def _values(served: Served, pick: Callable[[Point], tuple[float, float]]) -> list[tuple[float, float]]:
    return [_between(served, rate, pick) for rate in drawn_rates(served)]


def _scale(state: State, times: Times) -> Scale:
    """Return a scale around all times so far, rounded so that it rarely changes during a sweep."""
    limit = times.limit(state.served)
    values = [time for served in state.others for pair in _values(served, times.of) for time in pair if time]
    return Scale.around(0.7 * min([limit, *values]), max([3 * limit, *values]))


# ---- the layouts


def _draw_layouts(drawing: Drawing, state: State, y: float) -> float:
    """Draw a row for each layout of the same number of GPUs: its GPUs, the parts of a token's time,
    and the rate that it handles; return the y below.
    """
    wide = drawing.width >= WIDE
    y = draw_title(drawing, f"{state.layout.gpus} {state.gpu}, cut differently", PARTS, y) + 21
    left = MARGIN + (190 if wide else 0)
    room = (drawing.width - MARGIN - left - 24) * (0.45 if wide else 0.5)
    handled = Box(left + room + 24, y, drawing.width - MARGIN - left - room - 24 - MORE, ROW - 8)
    queues = [layout.queue_grows_from for layout in state.others if layout.queue_grows_from < math.inf]
    most = max([layout.goodput for layout in state.others if layout.is_found] + queues + [state.rate])
    times = [tpot_at(layout, state.rate) or 0.0 for layout in state.others]
    longest = min(2 * state.served.tpot, 1.2 * max(times) or math.inf)
    handles = f"requests/s{' it handles' * (drawing.width > WIDE)}; pale: no limit"
    for x, words in ((left, f"a token at {state.rate:g} requests/s"), (handled.x, handles)):
        drawing.text((x, y), words, size=SMALL, colour=QUIET)
    y += 7
    hidden_note(drawing, Box(left, y, drawing.width - MARGIN - left, ROW * len(state.others)))
    right = left - 12 if wide else drawing.width - MARGIN
    for served in state.others:
        _draw_gpus(drawing, served.layout, y, right, served.layout == state.layout)
        y += 0 if wide else 20
        with drawing.answer():
            _draw_time(drawing, Box(left, y + 4, room, ROW - 8), state, served, longest)
            _draw_rate(drawing, replace(handled, y=y + 4), state, served, most)
        y += ROW
    with drawing.answer():
        for x, value, end, across, colour, words in (
            (left, state.served.tpot, longest, room, GREEN, seconds(state.served.tpot)),
            (handled.x, state.rate, most, handled.width, INK, f"{state.rate:g}/s"),
        ):
            if value <= end:
                place = (x + value / end * (across - VALUES), y + 13)
                drawing.text(place, words, size=SMALL, colour=colour, anchor="middle")
    return y + 14


def _draw_gpus(drawing: Drawing, layout: Layout, y: float, right: float, selected: bool) -> None:
    """Write a layout's name, and draw a frame for each engine around its GPUs if they are not too
    many.
    """
    drawing.text((MARGIN, y + 16), str(layout), size=SMALL, bold=selected)
    x = MARGIN + max(NAMES, text_width(str(layout), SMALL) * BOLD + 10)
    across = layout.gpus // layout.dp
    wide = min(GPU, ((right - x + 4) / layout.dp - 8) / across)
    for _ in range(layout.dp if wide >= 3 else 0):
        drawing.rect(Box(x, y + 4, across * wide + 4, 16), RESERVED, tip=f"{layout}: an engine", radius=3)
        for rank in range(across):
            drawing.rect(Box(x + 2.5 + rank * wide, y + 6.5, wide - 1, 11), BLUE if selected else PINNED)
        x += across * wide + 8


def _draw_time(drawing: Drawing, box: Box, state: State, served: Served, longest: float) -> None:
    """Draw the parts of the time in which 99 % of the requests get each token, and its limit."""
    spent = tpot_at(served, state.rate)
    if served.refused or spent == math.inf:
        area = Box(box.x, box.y, box.width - VALUES, box.height)
        drawing.rect(area, BROKEN, tip=layout_words(served))
        drawing.hatch(area, MISSED, gap=9)
        words = "does not fit" if served.refused else "the queue grows"
        drawing.text((box.x + 5, box.y + 12), words, size=SMALL, colour=VERMILLION, halo=True)
    elif spent is not None:
        parts = experiment(state.model, state.gpu, served.layout, state.work).parts(state.rate, spent)
        tips = (f"{part.label} {seconds(value)}: {part.tip}" for part, value in zip(PARTS, parts, strict=True))
        segments = [replace(part, value=value, tip=tip) for part, value, tip in zip(PARTS, parts, tips, strict=True)]
        _draw_bar(drawing, box, segments, longest, (served.tpot, GREEN), seconds(spent), spent > served.tpot)


def tpot_at(served: Served, rate: float) -> float | None:
    """Return the time within which 99 % of the requests get each token at this rate, between the
    rates that have been run; infinity if the queue grows, None if it is not known.
    """
    if rate > served.queue_grows_from:
        return math.inf
    known = served.rates and served.rates[0] <= rate <= served.rates[-1]
    return _between(served, rate, TPOTS.of)[1] if known else None


def _draw_rate(drawing: Drawing, box: Box, state: State, served: Served, most: float) -> None:
    """Draw a bar up to the rate that a layout handles, a pale one up to where its queue grows, and a
    line at the knob's rate.
    """
    words = layout_words(served)
    colour = BLUE if served.layout == state.layout else PINNED
    if served.goodput < (queue := served.queue_grows_from) < math.inf:
        pale = Box(box.x, box.y, queue / most * (box.width - VALUES), box.height)
        drawing.rect(pale, colour, opacity=0.25, tip=f"{served.layout} without limits: {figures(queue)}")
        drawing.text((box.right + MORE, box.y + 12), figures(queue), size=SMALL, colour=QUIET, anchor="end")
    segment = Segment("", served.goodput if served.is_found else 0.0, colour, f"{served.layout}: {words}")
    shown = "0" if served.refused else words.split(";")[0]
    _draw_bar(drawing, box, [segment], most, (state.rate, INK), shown, served.is_found and served.goodput < state.rate)


def _draw_bar(
    drawing: Drawing, box: Box, parts: Sequence[Segment], most: float, line: tuple[float, str], words: str, missed: bool
) -> None:
    """Draw a stacked bar that ends at `most` at the latest, a line at a value, and words at the end."""
    room = box.width - VALUES
    x = 0.0
    for segment in parts:
        wide = min(segment.value / most * room, room - x)
        drawing.rect(Box(box.x + x, box.y, wide, box.height), segment.colour, tip=segment.tip)
        x += wide
    if line[0] <= most:
        across = box.x + line[0] / most * room
        dash = "4 3" * (line[1] == GREEN)
        drawing.line((across, box.y - 4), (across, box.bottom + 4), colour=line[1], width=1.5, dash=dash)
    colour = VERMILLION if missed else INK
    drawing.text((box.right, box.y + 12), words, size=SMALL, anchor="end", colour=colour)


def layout_words(served: Served) -> str:
    """Describe the rate that a layout handles, and what breaks beyond it."""
    if served.refused:
        return f"does not fit: {served.refused}"
    if not served.is_found:
        return "…"
    if served.knee is None:
        return f"{RATES[-1]:g}+"
    rate = f"< {RATES[0]:g}" if served.knee.rate <= RATES[0] else f"{figures(served.knee.rate)}"
    return f"{rate}; then {cause_words(served.knee.cause, served)}"

"""Draw lesson 06's picture: latencies and throughput by rate, and the other layouts of the same
number of GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from minivllm_lab.drawing import text_width
from minivllm_lab.palette import BLUE, GREEN, INK, VERMILLION
from widgets.serving.runs import RATES, Point
from widgets.serving.state import Knee, Served, State
from widgets.shell.plot import (
    MARGIN,
    Axes,
    Scale,
    draw_keys,
    figures,
    hidden_note,
    modelled,
    seconds,
    short,
    three_boxes,
)
from widgets.shell.svg import QUIET, SMALL, Box, Drawing, text_box
from widgets.shell.theme import MID


@dataclass(frozen=True)
class Times:
    """One of the two latencies that have a limit."""

    name: str
    of: Callable[[Point], tuple[float, float]]
    """Return a point's times for half and for 99 % of the requests."""
    limit: Callable[[Served], float]
    half: str
    """The words before the time of half of the requests, in a tooltip."""

    def tip(self, point: Point) -> str:
        """Describe a point's times."""
        half, most = map(seconds, self.of(point))
        return f"{self.half} {half}, 99 % within {most}, with {figures(point.inside)} requests in the system"


TTFTS = Times("time to first token", attrgetter("ttft"), attrgetter("ttft"), "Half have their first token within")
TPOTS = Times("time per output token", attrgetter("tpot"), attrgetter("tpot"), "Half have each token within")
RATE = Scale(RATES[0], RATES[-1], log=True)
TICKS, FEW_TICKS = (0.5, 1, 5, 10, 50, 100, 500), (1, 10, 100)
ROW, NAMES = 19, 140


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw the latency that breaks first by rate, the other one and throughput beside it, and below
    them the rate that each layout of these GPUs handles.
    """
    count = state.layout.gpus
    drawing = Drawing(
        width, 0, f"{state.model} on {count} {state.gpu}", f"Latencies against the rate as {state.layout}"
    )
    note = (
        f"{state.model} on {count} {state.gpu} as {state.layout}; the limits: 99 % have their first token within "
        f"{seconds(state.served.ttft)}, then one every {seconds(state.served.tpot)}; {modelled(state.error)}"
        f"{'; your collector' * state.own}"
    )
    y = drawing.paragraph((MARGIN, drawing.heading((MARGIN, 23), "What this layout handles") + 18), note, width - 32)
    if state.work.note:
        y = drawing.paragraph((MARGIN, y + 17), state.work.note, width - 2 * MARGIN)
    y = draw_keys(drawing, y + 20, KEYS)
    left, upper, lower = three_boxes(width, y + 32, 158, large=0.54)
    knee = state.served.knee
    first, second = (TPOTS, TTFTS) if knee and knee.cause == "tpot" else (TTFTS, TPOTS)
    _draw_breaking(Axes(drawing, left, RATE, _scale(state, first)), state, pinned, first)
    _draw_other(Axes(drawing, upper, RATE, _scale(state, second)), state, second)
    _draw_throughput(Axes(drawing, lower, RATE, _tokens_scale(state)), state)
    drawing.height = _draw_layouts(drawing, state, max(left.bottom, lower.bottom) + 62) + 12
    return drawing.render()


KEYS = (("99 % of requests", BLUE, "", 2.5), ("half of them", BLUE, "5 4", 1.6), ("limit", GREEN, "4 3", 1.5))


def _draw_breaking(axes: Axes, state: State, pinned: State | None, times: Times) -> None:
    axes.frame("requests a second, over all GPUs", times.name, x_ticks=TICKS, x_format="{:g}".format, y_format=seconds)
    served = state.served
    knee = served.knee
    limit = times.limit(served)
    if served.refused:
        axes.broken(None, None, f"{state.model} does not fit: {served.refused}")
    elif knee:
        axes.broken(knee.rate, None, knee_words(knee, served))
    if pinned and pinned.served.points:
        axes.pinned(drawn_rates(pinned.served), [most for _, most in _values(pinned.served, times.of)], pinned.rate)
    axes.mark_y(limit, f"limit {seconds(limit)}", GREEN)
    with axes.drawing.answer():
        for other in state.others:
            if other.layout != state.layout and other.points:
                rates = drawn_rates(other)
                values = [most for _, most in _values(other, times.of)]
                axes.line(rates, values, MID, width=1.6)
                x, y = axes.at(rates[0], values[0])
                name, place = str(other.layout), (x + 5, y + 13)
                if not any(text_box(place, name, SMALL).overlaps(words) for words in axes.drawing.words):
                    axes.drawing.text(place, name, size=SMALL, colour=QUIET)
    _draw_pair(axes, served, times.of)
    if knee and knee.cause == "queue":
        axes.without_end(knee.rate, limit)
    axes.here(state.rate, "rate", f"{state.rate:g} a second")
    _draw_tips(axes, served, times.tip)


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
    """Return the rates to draw: beyond the first at which the queue grows, runs are too short."""
    most = min((rate for rate in served.rates if "queue" in served.causes(rate)), default=RATES[-1])
    return [rate for rate in served.rates if rate <= most]


def _values(served: Served, pick: Callable[[Point], tuple[float, float]]) -> list[tuple[float, float]]:
    return [pick(served.points[rate]) for rate in drawn_rates(served)]


def _draw_pair(axes: Axes, served: Served, pick: Callable[[Point], tuple[float, float]]) -> None:
    values = _values(served, pick)
    if values:
        axes.line(drawn_rates(served), [half for half, _ in values], BLUE, width=1.6, dash="5 4")
        axes.line(drawn_rates(served), [most for _, most in values], BLUE)


def _scale(state: State, times: Times) -> Scale:
    """Return a scale around all times so far, rounded so that it rarely changes during a sweep."""
    limit = times.limit(state.served)
    values = [time for served in state.others for pair in _values(served, times.of) for time in pair if time]
    return Scale.around(0.7 * min([limit, *values]), max([2 * limit, *values]))


def _draw_other(axes: Axes, state: State, times: Times) -> None:
    _shade(axes, state.served)
    axes.frame("", times.name, x_ticks=(), y_ticks=axes.y.powers(), y_format=seconds)
    axes.mark_y(times.limit(state.served), "", GREEN)
    _draw_pair(axes, state.served, times.of)
    axes.also_here(state.rate)
    _draw_tips(axes, state.served, times.tip)


def _tokens_scale(state: State) -> Scale:
    most = max((point.tokens_per_second for point in state.served.points.values()), default=1000.0)
    return Scale(0, most * 1.15)


def _draw_throughput(axes: Axes, state: State) -> None:
    served = state.served
    _shade(axes, served)
    name, ticks = "output tokens a second", axes.y.ticks(3)
    axes.frame("requests a second", name, x_ticks=FEW_TICKS, x_format="{:g}".format, y_ticks=ticks)
    if served.points:
        axes.line(served.rates, [served.points[rate].tokens_per_second for rate in served.rates], BLUE, width=2)
    axes.also_here(state.rate)
    _draw_tips(axes, served, lambda point: f"{short(point.tokens_per_second)} output tokens a second")


def _shade(axes: Axes, served: Served) -> None:
    """Shade the broken region without its words."""
    if served.refused:
        axes.shade(None, None)
    elif served.knee:
        axes.shade(served.knee.rate, None)


def _draw_tips(axes: Axes, served: Served, words: Callable[[Point], str]) -> None:
    """Add a tooltip everywhere in the plot, with the results at the nearest rate."""
    axes.tips(served.rates, lambda rate: f"{rate:g} requests a second. {words(served.points[rate])}.")


# ---- the layouts


def _draw_layouts(drawing: Drawing, state: State, y: float) -> float:
    """Draw a bar for each layout of the same number of GPUs, up to the rate at its knee; return the
    y below.
    """
    count = state.layout.gpus
    title = f"What {count} {state.gpu} handle, by layout" if count > 1 else f"What one {state.gpu} handles"
    y = drawing.heading(
        (MARGIN, y), title, "requests a second within the limits; TP: GPUs share each layer, DP: engines"
    )
    most = max([layout.goodput for layout in state.others if layout.is_found] + [1.0])
    left = MARGIN + NAMES
    hidden_note(drawing, Box(left, y + 10, drawing.width - MARGIN - left, ROW * len(state.others)))
    for row, layout in enumerate(state.others):
        _draw_layout(drawing, layout, y + 10 + ROW * row, most, layout.layout == state.layout)
    return y + 10 + ROW * len(state.others)


def _draw_layout(drawing: Drawing, served: Served, y: float, most: float, selected: bool) -> None:
    drawing.text((MARGIN, y + 13), str(served.layout), size=SMALL, bold=selected)
    left = MARGIN + NAMES
    room = drawing.width - MARGIN - left
    has_bar = served.is_found and served.goodput > RATES[0]
    words = _fitting(layout_words(served), 0.5 * room if has_bar else room)
    longest = 0.5 * room - 8
    with drawing.answer():
        wide = served.goodput / most * longest if has_bar else 0.0
        if wide:
            bar = Box(left, y + 3, wide, ROW - 6)
            drawing.rect(bar, BLUE if selected else MID, tip=f"{served.layout}: {words}")
        place = (left + wide + 8 if wide else left, y + 13)
        drawing.text(place, words, size=SMALL, colour=VERMILLION if served.refused else INK)


def layout_words(served: Served) -> str:
    """Describe the rate that a layout handles, and what breaks beyond it."""
    if served.refused:
        return f"does not fit: {served.refused}"
    if not served.is_found:
        return "not known yet"
    if served.knee is None:
        return f"more than {RATES[-1]:g}"
    rate = f"below {RATES[0]:g}" if served.knee.rate <= RATES[0] else f"{figures(served.knee.rate)}"
    return f"{rate}; then {cause_words(served.knee.cause, served)}"


def _fitting(words: str, room: float) -> str:
    """Drop the explanation if it does not fit into the line."""
    return words if text_width(words, SMALL) * 1.06 <= room else re.split("[;:]", words)[0]

"""The picture of lesson 06's widget: latencies and throughput over the rate, and other layouts of as many GPUs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from minivllm_lab.drawing import text_width
from minivllm_lab.palette import BLUE, GREEN, INK, VERMILLION
from widgets.serving.runs import RATES, Point
from widgets.serving.state import Knee, Served, State
from widgets.shell.plot import MARGIN, Axes, Scale, draw_keys, seconds, short, three_boxes
from widgets.shell.svg import QUIET, SMALL, Box, Drawing
from widgets.shell.theme import MID

RATE = Scale(RATES[0], RATES[-1], log=True)
TICKS, FEW_TICKS = (0.5, 1, 5, 10, 50, 100, 500), (1, 10, 100)
TTFT = Scale(0.001, 10, log=True)
ROW, NAMES = 19, 140


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """TTFT, TPOT and tokens a second over the rate; below, what all layouts of these GPUs bear."""
    count = state.layout.gpus
    drawing = Drawing(width, 0, f"{state.model} on {count} {state.gpu}", f"Latencies over the rate as {state.layout}")
    off = f", {state.error}" if state.error else ""
    note = f"{state.model} on {count} {state.gpu} as {state.layout}; modelled{off}"
    y = drawing.paragraph((MARGIN, drawing.heading((MARGIN, 23), "What this layout bears") + 18), note, width - 32)
    if state.work.note:
        y = drawing.paragraph((MARGIN, y + 17), state.work.note, width - 2 * MARGIN)
    y = draw_keys(drawing, y + 20, KEYS)
    left, upper, lower = three_boxes(width, y + 32, 158, large=0.54)
    _draw_ttft(Axes(drawing, left, RATE, TTFT), state, pinned)
    _draw_tpot(Axes(drawing, upper, RATE, _tpot_scale(state)), state)
    _draw_throughput(Axes(drawing, lower, RATE, _tokens_scale(state)), state)
    y = _draw_layouts(drawing, state, max(left.bottom, lower.bottom) + 62)
    drawing.height = (_draw_reads(drawing, state, y + 8) if not state.served.refused else y) + 12
    return drawing.render()


KEYS = (("99% of requests", BLUE, "", 2.5), ("half", BLUE, "5 4", 1.6), ("service level", GREEN, "4 3", 1.5))


def _draw_ttft(axes: Axes, state: State, pinned: State | None) -> None:
    axes.frame(
        "requests a second, over all GPUs",
        "time to first token",
        x_ticks=TICKS,
        y_ticks=(0.001, 0.01, 0.1, 1, 10),
        x_format="{:g}".format,
        y_format=seconds,
    )
    served, knee = state.served, state.served.knee
    if served.refused:
        axes.broken(None, None, f"{state.model} does not fit: {served.refused}")
    elif knee:
        axes.broken(knee.rate, None, knee_words(knee, served))
    if pinned and pinned.served.points:
        axes.pinned(pinned.served.rates, [one[1] for one in _values(pinned.served, _ttfts)])
    axes.mark_y(served.ttft, "", GREEN)
    _draw_pair(axes, served, _ttfts)
    axes.here(state.rate, "rate", f"{state.rate:g} a second")
    _draw_tips(axes, served, lambda point: f"First token: half within {seconds(point.ttft[0])}, 99 % within "
               f"{seconds(point.ttft[1])}. {point.inside:.3g} requests inside")  # fmt: skip


def knee_words(knee: Knee, served: Served) -> str:
    """Where a layout breaks, and by what."""
    where = f"at {knee.rate:.3g}" if knee.rate > RATES[0] else f"below {RATES[0]:g}"
    return f"breaks {where}: {cause_words(knee.cause, served)}"


def cause_words(cause: str, served: Served) -> str:
    """What goes wrong beyond the knee."""
    return {
        "queue": "the queue grows without end",
        "ttft": f"first tokens come after {seconds(served.ttft)}",
        "tpot": f"tokens take over {seconds(served.tpot)}",
    }[cause]


def _ttfts(point: Point) -> tuple[float, float]:
    return point.ttft


def _tpots(point: Point) -> tuple[float, float]:
    return point.tpot


def _values(served: Served, pick: Callable[[Point], tuple[float, float]]) -> list[tuple[float, float]]:
    return [pick(served.points[rate]) for rate in served.rates]


def _draw_pair(axes: Axes, served: Served, pick: Callable[[Point], tuple[float, float]]) -> None:
    values = _values(served, pick)
    if values:
        axes.line(served.rates, [half for half, _ in values], BLUE, width=1.6, dash="5 4")
        axes.line(served.rates, [most for _, most in values], BLUE)


def _tpot_scale(state: State) -> Scale:
    """Up to what is seen, rounded up, so that it changes seldom while a sweep goes on."""
    most = max([2 * state.served.tpot, *(point.tpot[1] for point in state.served.points.values())])
    return Scale(0.001, 10 ** (math.ceil(3 * math.log10(most)) / 3), log=True)


def _draw_tpot(axes: Axes, state: State) -> None:
    _shade(axes, state.served)
    ticks = [at for at in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0) if at <= axes.y.high]
    axes.frame("", "time per output token", x_ticks=(), y_ticks=ticks[-5:], y_format=seconds)
    axes.mark_y(state.served.tpot, "", GREEN)
    _draw_pair(axes, state.served, _tpots)
    axes.also_here(state.rate)
    _draw_tips(axes, state.served, lambda point: f"Half have a token each {seconds(point.tpot[0])} or less, 99 % each "
               f"{seconds(point.tpot[1])}")  # fmt: skip


def _tokens_scale(state: State) -> Scale:
    most = max((point.tokens_per_second for point in state.served.points.values()), default=1000.0)
    return Scale(0, most * 1.15)


def _draw_throughput(axes: Axes, state: State) -> None:
    served = state.served
    _shade(axes, served)
    axes.frame(
        "requests a second",
        "output tokens a second",
        x_ticks=FEW_TICKS,
        x_format="{:g}".format,
        y_ticks=axes.y.ticks(3),
    )
    if served.points:
        axes.line(served.rates, [served.points[rate].tokens_per_second for rate in served.rates], BLUE, width=2)
    axes.also_here(state.rate)
    _draw_tips(axes, served, lambda point: f"{short(point.tokens_per_second)} output tokens a second")


def _shade(axes: Axes, served: Served) -> None:
    """The broken region again, without its words."""
    if served.refused:
        axes.shade(None, None, "")
    elif served.knee:
        axes.shade(served.knee.rate, None, "")


def _draw_tips(axes: Axes, served: Served, words: Callable[[Point], str]) -> None:
    """What the pointer asks for: the figures of the nearest rate, anywhere in the plot."""
    for rate, strip in axes.strips(served.rates):
        axes.drawing.rect(strip, "transparent", tip=f"{rate:g} requests a second. {words(served.points[rate])}.")


# ---- the layouts


def _draw_layouts(drawing: Drawing, state: State, y: float) -> float:
    """A bar for each layout of as many GPUs: the rate at its knee. Returns the y below."""
    count = state.layout.gpus
    title = f"What {count} {state.gpu} bear, by layout" if count > 1 else f"What one {state.gpu} bears"
    drawing.text((MARGIN, y), title, size=14.5, bold=True)
    after = MARGIN + text_width(title, 14.5) * 1.08 + 14
    if after + text_width("requests a second within the service level", SMALL) < drawing.width:
        drawing.text((after, y), "requests a second within the service level", size=SMALL, colour=QUIET)
    most = max([one.goodput for one in state.others if one.is_found] + [1.0])
    for row, one in enumerate(state.others):
        _draw_layout(drawing, one, y + 10 + ROW * row, most, one.layout == state.layout)
    return y + 10 + ROW * len(state.others)


def _draw_layout(drawing: Drawing, one: Served, y: float, most: float, mine: bool) -> None:
    drawing.text((MARGIN, y + 13), str(one.layout), size=SMALL, bold=mine)
    left, room = MARGIN + NAMES, drawing.width - 2 * MARGIN - NAMES
    bears = one.is_found and one.goodput > RATES[0]
    words = _fitting(layout_words(one), 0.65 * room if bears else room)
    longest = 0.35 * room - 8
    with drawing.answer():
        wide = one.goodput / most * longest if bears else 0.0
        if wide:
            drawing.rect(Box(left, y + 3, wide, ROW - 6), BLUE if mine else MID, tip=f"{one.layout}: {words}")
        place = (left + wide + 8 if wide else left, y + 13)
        drawing.text(place, words, size=SMALL, colour=VERMILLION if one.refused else INK)


def layout_words(one: Served) -> str:
    """What a layout bears, and what breaks beyond."""
    if one.refused:
        return f"does not fit: {one.refused}"
    if not one.is_found:
        return "not yet known"
    if one.knee is None:
        return f"more than {RATES[-1]:g}"
    if one.knee.rate <= RATES[0]:
        return f"below {RATES[0]:g}; {cause_words(one.knee.cause, one)}"
    return f"{one.knee.rate:.3g}; then {cause_words(one.knee.cause, one)}"


def _fitting(words: str, room: float) -> str:
    """`words`, without what explains them where that does not fit into one line."""
    return words if text_width(words, SMALL) * 1.06 <= room else re.split("[;:]", words)[0]


# ---- a client that reads seldom


def _draw_reads(drawing: Drawing, state: State, y: float) -> float:
    """How many events an answer becomes, by how seldom its client reads; returns the y of the last line."""
    whose = "your collector" if state.own else "the collector"
    if not state.reads:
        words = "A client that reads seldom: the requests are being served."
    else:
        total = max(2, round(state.work.mean_output))
        parts = [_read_words(one.pause, one.events, one.tokens, total) for one in state.reads]
        words = f"An answer of {total} tokens, through {whose}: a client that reads {'; '.join(parts)}."
    return drawing.paragraph((MARGIN, y + 12), words, drawing.width - 2 * MARGIN)


def _read_words(pause: float, events: int, tokens: int, total: int) -> str:
    lost = f" with {tokens} tokens" if tokens != total else ""
    return f"every {seconds(pause)} gets {events} event{'s' * (events != 1)}{lost}"

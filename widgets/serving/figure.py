"""Draw lesson 06's picture: for each layout of the same number of GPUs, what one token's time goes
to at each rate, and from which rate on it takes too long.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate, pairwise

from minivllm_lab.pictures.palette import GREEN, INK, ORANGE, PALE, PURPLE, SKY, VERMILLION
from minivllm_simulate.layouts import Layout
from widgets.serving.runs import RATES, experiment
from widgets.serving.state import Served, State
from widgets.shell.plot import MARGIN, ROW, WIDE, Axes, Scale, counted, figures, hidden_note, seconds
from widgets.shell.svg import BODY, BOLD, QUIET, SMALL, Box, Drawing, Segment, legend, text_width
from widgets.shell.theme import CARD, MID, RESERVED, TINT

RATE = Scale(RATES[0], RATES[-1], log=True)
TICKS = (1, 10, 100, 500)
SIDE, TICK, VALUES, NOUNS, GPU, TANK, ALL_ROWS, NARROW_ROW = 130, 46, 168, 82, 26, 44, 364, 72
"""The widths beside the plots: of the GPUs, of the scale, of the values, of their nouns, of a GPU at most; the
heights of a GPU, of all rows on a wide page, and of a plot on a narrow one.
"""
PARTS = (
    Segment("kernel launches", 0, MID, "launches and sampling, the same on any number of GPUs"),
    Segment("reading weights", 0, SKY, "reading the weights, of which each GPU has its share"),
    Segment("GPUs exchange", 0, ORANGE, "all-reduces between the GPUs that share an engine"),
    Segment("the batch: KV and arithmetic", 0, PURPLE, "the KV cache, prompts and answers, which grow with the load"),
)
"""The parts of a step, as `Experiment.parts` returns them."""


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw a row for each layout: its GPUs, the parts of a token's time by rate, and its time at
    this rate.
    """
    served = f"{state.model} on {state.layout.gpus} {state.gpu}"
    drawing = Drawing(width, 0, served, "The parts of one token's time against the rate, layout by layout")
    note = f"{served}{'; your collector' * state.own}; first token within {seconds(state.served.ttft)}"
    with drawing.layer(tip=f"Times are modelled{f', {state.error} against published runs' if state.error else ''}."):
        y = drawing.heading((MARGIN, 23), "Where a token's time goes", note)
    if state.work.note:
        y = drawing.paragraph((MARGIN, y + 17), state.work.note, width - 2 * MARGIN)
    y = legend(drawing, (MARGIN, y + 21), PARTS, width - 2 * MARGIN) - 19
    wide = width >= WIDE
    above, y = 20 if wide else 82, y + 8
    high = (ALL_ROWS + 60 - y) / len(state.others) - above if wide else NARROW_ROW
    left = MARGIN + SIDE * wide + TICK
    plot = Box(left, y + above, width - MARGIN - VALUES * wide - left, high)
    rows = [
        (served, Axes(drawing, replace(plot, y=plot.y + index * (high + above)), RATE, Scale(0, 2 * served.tpot)))
        for index, served in enumerate(state.others)
    ]
    top = next(axes.box.y for served, axes in rows if served.layout == state.layout) - above + 7
    drawing.rect(Box(6, top, width - 12, high + above - 3), TINT, radius=6)
    for served, axes in rows:
        chosen = served.layout == state.layout
        with drawing.layer(answer="" if chosen else "1"):
            _draw_row(axes, state, served)
        _draw_gpus(drawing, axes.box, served.layout, chosen=chosen)
        if not chosen:
            hidden_note(drawing, axes.box)
        axes.also_here(state.rate)
    _draw_handle(rows[-1][1], plot.y, state)
    for served, axes in rows:
        if pinned and pinned.served.points and served.layout == state.layout:
            rates = drawn_rates(pinned.served)
            axes.pinned(rates, [tpot_at(pinned.served, rate) or 0.0 for rate in rates], pinned.rate)
    drawing.height = rows[-1][1].box.bottom + 46
    return drawing.render()


def _draw_handle(last: Axes, top: float, state: State) -> None:
    """Draw the axis and its handle below the last row; every row can be dragged."""
    x, y = last.at(state.rate, 0)
    words = f"{state.rate:g}"
    ticks = [tick for tick in TICKS if abs(last.at(tick, 0)[0] - x) > 14 + 0.6 * text_width(words, SMALL)]
    last.frame("requests a second", "", x_ticks=ticks, x_format="{:g}".format, y_ticks=())
    last.drawing.text((x, y + 18), words, size=SMALL, bold=True, anchor="middle")
    with last.drawing.layer(drag="rate", low=f"{RATE.low!r}", high=f"{RATE.high!r}", log="1"):
        last.drawing.rect(replace(last.box, y=top, height=last.box.bottom - top), "transparent")
    last.drawing.circle((x, y), 7, INK)


def _draw_row(axes: Axes, state: State, served: Served) -> None:
    """Draw the parts of a layout's time, the region in which it is too slow, and its time here."""
    drawing, box = axes.drawing, axes.box
    knee = served.knee
    if served.refused:
        axes.shade(None, None, f"{state.model} does not fit: {served.refused}")
    elif knee:
        axes.shade(knee.rate, None, f"breaks at {per_second(knee.rate)}: {cause_words(knee.cause, served)}")
    end = min(axes.at(served.queue_grows_from, 0)[0], box.right)
    drawing.rect(Box(end, box.y, box.right - end, box.height), PALE)
    if not served.refused and box.right - end > 42:
        for row, words in enumerate(("queue", "grows")):
            place = (end + box.right) / 2, box.y + box.height / 2 - 3 + ROW * row
            drawing.text(place, words, size=SMALL, colour=QUIET, anchor="middle")
    _draw_parts(axes, state, served)
    if not served.refused:
        _draw_scale(axes, served, end)
    _draw_values(axes, state, served)


def _draw_scale(axes: Axes, served: Served, end: float) -> None:
    """Write 0 and the limit left of a plot, and draw the limit up to `end`."""
    x, height = axes.at(RATE.low, served.tpot)
    axes.drawing.line((x, height), (end, height), GREEN, width=1.5, dash="4 3")
    axes.drawing.text((x - 6, height - 9), "limit", size=SMALL, colour=GREEN, anchor="end")
    axes.drawing.text((x - 6, height + 5), seconds(served.tpot), size=SMALL, colour=GREEN, anchor="end")
    axes.drawing.text((x - 6, axes.box.bottom + 4), "0", size=SMALL, colour=QUIET, anchor="end")


def _draw_parts(axes: Axes, state: State, served: Served) -> None:
    """Stack the parts of a token's time over the rate."""
    known = drawn_rates(served)
    rates = sorted({*known, *(low * (high / low) ** (part / 2) for low, high in pairwise(known) for part in range(2))})
    run = experiment(state.model, state.gpu, served.layout, state.work)
    stacks = [list(accumulate(run.parts(rate, tpot_at(served, rate) or 0.0), initial=0.0)) for rate in rates]
    for index, part in enumerate(PARTS):
        lower, upper = (
            [axes.at(rate, min(stack[at], axes.y.high)) for rate, stack in zip(rates, stacks, strict=True)]
            for at in (index, index + 1)
        )
        axes.drawing.polygon([*lower, *reversed(upper)], part.colour)


def _draw_values(axes: Axes, state: State, served: Served) -> None:
    """Write a layout's time per token at the handle, the rate that it handles in time, and at most."""
    drawing, x = axes.drawing, axes.drawing.width - MARGIN - NOUNS
    y = axes.box.y + (axes.box.height / 2 - 14 if drawing.width >= WIDE else -58)
    spent = math.inf if served.refused else tpot_at(served, state.rate)
    late = served.refused or (served.knee and state.rate >= served.knee.rate)
    colour, words, size = VERMILLION if late else INK, "…", 16.0
    if spent == math.inf:
        words, size = "does not fit" if served.refused else "queue grows", SMALL
    elif spent:
        axes.points([state.rate], [min(spent, axes.y.high)], colour)
        words = seconds(spent)
    lines = [(words, "per token" * (size > SMALL), colour, size, size > SMALL)]
    if not served.refused and served.is_found:
        best = state.complete and RATES[0] < served.goodput == max(other.goodput for other in state.others)
        for rate, noun, bold in ((served.goodput, "in time", best), (served.queue_grows_from, "however slow", False)):
            colour = VERMILLION if rate < state.rate else GREEN if bold else INK
            lines.append((per_second(rate) if rate < math.inf else "–", noun, colour, BODY, bold))
    for line, (value, noun, colour, size, bold) in enumerate(lines):
        drawing.text((x - 6, y + 19 * line), value, size=size, bold=bold, colour=colour, anchor="end")
        drawing.text((x, y + 19 * line), noun, size=SMALL, colour=QUIET)


def _draw_gpus(drawing: Drawing, plot: Box, layout: Layout, *, chosen: bool) -> None:
    """Write a layout's name, and draw the GPUs of each engine, each filled with its share of the
    weights and linked to those with which it shares layers, unless they are too many.
    """
    wide = drawing.width >= WIDE
    name, count = str(layout), f"{counted(layout.tp * layout.pp, 'GPU')} × {counted(layout.dp, 'engine')}"
    parts = layout.tp * layout.pp
    after = MARGIN + 2 + max(120, BOLD * text_width(name, SMALL), text_width(count, SMALL))
    x, y = (MARGIN, plot.y + 20) if wide else (after, plot.y - 46)
    drawing.text((MARGIN, plot.y + 12 if wide else plot.y - 58), name, size=SMALL, bold=chosen)
    room, high = (SIDE - 10, min(TANK, plot.height - 52)) if wide else (drawing.width - MARGIN - NOUNS - 54 - x, 24)
    pitch = min(GPU, (room / layout.dp - 7) / layout.tp)
    part = high / layout.pp
    for _ in range(layout.dp if pitch >= 5 else 0):
        frame = Box(x, y, layout.tp * pitch + 4, high + 4)
        drawing.rect(frame, RESERVED, radius=4, tip=f"{layout}: an engine")
        for stage in range(layout.pp):
            middle = y + (stage + 0.5) * part + 2
            drawing.line((x + 4, middle), (frame.right - 4, middle), ORANGE, width=3)
            for rank in range(layout.tp):
                gpu = Box(x + 4 + rank * pitch, y + 4 + stage * part, pitch - 4, part - 4)
                share = gpu.height / parts
                drawing.rect(gpu, CARD)
                drawing.rect(Box(gpu.x, gpu.bottom - share, gpu.width, share), SKY)
        x = frame.right + 3
    y = y + high + 20 if wide else plot.y - 39
    drawing.text((MARGIN, y), count, size=SMALL, colour=QUIET)
    drawing.text((MARGIN, y + 15), f"each reads {f'1/{parts}' if parts > 1 else 'all'}", size=SMALL, colour=SKY)


def per_second(rate: float) -> str:
    """Format the rate that a layout handles: < 0.5/s, 4.27/s, 39/s."""
    return f"{'< ' * (rate <= RATES[0])}{f'{rate:,.0f}' if rate >= 10 else figures(rate)}/s"


def cause_words(cause: str, served: Served) -> str:
    """Describe what goes wrong beyond the knee."""
    return {
        "queue": "the queue grows without end",
        "ttft": f"first tokens take over {seconds(served.ttft)}",
        "tpot": f"later tokens take over {seconds(served.tpot)}",
    }[cause]


def drawn_rates(served: Served) -> list[float]:
    """Return the rates to draw: those that have been run, up to the one from which the queue grows."""
    end = served.queue_grows_from
    return [rate for rate in served.rates if rate < end] + [end] * (served.rates[:1] <= [end] and end < math.inf)


def tpot_at(served: Served, rate: float) -> float | None:
    """Return the time within which 99 % of the requests get each token at this rate, between the
    rates that have been run; infinity if the queue grows, None if it is not known.
    """
    if rate > served.queue_grows_from:
        return math.inf
    low = max((known for known in served.rates if known <= rate), default=None)
    high = min((known for known in served.rates if known >= rate), default=None)
    if low is None or high is None:
        return None
    share = math.log(rate / low) / math.log(high / low) if low < high else 0
    first, last = served.points[low].tpot[1], served.points[high].tpot[1]
    return first * (last / first) ** share if first else 0.0

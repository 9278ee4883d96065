"""Draw lesson 06's picture: for each layout of the same number of GPUs, what one token's time goes
to at each rate, and from which rate on it takes too long.
"""

from __future__ import annotations

import math
from itertools import accumulate

from minivllm_lab.palette import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, VERMILLION
from minivllm_simulate.layouts import Layout
from widgets.serving.runs import RATES, experiment
from widgets.serving.state import Knee, Served, State
from widgets.shell.plot import MARGIN, WIDE, Axes, Scale, figures, hidden_note, seconds
from widgets.shell.svg import QUIET, SMALL, Box, Drawing, Segment, legend
from widgets.shell.theme import CARD, IDLE, MID, MISSED, RESERVED, TINT

RATE = Scale(RATES[0], RATES[-1], log=True)
TICKS = (0.5, 1, 5, 10, 50, 100, 500)
SIDE, VALUES, GPU, ALL_ROWS, NARROW_ROW = 128, 92, 26, 372, 72
"""The widths beside the plots: of the GPUs, of the values, of a GPU at most; the height of all rows
on a wide page, and of a plot on a narrow one.
"""
PARTS = (
    Segment("launches", 0, MID, "launches and sampling, the same on any number of GPUs"),
    Segment("reading weights", 0, SKY, "reading the weights, of which each GPU has its share"),
    Segment("GPUs exchange", 0, ORANGE, "all-reduces between the GPUs that share an engine"),
    Segment("the batch", 0, PURPLE, "arithmetic, the KV cache and prompts, which grow with the load"),
)
"""The parts of a step, as `Experiment.parts` returns them."""


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw a row for each layout: its GPUs, the parts of a token's time by rate, and its time at
    this rate.
    """
    served = f"{state.model} on {state.layout.gpus} {state.gpu}"
    drawing = Drawing(width, 0, served, "The parts of one token's time against the rate, layout by layout")
    note = f"{served}, modelled{'; your collector' * state.own}"
    with drawing.layer(tip=f"The model's {state.error} against published runs." if state.error else ""):
        y = drawing.heading((MARGIN, 23), "Where a token's time goes", note)
    if state.work.note:
        y = drawing.paragraph((MARGIN, y + 17), state.work.note, width - 2 * MARGIN)
    y = legend(drawing, (MARGIN, y + 21), PARTS, width - 2 * MARGIN) + 4
    wide = width >= WIDE
    above = 6 if wide else 42
    high = (ALL_ROWS + 60 - y) / len(state.others) - above if wide else NARROW_ROW
    left = MARGIN + SIDE * wide
    plot = Box(left, y + above, width - MARGIN - VALUES * wide - left, high)
    rows = [
        (served, Axes(drawing, Box(plot.x, plot.y + index * (high + above), plot.width, high), RATE, _scale(state)))
        for index, served in enumerate(state.others)
    ]
    for served, axes in rows:
        with drawing.layer(answer="" if served.layout == state.layout else "1"):
            _draw_row(axes, state, served)
        _draw_gpus(drawing, axes.box, served.layout, chosen=served.layout == state.layout)
    bottom = rows[-1][1].box.bottom
    whole = Axes(drawing, Box(plot.x, y, plot.width, bottom - y), RATE, Scale(0, 1))
    whole.frame("requests a second", "", x_ticks=TICKS, x_format="{:g}".format, y_ticks=())
    whole.here(state.rate, "rate")
    for served, axes in rows:
        if pinned and pinned.served.points and served.layout == state.layout:
            rates = drawn_rates(pinned.served)
            axes.pinned(rates, [tpot_at(pinned.served, rate) or 0.0 for rate in rates], pinned.rate)
        with drawing.layer(answer="" if served.layout == state.layout else "1"):
            axes.tips(served.rates, lambda rate, served=served: _tip(state, served, rate))
    drawing.height = bottom + 46
    return drawing.render()


def _scale(state: State) -> Scale:
    """Return a scale to twice the limit, or to the longest time so far if that is shorter."""
    times = [tpot_at(served, rate) or 0.0 for served in state.others for rate in drawn_rates(served)]
    return Scale(0, min(2 * state.served.tpot, 1.2 * max(times, default=0.0) or math.inf))


def _draw_row(axes: Axes, state: State, served: Served) -> None:
    """Draw the parts of a layout's time, the region in which it is too slow, and its time here."""
    drawing, box = axes.drawing, axes.box
    chosen = served.layout == state.layout
    if chosen:
        drawing.rect(Box(box.x, box.y, box.width, box.height), TINT)
    knee = served.knee
    if served.refused:
        axes.shade(None, None, f"{state.model} does not fit: {served.refused}")
    elif knee:
        axes.shade(knee.rate, None, knee_words(knee, served))
        _draw_end(axes, served)
    _draw_parts(axes, state, served)
    if served.tpot < axes.y.high:
        axes.mark_y(served.tpot, "", GREEN)
        drawing.text((box.x + 5, axes.at(1, served.tpot)[1] - 5), f"limit {seconds(served.tpot)}", size=SMALL, colour=GREEN)
    _draw_knee(axes, state, served)
    _draw_value(axes, state, served)


def _draw_end(axes: Axes, served: Served) -> None:
    """Fill the rates at which the queue grows, and say so if there is room."""
    box = axes.box
    if served.queue_grows_from < RATES[-1]:
        x = axes.at(served.queue_grows_from, 0)[0]
        axes.drawing.rect(Box(x, box.y, box.right - x, box.height), MISSED)
        if box.right - x > 84:
            axes.drawing.text(((x + box.right) / 2, box.y + box.height / 2 + 4), "queue grows", size=SMALL, anchor="middle")


def _draw_parts(axes: Axes, state: State, served: Served) -> None:
    """Stack the parts of a token's time over the rate."""
    rates = drawn_rates(served)
    run = experiment(state.model, state.gpu, served.layout, state.work)
    stacks = [list(accumulate(run.parts(rate, tpot_at(served, rate) or 0.0), initial=0.0)) for rate in rates]
    for index, part in enumerate(PARTS):
        lower, upper = ([axes.at(rate, min(stack[at], axes.y.high)) for rate, stack in zip(rates, stacks, strict=True)]
                        for at in (index, index + 1))
        axes.drawing.polygon([*lower, *reversed(upper)], part.colour)


def _draw_knee(axes: Axes, state: State, served: Served) -> None:
    """Write the rate that a layout handles beside its wall."""
    box = axes.box
    if served.is_found and not served.refused:
        x = axes.at(served.goodput, 0)[0]
        best = served.goodput >= max(other.goodput for other in state.others if other.is_found)
        words = f"{figures(served.goodput)}/s"
        place, anchor = ((x - 6, "end") if x > box.x + 60 else (x + 6, "start"))
        axes.drawing.text((place, box.y + 15), words, size=15, bold=True, colour=GREEN if best else INK, anchor=anchor)


def _draw_value(axes: Axes, state: State, served: Served) -> None:
    """Write a layout's time per token at the handle, on a narrow page above its plot."""
    drawing, box = axes.drawing, axes.box
    spent = tpot_at(served, state.rate)
    knee = served.knee
    colour = VERMILLION if served.refused or (knee and state.rate >= knee.rate) else INK
    words = "…" if spent is None else "queue grows" if spent == math.inf else seconds(float(f"{spent:.2g}"))
    words = "does not fit" if served.refused else words
    size = SMALL if words[-1] not in "s…" else 24 if served.layout == state.layout else 16
    y = box.y + box.height / 2 + 8 if drawing.width >= WIDE else box.y - 12
    drawing.text((drawing.width - MARGIN, y), words, size=size, bold=True, colour=colour, anchor="end")


def _draw_gpus(drawing: Drawing, plot: Box, layout: Layout, *, chosen: bool) -> None:
    """Write a layout's name, and draw the GPUs of each engine, each filled with its share of the
    weights and linked to those with which it shares layers, unless they are too many.
    """
    wide = drawing.width >= WIDE
    place = (MARGIN, plot.y + 12) if wide else (MARGIN, plot.y - 16)
    drawing.text(place, str(layout), bold=chosen)
    x, y = (MARGIN, plot.y + 22) if wide else (MARGIN + 110, plot.y - 32)
    room, high = (SIDE - 10, plot.height - 22) if wide else (drawing.width - MARGIN - 84 - x, 26)
    pitch = min(GPU, (room / layout.dp - 7) / layout.tp, high / layout.pp - 2)
    for _ in range(layout.dp if pitch >= 5 else 0):
        frame = Box(x, y, layout.tp * pitch + 4, layout.pp * pitch + 4)
        drawing.rect(frame, RESERVED, radius=4, tip=f"{layout}: an engine")
        for stage in range(layout.pp):
            top = y + 4 + stage * pitch
            drawing.line((x + 4, top + pitch / 2 - 2), (frame.right - 4, top + pitch / 2 - 2), ORANGE, width=3)
            for rank in range(layout.tp):
                gpu = Box(x + 4 + rank * pitch, top, pitch - 4, pitch - 4)
                share = gpu.height / (layout.tp * layout.pp)
                drawing.rect(gpu, CARD)
                drawing.rect(Box(gpu.x, gpu.bottom - share, gpu.width, share), SKY)
        x = frame.right + 3


def _tip(state: State, served: Served, rate: float) -> str:
    """Describe a layout's latencies at a rate, and what a token's time goes to."""
    point = served.points[rate]
    spent = point.tpot[1]
    parts = experiment(state.model, state.gpu, served.layout, state.work).parts(rate, spent)
    goes = ", ".join(f"{part.label} {seconds(value)}" for part, value in zip(PARTS, parts, strict=True) if value)
    first = f"First tokens within {seconds(point.ttft[1])}"
    return f"{served.layout} at {rate:g} a second: 99 % get a token every {seconds(spent)}: {goes}. {first}."


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
    share = (rate - low) / ((high - low) or 1)
    first, last = served.points[low].tpot[1], served.points[high].tpot[1]
    return first + (last - first) * share

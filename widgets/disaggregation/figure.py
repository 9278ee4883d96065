"""Draw lesson 08's picture: a step of the GPUs that decode, in both designs, and beneath it the rates
that each part handles.
"""

from __future__ import annotations

import math
from dataclasses import replace

from minivllm_lab.disaggregation.goodput import SHARE
from minivllm_lab.pictures.drawing import ink_on, text_width
from minivllm_lab.pictures.palette import GREEN, GREY, INK, PURPLE, SKY, VERMILLION, YELLOW
from minivllm_simulate.load_sweep import within
from widgets.disaggregation.state import RATES, Side, State, Step
from widgets.shell.plot import MARGIN, VALUE, WIDE, Axes, Scale, counted, figures, hidden_note, percent, seconds, tokens
from widgets.shell.svg import HEADING, QUIET, SMALL, Box, Drawing
from widgets.shell.theme import DARK, IDLE, MID

STAGES = {"prefill": (PURPLE,), "link": (YELLOW,), "decode": (SKY,), "both": (PURPLE, SKY)}
BAR, ROW, NAMES, VALUES, TOTAL = 26, 22, 70, 118, 36
"""Pixels: the height of a step's bar and of a part's row, the widths left and right of the rows, and the height of a
design's total above them on a narrow page.
"""


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw a step of the GPUs that decode, in both designs, and the rates that each part handles."""
    mine, goal = state.mine, state.objective
    served = f"{state.model} on {mine.gpus} {state.gpu}"
    drawing = Drawing(width, 0, served, f"A step of {mine.name} GPUs, and the rates that they handle")
    note = (
        f"{served}, {tokens(state.work.prompt)} tokens in, {state.work.output} out. In time: "
        f"first token in {seconds(goal.ttft)}, then {seconds(goal.tpot)} each"
    )
    with drawing.layer(tip=f"Times are modelled{f', {state.error}' if state.error else ''}."):
        y = drawing.heading((MARGIN, 23), f"A decode step at {state.rate:g} requests a second") + 18
        y = drawing.paragraph((MARGIN, y), note, width - 2 * MARGIN)
    y = _draw_steps(drawing, state, y + 26)
    drawing.text((MARGIN, y + 36), "What each part handles", size=HEADING, bold=True)
    drawing.text((width - MARGIN, y + 36), "together up to", size=SMALL, colour=QUIET, anchor="end")
    above, beside = (48, VALUES) if width >= WIDE else (44 + TOTAL, 0)
    whole = Box(MARGIN + NAMES, y + above, width - 2 * MARGIN - NAMES - beside, 5 * ROW + (10 if beside else TOTAL))
    _draw_rates(drawing, whole, state, pinned)
    drawing.height = whole.bottom + 42
    return drawing.render()


def cause_words(cause: str, state: State) -> str:
    """Describe what goes wrong."""
    return {
        "queue": "prompts wait for a GPU that prefills",
        "prefill": f"a prefill alone takes over {seconds(state.objective.ttft)}",
        "room": "the decode GPUs have no free blocks",
        "link": "the link is too slow",
        "decode": "all seats of the decode GPUs are taken",
        "tpot": f"decoding takes over {seconds(state.objective.tpot)} a token",
        "ttft": f"first tokens take over {seconds(state.objective.ttft)}",
        "": "nothing breaks",
    }[cause]


# ---- a step in both designs


def _draw_steps(drawing: Drawing, state: State, y: float) -> float:
    """Draw the steps one above the other, on the same scale, and return the y below."""
    mine, both, limit = state.mine, state.both, state.objective.tpot
    slow = [_slow(state, side) for side in (mine, both)]
    ends = [max(step.least, time if time < math.inf else 0.0) for step, time in zip(state.steps, slow, strict=True)]
    scale = Scale(0, min(max(*ends, limit), 3 * limit))
    doing = f"{counted(mine.decode, 'GPU')} only decode{'s' * (mine.decode == 1)}", f"{both.gpus} GPUs do both"
    for step, words, answer, time, end in zip(state.steps, doing, ("", "1"), slow, ends, strict=True):
        box = Box(MARGIN + NAMES, y + 8, drawing.width - 2 * MARGIN - NAMES, 2 * BAR)
        axes = Axes(drawing, box, scale, Scale(0, 2))
        drawing.text((MARGIN, y), words, bold=True)
        for row, lane in enumerate(("memory", "arithmetic")):
            drawing.text((MARGIN, box.y + BAR * (row + 0.5) + 4), lane, size=SMALL)
        y, start, words = box.bottom + 40, axes.at(step.launch, 0)[0], f"{counted(step.decodes, 'answer')} each"
        with drawing.layer(answer=answer):
            _draw_step(axes, step, time, end, limit)
            drawing.text((start, y - 26), words, size=SMALL, colour=SKY)
    hidden_note(drawing, box)
    label = f"limit {seconds(limit)}"
    x = max(axes.at(limit, 0)[0], start + text_width(f"{words}  {label}", SMALL))
    drawing.text((x, y - 26), label, size=SMALL, colour=GREEN, anchor="end")
    return y - 26


def _slow(state: State, side: Side) -> float:
    """Return the seconds a token that 90 % of the answers stay within; 0 before this rate has been run."""
    point = side.points.get(state.rate)
    return within(sorted(client.tpot for client in point.clients), SHARE) if point else 0.0


def _draw_step(axes: Axes, step: Step, slow: float, end: float, limit: float) -> None:
    """Draw what a step waits for, beneath it what it computes meanwhile, and the limit."""
    drawing, box = axes.drawing, axes.box
    answers, chunk, read = step.decodes * step.token, step.chunk * step.token, step.launch + step.weights
    words = f"{'mean ' * (step.least > slow and step.chunk > 0)}{seconds(slow)}" if slow < math.inf else "no token"
    over = f", {seconds(float(f'{slow - limit:.2g}'))} over" * (limit < slow < math.inf)
    tip = f"Launches {seconds(step.launch)}, weights {seconds(step.weights)}, arithmetic {seconds(answers + chunk)}. "
    tip += f"{percent(SHARE)} of the answers: {words} a token at most." * (slow > 0)
    first = step.launch + answers
    x, y = axes.at(limit, 2)
    for names, start, stop, colour, row, rows in (
        (("launch",), 0.0, step.launch, MID, 0, 2),
        (("reads the weights", "weights"), step.launch, read, GREY, 0, 1),
        (("KV",), step.least, end, SKY, 0, 1),
        ((), step.launch, first, SKY, 1, 1),
        ((f"chunk of {step.chunk:,.0f} tokens", "prompt"), first, first + chunk, PURPLE, 1, 1),
        (("arithmetic idle", "idle"), first + chunk, read, IDLE, 1, 1),
    ):
        left, edge = (axes.at(min(time, axes.x.high), 0)[0] for time in (start, stop))
        bar, room = Box(left, y + BAR * row, edge - left - 1, BAR * rows - 1), min(edge, x) - left
        upright = rows > 1 and 16 < room < bar.height
        drawing.rect(bar, colour, tip=tip)
        name = next((name for name in names if text_width(name, SMALL) + 4 <= (bar.height if upright else room)), "")
        place = left + room / 2 + 4 * upright, bar.y + bar.height / 2 + 4 * (not upright)
        ink = INK if colour in DARK else ink_on(colour)
        drawing.text(place, name, size=SMALL, colour=ink, anchor="middle", turn=-90 * upright)
    late = max(0.0, axes.at(min(end, axes.x.high), 0)[0] - x)
    drawing.hatch(Box(x, y + BAR * (first + chunk > limit), late, BAR - 1), VERMILLION, gap=5)
    drawing.line((x, y - 4), (x, box.bottom + 2), GREEN, width=2)
    colour = VERMILLION if slow > limit else INK
    drawing.text((box.right, box.y - 8), (words + over) * (slow > 0), colour=colour, anchor="end", bold=True)


# ---- the rates that each part handles


def _draw_rates(drawing: Drawing, box: Box, state: State, pinned: State | None) -> None:
    """Draw a row for each part of the two pools, and one for the GPUs that do both."""
    mine, both = state.mine, state.both
    high = next((rate for rate in RATES if rate >= 1.2 * max(mine.bound, both.bound)), RATES[-1])
    whole = Axes(drawing, box, Scale(0, high), Scale(0, 1))
    pools = Axes(drawing, replace(box, height=3 * ROW), whole.x, whole.y)
    one = Axes(drawing, Box(box.x, box.bottom - 2 * ROW, box.width, 2 * ROW), whole.x, whole.y)
    beyond = f": {state.rate:g} →" * (state.rate > high)
    whole.frame(f"requests a second, over all GPUs{beyond}", "", x_format="{:g}".format, y_ticks=())
    names = {"prefill": f"{mine.prefill} prefill", "link": "KV link", "decode": f"{mine.decode} decode"}
    _draw_side(pools, state, mine, names, mine.is_found)
    with drawing.answer():
        _draw_side(one, state, both, {"both": f"{both.gpus} do both"}, state.is_tuned)
    hidden_note(drawing, replace(one.box, x=MARGIN, width=2 * NAMES))
    if pinned and pinned.mine.points:
        whole.pinned([pinned.mine.goodput] * 2, [0, 1], min(pinned.rate, high))
    # The handle's axis goes on beyond the picture, up to the highest rate.
    far = Axes(drawing, replace(box, width=box.width * RATES[-1] / high), Scale(0, RATES[-1]), whole.y)
    far.here(min(state.rate, high), "rate")


def _draw_side(axes: Axes, state: State, side: Side, names: dict[str, str], known: bool) -> None:
    """Draw up to which rate each part of a design handles the requests, and the rate that all do."""
    drawing, box = axes.drawing, axes.box
    right, wide = drawing.width - MARGIN, drawing.width >= WIDE
    total = f"{figures(side.goodput) if side.goodput > RATES[0] else f'< {RATES[0]:g}'}/s"
    if known and side.edge[1] < math.inf:
        words = f"{side.name} break at {total}: {cause_words(side.cause, state)}"
        axes.shade(max(side.goodput, RATES[0]), None, words)
    for index, (part, name) in enumerate(names.items()):
        high, most, colours = box.height / len(names), side.most(part), STAGES[part]
        y, late = box.y + index * high, state.rate > most
        end = axes.at(min(max(most, RATES[0]), axes.x.high), 0)[0]
        for half, colour in enumerate(colours):
            thick = (high - 6) / len(colours)
            tip = f"{name}: up to {figures(most)} requests a second"
            drawing.rect(Box(box.x, y + 3 + half * thick, end - box.x, thick), colour, tip=tip)
        place, colour = (MARGIN, y + high / 2 + 4), VERMILLION if late else INK
        drawing.text(place, name, size=SMALL, colour=colour, bold=late)
        if most > axes.x.high:
            place, colour = (box.right - 5, y + high / 2 + 4), ink_on(colours[-1])
            drawing.text(place, f"{figures(most)}/s →", size=SMALL, colour=colour, anchor="end")
    y = box.y + box.height / 2 + 3 if wide else box.y - 7
    with drawing.on_top():
        if known:
            late = state.rate in side.points and side.breaks(state.rate)
            colour = VERMILLION if late else GREEN
            drawing.text((right, y), total, size=VALUE, colour=colour, anchor="end", bold=True, halo=True)
        if state.rate in side.points:
            words = f"at {figures(state.rate)}/s: {percent(side.share(state.rate))} in time"
            place, anchor = ((right, y + 15), "end") if wide else ((MARGIN, y), "start")
            drawing.text(place, words, size=SMALL, anchor=anchor, halo=True)

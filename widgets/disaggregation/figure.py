"""Draw lesson 08's picture: a step of the GPUs that decode, in both designs, and beneath it the rates
that each part handles.
"""

from __future__ import annotations

import math
from dataclasses import replace

from minivllm_lab.disaggregation.goodput import SHARE
from minivllm_lab.drawing import ink_on, text_width
from minivllm_lab.palette import GREEN, GREY, INK, PURPLE, SKY, VERMILLION, YELLOW
from minivllm_simulate.load_sweep import within
from widgets.disaggregation.state import RATES, Side, State, Step
from widgets.shell.plot import MARGIN, VALUE, Axes, Scale, counted, figures, hidden_note, percent, seconds, tokens
from widgets.shell.svg import BODY, BOLD, HEADING, QUIET, SMALL, Box, Drawing
from widgets.shell.theme import DARK, IDLE, MID, MISSED

RATE = Scale(RATES[0], RATES[-1], log=True)
TICKS = (3, 10, 30, 100, 300)
STAGES = {"prefill": (PURPLE,), "link": (YELLOW,), "decode": (SKY,), "both": (PURPLE, SKY)}
BAR, ROW, NAMES, VALUES = 26, 22, 70, 118
"""Pixels: the height of a step's bar and of a part's row, and the widths left and right of the rows."""


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
    whole = Box(MARGIN + NAMES, y + 48, width - 2 * MARGIN - NAMES - VALUES, 5 * ROW + 10)
    _draw_rates(Axes(drawing, whole, RATE, Scale(0, 1)), state, pinned)
    drawing.height = whole.bottom + 42
    return drawing.render()


def limit_words(side: Side, preposition: str) -> str:
    """Name the highest rate that a design handles."""
    return f"{preposition} {figures(side.goodput)}" if side.goodput > RATES[0] else f"below {RATES[0]:g}"


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
        axes = Axes(drawing, Box(MARGIN, y + 8, drawing.width - 2 * MARGIN, 2 * BAR), scale, Scale(0, 2))
        drawing.text((MARGIN, y), words, bold=True)
        after = MARGIN + BOLD * text_width(words, BODY) + 8
        with drawing.layer(answer=answer):
            drawing.text((after, y), f"{counted(step.decodes, 'answer')} each", size=SMALL, colour=SKY)
            _draw_step(axes, step, time, end, limit)
        y = axes.box.bottom + 26
    hidden_note(drawing, axes.box)
    words, x = f"limit {seconds(limit)} a token", axes.at(limit, 0)[0]
    x = min(x, drawing.width - MARGIN - text_width(words, SMALL) / 2)
    drawing.text((x, y - 10), words, size=SMALL, colour=GREEN, anchor="middle")
    return y - 10


def _slow(state: State, side: Side) -> float:
    """Return the seconds a token that 90 % of the answers stay within; 0 before this rate has been run."""
    point = side.points.get(state.rate)
    return within(sorted(client.tpot for client in point.clients), SHARE) if point else 0.0


def _draw_step(axes: Axes, step: Step, slow: float, end: float, limit: float) -> None:
    """Draw what a step waits for, beneath it what it computes meanwhile, and the limit."""
    drawing, right = axes.drawing, axes.box.right
    answers, chunk, read = step.decodes * step.token, step.chunk * step.token, step.launch + step.weights
    free = "free" if answers + chunk <= step.weights else "not free"
    prompt = f"{step.chunk:,.0f} prompt tokens, {free}"
    words = f"{'mean ' * (step.least > slow and step.chunk > 0)}{seconds(slow)}" if slow < math.inf else "no token"
    tip = f"Launches {seconds(step.launch)}, weights {seconds(step.weights)}, arithmetic {seconds(answers + chunk)}. "
    tip += f"{percent(SHARE)} of the answers: {words} a token at most." * (slow > 0)
    first = step.launch + answers
    for names, start, stop, colour, row in (
        (("launch",), 0.0, step.launch, MID, 0),
        (("reads the weights", "weights"), step.launch, min(read, limit), GREY, 0),
        (("reads KV", "KV"), step.least, min(end, limit), SKY, 0),
        ((), step.launch, first, SKY, 1),
        ((f"computes {prompt}", prompt, free), first, first + chunk, PURPLE, 1),
        (("computing idles", "idle"), first + chunk, read, IDLE, 1),
    ):
        (left, y), (edge, _) = (axes.at(min(time, axes.x.high), 2 - row) for time in (start, stop))
        bar = Box(left, y, edge - left - 1, BAR - 1)
        drawing.rect(bar, colour, tip=tip)
        name = next((name for name in names if text_width(name, SMALL) + 3 <= bar.width), "")
        place, ink = (bar.x + bar.width / 2, y + BAR / 2 + 4), INK if colour in DARK else ink_on(colour)
        drawing.text(place, name, size=SMALL, colour=ink, anchor="middle")
    x, y = axes.at(limit, 2)
    late = Box(x, y, axes.at(min(end, axes.x.high), 0)[0] - x, BAR - 1)
    drawing.rect(late, MISSED, tip=tip)
    if late.width > 0:
        drawing.hatch(late, VERMILLION, gap=5)
    drawing.line((x, y - 4), (x, axes.box.bottom + 2), GREEN, width=2)
    colour, place = VERMILLION if slow > limit else INK, (right, axes.box.y - 8)
    drawing.text(place, words * (slow > 0), colour=colour, anchor="end", bold=True)


# ---- the rates that each part handles


def _draw_rates(whole: Axes, state: State, pinned: State | None) -> None:
    """Draw a row for each part of the two pools, and one for the GPUs that do both."""
    drawing, mine, both = whole.drawing, state.mine, state.both
    pools = Axes(drawing, replace(whole.box, height=3 * ROW), RATE, whole.y)
    one = Axes(drawing, Box(whole.box.x, pools.box.bottom + 10, whole.box.width, 2 * ROW), RATE, whole.y)
    whole.frame("requests a second, over all GPUs", "", x_ticks=TICKS, x_format="{:g}".format, y_ticks=())
    names = {"prefill": f"{mine.prefill} prefill", "link": "KV link", "decode": f"{mine.decode} decode"}
    _draw_side(pools, state, mine, names, mine.is_found)
    with drawing.answer():
        _draw_side(one, state, both, {"both": f"{both.gpus} do both"}, state.is_tuned)
    hidden_note(drawing, replace(one.box, x=MARGIN, width=2 * NAMES))
    if pinned and pinned.mine.points:
        whole.pinned([pinned.mine.goodput] * 2, [0, 1], pinned.rate)
    whole.here(state.rate, "rate")


def _draw_side(axes: Axes, state: State, side: Side, names: dict[str, str], known: bool) -> None:
    """Draw up to which rate each part of a design handles the requests, and the rate that all do."""
    drawing, box = axes.drawing, axes.box
    right, middle = drawing.width - MARGIN, box.y + box.height / 2
    if known and side.edge[1] < math.inf:
        words = f"{side.name} break {limit_words(side, 'at')}: {cause_words(side.cause, state)}"
        axes.shade(max(side.goodput, RATES[0]), None, words)
    for index, (part, name) in enumerate(names.items()):
        high, most, colours = box.height / len(names), side.most(part), STAGES[part]
        y, late = box.y + index * high, state.rate > most
        end = axes.at(min(max(most, RATES[0]), RATES[-1]), 0)[0]
        for half, colour in enumerate(colours):
            thick = (high - 6) / len(colours)
            tip = f"{name}: up to {figures(most)} requests a second"
            drawing.rect(Box(box.x, y + 3 + half * thick, end - box.x, thick), colour, tip=tip)
        place, colour = (MARGIN, y + high / 2 + 4), VERMILLION if late else INK
        drawing.text(place, name, size=SMALL, colour=colour, bold=late)
    if known:
        late = state.rate in side.points and side.breaks(state.rate)
        colour, words = VERMILLION if late else GREEN, f"{limit_words(side, '').replace('below', '<').strip()}/s"
        drawing.text((right, middle + 3), words, size=VALUE, colour=colour, anchor="end", bold=True)
    if state.rate in side.points:
        drawing.text((right, middle + 18), f"now {percent(side.share(state.rate))} in time", size=SMALL, anchor="end")

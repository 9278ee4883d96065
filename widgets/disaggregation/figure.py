"""Draw lesson 08's picture: a step of the GPUs that decode, in both designs, and beneath it the rates
that each part handles.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from minivllm_lab.disaggregation.goodput import SHARE
from minivllm_lab.pictures.drawing import QUIET, ink_on, text_width
from minivllm_lab.pictures.palette import GREEN, INK, PALE, PURPLE, SKY, VERMILLION
from minivllm_simulate.levers import KNOWN_ERROR
from minivllm_simulate.load_sweep import within
from widgets.disaggregation.state import RATES, Side, State, Step
from widgets.shell.plot import MARGIN, VALUE, Axes, Scale, counted, figures, hidden_note, percent, seconds, tokens
from widgets.shell.svg import BOLD, SMALL, Box, Drawing
from widgets.shell.theme import BROKEN, CARD, DARK, MID

STAGES = {"prefill": (PURPLE,), "link": (MID,), "decode": (SKY,), "both": (PURPLE, SKY)}
BAR, ROW, NAMES = 24, 18, 74
"""Pixels: the heights of a lane and of a part's row, and the width left of both."""


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw a step of the GPUs that decode, in both designs, and the rates that each part handles."""
    mine, goal = state.mine, state.objective
    served = f"{state.model} on {mine.gpus} {state.gpu}"
    drawing = Drawing(width, 0, served, f"A step of {mine.name} GPUs, and the rates that they handle")
    note = (
        f"{served}, {tokens(state.work.prompt)} tokens in, {state.work.output} out. In time: "
        f"first token in {seconds(goal.ttft)}, then {seconds(goal.tpot)} each"
    )
    with drawing.layer(tip=f"Times are modelled, {KNOWN_ERROR}."):
        y = drawing.heading((MARGIN, 23), f"A decode step at {state.rate:g} requests a second") + 18
        y = drawing.paragraph((MARGIN, y), note, width - 2 * MARGIN)
    y = _draw_steps(drawing, state, y + 26)
    y = drawing.heading((MARGIN, y + 36), "Requests a second handled in time")
    drawing.height = _draw_rates(drawing, state, y, pinned) + 42
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
    box = Box(MARGIN + NAMES, y + 8, drawing.width - 2 * MARGIN - NAMES, 2 * BAR)
    axes = Axes(drawing, box, Scale(0, min(max(*ends, limit), 3 * limit)), Scale(0, 2))
    label = axes.at(limit, 0)[0], box.bottom + 17
    side = "start" if limit < axes.x.high / 2 else "end"
    drawing.text(label, f"limit {seconds(limit)}", size=SMALL, colour=GREEN, anchor=side)
    doing = f"{counted(mine.decode, 'GPU')} decode{'s' * (mine.decode == 1)}", f"{both.gpus} GPUs do both"
    for step, words, answer, time, end in zip(state.steps, doing, ("", "1"), slow, ends, strict=True):
        axes = Axes(drawing, replace(box, y=y + 8), axes.x, axes.y)
        drawing.text((MARGIN, y), words, bold=True)
        for row, lane in enumerate(("memory", "arithmetic")):
            drawing.text((MARGIN, axes.box.y + BAR * (row + 0.5) + 4), lane, size=SMALL)
        after = MARGIN + BOLD * text_width(words) + 8
        with drawing.layer(answer=answer):
            _draw_step(axes, step, time, end, limit, after)
        y = axes.box.bottom + 36
    hidden_note(drawing, axes.box)
    return axes.box.bottom


def _slow(state: State, side: Side) -> float:
    """Return the seconds a token that 90 % of the answers stay within; 0 before this rate has been run."""
    point = side.points.get(state.rate)
    return within(sorted(client.tpot for client in point.clients), SHARE) if point else 0.0


def _draw_step(axes: Axes, step: Step, slow: float, end: float, limit: float, after: float) -> None:
    """Draw what a step waits for, beneath it what it computes meanwhile, and the limit."""
    drawing, box = axes.drawing, axes.box
    answers, chunk, read = step.decodes * step.token, step.chunk * step.token, step.launch + step.weights
    words = f"{'mean ' * (step.least > slow and step.chunk > 0)}{seconds(slow)}" if slow < math.inf else "no token"
    tip = f"Launches {seconds(step.launch)}, weights {seconds(step.weights)}, arithmetic {seconds(answers + chunk)}. "
    first, (x, y) = step.launch + answers, axes.at(limit, 2)
    chunk_end, stop = first + chunk, axes.at(min(end, axes.x.high), 0)[0]
    for name, begin, until, colour, row, rows in (
        ("launch", 0.0, step.launch, PALE, 0, 2),
        ("weights", step.launch, read, MID, 0, 1),
        ("KV", step.least, end, SKY, 0, 1),
        ("", step.launch, first, SKY, 1, 1),
        (f"{step.chunk:,.0f} tokens", first, chunk_end, PURPLE, 1, 1),
        ("idle", chunk_end, end, CARD, 1, 1),
    ):
        left, edge = (axes.at(min(time, axes.x.high), 0)[0] for time in (begin, until))
        bar, room = Box(left, y + BAR * row, edge - left - 1, BAR * rows - 1), min(edge, x) - left
        upright = rows > 1 and 16 < room < bar.height
        drawing.rect(bar, colour, tip=tip, stroke=MID if name == "idle" else "none")
        fits = text_width(name, SMALL) + 4 <= (bar.height if upright else room)
        place = left + room / 2 + 4 * upright, bar.y + bar.height / 2 + 4 * (not upright)
        ink = INK if colour in DARK else ink_on(colour)
        drawing.text(place, name * fits, size=SMALL, colour=ink, anchor="middle", turn=-90 * upright)
    drawing.hatch(Box(x, y + BAR * (chunk_end > limit), max(0.0, stop - x), BAR - 1), VERMILLION, gap=5)
    drawing.line((x, y - 4), (x, box.bottom + 2), GREEN, width=2)
    left, below = axes.at(step.launch, 0)[0], box.bottom + 12
    drawing.text((left, below), "decode", size=SMALL, colour=SKY)
    prompt = "of a prompt" + ", for free" * (chunk_end <= read)
    place = max(axes.at(min(chunk_end, axes.x.high), 0)[0] - 1, left + text_width(f"decode  {prompt}", SMALL)), below
    drawing.text(place, prompt * (chunk > 0), size=SMALL, colour=PURPLE, anchor="end")
    reads = f"{counted(step.decodes, 'answer')} each" * (end > step.least)
    drawing.text((after, box.y - 8), reads, size=SMALL, colour=SKY)
    colour = VERMILLION if slow > limit else INK
    least = after + text_width(reads, SMALL) + 2 + BOLD * text_width(words)
    drawing.text((max(stop, least), box.y - 8), words * (slow > 0), colour=colour, anchor="end", bold=True)


# ---- the rates that each part handles


def _draw_rates(drawing: Drawing, state: State, y: float, pinned: State | None) -> float:
    """Draw a row for each part of the two pools, and one for the GPUs that do both; return the y below."""
    mine, both = state.mine, state.both
    high = next((rate for rate in RATES if rate >= 1.2 * max(mine.bound, both.bound)), RATES[-1])
    box = Box(MARGIN + NAMES, y + 38, drawing.width - 2 * MARGIN - NAMES, 3 * ROW)
    pools = Axes(drawing, box, Scale(0, high), Scale(0, 1))
    one = Axes(drawing, replace(box, y=box.bottom + 38, height=2 * ROW), pools.x, pools.y)
    beyond = f": {state.rate:g} →" * (state.rate > high)
    one.frame(f"requests a second, over all GPUs{beyond}", "", x_format="{:g}".format, y_ticks=())
    names = {"prefill": f"{mine.prefill} prefill", "link": "KV link", "decode": f"{mine.decode} decode"}
    _draw_side(pools, state, mine, names, mine.is_found)
    with drawing.answer():
        _draw_side(one, state, both, {"both": f"{both.gpus} do both"}, state.is_tuned)
    hidden_note(drawing, replace(one.box, x=MARGIN, width=2 * NAMES))
    if pinned and pinned.mine.points:
        pools.pinned([pinned.mine.goodput] * 2, [0, 1], min(pinned.rate, high))
    pools.also_here(min(state.rate, high))
    # The handle's axis goes on beyond the picture, up to the highest rate.
    far = replace(one.box, width=box.width * RATES[-1] / high)
    Axes(drawing, far, Scale(0, RATES[-1]), one.y).here(min(state.rate, high), "rate")
    return one.box.bottom


def _draw_side(axes: Axes, state: State, side: Side, names: dict[str, str], known: bool) -> None:
    """Draw up to which rate each part of a design handles the requests, and above them the rate that all do."""
    drawing, box = axes.drawing, axes.box
    total = f"{figures(side.goodput) if side.goodput > RATES[0] else f'< {RATES[0]:g}'}/s"
    breaks = known and side.edge[1] < math.inf
    if breaks:
        words = f"{side.name} break at {total}: {cause_words(side.cause, state)}"
        axes.shade(max(side.goodput, RATES[0]), None, words)
    for index, (part, name) in enumerate(names.items()):
        high, most, colours = box.height / len(names), side.most(part), STAGES[part]
        y, first = box.y + index * high, breaks and part == side.weakest
        thick = 3 if part == "link" and not first else high - 5
        far = f"→ {figures(most)}/s" * (most > axes.x.high)
        end = axes.at(min(max(most, RATES[0]), axes.x.high), 0)[0] - text_width(far, SMALL) - 10 * bool(far)
        ground = BROKEN if breaks else CARD
        drawing.text((box.right - 4, y + high / 2 + 4), far, size=SMALL, colour=QUIET, anchor="end", halo=ground)
        for half, colour in enumerate(colours):
            bar = Box(box.x, y + (high - thick) / 2 + half * thick / len(colours), end - box.x, thick / len(colours))
            drawing.rect(bar, colour, tip=f"{name}: up to {figures(most)} requests a second")
        colour = VERMILLION if state.rate > most else INK
        drawing.text((MARGIN, y + high / 2 + 4), name, size=SMALL, colour=colour, bold=state.rate > most)
    late = state.rate in side.points and side.breaks(state.rate)
    write, y, x = partial(drawing.text, colour=VERMILLION if late else INK), box.y - 9, MARGIN
    if known:
        drawing.text((x, y), total, size=VALUE, colour=VERMILLION if late else GREEN, bold=True)
        x += BOLD * text_width(total, VALUE) + 9
    note = f"{side.weakest} breaks" * breaks
    if not side.prefill and state.known and 0 < state.gain < math.inf:
        note = f"×{1 / state.gain:.1f}"
    write((x, y), note, size=SMALL, bold=True)
    if state.rate in side.points:
        words = f"{percent(side.share(state.rate))} in time at {state.rate:g}/s"
        write((drawing.width - MARGIN, y), words, size=SMALL, anchor="end")

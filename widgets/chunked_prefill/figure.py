"""Draw lesson 10's picture: each step as a bar, and below them waiting times by token budget."""

from __future__ import annotations

import math
from collections.abc import Sequence

from minivllm_lab.pictures.palette import BLUE, GREEN, ORANGE, VERMILLION
from minivllm_simulate.cost_model import StepShape
from minivllm_simulate.load_sweep import Span
from widgets.chunked_prefill.runs import CHAT
from widgets.chunked_prefill.state import ALL_GAPS, BUDGETS, CLIENTS, State
from widgets.chunked_prefill.strip import draw_steps, two_digits
from widgets.shell.plot import MARGIN, WIDE, Axes, Scale, figures, percent, seconds, tokens
from widgets.shell.svg import BOLD, SMALL, Box, Drawing, text_box, text_width

BUDGET = Scale(BUDGETS[0], BUDGETS[-1], log=True)
TICKS = (64, 256, 1024, 4096, 16384)
GAPS = {
    "clients": f"longest gap, for {percent(CLIENTS)} of clients",
    "gaps": f"{percent(ALL_GAPS)} of all gaps are shorter",
}
"""The statistic by which gaps are judged."""
POLICIES = {"mixed": "", "whole": "; prompts are not cut", "first": "; prefill first"}


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw the steps, and waiting times by budget below."""
    serving = state.serving
    drawing = Drawing(width, 0, "What a token budget costs", f"Waiting times against the budget, now {state.budget}")
    note = (
        f"{serving.name} on {serving.gpu.name}, {serving.load:g} requests a second, {percent(serving.share)} with "
        f"{tokens(serving.longest)} tokens{POLICIES[serving.policy]}; modelled"
    )
    with drawing.layer(tip=f"{state.error} against published runs" if state.error else ""):
        y = draw_steps(drawing, state, note) + 42
    waited = state.waited(state.budget) if state.budget in state.points else 0.0
    colour = VERMILLION if waited > state.gap else BLUE
    drawing.number((MARGIN, y), two_digits(waited) if waited else "–", GAPS[state.judged], colour)
    box = Box(60, y + 30, width - 60 - MARGIN, 150)
    _draw_waits(Axes(drawing, box, BUDGET, _scale(state)), state, pinned)
    drawing.height = box.bottom + 42
    return drawing.render()


# ---- waiting times against the budget


def _scale(state: State) -> Scale:
    """Return a scale from a plain step's time to beyond a long prompt's time at the smallest
    budget, so that the scale rarely changes.
    """
    least = min(state.gap, state.serving.cost.seconds(StepShape.of([(1, CHAT)])))
    return Scale.around(0.4 * least, 3 * max([state.ttft, state.gap, *state.alone.values()]))


def _draw_waits(axes: Axes, state: State, pinned: State | None) -> None:
    name = "token budget per step (max_num_batched_tokens)"
    ticks = [tick for tick in TICKS if abs(axes.at(tick, 1)[0] - axes.at(state.budget, 1)[0]) > 32]
    axes.frame(name, "", x_ticks=ticks, x_format=tokens, y_format=seconds)
    here = min(axes.at(state.budget, 1)[0], axes.box.right - 14), axes.box.bottom + 18
    axes.drawing.text(here, f"{state.budget:,}", size=SMALL, anchor="middle", bold=True)
    _draw_broken(axes, state)
    if pinned and pinned.points:
        axes.pinned(pinned.run, [pinned.first(budget) for budget in pinned.run], pinned.budget)
        axes.pinned(pinned.run, [pinned.waited(budget) for budget in pinned.run], pinned.budget)
    axes.mark_y(state.gap, f"limit {seconds(state.gap)}", BLUE)
    axes.mark_y(state.ttft, f"limit {seconds(state.ttft)}", ORANGE)
    firsts, waits = ([time(budget) for budget in state.run] for time in (state.first, state.waited))
    _draw_curve(axes, state, firsts, "first token", ORANGE)
    with axes.drawing.answer():
        _draw_curve(axes, state, waits, "gap", BLUE)
        if state.judged == "gaps" and state.run:
            hidden = [state.points[budget].longest_gap(CLIENTS) for budget in state.run]
            axes.line(state.run, hidden, BLUE, width=1.8, dash="2 4")
            axes.label(axes.at(state.run[-1], hidden[-1]), "longest gap", BLUE, bold=False)
    axes.here(state.budget, "budget")
    with axes.drawing.answer():
        axes.tips(state.run, lambda budget: budget_words(state, budget))


def _draw_curve(axes: Axes, state: State, ys: Sequence[float], words: str, colour: str) -> None:
    """Draw a curve over the budgets, with its name where both limits are met, and a dot at the handle."""
    axes.line(state.run, ys, colour)
    curve = dict(zip(state.run, ys, strict=True))
    named = [budget for budget in state.run if not state.causes(budget)] or state.run
    for budget in named[len(named) // 2 :][:1]:
        if axes.drawing.width < WIDE:  # on a short curve it would hide the bend
            axes.label(axes.at(budget, curve[budget]), words, colour)
        else:
            axes.name([budget], [curve[budget]], words, colour)
    if state.budget in curve:
        axes.points([state.budget], [curve[state.budget]], colour)


def _draw_broken(axes: Axes, state: State) -> None:
    """Shade where the engine does not start, where long prompts wait too long, and where tokens
    come too late; mark where both limits are met.
    """
    for span in state.stopped:
        axes.broken(*span, _refused_words(state, span))
    for span in state.late:
        edge = span[1] or math.inf
        axes.shade(*span, words := "queue grows" if state.queue_at(edge) else "first token late")
        _draw_strip(axes, *span, words, VERMILLION)
        inside = [budget for budget in state.run if budget < edge]
        if span[1] and inside and "chunks" in state.causes(inside[-1]):
            steps = math.ceil(state.serving.prompt / edge)
            words = f"← at {edge:,.0f}: {tokens(state.serving.longest)}\nin {steps:,} steps"
            x, y = axes.at(edge, state.gap)
            axes.label((x - 7, y), words, ORANGE, bold=False)
    with axes.drawing.answer():
        for span in state.stalled:
            axes.shade(*span, words := f"stalls over {seconds(state.gap)}")
            _draw_strip(axes, *span, words, VERMILLION)
        for low, high in state.good if state.complete else ():
            _draw_strip(axes, low, high, "", GREEN)
            axes.explain(low, high, f"limits met: {low:,.0f} to {high:,.0f}", GREEN)


def _draw_strip(axes: Axes, low: float | None, high: float | None, words: str, colour: str) -> None:
    """Draw a strip above a range of budgets, with words above it or, where others stand there, beside them."""
    left, right = (axes.at(edge or end, axes.y.high)[0] for edge, end in ((low, axes.x.low), (high, axes.x.high)))
    axes.drawing.line((left, axes.box.y), (right, axes.box.y), colour, width=5)
    room = BOLD * text_width(words, SMALL)
    for x in (*[left] * (left + room < right), right - room, right - 2 * room - 10, 8.0):
        place = x, axes.box.y - 7
        area = text_box(place, words, SMALL, bold=True)
        if x > 4 and not any(area.overlaps(other) for other in axes.drawing.words):
            axes.drawing.text(place, words, size=SMALL, colour=colour, bold=True)
            return


def _refused_words(state: State, span: Span) -> str:
    """Explain why the engine does not start with the budgets of a region."""
    refused = [budget for budget in state.refusals if (span[0] or 0) <= budget < (span[1] or math.inf)]
    nearest = max(refused) if span[1] is not None else min(refused)
    whole = state.serving.policy != "mixed" and nearest < state.serving.longest
    why = f"{tokens(state.serving.longest)} tokens are never cut" if whole else state.refusals[nearest]
    return f"does not start: {why}"


def cause_words(state: State, cause: str, budget: int) -> str:
    """Describe what goes wrong with a budget."""
    serving = state.serving
    steps = math.ceil(serving.prompt / budget)
    most = figures(state.capacity[budget])
    turn = "long prompts wait their turn" if serving.threshold == 0 else "long prompts wait, or get too few tokens"
    return {
        "queue": f"the queue grows: {serving.load:g} requests/s arrive, but it handles {most}",
        "chunks": f"long prompts late: each takes {steps:,} steps, {seconds(state.alone[budget])} alone",
        "turn": turn,
    }.get(cause, "")


def budget_words(state: State, budget: int) -> str:
    """Describe the waiting times with a budget."""
    point, first = state.points[budget], seconds(state.first(budget))
    return (
        f"Budget {budget:,}: {percent(CLIENTS)} of clients wait at most {seconds(point.longest_gap(CLIENTS))} for a "
        f"token, {percent(ALL_GAPS)} of gaps are within {seconds(point.gap(ALL_GAPS))}, and {percent(CLIENTS)} of long "
        f"prompts have their first token within {first}."
    )

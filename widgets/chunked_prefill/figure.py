"""Draw lesson 10's picture: waiting times by token budget, and below them each step as a bar."""

from __future__ import annotations

import math

from minivllm_lab.palette import BLUE, GREEN, INK, ORANGE
from minivllm_simulate.cost_model import StepShape
from minivllm_simulate.load_sweep import Span
from widgets.chunked_prefill.runs import ANSWER, CHAT
from widgets.chunked_prefill.state import ALL_GAPS, BUDGETS, CLIENTS, State
from widgets.chunked_prefill.strip import draw_steps
from widgets.shell.plot import MARGIN, WIDE, Axes, Key, Scale, draw_head, figures, percent, seconds, tokens
from widgets.shell.svg import Box, Drawing

BUDGET = Scale(BUDGETS[0], BUDGETS[-1], log=True)
TICKS = (64, 256, 1024, 4096, 16384)
POLICIES = {"mixed": "", "whole": "; prompts are not cut", "first": "; prefill first, as in V0"}


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw waiting times by budget, and the steps below."""
    serving = state.serving
    drawing = Drawing(width, 0, "What a token budget costs", f"Waiting times against the budget, now {state.budget}")
    note = (
        f"{serving.name} on one {serving.gpu.name}, {serving.load:g} requests a second: {percent(serving.share)} have "
        f"{tokens(serving.longest)} tokens, the others {CHAT + ANSWER}{POLICIES[serving.policy]}"
    )
    error = state.error and f"{state.error} against published runs"
    y = draw_head(drawing, "How long clients wait", note, error, _keys(state))
    box = Box(60, y + 16, width - 60 - MARGIN, 148 if width >= WIDE else 170)
    _draw_waits(Axes(drawing, box, BUDGET, _scale(state)), state, pinned)
    drawing.height = draw_steps(drawing, state, box.bottom + 62) + 10
    return drawing.render()


def gap_words(judged: str) -> str:
    """Name the statistic by which gaps are judged."""
    return f"{percent(ALL_GAPS)} of all gaps" if judged == "gaps" else f"longest gap, {percent(CLIENTS)} of clients"


def _keys(state: State) -> list[Key]:
    other = "clients" if state.judged == "gaps" else "gaps"
    return [
        (gap_words(state.judged), BLUE, "", 2.5),
        (gap_words(other), BLUE, "2 4", 1.8),
        (f"first token (TTFT), {percent(CLIENTS)} of long prompts", ORANGE, "", 2.5),
    ]


# ---- waiting times against the budget


def _scale(state: State) -> Scale:
    """Return a scale from a plain step's time to beyond a long prompt's time at the smallest
    budget, so that the scale rarely changes.
    """
    least = min(state.gap, state.serving.cost.seconds(StepShape.of([(1, CHAT)])))
    return Scale.around(0.8 * least, 3 * max([state.ttft, state.gap, *state.alone.values()]))


def _draw_waits(axes: Axes, state: State, pinned: State | None) -> None:
    name = "token budget per step (max_num_batched_tokens)"
    axes.frame(name, "", x_ticks=TICKS, x_format=tokens, y_format=seconds)
    _draw_broken(axes, state)
    if pinned and pinned.points:
        axes.pinned(pinned.run, [pinned.first(budget) for budget in pinned.run], pinned.budget)
        axes.pinned(pinned.run, [pinned.waited(budget) for budget in pinned.run], pinned.budget)
    budgets = state.run
    axes.mark_y(state.gap, f"limit {seconds(state.gap)}", BLUE)
    axes.mark_y(state.ttft, f"limit {seconds(state.ttft)}", ORANGE)
    axes.line(budgets, [state.first(budget) for budget in budgets], ORANGE)
    with axes.drawing.answer():
        axes.line(budgets, [_other_gap(state, budget) for budget in budgets], BLUE, width=1.8, dash="2 4")
        axes.line(budgets, [state.waited(budget) for budget in budgets], BLUE)
        _draw_knee(axes, state)
        end = budgets[-1] if budgets and state.judged == "clients" else 0
        if end and _other_gap(state, end) < state.gap < state.waited(end):
            words = "long but rare: " * (axes.drawing.width >= WIDE) + "99 % hides them"
            axes.label(axes.at(end, _other_gap(state, end)), words, BLUE, bold=False)
    axes.here(state.budget, "budget")
    with axes.drawing.answer():
        _draw_tips(axes, state)


def _draw_knee(axes: Axes, state: State) -> None:
    """Mark the budget nearest to the knee, from which longer steps take longer."""
    knee = state.serving.knee
    if state.run and state.run[0] <= knee <= state.run[-1]:
        nearest = min(state.run, key=lambda budget: abs(math.log(budget / knee)))
        place = axes.at(nearest, state.waited(nearest))
        tip = f"Up to about {knee:.0f} tokens, a step takes as long as reading the weights: prompt tokens are free."
        axes.drawing.circle(place, 4.5, INK, tip=tip)
        axes.label(place, "knee", bold=False)


def _other_gap(state: State, budget: int) -> float:
    point = state.points[budget]
    return max(point.gap(ALL_GAPS) if state.judged == "clients" else point.longest_gap(CLIENTS), 1e-6)


def _draw_broken(axes: Axes, state: State) -> None:
    """Shade where the engine does not start, where long prompts wait too long, and where tokens
    come too late; mark where both limits are met.
    """
    with axes.drawing.answer():
        for low, high in state.good if state.complete else ():
            axes.explain(low, high, f"limits met: {low:,.0f} to {high:,.0f}", GREEN)
        for span in state.stalled:
            axes.broken(*span, f"stalls over {seconds(state.gap)}")
    for span in (*state.stopped, *state.late):
        axes.broken(*span, late_words(state, span))
        if state.queue_at(span[1]):
            axes.without_end(span[1] or 0, state.ttft)
    with axes.drawing.answer():
        for low, high in state.good if state.complete else ():
            axes.drawing.line(axes.at(low, axes.y.low), axes.at(high, axes.y.low), colour=GREEN, width=5)


def late_words(state: State, span: Span) -> str:
    """Explain why long prompts wait in a region, by the cause at its edge, or at the handle if the
    region has no edge.
    """
    inside = [budget for budget in (*state.run, *state.refusals) if (span[0] or 0) <= budget < (span[1] or math.inf)]
    if not inside:
        return ""
    nearest = max(inside) if span[1] is not None else min(inside) if span[0] is not None else state.budget
    if nearest in state.refusals:
        return _refusal_words(state, nearest)
    return cause_words(state, next(iter(state.causes(nearest)), ""), nearest) if nearest in state.points else ""


def _refusal_words(state: State, budget: int) -> str:
    if state.serving.policy != "mixed" and budget < state.serving.longest:
        return f"does not start: {tokens(state.serving.longest)} tokens are never cut"
    return f"does not start: {state.refusals[budget]}"


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
        "stall": f"tokens come over {seconds(state.gap)} apart",
        "": "",
    }[cause]


def _draw_tips(axes: Axes, state: State) -> None:
    """Add a tooltip everywhere in the plot, with the results at the nearest budget."""

    def tip(budget: int) -> str:
        point = state.points[budget]
        return (
            f"Budget {budget:,}: {percent(CLIENTS)} of the clients never wait more than "
            f"{seconds(point.longest_gap(CLIENTS))} for a token, and {percent(ALL_GAPS)} of all gaps are within "
            f"{seconds(point.gap(ALL_GAPS))}. {percent(CLIENTS)} of the long prompts have their first token within "
            f"{seconds(state.first(budget))}."
        )

    axes.tips(state.run, tip)

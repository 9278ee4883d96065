"""Draw lesson 10's picture: each step as a bar, and below them waiting times by token budget."""

from __future__ import annotations

import math

from minivllm_lab.drawing import text_width
from minivllm_lab.palette import BLUE, GREEN, ORANGE, VERMILLION
from minivllm_simulate.cost_model import StepShape
from minivllm_simulate.load_sweep import Span
from widgets.chunked_prefill.runs import ANSWER, CHAT
from widgets.chunked_prefill.state import ALL_GAPS, BUDGETS, CLIENTS, State
from widgets.chunked_prefill.strip import draw_steps
from widgets.shell.plot import MARGIN, VALUE, WIDE, Axes, Key, Scale, draw_keys, figures, percent, seconds, tokens
from widgets.shell.svg import BOLD, SMALL, Box, Drawing
from widgets.shell.theme import BROKEN

BUDGET = Scale(BUDGETS[0], BUDGETS[-1], log=True)
TICKS = (64, 256, 1024, 4096, 16384)
NARROW = 120
"""Pixels below which a region has its words above it."""
POLICIES = {"mixed": "", "whole": "; prompts are not cut", "first": "; prefill first, as in V0"}


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw the steps, and waiting times by budget below."""
    serving = state.serving
    drawing = Drawing(width, 0, "What a token budget costs", f"Waiting times against the budget, now {state.budget}")
    note = (
        f"{serving.name} on one {serving.gpu.name}, {serving.load:g} requests a second: {percent(serving.share)} have "
        f"{tokens(serving.longest)} tokens, the others {CHAT + ANSWER}{POLICIES[serving.policy]}"
    )
    error = f", {state.error} against published runs" if state.error else ""
    y = draw_steps(drawing, state, f"{note}; modelled{error}")
    y = draw_keys(drawing, drawing.heading((MARGIN, y + 32), "How long clients wait") + 20, _keys(state))
    box = Box(60, y + 26, width - 60 - MARGIN, 132 if width >= WIDE else 184)
    _draw_waits(Axes(drawing, box, BUDGET, _scale(state)), state, pinned)
    drawing.height = box.bottom + 42
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
    return Scale.around(0.4 * least, 3 * max([state.ttft, state.gap, *state.alone.values()]))


def _draw_waits(axes: Axes, state: State, pinned: State | None) -> None:
    name = "token budget per step (max_num_batched_tokens)"
    ticks = [tick for tick in TICKS if not 0.5 < tick / state.budget < 2]
    axes.frame(name, "", x_ticks=ticks, x_format=tokens, y_format=seconds)
    here = min(axes.at(state.budget, 1)[0], axes.box.right - 14), axes.box.bottom + 18
    axes.drawing.text(here, f"{state.budget:,}", size=SMALL, anchor="middle", bold=True)
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
        if state.budget in state.points:
            waited = float(f"{state.waited(state.budget):.2g}")
            x, y = axes.at(state.budget, waited)
            axes.drawing.circle((x, y), 4.5, BLUE)
            if state.gap < waited and x + 96 < axes.box.right:  # beside its point, over the limit
                axes.drawing.text((x + 10, y + 20), seconds(waited), size=VALUE, colour=BLUE, bold=True, halo=BROKEN)
            else:
                axes.label((x, y), seconds(waited), BLUE, size=VALUE)
        end = budgets[-1] if budgets and state.judged == "clients" else 0
        if end and _other_gap(state, end) < state.gap < state.waited(end) and axes.drawing.width >= WIDE:
            x, y = axes.at(end, _other_gap(state, end))
            axes.label((x + 8, y), "99 % hides them", BLUE, bold=False)
    axes.here(state.budget, "budget")
    with axes.drawing.answer():
        _draw_tips(axes, state)


def _other_gap(state: State, budget: int) -> float:
    point = state.points[budget]
    return max(point.gap(ALL_GAPS) if state.judged == "clients" else point.longest_gap(CLIENTS), 1e-6)


def _draw_broken(axes: Axes, state: State) -> None:
    """Shade where the engine does not start, where long prompts wait too long, and where tokens
    come too late; mark where both limits are met.
    """
    with axes.drawing.answer():
        for span in state.stalled:
            axes.broken(*span, f"stalls over {seconds(state.gap)}")
    for span in (*state.stopped, *state.late):
        words = late_words(state, span)
        if span[0] is None and 0 < axes.at(span[1] or math.inf, 1)[0] - axes.box.x < NARROW:
            axes.shade(*span, words)
            above = axes.box.x, axes.box.y - 6
            axes.drawing.text(above, f"{words.split(':')[0]} ↓", size=SMALL, colour=VERMILLION, bold=True)
        else:
            axes.broken(*span, words)
        if state.queue_at(span[1]):
            axes.without_end(span[1] or 0, state.ttft)
    with axes.drawing.answer():
        for low, high in state.good if state.complete else ():
            start, end = axes.at(low, axes.y.low), axes.at(high, axes.y.low)
            axes.drawing.line(start, end, colour=GREEN, width=5)
            words = f"limits met: {low:,.0f} to {high:,.0f}"
            if low <= state.budget <= high:
                axes.explain(low, high, words, GREEN)
                continue
            words = words if BOLD * text_width(words, SMALL) < end[0] - start[0] else words[12:]
            axes.label((start[0] - 4, start[1] - 10), words, GREEN)


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

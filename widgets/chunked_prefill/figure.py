"""Draw lesson 10's picture: waiting times by token budget, and below them every step."""

from __future__ import annotations

import math

from minivllm_lab.palette import BLUE, GREEN, ORANGE, SKY
from minivllm_simulate.cost_model import StepShape
from minivllm_simulate.load_sweep import Span, within
from widgets.chunked_prefill.runs import ANSWER, CHAT
from widgets.chunked_prefill.state import ALL_GAPS, BUDGETS, CLIENTS, State
from widgets.chunked_prefill.strip import draw_steps
from widgets.shell.plot import Axes, Key, Scale, draw_head, figures, percent, seconds, short, three_boxes, tokens
from widgets.shell.svg import QUIET, Box, Drawing

BUDGET = Scale(BUDGETS[0], BUDGETS[-1], log=True)
TICKS = (64, 256, 1024, 4096, 16384)
POLICIES = {"mixed": "", "whole": "; prompts are not cut", "first": "; prefill first, as in V0"}


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw waiting times by budget, the prefill rate and the chats beside them, and the steps
    below.
    """
    serving = state.serving
    drawing = Drawing(width, 0, "What a token budget costs", f"Waiting times against the budget, now {state.budget}")
    note = (
        f"{serving.name} on one {serving.gpu.name}, {serving.load:g} requests a second: {percent(serving.share)} have "
        f"{tokens(serving.longest)} tokens, the others {CHAT} in, all {ANSWER} out{POLICIES[serving.policy]}"
    )
    error = state.error and f"{state.error} against published runs"
    y = draw_head(drawing, "How long clients wait", note, error, _keys(state))
    main, upper, lower = three_boxes(width, y + 26, 170, large=0.56)
    _draw_waits(Axes(drawing, main, BUDGET, _scale(state)), state, pinned)
    _draw_rate(drawing, upper, state)
    _draw_chats(drawing, lower, state)
    drawing.height = draw_steps(drawing, state, max(main.bottom, lower.bottom) + 60) + 8
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
    axes.frame(
        "token budget per step (max_num_batched_tokens)",
        "waiting time",
        x_ticks=TICKS,
        x_format=tokens,
        y_format=seconds,
    )
    _draw_broken(axes, state)
    if pinned and pinned.points:
        axes.pinned(pinned.run, [pinned.first(budget) for budget in pinned.run], pinned.budget)
        axes.pinned(pinned.run, [pinned.waited(budget) for budget in pinned.run], pinned.budget)
    budgets = state.run
    axes.mark_y(state.gap, f"gap limit {seconds(state.gap)}", GREEN)
    axes.mark_y(state.ttft, f"TTFT limit {seconds(state.ttft)}", GREEN)
    axes.line(budgets, [state.first(budget) for budget in budgets], ORANGE)
    with axes.drawing.answer():
        axes.line(budgets, [_other_gap(state, budget) for budget in budgets], BLUE, width=1.8, dash="2 4")
        axes.line(budgets, [state.waited(budget) for budget in budgets], BLUE)
        _draw_blind_spot(axes, state)
    axes.here(state.budget, "budget", f"budget {state.budget:,}")
    with axes.drawing.answer():
        _draw_tips(axes, state)


def _draw_blind_spot(axes: Axes, state: State) -> None:
    """Say why 99 % of all gaps are short where clients have long ones."""
    few = [budget for budget in state.run if state.points[budget].gap(ALL_GAPS) < state.waited(budget) / 4]
    if few:
        place = axes.at(few[-1], state.points[few[-1]].gap(ALL_GAPS))
        axes.label(place, "few are long", BLUE, bold=False)


def _other_gap(state: State, budget: int) -> float:
    point = state.points[budget]
    return max(point.gap(ALL_GAPS) if state.judged == "clients" else point.longest_gap(CLIENTS), 1e-6)


def _draw_broken(axes: Axes, state: State) -> None:
    """Shade where the engine does not start, where long prompts wait too long, and where tokens
    come too late; mark where both limits are met.
    """
    with axes.drawing.answer():
        for span in state.stalled:
            axes.broken(*span, f"stalls: tokens over {seconds(state.gap)} apart")
    for span in (*state.stopped, *state.late):
        axes.broken(*span, late_words(state, span))
        if state.queue_at(span[1]):
            axes.without_end(span[1] or 0, state.ttft)
    with axes.drawing.answer():
        for low, high in state.good if state.complete else ():
            axes.drawing.line(axes.at(low, axes.y.low), axes.at(high, axes.y.low), colour=GREEN, width=5)
            axes.explain(low, high, f"limits met: {low:,.0f} to {high:,.0f}", GREEN)


def late_words(state: State, span: Span) -> str:
    """Explain why long prompts wait in a region, by the cause at its edge, or at the handle if the
    region has no edge.
    """
    inside = [budget for budget in (*state.run, *state.refusals) if _is_in(budget, span)]
    if not inside:
        return ""
    nearest = max(inside) if span[1] is not None else min(inside) if span[0] is not None else state.budget
    if nearest in state.refusals:
        return _refusal_words(state, nearest)
    return cause_words(state, next(iter(state.causes(nearest)), ""), nearest) if nearest in state.points else ""


def _is_in(budget: int, span: Span) -> bool:
    return (span[0] or 0) <= budget < (span[1] or math.inf)


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


# ---- the prefill rate, and the chats' first tokens


def _draw_rate(drawing: Drawing, box: Box, state: State) -> None:
    """Draw the prompt tokens per second at each budget, and the rate at which tokens arrive."""
    serving = state.serving
    rates = {budget: serving.prompt / alone for budget, alone in state.alone.items()}
    known = [serving.demand, *rates.values()]
    axes = Axes(drawing, box, BUDGET, Scale.around(0.8 * min(known), 1.25 * max(known)))
    ticks = axes.y.powers()
    axes.frame("", "a long prompt alone, tokens/s", x_ticks=(), y_ticks=ticks, y_format=short)
    axes.line(list(rates), list(rates.values()), ORANGE)
    axes.mark_y(serving.demand, f"{short(serving.demand)} arrive", GREEN)
    axes.mark_x(serving.knee, QUIET, dash="2 3")
    axes.label((axes.at(serving.knee, axes.y.low)[0], box.bottom - 8), f"knee {serving.knee:.0f}", QUIET, bold=False)
    axes.also_here(state.budget)

    def tip(budget: int) -> str:
        step = seconds(serving.cost.seconds(StepShape.of([(budget, 0)])))
        return f"Steps of {budget:,} tokens: {rates[budget]:,.0f} prompt tokens a second; the first takes {step}."

    axes.tips(list(rates), tip)


def _draw_chats(drawing: Drawing, box: Box, state: State) -> None:
    """Draw how long chats wait for their first token."""
    firsts = {budget: within(state.points[budget].chat_ttft, CLIENTS) for budget in state.run}
    least = state.serving.cost.seconds(StepShape.of([(CHAT, 0)]))
    axes = Axes(drawing, box, BUDGET, Scale.around(0.8 * least, 3 * max([7 * least, *state.alone.values()])))
    label = f"first token, {percent(CLIENTS)} of chats"
    axes.frame("budget", label, x_ticks=TICKS, x_format=tokens, y_ticks=axes.y.powers(), y_format=seconds)
    axes.line(list(firsts), list(firsts.values()), SKY)
    axes.also_here(state.budget)

    def tip(budget: int) -> str:
        within = seconds(firsts[budget])
        return f"Budget {budget:,}: {percent(CLIENTS)} of the chats have their first token within {within}"

    axes.tips(list(firsts), tip)

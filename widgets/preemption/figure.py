"""Draw lesson 11's picture: the pool and its victims, and below them what each pool loses."""

from __future__ import annotations

import math

from minivllm_lab.palette import GREEN, INK, ORANGE, PURPLE
from minivllm_simulate.kv_links import LINKS, Link
from minivllm_simulate.load_sweep import Span, spans
from widgets.preemption.pool import draw_pool
from widgets.preemption.state import HOST_LINKS, POOLS, SHARE, State
from widgets.shell.plot import Axes, Scale, draw_head, figures, hidden_note, percent, seconds, tokens, two_boxes
from widgets.shell.svg import Box, Drawing

POOL = Scale(POOLS[0], POOLS[-1], log=True)
TICKS = tuple(float(2**power) for power in range(13, 19))
LINK = Scale(1e9, 5e11, log=True)
HIGH = 104
"""The pixels of a plot's height."""


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw the pool and its victims over time; below, what each pool loses to preemption, and what a
    victim's token costs.
    """
    serving, title = state.serving, "When the pool is too small"
    drawing = Drawing(width, 0, title, f"A pool of {state.pool} tokens, and what its victims hold")
    victim = "by your function" if state.own else serving.rule
    y = draw_head(drawing, title, f"{serving.name} on one {serving.gpu.name}; victim: {victim}", state.error, ())
    y = draw_pool(drawing, state, y) + 38
    left, right = two_boxes(width, y, HIGH, large=0.58)
    _draw_loss(drawing, left, state, pinned)
    _draw_crossover(drawing, right, state)
    drawing.height = right.bottom + 44
    return drawing.render()


# ---- the tokens computed twice, by pool


def _draw_loss(drawing: Drawing, box: Box, state: State, pinned: State | None) -> None:
    """Draw the share of the tokens that are computed twice, or of the time that steps wait for copies."""
    pools, swaps = state.run, state.serving.policy != "recompute"
    lost = [state.points[pool].lost for pool in pools]
    alike = pinned if pinned and (pinned.serving.policy != "recompute") == swaps else None  # the same quantity
    before = [alike.points[pool].lost for pool in alike.run] if alike else []
    axes = Axes(drawing, box, POOL, Scale(0, 0.5 if max([0.0, *lost, *before]) <= 0.5 else 1))
    name = "time that steps wait for copies" if swaps else "tokens computed twice"
    ticks = (0, axes.y.high / 2, axes.y.high)
    axes.frame("tokens in the pool", name, x_ticks=TICKS, x_format=tokens, y_ticks=ticks, y_format=percent)
    _draw_broken(axes, state)
    if alike and before:
        axes.pinned(alike.run, before, alike.pool)
    with drawing.answer():
        axes.line(pools, lost, PURPLE if swaps else ORANGE)
    axes.here(state.pool, "pool")
    hidden_note(drawing, box)
    with drawing.answer():
        if state.pool in pools:
            here = state.points[state.pool].lost
            axes.points([state.pool], [here], INK)
            axes.label(axes.at(state.pool, here), percent(here))
        axes.tips(pools, lambda pool: _tip(state, pool))


def _draw_broken(axes: Axes, state: State) -> None:
    """Shade where the engine does not start, and where requests take too long."""
    for span in state.late:
        axes.broken(*span, late_words(state, span))
        if fine := [pool for pool in state.run if pool >= (span[1] or math.inf) and not state.causes(pool)]:
            lost = "in time" if state.points[fine[0]].lost else "none"
            axes.explain(fine[0], None, f"{lost} from {tokens(fine[0])}", GREEN)
    for span in state.stopped:
        inside = [pool for pool in state.refusals if (span[0] or 0) <= pool < (span[1] or math.inf)]
        axes.shade(*span, f"does not start: {state.refusals[inside[0]]}")
        axes.explain(*span, "does not start")


def late_words(state: State, span: Span) -> str:
    """Explain why requests take too long in a region, by the cause at the handle if it is inside, and
    at the region's edge otherwise.
    """
    low, high = span
    inside = [pool for pool in state.run if (low or 0) <= pool < (high or math.inf)]
    if not inside:
        return ""
    nearest = state.pool if state.pool in inside else max(inside) if high is not None else min(inside)
    return cause_words(state, state.cause(nearest), nearest)


def cause_words(state: State, cause: str, pool: int) -> str:
    """Describe what goes wrong with a pool."""
    point, load, most = state.points[pool], state.serving.load, state.serving.steady().capacity
    full = f"full: this load needs {state.saturation / 1024:,.0f}K tokens on average, not {tokens(pool)}"
    return {
        "queue": full if load <= most else f"too slow: any pool handles at most {figures(most)} of {load:g} requests/s",
        "thrash": f"thrashing: {percent(point.wasted)} of all tokens are computed twice",
        "copies": f"copies: steps wait for them {percent(point.copying / point.seconds)} of the time",
        "wait": f"too slow: over {seconds(state.limit)}, though few tokens are computed twice",
        "": "",
    }[cause]


def _tip(state: State, pool: int) -> str:
    point = state.points[pool]
    return (
        f"Pool {pool:,}: {percent(SHARE)} done within {seconds(state.latency(pool))}, half within "
        f"{seconds(point.latency(0.5))}; {point.preemptions:,} preemptions, {point.recomputed:,} tokens recomputed "
        f"({percent(point.wasted)} of all), {point.copied:,} blocks copied"
    )


# ---- the cost of a victim


def _draw_crossover(drawing: Drawing, box: Box, state: State) -> None:
    """Draw the time per token of a victim: recomputed, and swapped over links of any speed."""
    serving = state.serving
    crossover = serving.crossover
    rates = [LINK.low * (LINK.high / LINK.low) ** (index / 24) for index in range(25)]
    swaps = [serving.crossover_of(Link("any", rate, 0, "swept")).swap for rate in rates]
    axes = Axes(
        drawing, box, LINK, Scale.around(0.7 * min(crossover.recompute, *swaps), 1.4 * max(crossover.recompute, *swaps))
    )
    axes.frame(
        f"link, GB/s (dot: {serving.link.name})", "time for a token",
        x_ticks=(1e9, 1e10, 1e11), x_format=lambda rate: f"{rate / 1e9:g}", y_ticks=axes.y.powers(), y_format=micro,
    )  # fmt: skip
    for span in spans(rates, [swap / crossover.recompute for swap in swaps]):
        axes.shade(*span, "swapping costs more than recomputing")
        axes.explain(*span, "slower")
    axes.mark_y(crossover.recompute, "recompute it", ORANGE, dash="")
    axes.line(rates, swaps, PURPLE)
    axes.points([serving.link.bandwidth], [crossover.swap], INK)
    axes.label(axes.at(serving.link.bandwidth, crossover.swap), "swap it", PURPLE, bold=False)
    pieces = f"in pieces of {serving.pieces.bytes_of_copy(serving.model) / 1024:,.0f} KiB"
    for rate, strip in axes.strips([LINKS[name].bandwidth for name in reversed(HOST_LINKS)]):
        name = next(name for name in HOST_LINKS if LINKS[name].bandwidth == rate)
        each = serving.crossover_of(LINKS[name])
        tip = f"{name}: {each.bandwidth / 1e9:.3g} GB/s {pieces}; a token takes {micro(each.swap)} out and back"
        drawing.rect(strip, "transparent", tip=f"{tip}, {micro(each.recompute)} to recompute")


def micro(value: float) -> str:
    """Format the time that one token takes."""
    return f"{value * 1e6:.3g} µs" if value < 0.9995e-3 else f"{value * 1e3:.3g} ms"

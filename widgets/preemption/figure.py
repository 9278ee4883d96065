"""Draw lesson 11's picture: latency by pool size, and below it the pool, step by step."""

from __future__ import annotations

import math

from minivllm_lab.palette import BLUE, GREEN, INK, ORANGE, VERMILLION
from minivllm_simulate.kv_links import LINKS, Link
from minivllm_simulate.load_sweep import Span, spans
from widgets.preemption.pool import draw_pool
from widgets.preemption.runs import Point
from widgets.preemption.state import HOST_LINKS, POOLS, SHARE, State
from widgets.shell.plot import Axes, Key, Scale, draw_head, figures, percent, seconds, short, three_boxes, tokens
from widgets.shell.svg import QUIET, Box, Drawing

POOL = Scale(POOLS[0], POOLS[-1], log=True)
TICKS = tuple(float(2**power) for power in range(13, 19))
THRASH = 0.25
"""The share of repeated work from which a region is marked as thrashing."""
LINK = Scale(1e9, 5e11, log=True)
RULE_WORDS = {
    "last in": "victim: the last one in",
    "worst priority": "victim: the worst priority",
    "first in": "victim: the first one in",
    "most blocks": "victim: most blocks",
    "fewest left": "victim: fewest tokens left",
    "least computed": "victim: least computed",
}
POLICY_WORDS = {
    "recompute": "recomputed",
    "small": "swapped in small pieces",
    "large": "swapped in large pieces",
}


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw latency by pool size, the GPU's useful work and a victim's cost beside it, and the pool
    below.
    """
    serving = state.serving
    drawing = Drawing(width, 0, "When the pool is too small", f"Latency against the pool, now {state.pool} tokens")
    victim = "victim: by your function" if state.own else RULE_WORDS[serving.rule]
    note = (
        f"{serving.name} on one {serving.gpu.name}: {serving.load:g} requests a second, {serving.prompt} tokens in, "
        f"about {serving.answer} out; {victim}, {POLICY_WORDS[serving.policy]}"
    )
    y = draw_head(drawing, "When the pool is too small", note, state.error, _keys(state))
    main, upper, lower = three_boxes(width, y + 26, 146, large=0.56, between=50)
    _draw_latency(Axes(drawing, main, POOL, _scale(state)), state, pinned)
    _draw_work(drawing, upper, state)
    _draw_crossover(drawing, lower, state)
    drawing.height = draw_pool(drawing, state, max(main.bottom, lower.bottom) + 60) + 8
    return drawing.render()


def _keys(state: State) -> list[Key]:
    return [
        (f"{percent(SHARE)} done within", BLUE, "", 2.5),
        ("half within", BLUE, "2 4", 1.8),
        (f"limit: {seconds(state.limit)}", GREEN, "4 3", 1.5),
        ("this load fills it", QUIET, "2 3", 1.5),
        ("late, or queue grows", VERMILLION, "", 2.0),
    ]


# ---- latency against the pool


def _scale(state: State) -> Scale:
    """Return a scale around the limit and the time that a mean answer takes alone, so that it
    rarely changes.
    """
    alone = state.serving.answer * state.serving.step_alone
    return Scale.around(0.7 * min(alone, state.limit), 12 * max(alone, state.limit))


def _draw_latency(axes: Axes, state: State, pinned: State | None) -> None:
    axes.frame("tokens in the pool", "seconds to the last token", x_ticks=TICKS, x_format=tokens, y_format=seconds)
    with axes.drawing.answer():
        _draw_broken(axes, state)
    if pinned and pinned.points:
        axes.pinned(pinned.run, [pinned.latency(pool) for pool in pinned.run], pinned.pool)
    axes.mark_y(state.limit, "", GREEN)
    if axes.x.low < state.saturation < axes.x.high:
        axes.mark_x(state.saturation, QUIET, dash="2 3")
    pools = state.run
    with axes.drawing.answer():
        axes.line(pools, [state.points[pool].latency(0.5) for pool in pools], BLUE, width=1.8, dash="2 4")
        axes.line(pools, [state.latency(pool) for pool in pools], BLUE)
    axes.here(state.pool, "pool", f"pool {tokens(state.pool)}")
    with axes.drawing.answer():
        axes.tips(pools, lambda pool: _tip(state, pool))


def _draw_broken(axes: Axes, state: State) -> None:
    """Shade where the engine does not start, and where requests take too long."""
    late = state.late
    for span in late:
        axes.broken(*span, late_words(state, span))
        if state.queue_at(span[1]):
            axes.without_end(span[1] or 0, state.limit)
    for span in state.stopped:
        inside = [pool for pool in state.refusals if (span[0] or 0) <= pool < (span[1] or math.inf)]
        axes.broken(*span, f"does not start: {state.refusals[inside[0]]}")


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
    point, load = state.points[pool], state.serving.load
    return {
        "queue": f"full: {tokens(pool)} tokens handle {figures(state.capacity[pool])} of {load:g} requests/s",
        "thrash": f"thrashing: {percent(point.wasted)} of the work is done twice",
        "copies": f"copies: steps wait for them {percent(point.copying / point.seconds)} of the time",
        "wait": f"too slow: over {seconds(state.limit)}, though little work is repeated",
        "": "",
    }[cause]


def _tip(state: State, pool: int) -> str:
    point = state.points[pool]
    return (
        f"Pool {pool:,}: {percent(SHARE)} done within {seconds(state.latency(pool))}, half within "
        f"{seconds(point.latency(0.5))}; {point.preemptions:,} preemptions, {point.recomputed:,} tokens recomputed "
        f"({percent(point.wasted)} of all), {point.copied:,} blocks copied"
    )


# ---- the GPU's useful work, and the cost of a victim


def _draw_work(drawing: Drawing, box: Box, state: State) -> None:
    """Draw the tokens computed each second, and how many of them are computed for the first time."""
    pools = state.run
    known = [state.points[pool] for pool in pools]
    most = max([state.serving.demand, *(point.computed / point.seconds for point in known)])
    axes = Axes(drawing, box, POOL, Scale(0, 1.12 * most))
    ticks = [tick for tick in axes.y.ticks(3) if tick]
    axes.frame("", "tokens/s; dashed: with repeats", x_ticks=TICKS[::2], x_format=tokens, y_ticks=ticks, y_format=short)
    with drawing.answer():
        for span in state.where([max(point.wasted, 1e-9) / THRASH for point in known]):
            axes.broken(*span, "thrashing")
        axes.line(pools, [point.computed / point.seconds for point in known], ORANGE, width=1.8, dash="4 3")
        axes.line(pools, [(point.computed - point.recomputed) / point.seconds for point in known], BLUE)
    axes.also_here(state.pool)
    with drawing.answer():
        axes.tips(pools, lambda pool: _work_tip(pool, state.points[pool]))


def _work_tip(pool: int, point: Point) -> str:
    new = (point.computed - point.recomputed) / point.seconds
    rates = f"{point.computed / point.seconds:,.0f} tokens a second, {new:,.0f} of them useful"
    return f"Pool {pool:,}: {rates}; {point.tokens / point.seconds:,.0f} are answers"


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
        f"link, bytes/s (dot: {serving.link.name})", "time to swap a token",
        x_ticks=(1e9, 1e10, 1e11), x_format=short, y_ticks=axes.y.powers(), y_format=micro,
    )  # fmt: skip
    for span in spans(rates, [swap / crossover.recompute for swap in swaps]):
        axes.shade(*span, "swapping costs more than recomputing")
    axes.mark_y(crossover.recompute, "recompute it", ORANGE, dash="")
    axes.line(rates, swaps, BLUE)
    tip = (
        f"{serving.link.name}: {crossover.bandwidth / 1e9:.3g} GB/s in pieces of "
        f"{serving.pieces.bytes_of_copy(serving.model) / 1024:,.0f} KiB; a token takes {micro(crossover.swap)} out and "
        f"back, {micro(crossover.recompute)} to recompute"
    )
    axes.points([serving.link.bandwidth], [crossover.swap], INK, tips=[tip])
    for rate, strip in axes.strips([LINKS[name].bandwidth for name in reversed(HOST_LINKS)]):
        name = next(name for name in HOST_LINKS if LINKS[name].bandwidth == rate)
        each = serving.crossover_of(LINKS[name])
        tip = f"{name}: a token takes {micro(each.swap)} out and back, {micro(each.recompute)} to recompute"
        drawing.rect(strip, "transparent", tip=tip)


def micro(value: float) -> str:
    """Format the time that one token takes."""
    return f"{value * 1e6:.3g} µs" if value < 0.9995e-3 else f"{value * 1e3:.3g} ms"

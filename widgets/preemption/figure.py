"""Draw lesson 11's picture: where a pool exceeds its limits, and below it the pool, step by step."""

from __future__ import annotations

import math

from minivllm_lab.palette import BLUE, GREEN, INK, ORANGE
from minivllm_simulate.kv_links import LINKS, Link
from minivllm_simulate.load_sweep import Span, spans
from widgets.preemption.pool import draw_pool
from widgets.preemption.state import HOST_LINKS, POOLS, SHARE, State
from widgets.shell.plot import (
    Axes,
    Scale,
    draw_head,
    figures,
    hidden_note,
    percent,
    seconds,
    short,
    three_boxes,
    tokens,
)
from widgets.shell.svg import SMALL, Box, Drawing

POOL = Scale(POOLS[0], POOLS[-1], log=True)
TICKS = tuple(float(2**power) for power in range(13, 19))
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
    """Draw the requests per second that each pool handles, with the tokens computed twice and a
    victim's cost beside it, and the pool below.
    """
    serving = state.serving
    drawing = Drawing(width, 0, "When the pool is too small", f"Load handled by each pool, now {state.pool} tokens")
    victim = "victim: by your function" if state.own else RULE_WORDS[serving.rule]
    note = (
        f"{serving.name} on one {serving.gpu.name}: {serving.load:g} requests a second, {serving.prompt} tokens in, "
        f"about {serving.answer} out; {victim}, {POLICY_WORDS[serving.policy]}"
    )
    y = draw_head(drawing, "When the pool is too small", note, state.error, ())
    main, upper, lower = three_boxes(width, y + 9, 163, large=0.56, between=50)
    _draw_handled(drawing, main, state, pinned)
    _draw_loss(drawing, upper, state)
    _draw_crossover(drawing, lower, state)
    drawing.height = draw_pool(drawing, state, max(main.bottom, lower.bottom) + 60) + 8
    return drawing.render()


# ---- the load that each pool handles


def _draw_handled(drawing: Drawing, box: Box, state: State, pinned: State | None) -> None:
    """Draw the requests per second that each pool handles, and those that arrive."""
    sizes, load = sorted(state.capacity), state.serving.load
    rates = [state.capacity[size] for size in sizes]
    axes = Axes(drawing, box, POOL, Scale.around(0.8 * min(load, *rates), 1.25 * max(load, *rates)))
    axes.frame("tokens in the pool", "requests/s at most, if nothing is computed twice", x_ticks=TICKS, x_format=tokens)
    _draw_broken(axes, state)
    if pinned and pinned.capacity:
        axes.pinned(sorted(pinned.capacity), [pinned.capacity[size] for size in sorted(pinned.capacity)], pinned.pool)
    axes.mark_y(load, f"{load:g}/s arrive", GREEN)
    axes.line(sizes, rates, BLUE)
    axes.here(state.pool, "pool", f"pool {tokens(state.pool)}")
    with axes.drawing.answer():
        axes.tips(state.run, lambda pool: _tip(state, pool))


def _draw_broken(axes: Axes, state: State) -> None:
    """Shade where the engine does not start, and where requests take too long."""
    for span in state.late:
        axes.broken(*span, late_words(state, span))
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
        "queue": f"full: {tokens(pool)} tokens handle at most {figures(state.capacity[pool])} of {load:g} requests/s",
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


# ---- the tokens computed twice, and the cost of a victim


def _draw_loss(drawing: Drawing, box: Box, state: State) -> None:
    """Draw the share of the tokens that are computed twice, or of the time that steps wait for copies."""
    pools = state.run
    lost = [state.points[pool].lost for pool in pools]
    axes = Axes(drawing, box, POOL, Scale(0, 0.5 if max(lost, default=0) <= 0.5 else 1))
    name = "tokens computed twice" if state.serving.policy == "recompute" else "time for copies"
    axes.frame("", name, x_ticks=TICKS[::2], x_format=tokens, y_ticks=(0, axes.y.high), y_format=percent)
    hidden_note(drawing, box)
    with drawing.answer():
        axes.line(pools, lost, ORANGE)
    with drawing.answer():
        axes.also_here(state.pool)
        if state.pool in pools:
            here = state.points[state.pool].lost
            axes.points([state.pool], [here], INK)
            drawing.text((box.right, box.y - 10), percent(here), size=SMALL, anchor="end", bold=True)
        axes.tips(pools, lambda pool: _tip(state, pool))


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
        axes.explain(*span, "slower")
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

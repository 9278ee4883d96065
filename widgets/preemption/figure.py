"""The picture of lesson 11's widget: latency over the size of the pool, and below it the pool, step by step."""

from __future__ import annotations

import math

from minivllm_lab.palette import BLUE, GREEN, INK, ORANGE
from minivllm_simulate.kv_links import LINKS, Link
from minivllm_simulate.load_sweep import Span, spans
from widgets.preemption.pool import draw_pool
from widgets.preemption.state import HOST_LINKS, POOLS, SHARE, State
from widgets.shell.plot import MARGIN, Axes, Key, Scale, draw_keys, seconds, short, three_boxes, tokens
from widgets.shell.svg import QUIET, Box, Drawing

POOL = Scale(POOLS[0], POOLS[-1], log=True)
TICKS = tuple(float(2**power) for power in range(13, 19))
THRASH = 0.25
"""Share of the work that is done twice, from which on the widget says so."""
LINK = Scale(1e9, 5e11, log=True)
RULE_WORDS = {
    "last in": "the last one in goes", "worst priority": "the worst priority goes", "first in": "the first one in goes",
    "most blocks": "who has most blocks goes", "fewest left": "who is nearly done goes",
    "least computed": "who has least computed goes",
}  # fmt: skip
POLICY_WORDS = {
    "recompute": "and is computed again", "small": "and is swapped in small pieces",
    "large": "and is swapped in large pieces",
}  # fmt: skip


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Latency over the pool; beside it what the GPU's work is worth, and what a victim costs; below, the pool."""
    serving = state.serving
    drawing = Drawing(width, 0, "When the pool is too small", f"Latency over the pool, {state.pool} tokens here")
    y = drawing.heading((MARGIN, 23), "When the pool is too small")
    off = f", {state.error}" if state.error else ""
    who = "your function chooses who goes" if state.own else RULE_WORDS[serving.rule]
    note = (
        f"{serving.name} on one {serving.gpu.name}: {serving.load:g} requests a second, {serving.prompt} tokens in, "
        f"about {serving.answer} out; {who}, {POLICY_WORDS[serving.policy]}; modelled{off}"
    )
    y = draw_keys(drawing, drawing.paragraph((MARGIN, y + 18), note, width - 2 * MARGIN) + 19, _keys(state))
    main, upper, lower = three_boxes(width, y + 26, 150, large=0.56)
    _draw_latency(Axes(drawing, main, POOL, _scale(state)), state, pinned)
    _draw_work(drawing, upper, state)
    _draw_crossover(drawing, lower, state)
    drawing.height = draw_pool(drawing, state, max(main.bottom, lower.bottom) + 60) + 8
    return drawing.render()


def _keys(state: State) -> list[Key]:
    return [
        (f"{SHARE:.0%} answered within", BLUE, "", 2.5),
        ("half of them", BLUE, "2 4", 1.8),
        (f"asked: {seconds(state.limit)}", GREEN, "4 3", 1.5),
        ("filled by this load", QUIET, "2 3", 1.5),
    ]


# ---- latency over the pool


def _scale(state: State) -> Scale:
    """Around what is asked and what a mean answer takes alone, so that it changes seldom."""
    alone = state.serving.answer * state.serving.step_alone
    return Scale.around(0.7 * min(alone, state.limit), 12 * max(alone, state.limit))


def _draw_latency(axes: Axes, state: State, pinned: State | None) -> None:
    axes.frame(
        "tokens that the pool holds",
        "seconds to the last token",
        x_ticks=TICKS,
        x_format=tokens,
        y_format=seconds,
    )
    with axes.drawing.answer():
        _draw_broken(axes, state)
    if pinned and pinned.points:
        axes.pinned(pinned.run, [pinned.latency(one) for one in pinned.run])
    axes.mark_y(state.limit, "", GREEN)
    if axes.x.low < state.saturation < axes.x.high:
        axes.mark_x(state.saturation, QUIET, dash="2 3")
    pools = state.run
    with axes.drawing.answer():
        axes.line(pools, [state.points[one].latency(0.5) for one in pools], BLUE, width=1.8, dash="2 4")
        axes.line(pools, [state.latency(one) for one in pools], BLUE)
    axes.here(state.pool, "pool", f"pool {tokens(state.pool)}")
    with axes.drawing.answer():
        for pool, strip in axes.strips(pools):
            axes.drawing.rect(strip, "transparent", tip=_tip(state, pool))


def _draw_broken(axes: Axes, state: State) -> None:
    """Where the engine does not start, and where answers come too late."""
    late = state.late
    for span in late:
        axes.broken(*span, late_words(state, span))
    for span in state.stopped:
        inside = [one for one in state.refusals if (span[0] or 0) <= one < (span[1] or math.inf)]
        axes.broken(*span, f"does not start: {state.refusals[inside[0]]}")


def late_words(state: State, span: Span) -> str:
    """Why answers come late in a region, by what is wrong at its edge, or here if it has none."""
    low, high = span
    inside = [one for one in state.run if (low or 0) <= one < (high or math.inf)]
    if not inside:
        return ""
    nearest = max(inside) if high is not None else state.pool if state.pool in inside else min(inside)
    return cause_words(state, state.cause(nearest), nearest)


def cause_words(state: State, cause: str, pool: int) -> str:
    """What goes wrong with a pool."""
    point = state.points[pool]
    return {
        "queue": f"full: {state.capacity[pool]:.3g} requests a second at most, and {state.serving.load:g} come",
        "thrash": f"thrash: {point.wasted:.0%} of the work is done twice",
        "copies": f"copies: steps wait for them {point.copying / point.seconds:.0%} of the time",
        "wait": f"too slow: over {seconds(state.limit)}, though little is done twice",
        "": "",
    }[cause]


def _tip(state: State, pool: int) -> str:
    point = state.points[pool]
    return (
        f"Pool {pool:,}: {SHARE:.0%} within {seconds(state.latency(pool))}, half within {seconds(point.latency(0.5))}; "
        f"{point.preemptions:,} preemptions, {point.recomputed:,} tokens computed again ({point.wasted:.0%} of all), "
        f"{point.copied:,} blocks copied"
    )


# ---- what the GPU's work is worth, and what a victim costs


def _draw_work(drawing: Drawing, box: Box, state: State) -> None:
    """Tokens a second that are computed, and those of them that were not computed before."""
    pools = state.run
    known = [state.points[one] for one in pools]
    most = max([state.serving.demand, *(one.computed / one.seconds for one in known)])
    axes = Axes(drawing, box, POOL, Scale(0, 1.12 * most))
    ticks = [tick for tick in axes.y.ticks(3) if tick]
    axes.frame("", "tokens/s: all, and new ones", x_ticks=(), y_ticks=ticks, y_format=short)
    with drawing.answer():
        for span in state.where([max(one.wasted, 1e-9) / THRASH for one in known]):
            axes.broken(*span, "thrash")
        axes.line(pools, [one.computed / one.seconds for one in known], ORANGE, width=1.8, dash="4 3")
        axes.line(pools, [(one.computed - one.recomputed) / one.seconds for one in known], BLUE)
    axes.also_here(state.pool)
    with drawing.answer():
        for pool, strip in axes.strips(pools):
            point = state.points[pool]
            new = (point.computed - point.recomputed) / point.seconds
            said = f"Pool {pool:,}: {point.computed / point.seconds:,.0f} tokens a second, {new:,.0f} of them new"
            drawing.rect(strip, "transparent", tip=f"{said}; {point.tokens / point.seconds:,.0f} are of answers")


def _draw_crossover(drawing: Drawing, box: Box, state: State) -> None:
    """Seconds for each token of a victim: computed again, and copied out and back over links of any speed."""
    serving, found = state.serving, state.serving.crossover
    rates = [LINK.low * (LINK.high / LINK.low) ** (index / 24) for index in range(25)]
    swaps = [serving.crossover_of(Link("any", rate, 0, "swept")).swap for rate in rates]
    axes = Axes(
        drawing, box, LINK, Scale.around(0.7 * min(found.recompute, *swaps), 1.4 * max(found.recompute, *swaps))
    )
    axes.frame(
        "link to the host, bytes a second", "a victim's token, swapped", x_ticks=(1e9, 1e10, 1e11), x_format=short,
        y_ticks=axes.y.powers(), y_format=micro,
    )  # fmt: skip
    dearer = spans(rates, [one / found.recompute for one in swaps])
    for span in dearer:
        axes.shade(*span, "swap costs more than computing again")
    below = swaps[-1] > found.recompute or axes.y.share(found.recompute) > 0.85  # beside the curve, not on it
    axes.mark_y(found.recompute, "computed again", ORANGE, dash="", below=below)
    axes.line(rates, swaps, BLUE)
    tip = (
        f"{serving.link.name}: {found.bandwidth / 1e9:.3g} GB/s in pieces of "
        f"{serving.pieces.bytes_of_copy(serving.model) / 1024:,.0f} KiB; out and back {micro(found.swap)} a token, "
        f"computed again {micro(found.recompute)}"
    )
    axes.points([serving.link.bandwidth], [found.swap], INK, tips=[tip])
    for rate, strip in axes.strips([LINKS[name].bandwidth for name in reversed(HOST_LINKS)]):
        name = next(name for name in HOST_LINKS if LINKS[name].bandwidth == rate)
        each = serving.crossover_of(LINKS[name])
        said = f"{name}: out and back {micro(each.swap)} a token, computed again {micro(each.recompute)}"
        drawing.rect(strip, "transparent", tip=said)


def micro(value: float) -> str:
    """A time for a token."""
    return f"{value * 1e6:.3g} µs" if value < 0.9995e-3 else f"{value * 1e3:.3g} ms"

"""Draw lesson 11's picture: the pool and one victim, and below them what each pool loses."""

from __future__ import annotations

import math

from minivllm_lab.pictures.palette import GREEN, ORANGE, PURPLE
from widgets.preemption.pool import draw_pool
from widgets.preemption.state import POOLS, SHARE, State
from widgets.shell.plot import MARGIN, Axes, Scale, counted, hidden_note, modelled, percent, seconds, tokens
from widgets.shell.svg import SMALL, Box, Drawing

POOL = Scale(POOLS[0], POOLS[-1], log=True)
TICKS = tuple(float(2**power) for power in range(13, 19))


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw the pool and one victim over time; below, what each pool loses to preemption."""
    serving = state.serving
    point = state.points.get(state.pool)
    title = f"The pool, and one {'victim' if point and point.preemptions else 'request'}"
    drawing = Drawing(width, 0, title, f"A pool of {state.pool} tokens, and what a victim holds over time")
    victim = "by your function" if state.own else serving.rule
    note = f"{serving.name} on one {serving.gpu.name}; victim: {victim}; modelled"
    with drawing.layer(tip=modelled(state.error)):
        y = drawing.paragraph((MARGIN, drawing.heading((MARGIN, 23), title) + 18), note, width - 2 * MARGIN)
    loss = Box(60, draw_pool(drawing, state, y + 32) + 64, width - MARGIN - 60, 104)
    _draw_loss(drawing, loss, state, pinned)
    drawing.height = loss.bottom + 44
    return drawing.render()


# ---- the tokens computed twice, by pool


def _draw_loss(drawing: Drawing, box: Box, state: State, pinned: State | None) -> None:
    """Draw the share of the tokens that are computed twice, or of the time that steps wait for copies."""
    pools, swaps = state.run, state.serving.policy != "recompute"
    lost = [state.points[pool].lost for pool in pools]
    alike = pinned if pinned and (pinned.serving.policy != "recompute") == swaps else None  # the same quantity
    before = [alike.points[pool].lost for pool in alike.run] if alike else []
    axes = Axes(drawing, box, POOL, Scale(0, 0.5 if max([0.0, *lost, *before]) <= 0.5 else 1))
    words, colour = (
        ("of the time, steps wait for copies", PURPLE) if swaps else ("of all tokens computed twice", ORANGE)
    )
    axes.frame("tokens in the pool", "", x_ticks=TICKS, x_format=tokens, y_ticks=(0, axes.y.high), y_format=percent)
    for span in state.late:
        nearest = state.nearest(span)
        why = "" if nearest is None else cause_words(state, state.cause(nearest), nearest)
        axes.shade(*span, why)
        axes.explain(*span, why.split(":")[0])
        if any(pool >= (span[1] or math.inf) and not state.causes(pool) for pool in pools):
            axes.explain(span[1], None, "suffices on average", GREEN)
    for span in state.stopped:
        inside = [pool for pool in state.refusals if (span[0] or 0) <= pool < (span[1] or math.inf)]
        axes.shade(*span, f"does not start: {state.refusals[inside[0]]}")
        axes.explain(*span, "does not start")
    if alike and before:
        axes.pinned(alike.run, before, alike.pool)
    with drawing.answer():
        axes.line(pools, lost, colour)
    axes.here(state.pool, "pool")
    hidden_note(drawing, box)
    if state.pool in pools:
        point = state.points[state.pool]
        drawing.number((MARGIN, box.y - 12), percent(point.lost), words, colour)
        with drawing.answer():
            if point.recomputed:
                each = point.recomputed / point.preemptions
                words = f"{counted(point.preemptions, 'preemption')} × {each:,.0f} tokens on average:"
                drawing.text((MARGIN, box.y - 38), words, size=SMALL)
            axes.points([state.pool], [point.lost], colour, radius=6)
            axes.tips(pools, lambda pool: _tip(state, pool))


def cause_words(state: State, cause: str, pool: int) -> str:
    """Describe what goes wrong with a pool."""
    point, load, most = state.points[pool], state.serving.load, state.serving.steady().capacity()
    full = f"pool full on average: this load needs {state.saturation / 1024:,.0f}K tokens, not {tokens(pool)}"
    return {
        "queue": full if load <= most else f"too slow: any pool handles at most {most:.3g} of {load:g} requests/s",
        "thrash": f"thrashing: {percent(point.wasted)} of all tokens are computed twice",
        "copies": f"copies: steps wait for them {percent(point.copying / point.seconds)} of the time",
        "wait": f"too slow: over {seconds(state.limit)}, though few tokens are computed twice",
        "": "",
    }[cause]


def _tip(state: State, pool: int) -> str:
    point = state.points[pool]
    return (
        f"Pool {pool:,}: {percent(SHARE)} done within {seconds(state.latency(pool))}; {point.preemptions:,} "
        f"preemptions, {point.recomputed:,} tokens recomputed, {point.copied:,} blocks copied"
    )

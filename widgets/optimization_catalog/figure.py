"""Draw lesson 05's levers as two staircases, one for each order, and below them a token's time by
requests at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from minivllm_lab.pictures.drawing import QUIET, Point, text_width
from minivllm_lab.pictures.palette import BLUE, GREEN, GREY, INK, SKY, VERMILLION
from minivllm_simulate.levers import LeverResult
from widgets.optimization_catalog.runs import MODEL, REQUESTS, SLOTS, Outcome, Row, State, Step
from widgets.shell.plot import ROW, VALUE, WIDE, Axes, Scale, balanced, counted, draw_keys, hidden_note, percent
from widgets.shell.svg import SMALL, Box, Drawing, text_box
from widgets.shell.theme import TINT

MARGIN, CLIMB, SWEPT = 14, 198, 56
"""Pixels: around the picture, and the heights of the staircases and of the plot below."""
SIGNS = {"waiting": "…", "starts": "starts", "refused": "✕"}
ORDERS = ("in the list's order", "in reverse")
STAIRS = (BLUE, SKY)
"""The line of each order's staircase."""
BREAKS = {
    "refused": "does not start: too little memory",
    "late": "too slow",
    "preempts": "preemptions: the KV cache is full",
}
"""What is missed, and why."""
ACTS = {
    "kv_cache": "No token is computed twice.",
    "paging": "Memory is allocated block by block, not reserved for the longest request.",
    "continuous_batching": "A request joins the batch as soon as another leaves.",
    "flash_attention": "Scores stay on the chip, and the kernel reads blocks in place.",
    "gqa": "Four query heads share one head of keys and values: a quarter of the cache.",
    "chunked_prefill": "A prompt that does not fit into the rest of a step is cut into chunks.",
    "prefix_caching": "A prefix that another request had is not computed again.",
    "kv_dtype": "Keys and values in 8 bits take half the room and half the bandwidth.",
    "weight_bits": "A step reads about a quarter of the weights' bytes, but must unpack them.",
    "speculative_tokens": "A step verifies three drafts of each request; each is accepted with 60 % probability.",
    "tensor_parallel": "Two GPUs share each step, with two all-reduces per layer.",
    "cuda_graphs": "The host launches a step once instead of kernel by kernel.",
}
ON_THE_CACHE = ("paging", "prefix_caching", "kv_dtype")
"""Levers that act on the KV cache."""
WHY = {
    ("paging", "slower"): "Each step copies the blocks together until a kernel reads them in place.",
    ("paging", "nothing"): "Memory was not the limit.",
    ("kv_cache", "faster"): "Without it, each step computes every context again.",
    ("weight_bits", "slower"): "The step is compute-bound, and unpacking adds arithmetic.",
    ("weight_bits", "nothing"): "The step is not bound by reading the weights.",
    ("cuda_graphs", "nothing"): "The GPU, not its host, is the bottleneck.",
    ("cuda_graphs", "slower"): "The GPU is the bottleneck, and graphs take memory from the KV cache.",
    ("chunked_prefill", "nothing"): "Hardly any prompt had to wait for room in a step.",
    ("prefix_caching", "nothing"): "Few prompt tokens hit the cache, or they cost little.",
    ("continuous_batching", "nothing"): "Requests rarely wait for others in their batch.",
}


def figure(state: State, width: float = 640, pinned: State | None = None) -> str:
    """Draw the levers' staircases, and a token's time by requests at once."""
    drawing = Drawing(width, 0, "What each lever buys", _described(state))
    drawing.heading((MARGIN, 19), "What each lever buys")
    note = f"Tokens/s (log): {MODEL}, {state.gpu}, {REQUESTS[state.requests]}, ≤ {state.slots} at once; modelled"
    with drawing.layer(tip=f"The model's {state.error} against published runs." if state.error else ""):
        y = drawing.paragraph((MARGIN, 37), note, width - 2 * MARGIN)
    names = [f": {state.on[0].title} {place}" if state.on else "" for place in ("first", "last")]
    keys = zip(ORDERS, names, STAIRS, strict=True)
    y = draw_keys(drawing, y + 19, [(order + name, line, "", 4) for order, name, line in keys])
    y = _draw_climbs(drawing, y + 68, state)
    swept = Box(MARGIN + 34, y + 32, width - 2 * MARGIN - 34, SWEPT)
    _draw_swept(drawing, swept, state, pinned)
    drawing.height = swept.bottom + 42
    return drawing.render()


def _described(state: State) -> str:
    factors = (f"{row.title} {' and '.join(_change(step) for step in row.steps)}" for row in state.on)
    return f"{'; '.join(_ends(state))}. {ORDERS[0].capitalize()} and {ORDERS[1]}: {'; '.join(factors)}."


def _ends(state: State) -> tuple[str, str]:
    off = [row.title for row in state.rows if not row.steps]
    on = f"{len(state.on)} of {len(state.rows)} on" + f", without {off[0]}" * (len(off) == 1)
    return f"nothing on: {rate_words(state.nothing)}", f"{on}: {rate_words(state.everything)}"


def most_dependent(state: State) -> Row | None:
    """Return the lever whose gain depends the most on the others, if any gain depends on them."""
    return max((row for row in state.on if dependence(row) > 0.1), key=dependence, default=None)


def dependence(row: Row) -> float:
    """Return how far apart a lever's factors are in both orders, as a logarithm; 0 if one is unknown."""
    forth, back = (step.factor for step in row.steps)
    return abs(math.log(forth / back)) if forth and back else 0.0


# ---- the staircases


class Stair(NamedTuple):
    """A lever's stair in one order; where the server does not start, the rate before stays."""

    row: Row
    step: Step
    start: tuple[int, float]
    """How many levers are on before it, and the rate then."""
    top: tuple[int, float]
    colour: str
    special: bool
    """True for the lever whose gain depends most on the others."""


def _stairs(state: State, reverse: int) -> list[Stair]:
    """List the stairs of one order that are known."""
    rows, dependent = state.on[::-1] if reverse else state.on, most_dependent(state)
    rates = accumulate((row.steps[reverse].after for row in rows), _reached, initial=_reached(1.0, state.nothing))
    stairs = []
    for row, (start, top) in zip(rows, pairwise(enumerate(rates)), strict=True):
        effect, special = row.steps[reverse].effect, row is dependent
        quiet = GREEN if special else QUIET if effect == "nothing" else INK
        colour = VERMILLION if effect in ("slower", "refused") else quiet
        stairs += [Stair(row, row.steps[reverse], start, top, colour, special)] * (effect != "waiting")
    return stairs


def _reached(rate: float, run: Outcome) -> float:
    return run.tokens_per_second if isinstance(run, LeverResult) else rate


def _draw_climbs(drawing: Drawing, top: float, state: State) -> float:
    """Draw both staircases in one plot; return the y below."""
    climbs, low = [_stairs(state, reverse) for reverse in (0, 1)], _reached(1.0, state.nothing)
    rates = [low, _reached(low, state.everything), *(stair.top[1] for stairs in climbs for stair in stairs)]
    left, right = _left(state, drawing.width), drawing.width - MARGIN
    box = Box(left, top, right - left, CLIMB + 28 * (drawing.width < WIDE))
    scale = Scale(min(rates) / 1.9, max(*rates, 3 * low), log=True)
    axes = Axes(drawing, box, Scale(0, max(1, len(state.on))), scale)
    first, last = _ends(state)
    drawing.text((MARGIN, box.bottom + 16), first, size=SMALL, bold=True)
    drawing.text((right, box.bottom + 16), "each stair: one lever more", size=SMALL, colour=QUIET, anchor="end")
    drawing.text((right, top - 52), last, size=SMALL, bold=True, anchor="end")
    paths = [[axes.at(*corner) for stair in stairs for corner in _corners(stair)] for stairs in climbs]
    with drawing.answer():
        drawing.polygon([*paths[0], *paths[1][::-1]], TINT)
    for draws in ((_draw_stairs, _draw_stairs), (_name_all, _name_changes)):
        for reverse, (draw, stairs) in enumerate(zip(draws, climbs, strict=True)):
            with drawing.answer() if reverse else nullcontext():
                draw(axes, stairs, reverse)
    hidden_note(drawing, Box(left + box.width / 2, top + CLIMB / 2, box.width / 2, CLIMB / 2))
    drawing.circle(axes.at(0, low), 5, GREY)
    if isinstance(state.everything, LeverResult):
        mean = state.everything.tokens_per_second * state.everything.inter_token_latency
        drawing.text((right, top - 37), f"{mean:.2g} at once on average", size=SMALL, anchor="end")
        end = axes.at(len(state.on), rates[1])
        drawing.line((end[0], top - 33), end)
        drawing.circle(end, 5, BLUE)
    return box.bottom + 16


def _left(state: State, width: float) -> float:
    """Return the left end of the staircases, so that each lever's name has room left of its stair."""
    count, right = len(state.on), width - MARGIN
    rooms = (MARGIN + 12 + 1.02 * text_width(f"{row.title} ×0.00", SMALL) for row in state.on)
    return max([126, *((room - right * at / count) / (1 - at / count) for at, room in enumerate(rooms))])


def _corners(stair: Stair) -> list[Point]:
    return [stair.start, (stair.start[0], stair.top[1]), stair.top]


def _draw_stairs(axes: Axes, stairs: Sequence[Stair], reverse: int) -> None:
    for stair in stairs:
        start, corner, top = (axes.at(*corner) for corner in _corners(stair))
        colour = VERMILLION if stair.colour == VERMILLION else STAIRS[reverse]
        with axes.drawing.layer(group=stair.row.field):
            axes.drawing.polyline([start, corner, top], colour)
            if stair.special:
                axes.drawing.line(start, corner, stair.colour, width=7)
            place = Box(start[0] - 4, min(start[1], top[1]) - 4, top[0] - start[0], abs(top[1] - start[1]) + 8)
            axes.drawing.rect(place, "transparent", tip=_tip(stair, reverse))


def _name_all(axes: Axes, stairs: Sequence[Stair], _reverse: int) -> None:
    """Write each lever's name and factor left of its stair. If there is no room for all, leave out
    those that buy nothing.
    """
    for named in (stairs, [stair for stair in stairs if stair.step.effect != "nothing"]):
        grounds = [axes.at(*stair.start)[1] - 5 for stair in named]
        ys = list(accumulate(grounds, lambda above, y: min(above - ROW + 1, y)))
        if not ys or ys[-1] > axes.box.y - 24:
            break
    for stair, y in zip(named, ys, strict=True):
        x, high = axes.at(stair.start[0], stair.top[1])
        if _write(axes, [(x - 10, y)], stair, anchor="end"):
            axes.drawing.line((x, min(y - 8, high)), (x, high))


def _name_changes(axes: Axes, stairs: Sequence[Stair], _reverse: int) -> None:
    """Write the names and factors of the levers that buy or cost much, the most dependent one's first, then losses."""
    for stair in sorted(stairs, key=lambda stair: (not stair.special, stair.colour != VERMILLION)):
        (x, low), (_, high) = axes.at(*stair.start), axes.at(*stair.top)
        if stair.special and low - high > 100:
            _draw_surprise(axes, stair, (x - 10, low))
        elif stair.special or low - high >= ROW or stair.colour == VERMILLION:
            _write(axes, [(x + 6, high + 17 * down) for down in (1, 2, 3)], stair)
    if stairs[2:] and stairs[-1].special:
        first, last = stairs[0], stairs[-2]
        words = f"{first.row.title} to {last.row.title}: {_change(Step(first.step.before, last.step.after))} together"
        places = [(axes.box.right - 4, axes.at(*last.top)[1] + down) for down in (17, 57)]
        _write(axes, places, last._replace(colour=INK), "end", words)


def _draw_surprise(axes: Axes, stair: Stair, place: Point) -> None:
    """Write left of a tall stair, above its foot, what its lever buys, and why."""
    why = balanced(WHY.get((stair.row.field, stair.step.effect), ""), 150)
    x, y = place[0], place[1] - 27 - ROW * len(why)
    axes.drawing.text((x, y), _change(stair.step), size=VALUE, colour=stair.colour, anchor="end", bold=True)
    where = "last" if stair.top[0] == axes.x.high else "in reverse"
    for index, words in enumerate([f"{stair.row.title} {where}", *why]):
        colour = INK if index else stair.colour
        axes.drawing.text((x, y + 18 + ROW * index), words, size=SMALL, colour=colour, anchor="end", bold=not index)


def _write(axes: Axes, places: Sequence[Point], stair: Stair, anchor: str = "start", words: str = "") -> bool:
    """Write a lever's name and factor, or `words`, at the first of these places where they touch no other
    words; return whether there is one.
    """
    drawing, words = axes.drawing, words or f"{stair.row.title} {_change(stair.step)}"
    for place in places:
        box = text_box(place, words, SMALL, anchor, stair.special)
        if box.x > 2 and box.right < drawing.width - 2 and not any(box.overlaps(other) for other in drawing.words):
            drawing.text(place, words, size=SMALL, colour=stair.colour, anchor=anchor, bold=stair.special)
            return True
    return False


def _change(step: Step) -> str:
    """Format a lever's effect as a factor, or say why there is none."""
    if step.factor is None:
        return SIGNS[step.effect]
    return f"×{factor_words(step.factor)}"


def factor_words(factor: float) -> str:
    """Format a factor with two decimals, or with one if it is large."""
    return f"{factor:.2f}" if factor < 9.995 else f"{factor:.1f}"


def apart(value: float, limit: float) -> str:
    """Format `value` with enough digits to tell it from `limit`."""
    digits = next((digits for digits in range(1, 7) if round(value, digits) != limit), 7)
    return f"{value:,.{digits}f}"


def rate_words(run: Outcome) -> str:
    """Format a rate, rounded down, or say that there is none."""
    if isinstance(run, LeverResult):
        rate = run.tokens_per_second
        return f"{int(rate):,} tokens/s" if rate >= 100 else f"{rate:.3g} tokens/s"
    return "✕ does not start" if run else "…"


def _counts(run: LeverResult) -> str:
    """List the results of a run, from its rate to its preemptions."""
    cache = f"a KV cache of {run.kv_tokens:,} tokens" if run.kv_tokens else "no KV cache"
    hits = f", {percent(run.prefix_hit_rate)} of the prompt tokens hit the cache" if run.prefix_hit_rate else ""
    lost = f", {counted(run.preemptions, 'preemption')}" if run.preemptions else ""
    wait = f"{run.inter_token_latency * 1e3:,.1f} ms between tokens"
    batch = f"{run.mean_batch:.1f} requests per step"
    return f"{run.tokens_per_second:,.1f} tokens/s, {wait}, {batch}, {cache}{hits}{lost}"


def _tip(stair: Stair, reverse: int) -> str:
    """Write a tooltip: the results before and after, and why."""
    field, step = stair.row.field, stair.step
    head = f"Number {stair.start[0] + 1} {ORDERS[reverse]}, {stair.row.title}"
    if not isinstance(step.after, LeverResult):
        return f"{head}: the server does not start. {step.after}."
    before = _counts(step.before) if isinstance(step.before, LeverResult) else "does not start"
    idle = field in ON_THE_CACHE and not step.after.kv_tokens
    why = "There is no KV cache yet." if idle else WHY.get((field, step.effect), "")
    return f"{head}: {_change(step)}. Before: {before}. With it: {_counts(step.after)}. {ACTS[field]} {why}"


def _draw_swept(drawing: Drawing, box: Box, state: State, pinned: State | None) -> None:
    """Draw the time between a request's tokens by requests at once, and its limit."""
    slots, waits, tips = _known(state)
    limit = state.level * 1e3
    low, high = math.floor(math.log2(0.9 * min([limit, *waits]))), math.ceil(math.log2(1.1 * max([limit, *waits])))
    ends = Scale(2.0**low, 2.0**high, log=True)  # whole powers, so that it rarely changes during a sweep
    axes = Axes(drawing, box, Scale(SLOTS[0], SLOTS[-1], log=True), ends)
    name = f"with {f'these {len(state.on)}' if state.on else 'nothing'} on: ms a client waits per token"
    axes.frame("most requests at once: max_num_seqs", name, x_ticks=axes.x.doublings(), y_ticks=axes.y.doublings(3))
    for low, high, trouble in breaks(state):
        axes.tint(low, high, BREAKS[trouble], VERMILLION)
    if pinned is not None:
        axes.pinned(*_known(pinned)[:2], pinned.slots)
    axes.mark_y(limit, f"limit {limit:g} ms", GREEN)
    axes.line(slots, waits, BLUE, tips=tips)
    axes.here(state.slots, "slots")
    if state.slots in slots:
        x, y = axes.at(state.slots, wait := waits[slots.index(state.slots)])
        axes.label((x, y - 8), f"{apart(wait, limit)} ms", BLUE)
        axes.points([state.slots], [wait], BLUE)


def _known(state: State) -> tuple[list[int], list[float], list[str]]:
    """Return the numbers of slots at which the server runs, with milliseconds between tokens and tooltips."""
    runs = [(slots, run) for slots, run in zip(SLOTS, state.by_slots, strict=True) if isinstance(run, LeverResult)]
    waits = [run.inter_token_latency * 1e3 for _, run in runs]
    return [slots for slots, _ in runs], waits, [_point_tip(state, *pair) for pair in runs]


def breaks(state: State) -> list[tuple[float | None, float | None, str]]:
    """Return the regions in which the server with all levers breaks, as (low, high, cause); None
    stands for the axis's end.
    """
    regions: list[tuple[float | None, float | None, str]] = []
    at = 0
    between = [_edge(state.level, *pair) for pair in pairwise(zip(SLOTS, state.by_slots, strict=True))]
    for broken, run in groupby(state.by_slots, key=lambda outcome: bool(state.trouble(outcome))):
        outcomes = list(run)
        first, last = at, at + len(outcomes) - 1
        at = last + 1
        if broken:
            low = between[first - 1] if first else None
            high = between[last] if last + 1 < len(SLOTS) else None
            regions.append((low, high, state.trouble(outcomes[0])))
    return regions


def _edge(level: float, low: tuple[int, Outcome], high: tuple[int, Outcome]) -> float:
    """Return where the line between two runs crosses the limit, or the middle if it does not."""
    waits = [run.inter_token_latency / level for _, run in (low, high) if isinstance(run, LeverResult)]
    crosses = len(waits) == 2 and (waits[0] > 1) != (waits[1] > 1)
    share = math.log(waits[0]) / math.log(waits[0] / waits[1]) if crosses else 0.5
    return low[0] * (high[0] / low[0]) ** share


def _point_tip(state: State, slots: int, run: LeverResult) -> str:
    words = {"late": f" That is over the limit of {state.level * 1e3:g} ms.", "preempts": " The KV cache is full."}
    return f"{slots} at once: {_counts(run)}.{words.get(state.trouble(run), '')}"

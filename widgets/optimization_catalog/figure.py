"""Draw what each of lesson 05's levers buys in both orders, and below it a token's time by requests
at once.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise

from minivllm_lab.pictures.drawing import QUIET, RULE, Point, text_width
from minivllm_lab.pictures.palette import BLUE, GREEN, INK, VERMILLION
from minivllm_simulate.levers import KNOWN_ERROR, LeverResult
from widgets.optimization_catalog.runs import MODEL, SLOTS, Outcome, Row, State, Step
from widgets.shell.plot import MARGIN, ROW, VALUE, WIDE, Axes, Scale, balanced, counted, hidden_note, percent
from widgets.shell.svg import SMALL, Box, Drawing, Segment, legend
from widgets.shell.theme import BROKEN, CARD, MID

NAMES, PITCH, SWEPT = 132, 18, 84
"""Pixels: the width of the levers' names, the height of a row, and that of the plot below."""
SIGNS = {"waiting": "…", "starts": "starts", "refused": "✕ does not start"}
ORDERS, ENDS = ("above on", "below on"), ("first", "last")
"""Names of the two orders: for any lever, by the levers that are on before it; for the topmost, by its place."""
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
WHY = {
    ("paging", "uncached"): "No cache to page.",
    ("paging", "slower"): "Each step copies its blocks together.",
    ("paging", "nothing"): "Memory was not the limit.",
    ("kv_cache", "faster"): "Without it, each step recomputes every context.",
    ("weight_bits", "slower"): "Unpacking adds arithmetic.",
    ("weight_bits", "nothing"): "The step is not bound by reading the weights.",
    ("cuda_graphs", "nothing"): "The GPU, not its host, is the bottleneck.",
    ("cuda_graphs", "slower"): "Graphs take memory from the cache.",
    ("chunked_prefill", "nothing"): "Hardly any prompt had to wait for room in a step.",
    ("prefix_caching", "nothing"): "Few prompt tokens hit the cache, or they cost little.",
    ("continuous_batching", "nothing"): "Requests rarely wait for others in their batch.",
}


def figure(state: State, width: float = 640, pinned: State | None = None) -> str:
    """Draw what each lever buys in both orders, and a token's time by requests at once."""
    drawing = Drawing(width, 0, "What each lever buys", _described(state))
    with drawing.layer(tip=f"The model's {KNOWN_ERROR} against published runs."):
        note = (
            f"{MODEL} on {state.gpu}, modelled: {rate_words(state.nothing).split()[0]} → {rate_words(state.everything)}"
        )
        y = drawing.heading((MARGIN, 21), "What each lever buys", note)
    mark = partial(_draw_mark, drawing)
    keys = [Segment(f"with only those {on}", 0, "", draw=partial(mark, last=last)) for last, on in enumerate(ORDERS)]
    y = legend(drawing, (MARGIN, y + 22), keys, width - 2 * MARGIN)
    y = _draw_levers(drawing, y + 10, state)
    words = f"Wait for a token, with {f'these {len(state.on)}' if state.on else 'nothing'} on"
    swept = Box(MARGIN + 34, drawing.heading((MARGIN, y + 44), words) + 12, width - 2 * MARGIN - 34, SWEPT)
    _draw_swept(drawing, swept, state, pinned)
    drawing.height = swept.bottom + 42
    return drawing.render()


def _described(state: State) -> str:
    factors = (f"{row.title} {' and '.join(_change(step) for step in row.steps)}" for row in state.on)
    return f"Tokens/s with only those {' and '.join(ORDERS)}: {'; '.join(factors)}."


def most_dependent(state: State) -> Row | None:
    """Return the lever whose gain depends the most on the others, if any gain depends on them."""
    return max((row for row in state.on if dependence(row) > 0.1), key=dependence, default=None)


def dependence(row: Row) -> float:
    """Return how far apart a lever's factors are in both orders, as a logarithm; 0 if one is unknown."""
    forth, back = (step.factor for step in row.steps)
    return abs(math.log(forth / back)) if forth and back else 0.0


# ---- what each lever buys


def _draw_levers(drawing: Drawing, top: float, state: State) -> float:
    """Draw a row for each lever, with a dot for its factor in each order; return the y below."""
    count, special = len(state.rows), most_dependent(state)
    factors = [step.factor for row in state.on for step in row.steps if step.factor]
    scale = Scale(min(0.6, *factors, 1), max(10, 1.2 * max(factors, default=1)), log=True)
    box = Box(MARGIN + NAMES, top, drawing.width - 2 * MARGIN - NAMES, PITCH * count)
    axes = Axes(drawing, box, scale, Scale(count, 0))
    one, below = axes.at(1, 0)[0], box.bottom + 14
    drawing.rect(replace(box, width=one - box.x), BROKEN)
    drawing.text((MARGIN, below), "tokens/s", size=SMALL, colour=QUIET)
    drawing.text((one - 11, below), "slower", size=SMALL, colour=VERMILLION, anchor="end")
    for factor in scale.ticks(5):
        x = axes.at(factor, 0)[0]
        drawing.line((x, top), (x, box.bottom), QUIET if factor == 1 else RULE)
        with drawing.answer() if factor > 2 else nullcontext():
            drawing.text((x, below), f"×{factor:g}", size=SMALL, colour=QUIET, anchor="middle")
    if special:
        _draw_surprise(axes, state.rows.index(special), special, ENDS if special is state.on[0] else ORDERS)
    for index, row in enumerate(state.rows):
        _draw_lever(axes, index + 0.5, row, row is special)
    return box.bottom


def _draw_lever(axes: Axes, at: float, row: Row, special: bool) -> None:
    """Draw a lever's name and its factor in each order, joined by a line, in words where it loses or does not start."""
    drawing, y = axes.drawing, axes.at(1, at)[1]
    colour = GREEN if special else INK if row.steps else QUIET
    drawing.text((MARGIN, y + 4), row.title, size=SMALL, colour=colour, bold=special)
    drawing.text((axes.at(1, at)[0] + 8, y + 4), "off" * (not row.steps), size=SMALL, colour=QUIET)
    ends = [axes.at(step.factor, at) for step in row.steps if step.factor]
    with drawing.layer(group=row.field):
        with drawing.answer():
            drawing.polyline(ends, GREEN if special else MID, width=7 if special else 3)
        for last in range(len(row.steps))[::-1]:
            with drawing.answer() if last else nullcontext():
                _draw_dot(axes, at, row, last, special)


def _draw_dot(axes: Axes, at: float, row: Row, last: int, special: bool) -> None:
    """Draw what a lever buys in one order, with its factor and the reason if it loses, or say why it buys nothing."""
    drawing, step = axes.drawing, row.steps[last]
    x, y = axes.at(step.factor or 1, at)
    said = last and step.effect == row.steps[0].effect
    colour = VERMILLION if step.effect in ("slower", "refused") else BLUE
    if step.factor:
        _draw_mark(drawing, (x, y), last, colour, _tip(row, last))
    elif not said:
        drawing.text((axes.box.right, y + 4), SIGNS[step.effect], size=SMALL, colour=colour, anchor="end")
    if step.effect == "slower" and not said:
        drawing.text((x - 10, y + 4), _change(step), size=SMALL, colour=colour, anchor="end")
    elif said or special or dependence(row) < math.log(2):
        return
    right = max(axes.at(each.factor or 1, at)[0] for each in row.steps) + 20
    lines = balanced(_why(row, step), axes.box.right + 4 - right)
    for line, words in enumerate(lines):
        place = right, y + 4 + ROW * (line - (len(lines) - 1) / 2)
        drawing.text(place, words, size=SMALL, colour=colour if step.effect == "slower" else QUIET, halo=True)


def _draw_mark(drawing: Drawing, place: Point, last: int, colour: str = BLUE, tip: str = "") -> None:
    """Draw a hollow dot, or the larger filled one of the order from the bottom."""
    fill, stroke = (colour, CARD) if last else (CARD, colour)
    drawing.circle(place, 4 + 3 * last, fill, stroke=stroke, tip=tip)


def _draw_surprise(axes: Axes, index: int, row: Row, names: tuple[str, str]) -> None:
    """Write beside the most dependent lever's row what it buys in both orders, and why."""
    drawing, (forth, back) = axes.drawing, row.steps
    words, (x, y) = f"{names[0]} {_change(forth)}", axes.at(forth.factor or 1, index)
    x = min(max(x - 4, axes.at(1, 0)[0] + 4), axes.box.right - text_width(words, SMALL))
    drawing.text((x, y - 3), words, size=SMALL, colour=BLUE, halo=True)
    lines = balanced(_why(row, back), 0.6 * axes.box.width)
    high = 46 + ROW * len(lines)
    y += PITCH * (1 + (drawing.width < WIDE)) + 24 if index < 6 else 6 - high
    colour = VERMILLION if back.effect == "slower" else GREEN
    write = partial(drawing.text, anchor="end", halo=True)
    with drawing.answer():
        write((axes.box.right, y), _change(back), size=VALUE, colour=colour, bold=True)
        write((axes.box.right, y + 18), names[1], size=SMALL, colour=colour, bold=True)
        for line, words in enumerate(lines, 1):
            write((axes.box.right, y + 18 + ROW * line), words, size=SMALL)
    hidden_note(drawing, Box(axes.box.right - 160, y - 24, 160, high))


def _why(row: Row, step: Step) -> str:
    cached = isinstance(step.after, LeverResult) and step.after.kv_tokens
    return WHY.get((row.field, "" if cached else "uncached")) or WHY.get((row.field, step.effect), "")


def _change(step: Step) -> str:
    """Format a lever's effect as a factor, or say why there is none."""
    return f"×{factor_words(step.factor)}" if step.factor else SIGNS[step.effect]


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


def _tip(row: Row, last: int) -> str:
    """Write a tooltip: the results before and after, and why."""
    step = row.steps[last]
    head = f"{row.title}, with only those {ORDERS[last]}"
    if not isinstance(step.after, LeverResult):
        return f"{head}: the server does not start. {step.after}."
    before = _counts(step.before) if isinstance(step.before, LeverResult) else "does not start"
    return f"{head}: {_change(step)}. Before: {before}. With it: {_counts(step.after)}. {_why(row, step)}"


def _draw_swept(drawing: Drawing, box: Box, state: State, pinned: State | None) -> None:
    """Draw the time between a request's tokens by requests at once, and its limit."""
    slots, waits, tips = _known(state)
    limit = state.level * 1e3
    ends = Scale(0, 1.05 * max([limit, *waits]))
    axes = Axes(drawing, box, Scale(SLOTS[0], SLOTS[-1], log=True), ends)
    axes.frame("most requests at once: max_num_seqs", "", x_ticks=axes.x.doublings(), y_ticks=ends.ticks(4))
    for low, high, trouble in breaks(state):
        axes.broken(low, high, BREAKS[trouble])
    if pinned is not None:
        axes.pinned(*_known(pinned)[:2], pinned.slots)
    axes.mark_y(limit, f"limit {limit:g} ms", GREEN)
    axes.line(slots, waits, BLUE, tips=tips)
    axes.here(state.slots, "slots")
    if state.slots in slots:
        x, y = axes.at(state.slots, wait := waits[slots.index(state.slots)])
        side, anchor = (-6, "end") if state.slots > 2 else (6, "start")
        colour, ground = (VERMILLION, BROKEN) if wait > limit else (BLUE, CARD)
        place, words = (x + side, y - 9 if y > box.y + 22 else y + 18), f"{apart(wait, limit)} ms"
        drawing.text(place, words, size=SMALL, colour=colour, anchor=anchor, bold=True, halo=ground)
        axes.points([state.slots], [wait], BLUE)


def _known(state: State) -> tuple[list[int], list[float], list[str]]:
    """Return the numbers of slots at which the server runs, with milliseconds between tokens and tooltips."""
    runs = [(slots, run) for slots, run in zip(SLOTS, state.by_slots, strict=True) if isinstance(run, LeverResult)]
    waits = [run.inter_token_latency * 1e3 for _, run in runs]
    return [slots for slots, _ in runs], waits, [f"{slots} at once: {_counts(run)}." for slots, run in runs]


def breaks(state: State) -> list[tuple[float | None, float | None, str]]:
    """Return the regions in which the server with all levers breaks, as (low, high, cause); None
    stands for the axis's end.
    """
    runs = list(zip(SLOTS, state.by_slots, strict=True))
    troubles = [state.trouble(outcome) for outcome in state.by_slots]
    turns = [at for at in range(1, len(runs)) if bool(troubles[at]) != bool(troubles[at - 1])]
    edges = [None, *(_edge(state.level, *runs[at - 1 : at + 1]) for at in turns), None]
    regions = zip([0, *turns], pairwise(edges), strict=True)
    return [(low, high, troubles[first]) for first, (low, high) in regions if troubles[first]]


def _edge(level: float, low: tuple[int, Outcome], high: tuple[int, Outcome]) -> float:
    """Return where the line between two runs crosses the limit, or the middle if it does not."""
    waits = [run.inter_token_latency / level for _, run in (low, high) if isinstance(run, LeverResult)]
    crosses = len(waits) == 2 and (waits[0] > 1) != (waits[1] > 1)
    share = math.log(waits[0]) / math.log(waits[0] / waits[1]) if crosses else 0.5
    return low[0] * (high[0] / low[0]) ** share

"""Draw lesson 05's levers: both orders as waterfalls side by side, and below them a token's time by
requests at once.

A lever has the same row in both waterfalls: the ranking's order runs down on the left, its reverse
runs up on the right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise

from minivllm_lab.drawing import QUIET
from minivllm_lab.palette import BLUE, GREEN, GREY, INK, VERMILLION
from minivllm_simulate.levers import LeverResult
from widgets.optimization_catalog.runs import MODEL, REQUESTS, SLOTS, Outcome, Row, State, Step
from widgets.shell.plot import Axes, Scale, counted, hidden_note, percent, short
from widgets.shell.svg import SMALL, Box, Drawing
from widgets.shell.theme import BROKEN, MID, MISSED

MARGIN, ROW, LABELS, VALUES = 14, 15, 132, 64
WIDE = 560
"""The width from which both orders stand side by side."""
HEIGHT, SWEPT = 468, 104
"""The height of the picture with both orders side by side, and the least height of the plot below
them.
"""
SIGNS = {"faster": "▲", "slower": "▼", "starts": "▲ starts:", "refused": "✕ does not start"}
MARKS = {"faster": GREEN, "slower": VERMILLION, "nothing": MID, "starts": GREEN}
TITLES = ("↓ switched on from the top", "↑ switched on from the bottom")
ORDERS = ("the ranking's order", "the reverse order")
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
NEEDS = {"paging": ("kv_cache",), "prefix_caching": ("kv_cache", "paging"), "kv_dtype": ("kv_cache",)}
"""Levers that a lever needs before it."""
WHY = {
    ("paging", "slower"): "Each step copies the blocks together until a kernel reads them in place.",
    ("paging", "nothing"): "Memory was not the limit.",
    ("weight_bits", "slower"): "The step is compute-bound, and unpacking adds arithmetic.",
    ("weight_bits", "nothing"): "The step is not bound by reading the weights.",
    ("cuda_graphs", "nothing"): "The GPU, not its host, is the bottleneck.",
    ("cuda_graphs", "slower"): "The GPU is the bottleneck, and graphs take memory from the KV cache.",
    ("chunked_prefill", "nothing"): "Hardly any prompt had to wait for room in a step.",
    ("prefix_caching", "nothing"): "Few prompt tokens hit the cache, or they cost little.",
    ("continuous_batching", "nothing"): "Requests rarely wait for others in their batch.",
}


def figure(state: State, width: float = 640, pinned: State | None = None) -> str:
    """Draw both waterfalls on one logarithmic scale, and a token's time by requests at once."""
    wide, rows = width >= WIDE, (len(state.rows) + 2) * ROW
    drawing = Drawing(width, 0, "What each lever buys, in two orders", _described(state))
    drawing.heading((MARGIN, 19), "What each lever buys, in both orders")
    note = f"Output tokens/s of {MODEL} on {state.gpu}, {REQUESTS[state.requests]}, {state.slots} at once; modelled"
    with drawing.layer(tip=f"The model's {state.error} against published runs." if state.error else ""):
        y = drawing.paragraph((MARGIN, 37), note, width - 2 * MARGIN)
    scale = _scale(state)
    room = (width - 2 * MARGIN - LABELS) / (2 if wide else 1)
    left = Box(MARGIN + LABELS, y + 24, room - VALUES - 10, rows)
    right = replace(left, x=left.x + room) if wide else replace(left, y=left.bottom + 46)
    for y in sorted({left.y, right.y}):
        _draw_names(drawing, state, y)
    _draw_order(drawing, left, scale, state, 0)
    with drawing.answer():
        _draw_order(drawing, right, scale, state, 1)
    hidden_note(drawing, right)
    y = right.bottom + 52
    swept = Box(MARGIN + 34, y, width - 2 * MARGIN - 34, max(HEIGHT - y - 42, SWEPT))
    _draw_swept(drawing, swept, state, pinned)
    drawing.height = swept.bottom + 42
    return drawing.render()


def _described(state: State) -> str:
    ends = ", ".join(f"{name}: {rate_words(run)}" for name, run in _ends(state))
    factors = (f"{row.title} {' and '.join(_change(step) for step in row.steps)}" for row in state.on)
    return f"{ends}. In the ranking's order and in the reverse: {'; '.join(factors)}."


def _scale(state: State) -> Scale:
    runs = [state.nothing, state.everything, *(run for row in state.on for step in row.steps for run in step)]
    rates = [run.tokens_per_second for run in runs if isinstance(run, LeverResult)] or [1.0]
    return Scale(min(rates) / 1.5, max(max(rates), 3 * min(rates)) * 1.2, log=True)


def _ends(state: State) -> tuple[tuple[str, Outcome], tuple[str, Outcome]]:
    on = f"{len(state.on)} of {len(state.rows)} on" if state.on else "nothing on"
    return ("nothing on", state.nothing), (on, state.everything)


def _draw_names(drawing: Drawing, state: State, top: float) -> None:
    """Write the levers' names, with a frame around the one that gains the most from the others."""
    gains = {row.field: abs(math.log((row.steps[0].factor or 1) / (row.steps[1].factor or 1))) for row in state.on}
    for index, row in enumerate(state.rows, start=1):
        if gains.get(row.field, 0) == max([0.4, *gains.values()]):
            with drawing.answer(), drawing.on_top():
                row_box = Box(MARGIN - 6, top + index * ROW - 0.5, drawing.width - 2 * MARGIN + 12, ROW + 1)
                drawing.rect(row_box, "none", stroke=BLUE, radius=3)
                if row.field == "kv_cache":
                    drawing.text((MARGIN - 3, row_box.y + 12.5), "asked", size=SMALL, colour=BLUE)
        place = (MARGIN + LABELS - 8, top + index * ROW + 12)
        drawing.text(place, row.title, size=SMALL, colour=INK if row.steps else QUIET, anchor="end", group=row.field)


def _draw_order(drawing: Drawing, box: Box, scale: Scale, state: State, reverse: int) -> None:
    """Draw one waterfall from no levers to all levers that are on; the reverse order runs upward."""
    drawing.text((box.x, box.y - 4), TITLES[reverse], size=SMALL, bold=True)
    for tick in scale.ticks(4):
        x = box.x + scale.share(tick) * box.width
        drawing.line((x, box.y), (x, box.bottom))
        drawing.text((x, box.bottom + 14), short(tick), size=SMALL, colour=QUIET, anchor="middle")
    first, last = (_row(box, index) for index in ((-1, 0) if reverse else (0, -1)))
    (start, nothing), (end, everything) = _ends(state)
    _draw_end(drawing, first, scale, start, nothing, GREY)
    _draw_end(drawing, last, scale, end, everything, BLUE if state.on else GREY)
    before = first
    for index, row in list(enumerate(state.rows, start=1))[:: -1 if reverse else 1]:
        place = _row(box, index)
        if not row.steps:
            _draw_value(drawing, place, "off", MID)
            continue
        step = row.steps[reverse]
        if isinstance(step.before, LeverResult):
            _draw_link(drawing, before, place, scale, step.before)
        with drawing.layer(group=row.field):
            _draw_rung(drawing, place, scale, step)
            drawing.rect(Box(place.x, place.y - 2, place.width, ROW), "transparent", tip=_tip(state, row, reverse))
        before = place
    if isinstance(everything, LeverResult):
        _draw_link(drawing, before, last, scale, everything)


def _draw_value(drawing: Drawing, place: Box, words: str, colour: str) -> None:
    """Write what a row comes to, in the column on the right."""
    drawing.text((place.right + VALUES, place.y + 10), words, size=SMALL, colour=colour, anchor="end", halo=True)


def _row(box: Box, index: int) -> Box:
    rows = round(box.height / ROW)
    return Box(box.x, box.y + index % rows * ROW + 2, box.width, ROW - 4)


def _draw_link(drawing: Drawing, before: Box, place: Box, scale: Scale, reached: LeverResult) -> None:
    """Draw a line from the end of one bar to the next."""
    x = place.x + scale.share(reached.tokens_per_second) * place.width
    upper, lower = sorted((before, place), key=lambda box: box.y)
    drawing.line((x, upper.bottom), (x, lower.y), colour=QUIET)


def _draw_end(drawing: Drawing, place: Box, scale: Scale, words: str, run: Outcome, colour: str) -> None:
    """Draw a dot for the first or the last set of levers."""
    x = place.x
    if isinstance(run, LeverResult):
        x += scale.share(run.tokens_per_second) * place.width
        drawing.circle((x, place.y + 6), 5, colour, tip=f"{_counts(run)}.")
    beside, anchor = (x + 9, "start") if x < place.x + place.width / 2 else (x - 9, "end")
    drawing.text((beside, place.y + 10), words, size=SMALL, anchor=anchor, halo=True)
    _draw_value(drawing, place, rate_words(run).replace(" tokens", ""), INK)


def _draw_rung(drawing: Drawing, place: Box, scale: Scale, step: Step) -> None:
    """Draw the change that a lever makes."""
    words = _change(step)
    if not isinstance(step.after, LeverResult):
        if step.effect == "refused":
            drawing.rect(place, BROKEN)
            drawing.hatch(place, MISSED, gap=9)
        _draw_value(drawing, place, words, VERMILLION)
        return
    reached = [run.tokens_per_second for run in step if isinstance(run, LeverResult)]
    low, high = (scale.share(rate) * place.width for rate in (min(reached), max(reached)))
    bar = Box(place.x + low, place.y, max(high - low, 2), place.height)
    colour = MARKS.get(step.effect, MID)
    drawing.rect(bar, colour)
    _draw_value(drawing, place, words, colour)


def _change(step: Step) -> str:
    """Format a lever's effect as a sign and a factor."""
    if step.effect == "waiting":
        return "…"
    if step.effect == "nothing":
        return "no change"
    if step.factor is None:
        rate = f" {short(step.after.tokens_per_second)}" if isinstance(step.after, LeverResult) else ""
        return SIGNS[step.effect] + rate
    return f"{SIGNS[step.effect]} ×{factor_words(step.factor)}"


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


def _tip(state: State, row: Row, reverse: int) -> str:
    """Write a tooltip: the results before and after, and why."""
    step = row.steps[reverse]
    other = row.steps[1 - reverse]
    on = [lever.field for lever in state.on][:: -1 if reverse else 1]
    place = on.index(row.field)
    head = f"{row.title[0].upper()}{row.title[1:]}, number {place + 1} of {len(on)} in {ORDERS[reverse]}"
    if isinstance(step.after, str):
        return f"{head}: the server does not start. {step.after}."
    if not isinstance(step.after, LeverResult) or step.before is None:
        return f"{head}: still being served."
    before = _counts(step.before) if isinstance(step.before, LeverResult) else "does not start"
    elsewhere = f" In {ORDERS[1 - reverse]}: {_change(other)}." if other.effect != "waiting" else ""
    why = _why(row.field, step, on[:place])
    return f"{head}: {_change(step)}. Before: {before}. With it: {_counts(step.after)}. {why}{elsewhere}"


def _why(field: str, step: Step, before: Sequence[str]) -> str:
    """Explain what the lever acts on, or which of the levers it needs are missing from `before`."""
    names = {"kv_cache": "the KV cache", "paging": "paging"}
    missing = [names[need] for need in NEEDS.get(field, ()) if need not in before]
    if missing:
        return f"It needs {' and '.join(missing)} on before it, which is not the case in this order."
    return f"{ACTS[field]} {WHY.get((field, step.effect), '')}".strip()


def _draw_swept(drawing: Drawing, box: Box, state: State, pinned: State | None) -> None:
    """Draw the time between a request's tokens by requests at once, and its limit."""
    slots, waits = _known(state)
    limit = state.level * 1e3
    low, high = math.floor(math.log2(0.9 * min([limit, *waits]))), math.ceil(math.log2(1.1 * max([limit, *waits])))
    ends = Scale(2.0**low, 2.0**high, log=True)  # whole powers, so that it rarely changes during a sweep
    axes = Axes(drawing, box, Scale(SLOTS[0], SLOTS[-1], log=True), ends)
    name = f"with {f'these {len(state.on)}' if state.on else 'nothing'} on: ms a client waits per token"
    axes.frame("most requests at once: max_num_seqs", name, x_ticks=axes.x.doublings(), y_ticks=axes.y.doublings(4))
    for low, high, trouble in breaks(state):
        axes.broken(low, high, BREAKS[trouble])
    if pinned is not None:
        axes.pinned(*_known(pinned), pinned.slots)
    axes.mark_y(limit, f"limit {limit:g} ms", GREEN)
    runs = zip(SLOTS, state.by_slots, strict=True)
    tips = [_point_tip(state, count, run) for count, run in runs if isinstance(run, LeverResult)]
    axes.points(slots, waits, BLUE, radius=3.5)
    axes.line(slots, waits, BLUE, tips=tips)
    if state.slots in slots:
        x, y = axes.at(state.slots, wait := waits[slots.index(state.slots)])
        axes.label((x, y - 24), f"{apart(wait, limit)} ms", BLUE)
    axes.here(state.slots, "slots")


def _known(state: State) -> tuple[list[int], list[float]]:
    """Return the numbers of slots at which the server runs, and the milliseconds between tokens."""
    pairs = zip(SLOTS, state.by_slots, strict=True)
    points = [(slots, run.inter_token_latency * 1e3) for slots, run in pairs if isinstance(run, LeverResult)]
    return [slots for slots, _ in points], [wait for _, wait in points]


def breaks(state: State) -> list[tuple[float | None, float | None, str]]:
    """Return the regions in which the server with all levers breaks, as (low, high, cause); None
    stands for the axis's end.
    """
    regions: list[tuple[float | None, float | None, str]] = []
    at = 0
    between = [_edge(state.level, *pair) for pair in pairwise(zip(SLOTS, state.by_slots, strict=True))]
    for broken, run in groupby(state.by_slots, key=lambda outcome: bool(state.trouble(outcome))):
        outcomes = list(run)
        first = at
        last = at + len(outcomes) - 1
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

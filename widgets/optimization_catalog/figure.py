"""Draw lesson 05's levers as a waterfall, below it one of them in the reverse order, and a token's
time by requests at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, pairwise

from minivllm_lab.drawing import QUIET, Point
from minivllm_lab.palette import BLUE, GREEN, GREY, INK, VERMILLION
from minivllm_simulate.levers import LeverResult
from widgets.optimization_catalog.runs import MODEL, REQUESTS, SLOTS, Outcome, Row, State, Step
from widgets.shell.plot import VALUE, Axes, Scale, counted, hidden_note, percent, short
from widgets.shell.svg import SMALL, Box, Drawing
from widgets.shell.theme import BROKEN, MID, MISSED

MARGIN, ROW, NAMES, VALUES, SWEPT = 14, 15, 132, (52, 70), 56
"""Pixels: around the picture, a row, the names, both columns of factors, and the plot below."""
SIGNS = {"waiting": "…", "starts": "starts", "refused": "✕"}
MARKS = {"faster": GREEN, "slower": VERMILLION, "starts": GREEN, "refused": VERMILLION}
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
    """Draw the levers' waterfall, and a token's time by requests at once."""
    drawing = Drawing(width, 0, "What each lever buys", _described(state))
    drawing.heading((MARGIN, 19), "What each lever buys")
    note = f"Output tokens/s of {MODEL} on {state.gpu}, {REQUESTS[state.requests]}, {state.slots} at once; modelled"
    with drawing.layer(tip=f"The model's {state.error} against published runs." if state.error else ""):
        y = drawing.paragraph((MARGIN, 37), note, width - 2 * MARGIN)
    box = Box(MARGIN + NAMES, y + 27, width - 2 * MARGIN - NAMES - sum(VALUES), ROW * (len(state.rows) + 2))
    _draw_waterfall(drawing, box, state)
    y = _draw_frame(drawing, box, state, row) if (row := framed(state)) else box.bottom
    swept = Box(MARGIN + 34, y + 32, width - 2 * MARGIN - 34, SWEPT)
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


def framed(state: State) -> Row | None:
    """Return the lever whose gain depends the most on the others."""
    return max(state.on, key=dependence, default=None)


def dependence(row: Row) -> float:
    """Return how far apart a lever's factors are in both orders, as a logarithm; 0 if one is unknown."""
    forth, back = (step.factor for step in row.steps)
    return abs(math.log(forth / back)) if forth and back else 0.0


# ---- the waterfall


def _draw_waterfall(drawing: Drawing, box: Box, state: State) -> None:
    """Draw the rates from no levers to all that are on, in the ranking's order."""
    scale = _scale(state)
    for tick in scale.ticks(4 if box.width > 200 else 2):
        x = box.x + scale.share(tick) * box.width
        drawing.line((x, box.y), (x, box.bottom))
        if x < box.right - 16:  # else it would touch the next words
            drawing.text((x, box.y - 6), short(tick), size=SMALL, colour=QUIET, anchor="middle")
    for reverse, words in enumerate(("in order", "in reverse")):
        drawing.text((_column(box, reverse), box.y - 6), words, size=SMALL, colour=QUIET, anchor="end")
    ys = (box.y + 2 + ROW * index for index in range(len(state.rows) + 2))
    before, *_ = places = [Box(box.x, y, box.width, ROW - 4) for y in ys]
    ends = _ends(state)
    _draw_end(drawing, places[0], scale, *ends[0], GREY)
    _draw_end(drawing, places[-1], scale, *ends[1], BLUE if state.on else GREY)
    for row, place in zip(state.rows, places[1:], strict=False):
        with drawing.layer(group=row.field):
            _draw_row(drawing, place, scale, state, row)
        if row.steps:
            _draw_link(drawing, before, place, scale, row.steps[0].before)
            before = place
    _draw_link(drawing, before, places[-1], scale, state.everything)


def _column(box: Box, reverse: int) -> float:
    """Return the right edge of an order's factors."""
    return box.right + sum(VALUES[: reverse + 1])


def _name(drawing: Drawing, place: Box, words: str, colour: str = INK, *, bold: bool = False) -> None:
    drawing.text((place.x - 8, place.y + 10), words, size=SMALL, colour=colour, anchor="end", bold=bold)


def _draw_link(drawing: Drawing, before: Box, place: Box, scale: Scale, reached: Outcome) -> None:
    """Draw a line from the end of one bar to the next."""
    if isinstance(reached, LeverResult):
        x = place.x + scale.share(reached.tokens_per_second) * place.width
        drawing.line((x, before.bottom), (x, place.y), colour=QUIET)


def _draw_end(drawing: Drawing, place: Box, scale: Scale, words: str, run: Outcome, colour: str) -> None:
    """Draw a dot for the first or the last set of levers."""
    x = place.x
    if isinstance(run, LeverResult):
        x += scale.share(run.tokens_per_second) * place.width
        drawing.circle((x, place.y + 6), 5, colour, tip=f"{_counts(run)}.")
    _name(drawing, place, words)
    drawing.text((x + 9, place.y + 10), rate_words(run), size=SMALL, bold=True, halo=True)


def _draw_row(drawing: Drawing, place: Box, scale: Scale, state: State, row: Row) -> None:
    """Draw a lever's bar, and its factors in both orders."""
    _name(drawing, place, row.title, INK if row.steps else QUIET)
    if not row.steps:
        drawing.text((_column(place, 0), place.y + 10), "off", size=SMALL, colour=QUIET, anchor="end")
        return
    _draw_bar(drawing, place, scale, row.steps[0])
    _draw_factor(drawing, (_column(place, 0), place.y + 10), row.steps[0])
    with drawing.answer():
        _draw_factor(drawing, (_column(place, 1), place.y + 10), row.steps[1])
    drawing.rect(Box(place.x, place.y - 2, place.width, ROW), "transparent", tip=_tip(state, row, 0))


def _draw_bar(drawing: Drawing, place: Box, scale: Scale, step: Step, opacity: float = 1) -> None:
    """Draw the change that a lever makes."""
    if step.effect == "refused":
        drawing.rect(place, BROKEN)
        drawing.hatch(place, MISSED, gap=9)
    reached = [run.tokens_per_second for run in step if isinstance(run, LeverResult)]
    if isinstance(step.after, LeverResult):
        low, high = (scale.share(rate) * place.width for rate in (min(reached), max(reached)))
        bar = Box(place.x + low, place.y, max(high - low, 2), place.height)
        drawing.rect(bar, MARKS.get(step.effect, MID), opacity=opacity)


def _draw_factor(drawing: Drawing, place: Point, step: Step, size: float = SMALL) -> None:
    """Write the factor that a lever buys."""
    colour = MARKS.get(step.effect, MID)
    drawing.text(place, _change(step), size=size, colour=colour, anchor="end", bold=size > SMALL)


def _draw_frame(drawing: Drawing, box: Box, state: State, row: Row) -> float:
    """Draw one lever in the reverse order, in a frame below the waterfall; return the frame's bottom."""
    scale, step, index = _scale(state), row.steps[1], state.on.index(row)
    place = Box(box.x, box.bottom + 13, box.width, 24)
    _name(drawing, place, row.title, bold=True)
    _name(drawing, Box(place.x, place.y + 15, 0, 0), "switched on last" if index == 0 else "in reverse")
    hidden_note(drawing, place)
    others = [lever.field for lever in state.on[:index:-1]]
    with drawing.answer():
        _draw_bar(drawing, place, scale, step, 0.45)
        for run, colour in zip(step, (GREY, BLUE), strict=True):
            if isinstance(run, LeverResult):
                x = place.x + scale.share(run.tokens_per_second) * place.width
                drawing.circle((x, place.y + 12), 5, colour, tip=f"{_counts(run)}.")
        _draw_factor(drawing, (_column(place, 1), place.y + 21), step, VALUE)
        drawing.rect(place, "transparent", tip=_tip(state, row, 1))
        before = (
            f"{rate_words(step.before)} with {counted(len(others), 'other') if others else 'nothing else'} on. "
            if step.before
            else ""
        )
        reason = before + (WHY.get((row.field, step.effect)) or _why(row.field, step, others))
        y = drawing.paragraph((MARGIN + 6, place.bottom + 19), reason, drawing.width - 2 * MARGIN - 12, colour=INK)
    frame = Box(MARGIN - 6, box.bottom + 6, drawing.width - 2 * MARGIN + 12, y + 8 - box.bottom - 6)
    drawing.rect(frame, "none", stroke=BLUE, radius=4)
    return frame.bottom


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
    axes.frame("most requests at once: max_num_seqs", name, x_ticks=axes.x.doublings(), y_ticks=axes.y.doublings(3))
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
        axes.label((x, y - 8), apart(wait, limit), BLUE)
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

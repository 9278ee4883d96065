"""Draw lesson 12's picture: waiting times by number of slots, what adapters cost, and the slots
over time.
"""

from __future__ import annotations

import math

from minivllm_lab.drawing import text_width
from minivllm_lab.palette import BLUE, GREEN, ORANGE, PURPLE
from minivllm_simulate.load_sweep import Span
from minivllm_simulate.memory import weight_bytes
from widgets.multi_lora.runs import ANSWER, PROMPT
from widgets.multi_lora.state import CLIENTS, SLOTS, WAYS, State
from widgets.multi_lora.strip import draw_strip
from widgets.shell.plot import MARGIN, Axes, Scale, counted, modelled, percent, seconds, three_boxes
from widgets.shell.svg import QUIET, SMALL, Box, Drawing, Segment, legend, stacked_bar
from widgets.shell.theme import IDLE, RESERVED

ACROSS = Scale(SLOTS[0], SLOTS[-1], log=True)
TICKS = (1, 4, 16, 64, 256)
NAMES = {"together": "together", "loop": "in a loop", "merged": "merged"}
COLOURS = {"together": BLUE, "loop": ORANGE, "merged": PURPLE}
DASHES = {"together": "", "loop": "6 3", "merged": "2 4"}


def gigabytes(value: float) -> str:
    """Format a number of bytes in MB, GB or TB."""
    if value < 0.9995e9:
        return f"{value / 1e6:.3g} MB"
    return f"{value / 1e12:.3g} TB" if value >= 0.9995e12 else f"{value / 1e9:.3g} GB"


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw waiting times by number of slots, hits and the cost of a step beside them, and slots
    over time below.
    """
    serving = state.serving
    drawing = Drawing(width, 0, "Many adapters, few slots", f"Waiting times against the slots, now {state.slots}")
    y = drawing.heading((MARGIN, 23), "How long clients wait")
    note = (
        f"{serving.name} on one {serving.gpu.name}; {counted(serving.adapters, 'adapter')} of rank "
        f"{serving.rank}, Zipf {serving.skew:g}; {serving.load:g} requests a second, {PROMPT} tokens in, {ANSWER} out; "
        f"{modelled(state.error)}"
    )
    y = _draw_memory(drawing, state, drawing.paragraph((MARGIN, y + 18), note, width - 2 * MARGIN) + 10)
    main, upper, lower = three_boxes(width, y + 20, 160, large=0.5, between=50)
    _draw_waits(Axes(drawing, main, ACROSS, _scale(state)), state, pinned)
    _draw_hits(drawing, upper, state)
    _draw_rates(drawing, lower, state)
    drawing.height = draw_strip(drawing, state, max(main.bottom, lower.bottom) + 60) + 8
    return drawing.render()


# ---- memory


def _draw_memory(drawing: Drawing, state: State, y: float) -> float:
    """Draw the GPU's memory: weights, slots, and what is left; return the y below."""
    serving = state.serving
    slot = serving.cost.slot_bytes
    weights = weight_bytes(serving.model)
    slots = state.slots * slot
    cache = 0.0 if state.refused else serving.ledger(state.slots).kv_bytes
    slots_tip = f"{state.slots} slots of {gigabytes(slot)}, used or not: {gigabytes(slots)}"
    parts = [
        Segment(f"weights {gigabytes(weights)}", weights, RESERVED, tip=f"Weights, shared: {gigabytes(weights)}"),
        Segment(f"slots {gigabytes(slots)}", slots, ORANGE, tip=slots_tip),
        Segment(f"KV cache {gigabytes(cache)}", cache, BLUE, tip=f"Left for the KV cache: {gigabytes(cache)}"),
    ]
    total = max(serving.gpu.memory_bytes, sum(part.value for part in parts))
    bar = Box(MARGIN, y, drawing.width - 2 * MARGIN, 18)
    drawing.rect(bar, IDLE, tip="Not for the KV cache: activations, and what gpu_memory_utilization leaves free")
    stacked_bar(drawing, bar, parts, total)
    fits = min(serving.copies_that_fit, serving.adapters)
    legend(drawing, (MARGIN, y + 33), [Segment(f"slots {gigabytes(slots)}", 0, ORANGE)], drawing.width)
    words = f"merged copies: {gigabytes(state.merged_bytes)}, {fits:,} fit"
    with drawing.answer():
        drawing.text((drawing.width - MARGIN, y + 33), words, size=SMALL, colour=QUIET, anchor="end")
    return y + 36


# ---- waiting times against the slots


def _scale(state: State) -> Scale:
    """Return a scale from the time of a first step to beyond the longest wait, in thirds of a
    decade.
    """
    low, high = 0.8 * min(state.ttft, 0.012), 2 * max([state.ttft, 5.0, *(state.first(slots) for slots in state.run)])
    return Scale.around(low, high)


def _draw_waits(axes: Axes, state: State, pinned: State | None) -> None:
    label = f"first token of {percent(CLIENTS)}; dotted: in the long run"
    axes.frame("slots on the GPU (max_loras)", label, x_ticks=TICKS, y_format=seconds)
    for span in state.stopped:
        axes.broken(*span, _refusal_words(state))
    with axes.drawing.answer():
        for span in state.late:
            axes.broken(*span, late_words(state, span))
    if pinned and pinned.run:
        axes.pinned(pinned.run, [pinned.first(slots) for slots in pinned.run], pinned.slots)
    axes.mark_y(state.ttft, "limit", GREEN)
    with axes.drawing.answer():
        later = [slots for slots in state.run if state.long_wait[slots] > state.first(slots)]
        axes.line(later, [state.long_wait[slots] for slots in later], BLUE, width=1.8, dash="2 4")
        axes.line(state.run, [state.first(slots) for slots in state.run], BLUE)
    axes.here(state.slots, "slots", counted(state.slots, "slot"))
    with axes.drawing.answer():
        axes.tips(state.run, lambda slots: _tip(state, slots))


def late_words(state: State, span: Span) -> str:
    """Explain why clients wait in a region, by the cause at the handle if it is inside, and at the
    region's edge otherwise.
    """
    inside = [slots for slots in state.run if (span[0] or 0) <= slots < (span[1] or math.inf)]
    if not inside:
        return ""
    nearest = state.slots if state.slots in inside else inside[-1] if span[1] is not None else inside[0]
    return cause_words(state, state.cause(nearest), nearest)


def cause_words(state: State, cause: str, slots: int) -> str:
    """Describe what goes wrong with this many slots."""
    point = state.points[slots]
    return {
        "slots": f"too few slots: the queue grows while {percent(1 - point.cache_used)} of the KV cache is free",
        "cache": "the slots leave too little memory for the KV cache",
        "engine": f"{state.serving.load:g} requests a second are more than the GPU handles",
        "": "",
    }[cause]


def _refusal_words(state: State) -> str:
    serving = state.serving
    if serving.rank > serving.max_lora_rank:
        return f"does not start: rank {serving.rank} is above max_lora_rank {serving.max_lora_rank}"
    return "does not start: weights and slots fill the GPU"


def _tip(state: State, slots: int) -> str:
    point = state.points[slots]
    return (
        f"{counted(slots, 'slot')}: {percent(CLIENTS)} have their first token within {seconds(state.first(slots))}. "
        f"On average {point.distinct:.3g} adapters are in use and {point.waiting:.3g} requests wait, "
        f"{point.held:.3g} only for a slot. {percent(point.cache_used, 1)} of the KV cache is used; {point.asked} "
        f"requests took {point.loads} copies into slots."
    )


# ---- tokens a second, and hits


def _draw_rates(drawing: Drawing, box: Box, state: State) -> None:
    """Draw the tokens per second of a step by its number of adapters: applied together, in a loop,
    or merged.
    """
    if not state.serving.at_once:
        return
    most = max(2, min(state.batch, state.serving.adapters))
    counts = sorted({1, *(round(most ** (part / 8)) for part in range(9))})
    rates = {way: [state.rate(way, count) for count in counts] for way in WAYS}
    low, high = min(map(min, rates.values())), max(map(max, rates.values()))
    scale = Scale(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high * 1.2)), log=True)
    axes = Axes(drawing, box, Scale(1, most, log=True), scale)
    label = f"adapters in a step of {state.batch} requests"
    axes.frame(label, "tokens/s:", x_ticks=_doublings(most), y_ticks=scale.powers()[::2])
    x = box.x + 58
    for way in WAYS:
        drawing.text((x, box.y - 10), NAMES[way], size=SMALL, colour=COLOURS[way])
        x += text_width(NAMES[way], SMALL) + 8
    with drawing.answer():
        for way in reversed(WAYS):
            axes.line(counts, rates[way], COLOURS[way], dash=DASHES[way])
    axes.also_here(min(max(state.distinct, 1), most))

    def tip(count: int) -> str:
        listed = ", ".join(f"{NAMES[way]} {state.rate(way, count):,.0f}" for way in WAYS)
        return f"{count} adapters in a step of {state.batch}, tokens/s: {listed}"

    with drawing.answer():
        axes.tips(counts, tip)


def _doublings(most: int) -> list[float]:
    """List about four powers of two up to `most`."""
    powers = range(most.bit_length())
    return [2.0**power for power in (powers[::2] if len(powers) > 4 else powers)]


def _draw_hits(drawing: Drawing, box: Box, state: State) -> None:
    """Draw two hit rates: that of a formula, for requests one at a time, and the one counted in
    these runs.
    """
    axes = Axes(drawing, box, ACROSS, Scale(0, 1))
    ticks = (0, 0.5, 1)
    axes.frame("", "hit rate: adapter is in a slot", x_ticks=TICKS[::2], y_ticks=ticks, y_format=percent)
    alone = [state.serving.hit_rate(slots) for slots in SLOTS]
    axes.line(SLOTS, alone, PURPLE, width=1.8, dash="2 4")
    axes.label(axes.at(SLOTS[2], alone[2]), "one at a time", PURPLE, bold=False)
    with drawing.answer():
        axes.line(state.run, [state.points[slots].hit_rate for slots in state.run], BLUE)
    axes.also_here(state.slots)

    def tip(slots: int) -> str:
        return (
            f"{slots} slots: {percent(state.points[slots].hit_rate)} of the admitted requests found their adapter in a "
            f"slot; one request at a time it would be {percent(state.serving.hit_rate(slots))}"
        )

    with drawing.answer():
        axes.tips(state.run, tip)

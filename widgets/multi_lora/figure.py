"""Draw lesson 12's pictures: waiting times by number of slots with the slots over time, and what
adapters cost.
"""

from __future__ import annotations

import math

from minivllm_lab.palette import BLUE, GREEN, ORANGE, PURPLE
from minivllm_simulate.load_sweep import Span
from minivllm_simulate.memory import weight_bytes
from widgets.multi_lora.runs import ANSWER, PROMPT
from widgets.multi_lora.state import CLIENTS, SLOTS, WAYS, State
from widgets.multi_lora.strip import draw_strip
from widgets.shell.plot import MARGIN, WIDE, Axes, Scale, counted, hidden_note, modelled, percent, seconds
from widgets.shell.svg import QUIET, SMALL, Box, Drawing, Segment, legend, stacked_bar
from widgets.shell.theme import CARD, IDLE, RESERVED

ACROSS = Scale(SLOTS[0], SLOTS[-1], log=True)
TICKS = (1, 4, 16, 64, 256)
NAMES = {"together": "all adapters at once", "loop": "one after the other", "merged": "merged, a model for each"}
COLOURS = {"together": BLUE, "loop": ORANGE, "merged": PURPLE}
DASHES = {"together": "", "loop": "6 3", "merged": "2 4"}


def gigabytes(value: float) -> str:
    """Format a number of bytes in MB, GB or TB."""
    if value < 0.9995e9:
        return f"{value / 1e6:.3g} MB"
    return f"{value / 1e12:.3g} TB" if value >= 0.9995e12 else f"{value / 1e9:.3g} GB"


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw waiting times by number of slots, with hits beside them, and slots over time below."""
    drawing = Drawing(width, 0, "Many adapters, few slots", f"Waiting times against the slots, now {state.slots}")
    y = _draw_head(drawing, state, "How long clients wait") + 34
    wide = width >= WIDE
    main = Box(60, y, round(width * 0.62 if wide else width - MARGIN) - 60, 166)
    hits = Box(main.right + 62, y, width - main.right - 62 - MARGIN, 166)
    if not wide:
        hits = Box(60, main.bottom + 72, main.width, 90)
    _draw_waits(Axes(drawing, main, ACROSS, _scale(state)), state, pinned)
    _draw_hits(drawing, hits, state)
    drawing.height = draw_strip(drawing, state, hits.bottom + 62) + 8
    return drawing.render()


def detail(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw the memory that slots take, and the speed of a step by its number of adapters."""
    drawing = Drawing(width, 0, "What adapters cost", "Memory, and tokens per second against the adapters in a step")
    y = _draw_memory(drawing, state, _draw_head(drawing, state, "What adapters cost") + 36)
    plot = Box(60, y + 42, width - 60 - MARGIN, 200)
    _draw_rates(drawing, plot, state)
    drawing.height = plot.bottom + 46
    return drawing.render()


def _draw_head(drawing: Drawing, state: State, title: str) -> float:
    """Write the title and what is served, and return the y of the last line."""
    serving = state.serving
    y = drawing.heading((MARGIN, 23), title)
    note = (
        f"{serving.name} on one {serving.gpu.name}; {counted(serving.adapters, 'adapter')} of rank "
        f"{serving.rank}, skew {serving.skew:g}; {serving.load:g} requests a second, {PROMPT} tokens in, {ANSWER} out; "
        f"{modelled(state.error)}"
    )
    return drawing.paragraph((MARGIN, y + 18), note, drawing.width - 2 * MARGIN)


# ---- what adapters cost


def _draw_memory(drawing: Drawing, state: State, y: float) -> float:
    """Draw the GPU's memory: weights, slots, and what is left; return the y below."""
    serving = state.serving
    slot = serving.cost.slot_bytes
    weights = weight_bytes(serving.model)
    slots = state.slots * slot
    cache = 0.0 if state.refused else serving.ledger(state.slots).kv_bytes
    slots_words = f"{counted(state.slots, 'slot')} of {gigabytes(slot)}, used or not: {gigabytes(slots)}"
    parts = [
        Segment(f"weights {gigabytes(weights)}", weights, RESERVED, tip=f"Weights, shared: {gigabytes(weights)}"),
        Segment(f"slots {gigabytes(slots)}", slots, ORANGE, tip=slots_words),
        Segment(f"KV cache {gigabytes(cache)}", cache, BLUE, tip=f"Left for the KV cache: {gigabytes(cache)}"),
    ]
    total = max(serving.gpu.memory_bytes, sum(part.value for part in parts))
    drawing.text((MARGIN, y - 7), f"memory of one {serving.gpu.name}", size=SMALL, colour=QUIET)
    bar = Box(MARGIN, y, drawing.width - 2 * MARGIN, 22)
    drawing.rect(bar, IDLE, tip="Not for the KV cache: activations, and what gpu_memory_utilization leaves free")
    stacked_bar(drawing, bar, parts, total)
    fits = min(serving.copies_that_fit, serving.adapters)
    words = f"A merged copy of the model for each adapter would take {gigabytes(state.merged_bytes)}: {fits:,} fit."
    keys = [Segment(slots_words, 0, ORANGE), Segment("activations, and left free", 0, IDLE)]
    y = legend(drawing, (MARGIN, y + 42), keys, bar.width)
    return drawing.paragraph((MARGIN, y), words, bar.width)


# ---- waiting times against the slots


def _scale(state: State) -> Scale:
    """Return a scale from the time of a first step to beyond the longest wait, up to a minute in the
    long run, in thirds of a decade so that it rarely changes.
    """
    waits = [max(state.first(slots), min(state.long_wait[slots], 30)) for slots in state.run]
    return Scale.around(0.8 * min(state.ttft, 0.012), 2 * max([state.ttft, 5.0, *waits]))


def _draw_waits(axes: Axes, state: State, pinned: State | None) -> None:
    label = f"{percent(CLIENTS)} have a first token within; dotted: long run"
    axes.frame("slots on the GPU (max_loras)", label, x_ticks=TICKS, y_format=seconds)
    for span in state.stopped:
        axes.broken(*span, _refusal_words(state))
    with axes.drawing.answer():
        for span in state.late:
            axes.broken(*span, late_words(state, span))
    if pinned and pinned.run:
        axes.pinned(pinned.run, [pinned.first(slots) for slots in pinned.run], pinned.slots)
    axes.mark_y(state.ttft, f"limit: {seconds(state.ttft)}", GREEN)
    hidden_note(axes.drawing, axes.box)
    with axes.drawing.answer():
        later = [slots for slots in state.run if state.long_wait[slots] > state.first(slots)]
        later += [slots for slots in state.run if later and slots > later[-1]][:1]
        axes.line(later, [state.in_the_end(slots) for slots in later], BLUE, width=1.8, dash="2 4")
        axes.drawing.rect(Box(axes.box.x - 4, axes.box.y - 5, axes.box.width, 4.5), CARD)  # ends that line at the frame
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
        "slots": f"too few slots: requests wait while the KV cache is {percent(1 - point.cache_used)} free",
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
    label = f"different adapters in a step of {state.batch} requests"
    axes.frame(label, "tokens a second, with the adapters applied", x_ticks=axes.x.doublings(), y_ticks=scale.powers())
    for way in reversed(WAYS):
        axes.line(counts, rates[way], COLOURS[way], dash=DASHES[way])
        axes.label(axes.at(counts[-2], rates[way][-2]), NAMES[way], COLOURS[way])
    axes.also_here(min(max(state.distinct, 1), most))

    def tip(count: int) -> str:
        listed = ", ".join(f"{NAMES[way]} {state.rate(way, count):,.0f}" for way in WAYS)
        return f"{count} adapters in a step of {state.batch}, tokens/s: {listed}"

    axes.tips(counts, tip)


def _draw_hits(drawing: Drawing, box: Box, state: State) -> None:
    """Draw the share of admitted requests that found their adapter in a slot."""
    axes = Axes(drawing, box, ACROSS, Scale(0, 1))
    ticks = (0, 0.5, 1)
    axes.frame("slots", "hit rate when admitted", x_ticks=TICKS[::2], y_ticks=ticks, y_format=percent)
    hidden_note(drawing, box)
    with drawing.answer():
        axes.also_here(state.slots)
        axes.line(state.run, [state.points[slots].hit_rate for slots in state.run], BLUE)
        axes.tips(
            state.run, lambda slots: f"{slots} slots: {percent(state.points[slots].hit_rate)} of the requests hit"
        )

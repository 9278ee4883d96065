"""Draw lesson 12's pictures: waiting times and memory by number of slots with the slots over time,
and what adapters cost.
"""

from __future__ import annotations

import math

from minivllm_lab.pictures.drawing import text_width
from minivllm_lab.pictures.palette import BLUE, GREEN, INK, ORANGE, VERMILLION
from minivllm_simulate.load_sweep import Span
from minivllm_simulate.memory import weight_bytes
from widgets.multi_lora.runs import ANSWER, PROMPT
from widgets.multi_lora.state import CLIENTS, SLOTS, WAYS, State
from widgets.multi_lora.strip import draw_strip
from widgets.shell.plot import MARGIN, WIDE, Axes, Scale, balanced, counted, hidden_note, modelled, percent, seconds
from widgets.shell.svg import BOLD, QUIET, SMALL, Box, Drawing
from widgets.shell.theme import BROKEN, MID, MISSED, RESERVED

ACROSS = Scale(SLOTS[0], SLOTS[-1], log=True)
TICKS = (1, 4, 16, 64, 256, 1000)


def gigabytes(value: float) -> str:
    """Format a number of bytes in MB, GB or TB."""
    if value < 0.9995e9:
        return f"{value / 1e6:.3g} MB"
    return f"{value / 1e12:.3g} TB" if value >= 0.9995e12 else f"{value / 1e9:.3g} GB"


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw the slots with their queue, and below them the waiting times and the GPU's memory by number
    of slots.
    """
    drawing = Drawing(width, 0, "Many adapters, few slots", f"Waiting times against the slots, now {state.slots}")
    serving = state.serving
    note = (
        f"{serving.name} on {serving.gpu.name}; {serving.load:g} requests a second for "
        f"{counted(serving.adapters, 'adapter')} (1: the most popular); modelled"
    )
    y = draw_strip(drawing, state, _draw_head(drawing, state, "Queue, slots and memory", note) + 14) + 44
    waits = Box(64, y, width - 64 - MARGIN, 332 - y if width >= WIDE else 150)
    memory = Box(waits.x, waits.bottom + 10, waits.width, 84)
    _draw_waits(Axes(drawing, waits, ACROSS, _scale(state)), state, pinned)
    _draw_memory(Axes(drawing, memory, ACROSS, Scale(0, serving.gpu.memory_bytes / 1e9)), state)
    drawing.height = memory.bottom + 44
    return drawing.render()


def detail(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw the time of a step with adapters, in each of `WAYS`."""
    drawing = Drawing(width, 0, "What adapters cost", "The time of a step, in three ways")
    note = f"a step of {counted(state.batch, 'request')} with {counted(state.applied, 'adapter')}; modelled"
    y = _draw_head(drawing, state, "What adapters cost", note)
    if state.serving.at_once:
        y = _draw_steps(drawing, state, y + 40)
    adapters = state.serving.adapters
    copies = f"{adapters:,} merged cop{'ies' if adapters > 1 else 'y'}"
    fits = min(state.serving.copies_that_fit, adapters)
    words = f"{copies} would take {gigabytes(state.merged_bytes)}; {fits:,} fit."
    colour = VERMILLION if fits < adapters else QUIET
    drawing.height = drawing.paragraph((MARGIN, y + 20), words, width - 2 * MARGIN, colour=colour) + 18
    return drawing.render()


def _draw_head(drawing: Drawing, state: State, title: str, note: str) -> float:
    """Write the title and a note, and return the y of the last line."""
    serving = state.serving
    tip = f"{PROMPT} tokens in, {ANSWER} out, rank {serving.rank}, skew {serving.skew:g}; {modelled(state.error)}"
    with drawing.layer(tip=tip):
        y = drawing.heading((MARGIN, 23), title)
        return drawing.paragraph((MARGIN, y + 18), note, drawing.width - 2 * MARGIN)


# ---- waiting times and memory


def _scale(state: State) -> Scale:
    """Return a scale from the time of a first step to beyond the longest wait, up to half an hour in
    the long run, in thirds of a decade so that it rarely changes.
    """
    waits = [max(state.first(slots), min(state.long_wait[slots], 1000)) for slots in state.run]
    return Scale.around(0.8 * min(state.ttft, 0.012), 2 * max([state.ttft, 5.0, *waits]))


def _draw_waits(axes: Axes, state: State, pinned: State | None) -> None:
    axes.frame("", "", x_ticks=(), y_ticks=axes.y.powers()[::2], y_format=seconds)
    with axes.drawing.answer():
        for span in state.late:
            axes.shade(*span, words := late_words(state, span))
            axes.explain(*span, words.split(":")[0])
    for span in state.stopped:
        axes.shade(*span, _refusal_words(state))
        words, place = "does not start", (axes.box.right - 4, axes.box.y + 0.9 * axes.box.height)
        axes.drawing.text(place, words, size=SMALL, colour=VERMILLION, bold=True, turn=-90, halo=BROKEN)
    if pinned and pinned.run:
        axes.pinned(pinned.run, [pinned.in_the_end(slots) for slots in pinned.run], pinned.slots)
    if state.slots in state.run:
        wait = state.in_the_end(state.slots)
        number = seconds(float(f"{wait:.2g}")) if wait < 3600 else "hours"
        colour = VERMILLION if state.cause(state.slots) else GREEN
        words = f"to first token for {percent(CLIENTS)} of requests"
        axes.drawing.number((MARGIN, axes.box.y - 10), number, words, colour)
    axes.mark_y(state.ttft, f"limit: {seconds(state.ttft)}", GREEN)
    hidden_note(axes.drawing, axes.box)
    with axes.drawing.answer():
        walls = [wall for wall, _ in state.stopped if wall and state.complete]
        waits = [state.in_the_end(slots) for slots in (*state.run, *(state.run[-1] for _ in walls))]
        axes.line([*state.run, *walls], waits, BLUE)
        low, enough = state.late[0] if state.late else (0, None)
        if low is None and enough and state.slots < enough < state.run[-1]:
            _draw_enough(axes, state, enough)
    axes.here(state.slots, "slots", counted(state.slots, "slot"))
    with axes.drawing.answer():
        axes.tips(state.run, lambda slots: _tip(state, slots))


def _draw_enough(axes: Axes, state: State, enough: float) -> None:
    """Write how many slots are enough, and why, above the limit if there is room."""
    load, at_once = state.serving.load, state.serving.at_once
    lines = [
        f"{math.ceil(enough)} slots are enough:",
        f"{at_once:.0f} requests at once",
        f"({load:g} a second × {round(at_once / load, 1) or at_once / load:.2g} s)",
        f"use ~{state.wanted:.0f} adapters",
    ]
    (x, limit), wall = axes.at(enough, state.ttft), axes.at(min(ACROSS.high, state.serving.most_slots), 1)[0]
    if BOLD * max(text_width(words, SMALL) for words in lines) > wall - x - 8 or limit < axes.box.y + 66:
        axes.explain(enough, None, lines[0][:-1], GREEN)
        return
    for row, words in enumerate(lines):
        place = x + 7, axes.box.y + 13 + 16 * row
        axes.drawing.text(place, words, size=SMALL, colour=GREEN, bold=row in (0, 3), halo=True)


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
    point, taken = state.points[slots], gigabytes(slots * state.serving.cost.slot_bytes)
    return (
        f"{counted(slots, 'slot')}, {taken}: {percent(CLIENTS)} have their first token within "
        f"{seconds(state.first(slots))}. "
        f"On average {point.distinct:.3g} adapters are in use and {point.waiting:.3g} requests wait, "
        f"{point.held:.3g} only for a slot. {percent(point.cache_used, 1)} of the KV cache is used; "
        f"{percent(point.hit_rate)} of the admitted requests found their adapter in a slot."
    )


def _draw_memory(axes: Axes, state: State) -> None:
    """Draw how much of the GPU's memory the slots leave for the KV cache."""
    serving, drawing, box = state.serving, axes.drawing, axes.box
    name, ticks = "slots on the GPU (max_loras)", axes.y.ticks(3)
    axes.frame(name, "", x_ticks=TICKS, x_format="{:,}".format, y_ticks=ticks, y_format="{:g} GB".format)
    weights, slot = weight_bytes(serving.model) / 1e9, serving.cost.slot_bytes / 1e9
    counts = [max(min(ACROSS.high, serving.most_slots), ACROSS.low) ** (part / 40) for part in range(41)]
    base, wall = axes.at(ACROSS.low, min(weights, axes.y.high))[1], axes.at(counts[-1], 0)[0]
    top = axes.at(ACROSS.low, weights + serving.most_slots * slot)[1]
    if serving.most_slots > ACROSS.low:
        drawing.rect(Box(box.x, top, wall - box.x, base - top), RESERVED)
        edge = [axes.at(count, weights + count * slot) for count in counts]
        drawing.polygon([*edge, (wall, base), (box.x, base)], ORANGE)
        drawing.text((wall - 5, base - 3), "slots", size=SMALL, anchor="end")
    drawing.rect(Box(box.x, base, box.width, box.bottom - base), MID)
    if box.bottom - base > 14:
        drawing.text((box.x + 7, (base + box.bottom) / 2 + 4), "weights", size=SMALL)
    for span in state.stopped:
        axes.shade(*span)
    axes.also_here(state.slots)
    point = state.points.get(state.slots)
    words = f"KV cache: {percent(1 - point.cache_used)} free" if point else "KV cache"
    most = wall - 36 - BOLD * text_width(words, SMALL)
    if most > box.x and base - top > 18:
        place = max(box.x, min(axes.at(state.slots, 0)[0], most)) + 8, top + 16
        drawing.text(place, words, size=SMALL, bold=True, halo=RESERVED)


# ---- what adapters cost


def _draw_steps(drawing: Drawing, state: State, y: float) -> float:
    """Draw the time of a step as bars, one for each way to apply its adapters: its passes over the model,
    and what the adapters add; return the y below.
    """
    count, fits = state.applied, state.serving.copies_that_fit
    rates = state.rate("merged", 1), *(state.rate(way, count) for way in WAYS)
    base, together, loop, merged = (state.batch / rate for rate in rates)
    kernel = f"{'all ' * (count > 1)}{count} in one kernel"
    drawing.number((MARGIN, y), f"{together / base:.2f}", f"times as long with {kernel}", BLUE)
    rows = [
        ("without adapters", INK, [(base, MID)]),
        (kernel, BLUE, [(base, MID), (together - base, BLUE)]),
        ("one after the other", ORANGE, [(base, MID), *[((loop - base) / count, ORANGE)] * count]),
        ("a merged model each", INK, [(merged / count, MID if index < fits else "none") for index in range(count)]),
    ]
    left, x, wide = MARGIN + (150 if drawing.width >= WIDE else 86), 0.0, 0.0
    for name, colour, pieces in rows:
        y += 34
        lines = balanced(name, left - MARGIN - 4)
        for index, line in enumerate(lines):
            drawing.text((MARGIN, y + 13 * (index - (len(lines) - 1) / 2)), line, size=SMALL, colour=colour)
        x = left
        for part, fill in pieces:
            wide = part / max(together, loop, merged) * (drawing.width - MARGIN - left - 94)
            box = Box(x, y - 15, wide - min(1, wide / 2), 22)
            drawing.rect(box, fill, stroke=MISSED if fill == "none" else "none", tip=seconds(part))
            if fill == "none":
                drawing.hatch(box, VERMILLION)
            x += wide
        total = sum(part for part, _ in pieces)
        drawing.text((x + 6, y), seconds(total) + f" ×{total / base:.3g}" * (name != rows[0][0]), size=SMALL)
    if fits < count:
        middle = x - (count - fits) * wide / 2, y
        drawing.text(middle, "do not fit", size=SMALL, colour=VERMILLION, anchor="middle", halo=True)
        drawing.text((x + 6, y + 15), "if they fitted", size=SMALL, colour=VERMILLION)
    return y + 19

"""Draw lesson 12's pictures: waiting times and memory by number of slots with the slots over time,
and what adapters cost.
"""

from __future__ import annotations

from minivllm_lab.pictures.drawing import ink_on, text_width
from minivllm_lab.pictures.palette import BLUE, GREEN, INK, ORANGE, SKY, VERMILLION
from widgets.multi_lora.runs import ANSWER, PROMPT
from widgets.multi_lora.state import CLIENTS, SLOTS, State
from widgets.multi_lora.strip import draw_strip
from widgets.shell.plot import (
    MARGIN,
    WIDE,
    Axes,
    Scale,
    balanced,
    counted,
    hidden_note,
    modelled,
    percent,
    seconds,
)
from widgets.shell.svg import BOLD, QUIET, SMALL, Box, Drawing
from widgets.shell.theme import BROKEN, IDLE, MID

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
    note = f"{serving.load:g} requests a second for {counted(serving.adapters, 'adapter')}; modelled"
    y = draw_strip(drawing, state, _draw_head(drawing, state, "The queue and the LoRA slots", note) + 14) + 60
    waits = Box(64, y, width - 64 - MARGIN, 366 - y if width >= WIDE else 180)
    memory = Box(waits.x, waits.bottom + 10, waits.width, 42)
    _draw_waits(Axes(drawing, waits, ACROSS, _scale(state)), state, pinned)
    _draw_memory(Axes(drawing, memory, ACROSS, Scale(0, max(serving.most_slots, 1))), state)
    drawing.height = memory.bottom + 44
    return drawing.render()


def detail(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw the time of a step with adapters, and how many merged models fit."""
    drawing = Drawing(width, 0, "What adapters cost", "The time of a step, and the models that fit")
    note = f"a step of {counted(state.batch, 'request')} with {counted(state.applied, 'adapter')}; modelled"
    y = _draw_head(drawing, state, "What adapters cost", note)
    if state.serving.at_once:
        y = _draw_steps(drawing, state, y + 42)
    drawing.height = _draw_copies(drawing, state, y + 28) + 24
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
            nearest = state.nearest(span)
            words = "" if nearest is None else cause_words(state, state.cause(nearest), nearest)
            axes.shade(*span, words)
            axes.explain(*span, words.split(":")[0])
            if span[0] is None and state.missing:
                why = f"{state.wanted:.0f} adapters in use on average"
                axes.explain(span[1], None, f"{state.slots + state.missing} slots are enough: {why}", GREEN)
    for span in state.stopped:
        axes.shade(*span, "does not start")
        words = "no memory left" if span[0] else "does not start"
        place = axes.box.right, axes.box.y - 6
        axes.drawing.text(place, f"{words} ↓", size=SMALL, colour=VERMILLION, anchor="end", bold=True)
    axes.mark_y(state.ttft, f"limit: {seconds(state.ttft)}", GREEN)
    if pinned and pinned.run:
        axes.pinned(pinned.run, [pinned.in_the_end(slots) for slots in pinned.run], pinned.slots)
    hidden_note(axes.drawing, axes.box)
    axes.here(state.slots, "slots", counted(state.slots, "slot"))
    with axes.drawing.answer():
        walls = [wall for wall, _ in state.stopped if wall and state.complete]
        waits = [state.in_the_end(slots) for slots in (*state.run, *(state.run[-1] for _ in walls))]
        axes.line([*state.run, *walls], waits, BLUE)
        if state.slots in state.run:
            _draw_here(axes, state)


def _draw_here(axes: Axes, state: State) -> None:
    wait = state.in_the_end(state.slots)
    number = seconds(float(f"{wait:.2g}")) if wait < 3600 else "hours"
    colour = VERMILLION if state.cause(state.slots) else GREEN
    later = wait > state.first(state.slots)
    words = f"to first token for {percent(CLIENTS)}{', in the long run' if later else ' of requests'}"
    axes.drawing.number((MARGIN, axes.box.y - 28), number, words, colour)
    axes.points([state.slots], [wait], colour, radius=6)


def cause_words(state: State, cause: str, slots: int) -> str:
    """Describe what goes wrong with this many slots."""
    point = state.points[slots]
    return {
        "slots": f"too few slots: requests wait while the KV cache is {percent(1 - point.cache_used)} free",
        "cache": "the slots leave too little memory for the KV cache",
        "engine": f"{state.serving.load:g} requests a second are more than the GPU handles",
        "": "",
    }[cause]


def _draw_memory(axes: Axes, state: State) -> None:
    """Draw how much of the memory beside the weights the slots leave for the KV cache."""
    drawing, box, most = axes.drawing, axes.box, min(ACROSS.high, state.serving.most_slots)
    axes.frame("slots on the GPU (max_loras)", "", x_ticks=TICKS, x_format="{:,}".format, y_ticks=())
    drawing.text((box.x - 7, box.y + 26), "memory", size=SMALL, colour=QUIET, anchor="end")
    if most > ACROSS.low:
        wall = axes.at(most, 0)[0]
        drawing.rect(Box(box.x, box.y, wall - box.x, box.height), IDLE)
        edge = [axes.at(most ** (part / 40), most ** (part / 40)) for part in range(41)]
        drawing.polygon([*edge, (wall, box.bottom), (box.x, box.bottom)], SKY)
        drawing.text((wall - 5, box.bottom - 5), "slots", size=SMALL, colour=ink_on(SKY), anchor="end")
    for span in state.stopped:
        axes.shade(*span)
    axes.also_here(state.slots)
    if point := state.points.get(state.slots):
        words = f"KV cache: {percent(point.cache_used)} in use"
        wide, here = BOLD * text_width(words, SMALL), axes.at(state.slots, 0)[0]
        x = here + 8 if here + wide + 12 < axes.at(most, 0)[0] else max(box.x, here - wide - 16) + 8
        drawing.text((x, box.y + 17), words, size=SMALL, bold=True, halo=IDLE)


# ---- what adapters cost


def _draw_steps(drawing: Drawing, state: State, y: float) -> float:
    """Draw the time of a step as bars: without adapters, and with what they add, in one kernel or in a loop;
    return the y below.
    """
    count = state.applied
    base, together, loop = state.step_seconds
    kernel = f"{'all ' * (count > 1)}{count} in one kernel"
    drawing.number((MARGIN, y), f"{together / base:.2f}", f"times as long with {kernel}", BLUE)
    left, x, high = _left(drawing), 0.0, 24
    wide = (drawing.width - MARGIN - left - 60) / max(together, loop)
    rows = [
        ("without adapters", INK, base, 1),
        (kernel, BLUE, together, 1),
        ("one after the other", ORANGE, loop, count),
    ]
    y = _part(drawing, "time per step", y + 14) - 5
    for name, colour, total, pieces in rows:
        y += 34
        _name(drawing, name, y, colour)
        drawing.rect(Box(left, y - 16, base * wide, high), MID, tip=seconds(base))
        each = (total - base) * wide / pieces
        for piece in range(pieces):
            x = left + base * wide + piece * each
            drawing.rect(Box(x + 1, y - 16, each - 1, high), colour, tip=seconds(total - base))
        drawing.text((left + total * wide + 7, y + 1), seconds(total), size=SMALL, bold=True)
    if count > 1:
        y += 26
        drawing.text((left + base * wide, y), f"each as long as all {count}", size=SMALL, colour=ORANGE)
    return y


def _draw_copies(drawing: Drawing, state: State, y: float) -> float:
    """Draw a merged model for each adapter of a step, and which of them do not fit; return the y of their name."""
    count, left = state.applied, _left(drawing)
    fits, each = min(state.serving.copies_that_fit, count), (drawing.width - MARGIN - left - 84) / max(count, 8)
    y = _part(drawing, "GPU memory", y) + 26
    _name(drawing, "merged models", y, INK)
    for index in range(count):
        box = Box(left + index * each, y - 16, each - min(4, each / 4), 24)
        drawing.rect(box, IDLE if index < fits else BROKEN, stroke=MID if index < fits else VERMILLION)
        if index >= fits:
            drawing.hatch(box, VERMILLION)
    edge, colour = left + fits * each - 2, VERMILLION if fits < count else INK
    if fits < count:
        drawing.line((edge, y - 22), (edge, y + 14), INK, width=3)
    drawing.text((left + count * each + 5, y + 1), f"{fits} of {count} fit", size=SMALL, colour=colour, bold=True)
    return y


def _part(drawing: Drawing, name: str, y: float) -> float:
    """Draw a rule with the name of the bars below it, and return the y of the name."""
    drawing.line((MARGIN, y), (drawing.width - MARGIN, y))
    drawing.text((MARGIN, y + 18), name, size=SMALL, bold=True)
    return y + 18


def _left(drawing: Drawing) -> float:
    return MARGIN + (150 if drawing.width >= WIDE else 86)


def _name(drawing: Drawing, name: str, y: float, colour: str) -> None:
    lines = balanced(name, _left(drawing) - MARGIN - 4)
    for index, line in enumerate(lines):
        drawing.text((MARGIN, y + 14 * (index - (len(lines) - 1) / 2)), line, size=SMALL, colour=colour)

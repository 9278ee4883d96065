"""Draw lesson 01's picture: the memory as a bar, the KV cache slot by slot, and the lengths at
which not one request fits.
"""

from __future__ import annotations

from dataclasses import replace

from minivllm.config.units import GIB
from minivllm_lab.pictures.drawing import text_width
from minivllm_lab.pictures.palette import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILLION
from widgets.kv_cache.state import CONTEXTS, State
from widgets.shell.plot import MARGIN, WIDE, Axes, Scale, counted, hidden_note, percent, tokens
from widgets.shell.svg import SMALL, Box, Drawing, Segment, legend, stacked_bar, without_room
from widgets.shell.theme import CARD, HELD, MID, MISSED, NOT_OURS, RESERVED, TINT

POOL, LEAST_SLOT, APART = 128, 6, 7
"""Pixels of height of the KV cache's slots, and of a slot, and between the last slot and what is left over."""
LEFT_OVER = "left over: too short for a request"


def draw(state: State, width: float, pinned: State | None, words: str) -> str:
    """Draw the picture; `words` describe it for screen readers."""
    drawing = Drawing(width, 0, f"The KV cache of {state.model} on {state.hardware.name}", words)
    bar = _draw_memory(drawing, state)
    panel = Box(MARGIN, bar.bottom + 16, width - 2 * MARGIN, POOL + (72 if width >= WIDE else 108))
    if state.ledger and not state.beyond_model:
        _draw_magnifier(drawing, state, bar, panel)
    drawing.rect(panel, TINT)
    draw_panel = _draw_slots if state.starts else _draw_refused
    draw_panel(drawing, state, Box(panel.x + 12, panel.y, panel.width - 24, panel.height - 10))
    y = drawing.heading((MARGIN, panel.bottom + 28), "Requests at once")
    plot = Box(MARGIN + 36, y + 12, width - 2 * MARGIN - 44, 92 if width >= WIDE else 140)
    drawing.height = plot.bottom + 44
    _draw_plot(drawing, state, pinned, plot)
    return drawing.render()


def _draw_memory(drawing: Drawing, state: State) -> Box:
    """Draw the bar of the GPU's memory, and return its box."""
    card, width = state.hardware.memory_bytes, drawing.width - 2 * MARGIN
    which = f"one {state.hardware.name}" if state.tp == 1 else f"each of {state.tp} {state.hardware.name}"
    y = drawing.heading((MARGIN, 20), f"Memory of {which}: {card / GIB:.1f} GiB")
    (_, weights), *others = state.needs
    parts = ", ".join(f"{name} {size / GIB:,.2f}" for name, size in others)
    working = _part("working memory", state.needed - weights, PURPLE, f": {parts}")
    segments = [_part("weights", weights, GREY), working]
    if state.ledger:
        engine = int(card * state.utilization)
        held = f": {state.tokens:,} tokens of {state.bytes_per_token:,.0f} bytes"
        segments.append(_part("KV cache", engine - state.needed, HELD, held))
        segments.append(replace(_part("not given to vLLM", card - engine, NOT_OURS), hatched=True))
    total = max(card, state.needed)
    bottom = legend(drawing, (MARGIN, y + 22), without_room(segments, total, width), width)
    bar = Box(MARGIN, bottom - 10, width, 24)
    stacked_bar(drawing, bar, segments, total)
    if state.needed > card:
        edge = bar.x + card / state.needed * width
        drawing.line((edge, bar.y - 5), (edge, bar.bottom + 5), colour=VERMILLION, width=2.5)
    return bar


def _part(name: str, size: int, colour: str, tip: str = "") -> Segment:
    return Segment(f"{name} {size / GIB:,.1f} GiB", size, colour, tip=f"{name}, {size / GIB:,.2f} GiB{tip}")


def _draw_magnifier(drawing: Drawing, state: State, bar: Box, panel: Box) -> None:
    """Draw a wedge from the KV cache's part of the bar to the panel that enlarges it."""
    card, budget = state.hardware.memory_bytes, int(state.hardware.memory_bytes * state.utilization)
    left, right = (bar.x + part / card * bar.width for part in (state.needed, budget))
    drawing.polygon([(left, bar.bottom), (right, bar.bottom), (panel.right, panel.y), (panel.x, panel.y)], RESERVED)


def _draw_slots(drawing: Drawing, state: State, box: Box) -> None:
    """Draw a strip for each slot, with the tokens that its request ever holds and those only
    reserved.
    """
    drawn = max(len(state.lengths), 1)
    fill = "fills" if state.slots == 1 else "fill"
    y = drawing.heading((box.x, box.y + 20), f"{counted(state.slots, 'request')} {fill} the KV cache")
    key = "reserved, never used" + (f" ({drawn} drawn)" if drawn < state.slots else "")
    keys = [Segment(key, 0, RESERVED), Segment("tokens it ever holds", 0, HELD)]
    beside, room = drawing.words[-1].right + 16, sum(text_width(key.label, SMALL) + 34 for key in keys) - 16
    place = (beside, y) if beside + room < box.right else (box.x, y + 20)
    y = legend(drawing, place, keys, box.width) + 13
    drawing.number((box.x, y), percent(state.held, 1), "of the cache ever holds a token", BLUE)
    pool = Box(box.x, y + 11, box.width, box.bottom - y - 11)
    hidden_note(drawing, pool)
    rest = state.tokens - state.slots * state.max_model_len
    below = rest / state.max_model_len * pool.width + 10 + text_width(LEFT_OVER, SMALL) > pool.width
    height = pool.height - APART - 16 * below
    columns = -(-drawn // (int(height / LEAST_SLOT) - 1))
    rows = -(-drawn // columns)
    wide, high = pool.width / columns, height / (rows + 1)
    gap = min(3.0, high / 5)
    slot = Box(pool.x, pool.y, wide - gap - 1, high - gap)
    for index in range(drawn):
        part = replace(slot, x=slot.x + index % columns * wide, y=slot.y + index // columns * high)
        length = state.lengths[index] if state.lengths else 0
        drawing.rect(part, RESERVED)
        with drawing.answer():
            tip = f"Request {index + 1} holds {length:,} of its {state.max_model_len:,} tokens"
            drawing.rect(part, "transparent", tip=tip)
            drawing.rect(replace(part, width=length / state.max_model_len * part.width), HELD, tip=tip)
    if drawn == state.slots and rest:
        part = replace(slot, y=slot.y + rows * high + APART, width=rest / state.max_model_len * slot.width)
        drawing.rect(part, CARD, stroke=MID, dash="3 3", tip=f"{rest:,} tokens, which no request can use")
        place = (pool.x, part.bottom + 15) if below else (part.right + 7, part.y + part.height / 2 + 4)
        drawing.text(place, LEFT_OVER, size=SMALL)


def _draw_refused(drawing: Drawing, state: State, box: Box) -> None:
    """Draw one request of the maximum length, and the part of it that is possible."""
    short = state.needed - int(state.hardware.memory_bytes * state.utilization)
    if state.beyond_model:
        title, most = "Longer than the model supports", state.model_limit
        note = f"{state.model} supports {most:,} tokens"
    elif state.ledger:
        title, most = "Not even one request fits", state.longest
        note = f"the longest that fits has {most:,} tokens"
    else:
        title, most = "No room for a KV cache", 0
        note = f"{short / GIB:,.1f} GiB too little even without it" if short > 0 else "less is left than a block takes"
    y = drawing.heading((box.x, box.y + 20), title, note)
    drawing.text((box.x, y + 26), f"one request of {state.max_model_len:,} tokens", size=SMALL, colour=VERMILLION)
    request = Box(box.x, y + 36, box.width, box.bottom - y - 36)
    drawing.rect(request, CARD, stroke=VERMILLION, dash="5 3")
    drawing.hatch(request, MISSED)
    room = replace(request, width=request.width * min(1.0, most / state.max_model_len))
    drawing.rect(room, SKY, tip=f"{most:,} of its tokens are possible")


def _draw_plot(drawing: Drawing, state: State, pinned: State | None, box: Box) -> None:
    """Draw how many requests fit by reserved length, and the lengths at which vLLM refuses to start."""
    own = [state.tokens / mean if mean else 1.0 for mean in state.mean_lengths]
    levels = zip(state.contexts, own, strict=True)  # shorter limits refuse the long requests
    flat = sum(limit < state.max_model_len and count > 1.04 * own[-1] for limit, count in levels)
    counts = Scale.around(1, 2 * max([100.0, *own[flat:], *state.concurrency]))
    axes = Axes(drawing, box, Scale(CONTEXTS[0], CONTEXTS[-1], log=True), counts)
    axes.frame(
        "max_model_len: tokens that each request reserves",
        "",
        x_format=tokens,
        x_ticks=axes.x.doublings(12 if drawing.width >= WIDE else 4),
        y_ticks=axes.y.powers(),
    )
    cause = f"no request fits above {state.wall:,}" if state.ledger else "no room for a KV cache"
    axes.broken(state.wall or None, None, "past the model's limit" if 0 < state.model_limit == state.wall else cause)
    axes.here(state.max_model_len, "max_model_len")  # before the curves, or it covers their tips
    if pinned:
        axes.pinned(pinned.contexts, pinned.concurrency, pinned.max_model_len)
    if not state.right_bytes and state.contexts:
        true = [count * state.bytes_per_token / state.counted_bytes for count in state.concurrency]
        axes.line(state.contexts, true, ORANGE, dash="6 4")
        axes.name(state.contexts, true, "the engine's count", ORANGE)
    with drawing.answer():
        if fit := state.at_own_length:
            axes.line(state.contexts[flat:], own[flat:], GREEN, width=2, dash="2 4")
            if state.starts:
                _draw_times(axes, state, fit)
            _draw_point(axes, state.max_model_len, fit, f"{round(fit):,} by own length", GREEN)
    pairs = zip(state.contexts, state.concurrency, strict=True)
    tips = [f"{int(count):,} of {context:,} tokens" for context, count in pairs]
    axes.line(state.contexts, state.concurrency, BLUE, tips=tips)
    if state.starts:
        _draw_point(axes, state.max_model_len, state.tokens / state.max_model_len, f"{state.slots:,} reserved", BLUE)


def _draw_times(axes: Axes, state: State, fit: float) -> None:
    """Bracket the requests that fit by own length and as reserved, with their ratio, where there is room."""
    (x, low), (_, high) = (axes.at(state.max_model_len, count) for count in (state.slots, fit))
    if low - high > 16 and x + 90 < axes.box.right:
        axes.drawing.polyline([(x + 9, high), (x + 13, high), (x + 13, low), (x + 9, low)], INK, width=1.5)
        axes.drawing.text((x + 18, (low + high) / 2 + 4), f"× {round(fit) / state.slots:,.1f}", size=SMALL, bold=True)


def _draw_point(axes: Axes, x: float, y: float, words: str, colour: str) -> None:
    """Draw a dot, and write its words."""
    point = axes.at(x, y)
    axes.drawing.circle(point, 6, colour)
    axes.label(point, words if axes.drawing.width >= WIDE else words.replace(" ", "\n", 1), colour)

"""Draw lesson 01's picture: the memory as a bar, the KV cache slot by slot, and the lengths at
which not one request fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from minivllm.config.units import GIB
from minivllm_lab.drawing import QUIET
from minivllm_lab.palette import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION
from widgets.shell.plot import MARGIN, WIDE, Axes, Scale, balanced, hidden_note, percent, tokens
from widgets.shell.strip import draw_title
from widgets.shell.svg import BOLD, SMALL, Box, Drawing, Segment, legend, stacked_bar, text_box, without_room
from widgets.shell.theme import CARD, HELD, MID, MISSED, NOT_OURS, RESERVED, TINT

if TYPE_CHECKING:
    from widgets.kv_cache.state import Pool, State

BEFORE_CACHE = (("weights", GREY), ("activations", PURPLE), ("libraries", VERMILLION), ("CUDA graphs", ORANGE))
"""The name and colour of each item that the ledger lists before the KV cache."""
WIDE_HEIGHT = 470
PANEL_HEIGHT, NARROW_PANEL_HEIGHT = 126, 176
STRIP = 12
"""The rough ratio of a slot's width to its height."""
BELOW_ONE = 20
"""Pixels below the line of one request, for GPUs' names."""
TO_COMPARE = ("L4", "H100", "MI300X")
"""The GPUs whose curves are drawn beside the reader's: a small one, the usual one and the largest."""


def draw(state: State, width: float, pinned: State | None, words: str) -> str:
    """Draw the picture; `words` describe it for screen readers."""
    drawing = Drawing(width, WIDE_HEIGHT, f"The KV cache of {state.model} on {state.hardware.name}", words)
    bar = _draw_memory(drawing, state)
    panel = Box(MARGIN, bar.bottom + 16, width - 2 * MARGIN, PANEL_HEIGHT if width >= WIDE else NARROW_PANEL_HEIGHT)
    if state.ledger and not state.beyond_model:
        _draw_magnifier(drawing, state, bar, panel)
    drawing.rect(panel, TINT)
    inside = Box(panel.x + 12, panel.y, panel.width - 24, panel.height)
    if state.beyond_model:
        _draw_refused(drawing, state, inside)
    elif state.ledger is None:
        _draw_nothing_left(drawing, state, inside)
    elif state.fits:
        inside = _draw_slots(drawing, state, inside)
    else:
        _draw_shortage(drawing, state, inside)
    top = _draw_plot_heading(drawing, state, max(panel.bottom, inside.bottom + 8) + 22)
    drawing.height = max(WIDE_HEIGHT, top + 206) if width < WIDE else WIDE_HEIGHT
    _draw_plot(drawing, state, pinned, Box(MARGIN + 44, top, width - 2 * MARGIN - 52, drawing.height - 44 - top))
    return drawing.render()


def _draw_memory(drawing: Drawing, state: State) -> Box:
    """Draw the bar of the GPU's memory, and return its box."""
    card, needed, width = state.hardware.memory_bytes, state.needed, drawing.width - 2 * MARGIN
    which = f"one {state.hardware.name}" if state.tp == 1 else f"each of {state.tp} GPUs ({state.hardware.name})"
    y = drawing.heading((MARGIN, 20), f"Memory of {which}", f"{card / GIB:.1f} GiB; each part in GiB")
    segments = [
        Segment(f"{name} {size / GIB:,.1f}", size, colour, tip=f"{whole_name}: {size / GIB:,.2f} GiB")
        for (whole_name, size), (name, colour) in zip(state.needs, BEFORE_CACHE, strict=True)
    ]
    if state.ledger:
        cache, rest = int(card * state.utilization) - needed, card - int(card * state.utilization)
        words = f"KV cache: {cache / GIB:.2f} GiB, {state.tokens:,} tokens of {state.bytes_per_token:,.0f} bytes"
        segments.append(Segment(f"KV cache {cache / GIB:.1f}", cache, HELD, tip=words))
        tip = f"Not for this engine: {rest / GIB:.2f} GiB, which gpu_memory_utilization leaves to other programs"
        segments.append(Segment(f"not given to the engine {rest / GIB:.1f}", rest, NOT_OURS, tip=tip, hatched=True))
    total = max(card, needed)
    bottom = legend(drawing, (MARGIN, y + 22), without_room(segments, total, width), width)
    bar = Box(MARGIN, bottom - 10, width, 24)
    stacked_bar(drawing, bar, segments, total)
    if needed > card:
        edge = bar.x + card / needed * width
        drawing.line((edge, bar.y - 5), (edge, bar.bottom + 5), colour=VERMILLION, width=2.5)
    return bar


def _draw_magnifier(drawing: Drawing, state: State, bar: Box, panel: Box) -> None:
    """Draw a wedge from the KV cache's part of the bar to the panel that enlarges it."""
    card, budget = state.hardware.memory_bytes, int(state.hardware.memory_bytes * state.utilization)
    left, right = (bar.x + part / card * bar.width for part in (state.needed, budget))
    drawing.polygon([(left, bar.bottom), (right, bar.bottom), (panel.right, panel.y), (panel.x, panel.y)], RESERVED)


def _draw_slots(drawing: Drawing, state: State, box: Box) -> Box:
    """Draw a strip for each slot, with the tokens that its request ever holds and those only
    reserved; return their box.
    """
    drawn = max(len(state.lengths), min(state.slots, 1))
    note = f"{state.slots:,} reservation{'s' * (state.slots > 1)} of {state.max_model_len:,}"
    note += f" (the first {drawn} are shown)" if drawn < state.slots else ""
    y = drawing.heading((box.x, box.y + 19), "A full KV cache", note)
    drawing.rect(Box(box.x, y + 18, 12, 12), HELD, radius=2)
    drawing.number((box.x + 18, y + 31), percent(state.held, 1), "ever holds a token", BLUE)
    keys = [
        Segment("never used", 0, RESERVED, f"{percent(state.reserved - state.held, 1)} of the cache"),
        Segment("too small for one more", 0, CARD, outlined=True),
    ]
    place = (drawing.words[-1].right + 16, y + 31) if drawing.width >= WIDE else (box.x, y + 53)
    top = legend(drawing, place, keys, box.right - place[0]) - 9
    pool = Box(box.x, top, box.width, max(box.bottom - 8 - top, 60))
    columns = max(1, round((drawn * pool.width / pool.height / STRIP) ** 0.5))
    wide, high = pool.width / columns, min(pool.height // -(-(drawn + 1) // columns), 34.0)
    gap = min(3.0, high / 5)
    hidden_note(drawing, pool)
    for index in range(drawn + 1):
        slot = Box(pool.x + index % columns * wide, pool.y + index // columns * high, wide - gap - 1, high - gap)
        if index < drawn:
            length = state.lengths[index] if state.lengths else 0
            drawing.rect(slot, RESERVED)
            with drawing.answer():
                tip = f"Request {index + 1} holds {length:,} of its {state.max_model_len:,} tokens"
                drawing.rect(slot, "transparent", tip=tip)
                drawing.rect(replace(slot, width=length / state.max_model_len * slot.width), HELD, tip=tip)
        elif drawn == state.slots:
            rest = state.tokens - state.slots * state.max_model_len
            part = replace(slot, width=rest / state.max_model_len * slot.width)
            tip = f"{rest:,} tokens: less than one reservation, so no request can use them"
            drawing.rect(part, CARD, stroke=MID, tip=tip)
    return pool


def _draw_shortage(drawing: Drawing, state: State, box: Box) -> None:
    """Draw one request of the maximum length, and the part of it that fits."""
    note = f"the longest request that fits has {state.longest:,} tokens"
    y = drawing.heading((box.x, box.y + 19), "The KV cache is too small", note)
    drawing.text((box.x, y + 28), f"One request of {state.max_model_len:,} tokens", colour=VERMILLION)
    _draw_too_long(drawing, replace(box, y=y + 36), state.longest, state.max_model_len)


def _draw_too_long(drawing: Drawing, box: Box, most: int, length: int) -> None:
    """Draw one request, hatched where it exceeds `most` tokens."""
    request = replace(box, height=34)
    drawing.rect(request, CARD, stroke=VERMILLION, dash="5 3", tip=f"One request of {length:,} tokens")
    drawing.hatch(request, MISSED)
    room = replace(request, width=max(2.0, request.width * min(1.0, most / length)))
    drawing.rect(room, SKY, tip=f"{most:,} of its tokens are possible")


def _draw_nothing_left(drawing: Drawing, state: State, box: Box) -> None:
    short = state.needed - int(state.hardware.memory_bytes * state.utilization)
    note = f"{short / GIB:,.1f} GiB too little even without it" if short > 0 else "less is left than one block takes"
    y = drawing.heading((box.x, box.y + 19), "No KV cache at all", note)
    if state.needed > state.hardware.memory_bytes:
        words = "The vertical line in the bar marks the end of the memory."
        drawing.paragraph((box.x, y + 28), words, box.width, colour=VERMILLION, size=13)


def _draw_refused(drawing: Drawing, state: State, box: Box) -> None:
    """Compare the model's limit with max_model_len."""
    y = drawing.heading((box.x, box.y + 19), "Refused before any memory is taken")
    words = f"max_model_len is {state.max_model_len:,} tokens, but {state.model} supports {state.model_limit:,}"
    y = drawing.paragraph((box.x, y + 24), words, box.width, colour=VERMILLION, size=13)
    _draw_too_long(drawing, replace(box, y=y + 12), state.model_limit, state.max_model_len)


def _draw_plot_heading(drawing: Drawing, state: State, y: float) -> float:
    """Draw the plot's title and keys, and return the y where the plot begins."""
    own = f"{state.hardware.name}, reserved"
    keys = [Segment(own, 0, BLUE, dash="none"), Segment("by their own lengths", 0, GREEN, dash="2 4")]
    if not state.right_bytes:
        keys.append(Segment("the engine's count", 0, ORANGE, dash="6 4"))
    return draw_title(drawing, "Requests at once", keys, y) + (24 if drawing.width >= WIDE else 38)


def _draw_plot(drawing: Drawing, state: State, pinned: State | None, box: Box) -> None:
    """Draw the curves of all GPUs by reserved length, the line of one request, and the refused
    lengths.
    """
    most = 2.2 * max(100.0, state.at_own_length, *(pool.tokens / state.contexts[0] for pool in state.pools))
    y = Scale(most ** (-BELOW_ONE / (box.height - BELOW_ONE)), most, log=True)
    axes = Axes(drawing, box, Scale(state.contexts[0], state.contexts[-1], log=True), y)
    ticks = [10.0**power for power in range(6) if 10**power <= y.high]
    axes.frame(
        "max_model_len: tokens that each request reserves", "", x_format=tokens, y_format="{:,.0f}".format,
        x_ticks=axes.x.doublings(int(box.width // 45)), y_ticks=ticks,
    )  # fmt: skip
    _draw_broken(axes, state)
    drawing.rect(Box(box.x, box.bottom - BELOW_ONE, box.width + 1, BELOW_ONE - 0.5), CARD)
    axes.mark_y(1, "", VERMILLION)
    axes.here(state.max_model_len, "max_model_len")  # before the curves, or it covers their tips
    if pinned:
        axes.pinned(pinned.contexts, pinned.concurrency, pinned.max_model_len)
    _draw_curves(axes, state)
    _name_the_ends(axes, state)
    _draw_here(axes, state)


def _draw_broken(axes: Axes, state: State) -> None:
    """Shade the lengths at which vLLM refuses to start, because memory is short or the model's
    limit is exceeded, and write why above each.
    """
    limit, last = _limit(state), state.contexts[-1]
    if limit < last:
        axes.tint(limit, None, "", VERMILLION)
        _write_above(axes, limit, last, "past the model's limit")
    if state.longest < limit:
        cause = f"{state.hardware.name}: none fits" if state.ledger else "no KV cache is left"
        axes.shade(state.longest, limit if limit < last else None, f"{cause}, refused")
        _write_above(axes, state.longest, limit, cause)


def _write_above(axes: Axes, low: float, high: float, words: str) -> None:
    """Write words in at most two lines above a part of the plot or, if it is too narrow for them,
    before it with an arrow, unless other words are there.
    """
    left, right = (axes.at(max(end, axes.x.low), 1)[0] for end in (low, high))
    room = (axes.drawing.width if high == axes.x.high else right) - 8 - left
    for lines, x, anchor in ((balanced(words, room), left, "start"), ([f"{words} →"], left - 4, "end")):
        places = [(x, axes.box.y - 6 - 15 * row) for row in range(len(lines))][::-1]
        boxes = [text_box(place, line, SMALL, anchor, bold=True) for place, line in zip(places, lines, strict=True)]
        fits = (
            len(lines) < 3
            and min(box.x for box in boxes) > 0
            and (anchor == "end" or max(box.width for box in boxes) <= BOLD * room)
        )
        if fits and not any(box.overlaps(other) for box in boxes for other in axes.drawing.words):
            for place, line in zip(places, lines, strict=True):
                axes.drawing.text(place, line, size=SMALL, colour=VERMILLION, anchor=anchor, bold=True)
            return


def _draw_curves(axes: Axes, state: State) -> None:
    """Draw other GPUs' curves thin, up to the model's limit, then this GPU's."""
    for pool in _others(state):
        _draw_curve(axes, state, pool, MID, 1.3)
    if not state.right_bytes:
        ratio = state.bytes_per_token / state.counted_bytes
        counted = [count * ratio for count in state.concurrency]
        axes.line(state.contexts, counted, ORANGE, width=2, dash="6 4")
    with axes.drawing.answer():
        means = [(context, mean) for context, mean in zip(state.contexts, state.mean_lengths, strict=True) if mean]
        means = [(context, mean) for context, mean in means if context <= min(state.longest, _limit(state))]
        means = [*means[:-1:2], *means[-1:]]
        if state.tokens and means:
            xs, ys = [context for context, _ in means], [state.tokens / mean for _, mean in means]
            axes.line(xs, ys, GREEN, width=2, dash="2 4", tips=[_own_tip(state, *pair) for pair in means], group="own")
    if state.tokens:
        _draw_curve(axes, state, state.pool, BLUE, 2.5)


def _draw_curve(axes: Axes, state: State, pool: Pool, colour: str, width: float) -> None:
    """Draw how many requests fit at once, down to a single one or up to the model's limit."""
    xs = sorted({min(context, max(pool.longest, 1), _limit(state)) for context in state.contexts})
    counts = [pool.tokens / context for context in xs]
    axes.line(xs, counts, colour, width=width, tips=_tips(pool, xs), group=pool.gpu)


def _limit(state: State) -> int:
    return min(state.model_limit or state.contexts[-1], state.contexts[-1])


def _others(state: State) -> list[Pool]:
    return [pool for pool in state.pools if pool.gpu in TO_COMPARE and pool.tokens and pool.gpu != state.hardware.name]


def _tips(pool: Pool, contexts: Sequence[int]) -> list[str]:
    """Write the tooltips of a GPU's curve, one for each reserved length."""
    counts = [int(pool.tokens / context) for context in contexts]
    return [
        f"{pool.gpu}: {f'{count:,} requests' if count else 'not one request'} of {context:,} tokens; its cache holds "
        f"{pool.tokens:,}"
        for context, count in zip(contexts, counts, strict=True)
    ]


def _own_tip(state: State, context: int, mean: float) -> str:
    return (
        f"Requests of at most {context:,} tokens have {mean:,.0f} on average: {state.tokens / mean:,.0f} would fit if "
        "each held only its own tokens"
    )


def _name_the_ends(axes: Axes, state: State) -> None:
    """Draw a dot where each curve ends, on the line of one request or at the model's limit, and
    write the GPU's name beside it where there is room.
    """
    drawing, most = axes.drawing, _limit(state)
    for pool in (state.pool, *reversed(_others(state))) if state.tokens else _others(state):
        own, cut = pool is state.pool, pool.longest > most
        x, y = axes.at(most, pool.tokens / most) if cut else axes.at(max(pool.longest, axes.x.low), 1)
        tip = f"{pool.gpu}: the longest request that fits has {pool.longest:,} tokens"
        drawing.circle((x, y), 5.5 if own else 3.5, BLUE if own else GREY, tip=tip, group=pool.gpu)
        beside = [((x + 8, y + down), "start") for down in ((4, -2, 10) if cut else (15,))]
        for place, anchor in [*beside, ((x - 8, y + 15), "end")][:: 1 if cut else -1]:
            box = text_box(place, pool.gpu, SMALL, anchor, bold=True)
            inside = axes.box.x < box.x and box.right < drawing.width
            if inside and not any(box.overlaps(other) for other in drawing.words):
                colour = BLUE if own else QUIET
                drawing.text(place, pool.gpu, size=SMALL, colour=colour, anchor=anchor, bold=own, halo=not cut)
                break


def _draw_here(axes: Axes, state: State) -> None:
    """Draw dots on the curves at `max_model_len`, and write their counts."""
    if not state.tokens:
        return
    drawing, count = axes.drawing, state.tokens / state.max_model_len
    colour = BLUE if state.starts else VERMILLION
    x, y = axes.at(min(state.max_model_len, axes.x.high), max(count, axes.y.low))
    drawing.circle((x, y), 6, colour, tip=_tips(state.pool, [state.max_model_len])[0])
    axes.label((x, y), f"{state.slots:,}" if state.starts else "refused", colour)
    if state.at_own_length:
        with drawing.answer():
            own = axes.at(min(state.max_model_len, axes.x.high), min(state.at_own_length, axes.y.high))
            drawing.circle(own, 4.5, GREEN, tip=_own_tip(state, state.max_model_len, state.mean_length))
            axes.label((own[0], own[1] - 14), f"{state.at_own_length:,.0f}", GREEN)

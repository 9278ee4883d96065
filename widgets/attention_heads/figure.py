"""Draw lesson 09's pictures: how many requests fit on how many GPUs; what each GPU keeps, beside
published models.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import groupby

from minivllm_lab.attention_heads.siblings import ROPE
from minivllm_lab.pictures.drawing import ink_on, text_width
from minivllm_lab.pictures.palette import BLUE, GREEN, INK, ORANGE, PURPLE, VERMILLION
from widgets.attention_heads.state import TPS, Place, State, Use
from widgets.shell.plot import MARGIN, VALUE, Axes, Scale, counted, hidden_note, tokens
from widgets.shell.strip import draw_title
from widgets.shell.svg import BOLD, QUIET, SMALL, Box, Drawing, Segment, legend, stacked_bar, text_box
from widgets.shell.theme import BROKEN, CARD, IDLE, MID, MISSED

HALF, STEP = math.sqrt(2), 1.28
GPUS = Scale(TPS[0] / HALF, TPS[-1] * HALF, log=True)
"""Each number of GPUs has the part of the axis nearest to it; its level takes a little less."""
ABOVE, MEMORY, NUMBERS, PLOT = 34, 110, 15, 160
"""Pixels of height: what does not fit, a GPU's memory, its number, and the plot."""
TRACK, ROW, NEXT, INDENT = 24, 58, 48, 14
"""Pixels of height of a model's operations, of its row, and of that of its part, which is indented."""
KIB = 1024


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw what each GPU keeps, and below it the requests that fit by number of GPUs."""
    drawing = Drawing(width, 0, "What each GPU keeps", f"{state.model}, {state.mine.name}. {rank_words(state)}")
    y = _draw_gpus(drawing, _draw_head(drawing, state), state)
    copied = any(place.copies > 1 for place in state.mine.places)
    y = draw_title(drawing, "Requests that fit", [Segment("without copies", 0, ORANGE, dash="4 3")] * copied, y + 34)
    plot = Box(MARGIN, y + 16, width - 2 * MARGIN, PLOT)
    _draw_fits(Axes(drawing, plot, GPUS, _scale(state)), state, pinned)
    drawing.height = plot.bottom + 44
    return drawing.render()


def detail(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw what published models and the reader's make of each byte."""
    drawing = Drawing(width, 0, "Published models", f"Beside {state.mine.name}")
    drawing.height = _draw_uses(drawing, Box(MARGIN, 24, width - 2 * MARGIN, 0), state) + MARGIN
    return drawing.render()


def kib(size: float) -> str:
    """Format bytes in KiB."""
    return f"{size / KIB:,.1f}".removesuffix(".0")


# ---- requests that fit


def _scale(state: State) -> Scale:
    """Return a scale that holds all that fits, and what would fit without the first copies."""
    first = next((place for place in state.mine.places if place.fits >= 1 and place.copies > 1), state.here)
    return Scale(0, 1.2 * max(state.wanted, first.fits * first.copies, *(place.fits for place in state.mine.places)))


def _draw_fits(axes: Axes, state: State, pinned: State | None) -> None:
    drawing = axes.drawing
    axes.frame("GPUs that share the model (tensor parallel)", "", x_ticks=TPS, y_ticks=())
    with drawing.answer():
        _draw_broken(axes, state)
    if pinned:
        axes.pinned(TPS, [place.fits for place in pinned.mine.places], pinned.tp)
    axes.here(state.tp, "tensor_parallel_size", line=False)
    hidden_note(drawing, axes.box)
    with drawing.answer():
        for place in state.mine.places:
            _draw_place(axes, place)
    axes.mark_y(state.wanted, "")
    axes.label(axes.at(TPS[0] / HALF, state.wanted), f"{state.wanted} required", bold=False)
    drawing.circle(axes.at(state.tp, 0), 7, INK)
    with drawing.answer():
        for place in sorted(state.mine.places, key=lambda place: place.tp != state.tp):  # the handle's first
            _write_fits(axes, place, state)
        axes.tips(TPS, lambda tp: _fits_tip(state, state.mine.at(tp)))


def _draw_place(axes: Axes, place: Place) -> None:
    """Draw the requests that fit on this many GPUs and, dashed above them, those that would without copies."""
    low, high = place.tp / STEP, place.tp * STEP
    fits, full = int(place.fits), min(int(place.fits * place.copies), axes.y.high)
    (left, top), (right, bottom) = axes.at(low, fits), axes.at(high, 0)
    axes.drawing.rect(Box(left, top, right - left, bottom - top), BLUE)
    if fits:
        axes.line([low, low, high, high], [0, fits, fits, 0], BLUE, width=1)
    if full > fits:
        outline = [((low, low), (fits, full)), ((high, high), (fits, full)), ((low, high), (full, full))]
        for xs, ys in outline[: 2 + (full < axes.y.high)]:  # open if it ends above the plot
            axes.line(xs, ys, ORANGE, width=1.5, dash="4 3")


def _write_fits(axes: Axes, place: Place, state: State) -> None:
    """Write how many requests fit, at the handle with how many more than on half the GPUs, and how many would fit
    without copies, where there is room.
    """
    fails, full, drawing = int(place.fits) < state.wanted, place.fits * place.copies, axes.drawing
    (x, y), above = axes.at(place.tp, place.fits), max(axes.at(place.tp, full)[1] - 5, axes.box.y + 15)
    size = VALUE if place.tp == state.tp else SMALL
    colour, rim = (VERMILLION, BROKEN) if fails else (BLUE, CARD)
    numbers = [(y - 8, f"{int(place.fits):,}", size, colour)]
    if full > place.fits:
        numbers += [(above + 15 * (full > axes.y.high), f"{int(full):,}", SMALL, ORANGE)]
    if full > axes.y.high:
        numbers += [(above, "↑", SMALL, ORANGE)]
    if place.tp == state.tp > 1:
        numbers += [(y - 10 - VALUE, f"+{int(place.fits) - int(state.mine.at(place.tp // 2).fits)}", SMALL, colour)]
    for y, words, size, colour in numbers:
        box = text_box((x, y), words, size, "middle", bold=True)
        if not any(box.overlaps(other) for other in drawing.words):
            drawing.text((x, y), words, size=size, colour=colour, anchor="middle", bold=True, halo=rim)


def _fits_tip(state: State, place: Place) -> str:
    if place.refused:
        return f"{place.tp} GPUs: {cause_words(state, place.tp)}"
    return (
        f"{place.tp} GPUs: {place.fits:,.1f} requests fit, at {place.tokens_per_second:,.0f} tokens a second (modelled)"
    )


def _draw_broken(axes: Axes, state: State) -> None:
    """Shade where too few requests fit, and where heads cannot be split."""
    for cause, group in groupby(TPS, key=lambda tp: state.cause(tp).replace("weights", "few")):
        counts = list(group)
        if cause in ("", "copies"):
            continue
        low = None if counts[0] == TPS[0] else counts[0] / HALF
        high = None if counts[-1] == TPS[-1] else counts[-1] * HALF
        nearest = state.tp if low is None and high is None else counts[0] if high is None else counts[-1]
        words = cause_words(state, nearest)
        axes.shade(low, high, words)
        axes.explain(low, high, "too few" if cause == "few" else words)


def cause_words(state: State, tp: int) -> str:
    """Describe what is wrong on this many GPUs."""
    place = state.mine.at(tp)
    return {
        "long": f"{state.model} supports at most {state.longest:,} tokens",
        "heads": f"{state.query_heads} query heads cannot be split over {tp}",
        "weights": f"not even the weights fit on {tp} GPU{'s' * (tp > 1)}",
        "few": f"{int(place.fits)} of {state.wanted} requests fit on {tp}",
    }[state.cause(tp)]


# ---- the GPUs one by one


def _draw_head(drawing: Drawing, state: State) -> float:
    """Write the title and the colours, and return the y below."""
    heads = f"{state.kv_heads} KV head{'s' * (state.kv_heads > 1)}"
    title = f"{'A latent' if state.latent else heads} on {counted(state.tp, state.hardware.name)}"
    load = f"{state.model}, {counted(state.wanted, 'request')} of {tokens(state.context)} tokens"
    y = drawing.heading((MARGIN, 23), title, load)
    keys = [
        Segment("latent" if state.latent else "KV heads", 0, BLUE),
        Segment("copies", 0, ORANGE),
        Segment("weights etc.", 0, MID),
        *[Segment("free", 0, IDLE, outlined=True)] * (state.shares[1] < 1),
    ]
    return legend(drawing, (MARGIN, y + 22), keys, drawing.width - 2 * MARGIN) - 8


def _draw_gpus(drawing: Drawing, y: float, state: State) -> float:
    """Draw the memory of each GPU, filled from below, and return the y below."""
    whole = Box(MARGIN, y + ABOVE, drawing.width - 2 * MARGIN, MEMORY)
    room = whole.width / state.tp
    gap = min(4.0, room / 5)
    gpus = [Box(whole.x + rank * room + gap / 2, whole.y, room - gap, MEMORY) for rank in range(state.tp)]
    weights = min(state.shares[0], 1) * MEMORY
    step = next(step for step in TPS if step * room >= text_width("GPU 00", SMALL) + 6)
    for rank, gpu in enumerate(gpus):
        drawing.rect(gpu, IDLE, stroke=MID)
        drawing.rect(Box(gpu.x, gpu.bottom - weights, gpu.width, weights), MID)
        if rank % step == 0:
            drawing.text((gpu.x, gpu.bottom + NUMBERS), f"GPU {rank}", size=SMALL, colour=QUIET)
    hidden_note(drawing, whole)
    with drawing.answer():
        if state.here.divisible:
            seen = set[int]()
            for rank, gpu in enumerate(gpus):
                _draw_heads(drawing, gpu, state, state.ranks[rank], seen)
                seen |= set(state.ranks[rank])
        words, colour = _memory_words(state)
        rim = BROKEN if colour == VERMILLION else True
        drawing.text((whole.x, whole.y - 12), words, size=SMALL, colour=colour, bold=True, halo=rim)
    return whole.bottom + NUMBERS


def _draw_heads(drawing: Drawing, gpu: Box, state: State, heads: Sequence[int], seen: Collection[int]) -> None:
    """Draw the KV heads of one GPU side by side, as high as the requests make them; what an earlier
    GPU keeps, too, is a copy.
    """
    low, high = (min(share, 1) * MEMORY for share in state.shares)
    wide = gpu.width / len(heads)
    for index, head in enumerate(heads):
        part = Box(gpu.x + index * wide, gpu.bottom - high, wide - (index + 1 < len(heads)) * (wide > 3), high - low)
        colour = ORANGE if head in seen else BLUE
        drawing.rect(part, colour)
        words = "latent" if state.latent else str(head)
        if text_width(words, SMALL) + 2 <= part.width and part.height > SMALL:
            where = (part.x + part.width / 2, part.y + part.height / 2 + 4)
            drawing.text(where, words, size=SMALL, colour=ink_on(colour), anchor="middle")
    over = min((state.shares[1] - 1) * MEMORY, ABOVE)
    if over > 0:
        beyond = Box(gpu.x, gpu.y - over, gpu.width, over)
        drawing.rect(beyond, BROKEN)
        drawing.hatch(beyond, MISSED)
        drawing.line((gpu.x, gpu.y), (gpu.right, gpu.y), colour=VERMILLION, width=2.5)


def _memory_words(state: State) -> tuple[str, str]:
    """Say what the memory of the GPUs shows, and in which colour."""
    place = state.here
    cause = state.cause(state.tp)
    if cause == "few":
        return f"{state.wanted - int(place.fits)} of {state.wanted} requests do not fit", VERMILLION
    if cause not in ("", "copies"):
        return cause_words(state, state.tp), VERMILLION
    if place.copies > 1:
        return f"{state.tp - state.tp // place.copies} of {state.tp} GPUs keep only copies", ORANGE
    return f"room for {int(place.fits) - state.wanted} more", QUIET


def rank_words(state: State) -> str:
    """Describe what each GPU keeps, and how many GPUs keep the same heads."""
    place = state.here
    if not place.divisible:
        return f"{state.query_heads} query heads cannot be split over {state.tp} GPUs."
    kept = max(map(len, state.ranks))
    held = f"{kept} of {state.kv_heads} KV heads" if state.kv_heads > 1 else "the only KV head"
    held = "the whole latent" if state.latent else held
    alike = f" ({place.copies} keep the same)" if place.copies > 1 else ""
    subject = "Each GPU" if state.tp > 1 else "The GPU"
    return f"{subject} keeps {held}{alike}: {kib(place.kv_bytes)} KiB a token."


# ---- what is made of each byte


def _draw_uses(drawing: Drawing, box: Box, state: State) -> float:
    """Draw the operations for each byte read, beside what the GPU could do; return the y below."""
    ridge, uses = state.hardware.ridge(), state.uses
    y = drawing.heading((box.x, box.y), "Operations for each byte read") + 24
    across = Scale(0, max(ridge, *(1.15 * use.operations for use in uses)))  # room for a number beside the longest
    limit = box.x + across.share(ridge) * box.width
    words = f"{state.hardware.name} could do {ridge:.0f}"
    drawing.text((limit, y), words, size=SMALL, colour=GREEN, anchor="end", bold=True)
    track = Box(box.x, y - TRACK, box.width, TRACK)
    for use in uses:
        step = NEXT if use.yours else ROW
        track = replace(track, y=track.y + step)
        parts = [Segment("", use.operations, BLUE if use.yours else MID)]
        if use.latent:
            both = (("as key", use.query_heads), ("as value", use.operations - use.query_heads))
            colour, tip = BLUE if use.yours else PURPLE, f"{use.latent} of its {use.latent + ROPE} numbers are a value"
            parts = [Segment(f"{part:.3g} {name}", part, colour, tip) for name, part in both]
        rest = Segment("waits for memory" * (use is uses[0]), ridge - use.operations, CARD)
        stacked_bar(drawing, track, [*parts, rest], across.high)
        drawing.rect(replace(track, width=limit - box.x), "none", stroke=MID)
        drawing.line((limit, track.bottom - step + 4), (limit, track.bottom + 4), colour=GREEN, width=2)
        _write_use(drawing, track, use, box.x + across.share(use.operations) * box.width + 6)
    return track.bottom + 4


def _write_use(drawing: Drawing, track: Box, use: Use, x: float) -> None:
    """Write a model's name above its track with the heads that a byte serves, and at `x` its operations."""
    left, y = track.x + INDENT * use.yours, track.y - 6
    if use.yours:  # a part of the model above
        drawing.polyline([(track.x + 3, y - 13), (track.x + 3, y - 4), (left - 4, y - 4)], QUIET, width=1.5)
    drawing.text((left, y), use.name, size=SMALL, bold=True, colour=BLUE if use.yours else INK)
    words = f"a byte serves {counted(use.query_heads / use.kv_heads, 'query head')}"
    if use.latent:
        words = f"a vector serves {counted(use.query_heads, 'query head')}:"
    drawing.text((left + text_width(use.name, SMALL) * BOLD + 6, y), words, size=SMALL, colour=QUIET)
    drawing.text((x, track.bottom - 8), f"{use.operations:.3g}", size=SMALL + 1, bold=True)

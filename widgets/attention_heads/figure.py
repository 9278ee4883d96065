"""Draw lesson 09's pictures: how many requests fit on how many GPUs; what each GPU keeps, beside
published models.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import groupby

from minivllm_lab.pictures.drawing import ink_on, text_width
from minivllm_lab.pictures.palette import BLUE, GREEN, ORANGE, VERMILLION
from widgets.attention_heads.state import TPS, Place, State, published_models
from widgets.shell.plot import MARGIN, VALUE, WIDE, Axes, Scale, balanced, counted, hidden_note, modelled, tokens
from widgets.shell.strip import draw_title
from widgets.shell.svg import BOLD, QUIET, SMALL, Box, Drawing, Segment, legend, text_box
from widgets.shell.theme import BROKEN, IDLE, MID, MISSED

HALF, STEP = math.sqrt(2), 1.3
GPUS = Scale(TPS[0] / HALF, TPS[-1] * HALF, log=True)
"""Each number of GPUs has the part of the axis nearest to it; its level takes a little less."""
ABOVE, MEMORY, NUMBERS, PLOT = 34, 130, 15, 140
"""Pixels of height: what does not fit, a GPU's memory, its number, and the plot."""
MODEL_HEADS, MODEL_BYTES, MODEL_ROW = 155, 36, 20
"""Pixels of a model's name and heads, of its bytes, and of its row."""
KIB = 1024


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw what each GPU keeps, and below it the requests that fit by number of GPUs."""
    drawing = Drawing(width, 0, "What each GPU keeps", f"{state.model}, {state.mine.name}. {rank_words(state)}")
    y = _draw_gpus(drawing, _draw_head(drawing, state), state)
    copied = any(place.copies > 1 for place in state.mine.places)
    y = draw_title(drawing, "Requests that fit", [Segment("without copies", 0, BLUE, dash="2 4")] * copied, y + 34)
    plot = Box(46, y + 16, width - 46 - MARGIN, PLOT if width >= WIDE else 180)
    _draw_fits(Axes(drawing, plot, GPUS, _scale(state)), state, pinned)
    drawing.height = plot.bottom + 44
    return drawing.render()


def detail(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw published models."""
    drawing = Drawing(width, 0, "Published models", f"Beside {state.mine.name}")
    drawing.height = _draw_models(drawing, Box(MARGIN, 24, width - 2 * MARGIN, 0), state) + 10
    return drawing.render()


def kib(size: float) -> str:
    """Format bytes in KiB."""
    return f"{size / KIB:,.1f}".removesuffix(".0")


# ---- requests that fit


def _scale(state: State) -> Scale:
    """Return a scale that ends well above all curves, which leaves room for words."""
    fits = [state.wanted, *(place.fits for place in _fitting(state))]
    low, high = math.floor(3 * math.log10(0.8 * min(fits))), math.ceil(3 * math.log10(5 * max(fits)))
    return Scale(10 ** (low / 3), 10 ** (high / 3), log=True)


def _draw_fits(axes: Axes, state: State, pinned: State | None) -> None:
    axes.frame("GPUs that share the model (tensor parallel)", "", x_ticks=TPS, y_ticks=axes.y.powers())
    with axes.drawing.answer():
        _draw_broken(axes, state)
    if pinned:
        places = _fitting(pinned)
        axes.pinned([place.tp for place in places], [place.fits for place in places], pinned.tp)
    axes.mark_y(state.wanted, "")
    axes.label(axes.at(TPS[0] / HALF, state.wanted), f"{state.wanted} required", bold=False)
    hidden_note(axes.drawing, axes.box)
    with axes.drawing.answer():
        for place in _fitting(state):
            ends = [place.tp / STEP, place.tp * STEP]
            axes.line(ends, [place.fits * place.copies] * 2, BLUE, width=2, dash="2 4")
            axes.line(ends, [place.fits] * 2, BLUE, width=4)
        _write_fits(axes, state)
    axes.here(state.tp, "tensor_parallel_size")
    with axes.drawing.answer():
        axes.tips(TPS, lambda tp: _fits_tip(state, state.mine.at(tp)))


def _write_fits(axes: Axes, state: State) -> None:
    """Write the requests that fit at the handle, large, why they are more than on half as many GPUs, and those without
    copies.
    """
    drawing, here, half = axes.drawing, state.here, state.mine.at(max(state.tp // 2, 1))
    if here.fits < 1:
        return
    (x, y), words = axes.at(state.tp, here.fits), f"{int(here.fits):,}"
    step = y - axes.at(1, max(here.fits, state.mine.at(min(2 * state.tp, TPS[-1])).fits))[1]
    y -= 4 if drawing.width >= WIDE else 6 + step * (step < VALUE)  # there, the number reaches over the next level
    right = x + BOLD * text_width(words, VALUE) + 10 < axes.box.right
    beside, anchor = (7, "start") if right else (-7, "end")
    drawing.text((x + beside, y), words, size=VALUE, colour=BLUE, anchor=anchor, bold=True)
    more = int(here.fits) - int(half.fits)
    if here.copies > 1 and more > 0 and half.fits and not state.wrong:
        lines = balanced(f"+{more}: fewer weights per GPU", 240 if drawing.width >= WIDE else 80)
        axes.label(axes.at(state.tp, state.wanted), "\n".join(lines), BLUE, bold=False)
    for tp, fits, off, side in ((half.tp, half.fits, 0, "middle"), (state.tp, here.fits * here.copies, beside, anchor)):
        (x, y), words = axes.at(tp, fits), f"{int(fits):,}"
        place = x + off, max(y - 6, axes.box.y + SMALL)
        box = text_box(place, words, SMALL, side, bold=True)
        if fits not in (0, here.fits) and not any(box.overlaps(other) for other in drawing.words):
            drawing.text(place, words, size=SMALL, colour=BLUE, anchor=side, bold=True)


def _fitting(state: State) -> list[Place]:
    return [place for place in state.mine.places if place.fits >= 1]


def _fits_tip(state: State, place: Place) -> str:
    if place.refused:
        return f"{place.tp} GPUs: {cause_words(state, place.tp)}"
    gain = state.mine.gain(place.tp)
    times = f", {gain:.2f} times those of half as many GPUs" if 0 < gain < math.inf else ""
    rate = f"{place.tokens_per_second:,.0f} tokens a second ({modelled(state.error)})"
    return f"{place.tp} GPUs: {place.fits:,.1f} requests fit{times}, at {rate}"


def _draw_broken(axes: Axes, state: State) -> None:
    """Shade where too few requests fit, where heads cannot be split, and, in the colour of copies,
    where more GPUs only add copies.
    """
    for cause, group in groupby(TPS, key=lambda tp: state.cause(tp).replace("weights", "few")):
        counts = list(group)
        if not cause:
            continue
        low = None if counts[0] == TPS[0] else counts[0] / HALF
        high = None if counts[-1] == TPS[-1] else counts[-1] * HALF
        nearest = state.tp if low is None and high is None else counts[0] if high is None else counts[-1]
        words = cause_words(state, nearest)
        if cause == "copies":
            axes.tint(low, high, words, ORANGE)
        else:
            axes.broken(low, high, words)


def cause_words(state: State, tp: int) -> str:
    """Describe what is wrong on this many GPUs."""
    place = state.mine.at(tp)
    return {
        "long": f"{state.model} supports at most {state.longest:,} tokens",
        "heads": f"{state.query_heads} query heads cannot be split over {tp}",
        "weights": f"not even the weights fit on {tp} GPU{'s' * (tp > 1)}",
        "few": f"{int(place.fits)} of {state.wanted} requests fit on {tp}",
        "copies": "copies",
        "": "",
    }[state.cause(tp)]


def held_words(state: State, tp: int) -> str:
    """Compare the requests that fit with those of half as many GPUs."""
    fit, before = (int(state.mine.at(count).fits) for count in (tp, max(tp // 2, 1)))
    return f"{tp} GPUs hold {fit:,}, {tp // 2} hold {before:,}"


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
        Segment("weights and the rest", 0, MID),
        Segment("free", 0, IDLE, outlined=True),
    ]
    return legend(drawing, (MARGIN, y + 22), keys, drawing.width - 2 * MARGIN) - 8


def _draw_gpus(drawing: Drawing, y: float, state: State) -> float:
    """Draw the memory of each GPU, filled from below, and return the y below."""
    whole = Box(MARGIN, y + ABOVE, drawing.width - 2 * MARGIN, MEMORY)
    room = whole.width / state.tp
    gap = min(4.0, room / 5)
    gpus = [Box(whole.x + rank * room + gap / 2, whole.y, room - gap, MEMORY) for rank in range(state.tp)]
    weights = min(state.reserved / state.budget, 1) * MEMORY
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
                drawing.rect(gpu, "transparent", tip=_rank_tip(state, rank))
                seen |= set(state.ranks[rank])
        words, colour = _memory_words(state)
        rim = BROKEN if colour == VERMILLION else True
        drawing.text((whole.x, whole.y - 12), words, size=SMALL, colour=colour, bold=True, halo=rim)
    return whole.bottom + NUMBERS


def _filled(state: State) -> float:
    """Return the part of a GPU's memory that the weights and all requests take."""
    return (state.reserved + state.needed) / state.budget


def _draw_heads(drawing: Drawing, gpu: Box, state: State, heads: Sequence[int], seen: Collection[int]) -> None:
    """Draw the KV heads of one GPU side by side, as high as the requests make them; what an earlier
    GPU keeps, too, is a copy.
    """
    low, high = (min(part, 1) * MEMORY for part in (state.reserved / state.budget, _filled(state)))
    wide = gpu.width / len(heads)
    for index, head in enumerate(heads):
        part = Box(gpu.x + index * wide, gpu.bottom - high, wide - (index + 1 < len(heads)) * (wide > 3), high - low)
        colour = ORANGE if head in seen else BLUE
        drawing.rect(part, colour)
        words = "latent" if state.latent else str(head)
        if text_width(words, SMALL) + 2 <= part.width and part.height > SMALL:
            where = (part.x + part.width / 2, part.y + part.height / 2 + 4)
            drawing.text(where, words, size=SMALL, colour=ink_on(colour), anchor="middle")
    over = min((_filled(state) - 1) * MEMORY, ABOVE)
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


def _rank_tip(state: State, rank: int) -> str:
    count = state.query_heads // state.tp
    first = rank * count
    queries = f"query heads {first} to {first + count - 1}" if count > 1 else f"query head {rank}"
    heads = state.ranks[rank]
    kept = "the latent" if state.latent else f"KV head{'s' * (len(heads) > 1)} {', '.join(map(str, heads))}"
    copies = f"; {state.here.copies} GPUs keep the same" if state.here.copies > 1 else ""
    return f"GPU {rank}: {queries}, {kept}{copies}"


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


# ---- real models


def _draw_models(drawing: Drawing, box: Box, state: State) -> float:
    """Draw operations per byte and bytes per token of the reader's variant and of published models;
    return the y below.
    """
    ridge, copies = state.hardware.ridge(), state.here.copies
    y = drawing.heading((box.x, box.y), "Operations for each byte read") + 22
    drawing.text((box.x, y), "query : KV heads", size=SMALL, colour=QUIET)
    drawing.text((box.right, y), "KiB a token", size=SMALL, colour=QUIET, anchor="end")
    real, left = published_models(), box.x + MODEL_HEADS + 8
    bars = Box(left, y + 9, box.right - MODEL_BYTES - left, MODEL_ROW * (2 + len(real)))
    most = 2 * max(ridge, *(operations for *_, operations in real))
    axes = Axes(drawing, bars, Scale(0.8, most, log=True), Scale(0, 1))
    axes.frame("", "", x_ticks=(1, 10, 100), y_ticks=())
    axes.mark_x(ridge, GREEN)
    x, words = axes.at(ridge, 0)[0], f"{state.hardware.name} could do {ridge:.0f}"
    end = min(x + text_width(words, SMALL) / 2, box.right - text_width("KiB a token", SMALL) - 10)
    drawing.text((end, y), words, size=SMALL, colour=GREEN, anchor="end")
    drawing.text((x - 6, bars.bottom - 5), "← waits for memory", size=SMALL, colour=GREEN, anchor="end")
    heads = f"{state.query_heads} : {1 if state.latent else state.kv_heads}"
    mine = ("yours", heads, state.here.kv_bytes * state.tp, state.here.intensity)
    for row, (name, heads, size, operations) in enumerate([mine] * (mine[2] > 0) + [*real]):
        own, middle = name == "yours", bars.y + (row + 0.5) * MODEL_ROW
        at = axes.at(max(operations, 0.9), 0)[0]
        named = f"yours, {copies} copies" if own and copies > 1 else name.removesuffix("-hf")
        drawing.text((box.x, middle + 4), named, size=SMALL, bold=own)
        drawing.text((box.x + MODEL_HEADS, middle + 4), heads, size=SMALL, bold=own, anchor="end")
        drawing.line((bars.x, middle), (bars.right, middle))
        drawing.circle((at, middle), 5, BLUE if own else MID)
        words = f"{operations:.3g}"
        before = at + 14 + text_width(words, SMALL) > (x if at < x else bars.right)
        divided = f" = {operations * copies:.3g} ÷ {copies}"
        if own and copies > 1 and at + 14 + BOLD * text_width(words + divided, SMALL) < x:
            words += divided
        place, anchor = ((at - 9, middle + 4), "end") if before else ((at + 9, middle + 4), "start")
        drawing.text(place, words, size=SMALL, bold=own, anchor=anchor, halo=True)
        drawing.text((box.right, middle + 4), kib(size), size=SMALL, bold=own, anchor="end")
    return bars.bottom + 17

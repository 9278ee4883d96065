"""Draw lesson 09's pictures: how many requests fit on how many GPUs; what each GPU keeps, beside
published models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby

from minivllm_lab.drawing import text_width
from minivllm_lab.palette import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY
from widgets.attention_heads.state import TPS, Kind, Place, State
from widgets.shell.plot import MARGIN, WIDE, Axes, Key, Scale, draw_head, hidden_note, short, three_boxes, tokens
from widgets.shell.svg import HEADING, QUIET, SMALL, Box, Drawing
from widgets.shell.theme import CARD, IDLE, MID, MISSED

HALF = math.sqrt(2)
GPUS = Scale(TPS[0] / HALF, TPS[-1] * HALF, log=True)
"""Each number of GPUs has the part of the axis nearest to it."""
STYLES = {"MHA": (ORANGE, "8 4"), "MQA": (PURPLE, "2 4"), "late": (SKY, "9 3 2 3"), "GQA,": (GREY, "5 3")}
"""The colour and dashes of a kind shown for comparison, by the start of its name."""
ACROSS, RANK_ROW = 16, 27
"""GPUs in a row, and pixels from row to row."""
LEAST_NUMBER = 8
"""The least width in pixels of a KV head that shows its number."""
MODEL_NAMES, MODEL_BYTES, MODEL_ROW = 112, 44, 15
"""Pixels of a model's name, of its bytes, and of its row."""
KIB = 1024


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw the requests that fit by number of GPUs, with bytes and rates beside them."""
    drawing = Drawing(width, 0, "What fits on 1 to 64 GPUs", f"{state.model}, {state.mine.name}, against the GPUs")
    note = (
        f"{state.model} with {state.query_heads} query heads on {state.hardware.name}, requests of "
        f"{tokens(state.context)} tokens; memory as vLLM counts it"
    )
    y = draw_head(drawing, "Requests that fit", note, state.error, _keys(state))
    main, upper, lower = three_boxes(width, y + 26, 290, large=0.54)
    _draw_fits(Axes(drawing, main, GPUS, _scale(state)), state, pinned)
    _draw_bytes(drawing, upper, state)
    _draw_rates(drawing, lower, state)
    drawing.height = max(main.bottom, lower.bottom) + 46
    return drawing.render()


def detail(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw each GPU's KV heads, and published models."""
    drawing = Drawing(width, 0, "GPU by GPU", rank_words(state))
    whole = Box(MARGIN, 24, width - 2 * MARGIN, 0)
    y = _draw_ranks(drawing, whole, state) + 34
    drawing.height = _draw_models(drawing, Box(MARGIN, y, whole.width, 0), state) + 10
    return drawing.render()


def kib(size: float) -> str:
    """Format bytes in KiB."""
    return f"{size / KIB:,.1f}".removesuffix(".0")


def style(kind: Kind) -> tuple[str, str]:
    """Return the colour and the dash pattern of a variant shown for comparison."""
    return STYLES[kind.name[:4]] if kind.name[:4] in STYLES else STYLES[kind.name[:3]]


def _keys(state: State) -> list[Key]:
    beside = [(kind.name, *style(kind), 1.8) for kind in state.others]
    return [(state.mine.name, BLUE, "", 2.5), *beside, (f"{state.wanted} required", GREEN, "4 3", 1.5)]


# ---- requests that fit


def _scale(state: State) -> Scale:
    """Return a scale that ends well above all curves, which leaves room for words."""
    most = max([state.wanted, *(place.fits for kind in (state.mine, *state.others) for place in kind.places)])
    return Scale(0.5, 10 ** (math.ceil(3 * math.log10(5 * most)) / 3), log=True)


def _draw_fits(axes: Axes, state: State, pinned: State | None) -> None:
    axes.frame(
        "GPUs that share the model (tensor parallel)",
        f"requests of {tokens(state.context)} tokens that fit",
        x_ticks=TPS,
        x_format="{:g}".format,
        y_ticks=axes.y.powers(),
        y_format=short,
    )
    with axes.drawing.answer():
        _draw_broken(axes, state)
    if pinned:
        axes.pinned(*_curve(pinned.mine, _fits), pinned.tp)
    axes.mark_y(state.wanted, "", GREEN)
    hidden_note(axes.drawing, axes.box)
    with axes.drawing.answer():
        axes.line(*_curve(state.mine, _fits), BLUE)
        for kind in state.others:  # on top, because some lie on the reader's
            colour, dash = style(kind)
            axes.line(*_curve(kind, _fits), colour, width=1.8, dash=dash)
        axes.points(*_curve(state.mine, lambda place: place.fits * (place.fits >= axes.y.low)), BLUE, radius=3.5)
    axes.here(state.tp, "tensor_parallel_size", f"{state.tp} GPU{'s' * (state.tp > 1)}")
    with axes.drawing.answer():
        axes.tips(TPS, lambda tp: _fits_tip(state, state.mine.at(tp)))


def _fits(place: Place) -> float:
    return place.fits


def _curve(kind: Kind, value: Callable[[Place], float]) -> tuple[list[float], list[float]]:
    """Return the numbers of GPUs and the values, without values of 0."""
    points = [(float(place.tp), value(place)) for place in kind.places if value(place) > 0]
    return [tp for tp, _ in points], [height for _, height in points]


def _fits_tip(state: State, place: Place) -> str:
    if place.refused:
        return f"{place.tp} GPUs: {cause_words(state, place.tp)}"
    gain = state.mine.gain(place.tp)
    times = f", {gain:.2f} times those of half as many GPUs" if 0 < gain < math.inf else ""
    return f"{place.tp} GPUs: {place.fits:,.1f} requests fit{times}; {place.copies} keep the same keys and values"


def _draw_broken(axes: Axes, state: State) -> None:
    """Shade where too few requests fit, and where more GPUs only add copies."""
    for words, group in groupby(TPS, key=lambda tp: _kind_of(state.cause(tp))):
        counts = list(group)
        if words:
            low = None if counts[0] == TPS[0] else counts[0] / HALF
            high = None if counts[-1] == TPS[-1] else counts[-1] * HALF
            nearest = state.tp if low is None and high is None else counts[0] if high is None else counts[-1]
            axes.broken(low, high, cause_words(state, nearest))


def _kind_of(cause: str) -> str:
    """Group causes that share a region: too few requests fit, or no more than before."""
    return {"": "", "long": "long", "weights": "few", "few": "few", "copies": "more", "heads": "more"}[cause]


def cause_words(state: State, tp: int) -> str:
    """Describe what is wrong on this many GPUs."""
    place = state.mine.at(tp)
    return {
        "long": f"{state.model} supports at most {state.longest:,} tokens",
        "heads": f"{state.query_heads} query heads cannot be split over {tp}",
        "weights": f"not even the weights fit on {tp} GPU{'s' * (tp > 1)}",
        "few": f"{int(place.fits)} of {state.wanted} requests fit on {tp}",
        "copies": f"copies: {held_words(state, tp)}",
        "": "",
    }[state.cause(tp)]


def held_words(state: State, tp: int) -> str:
    """Compare the requests that fit with those of half as many GPUs."""
    fit, before = (int(state.mine.at(count).fits) for count in (tp, max(tp // 2, 1)))
    return f"{tp} GPUs hold {fit:,}, {tp // 2} hold {before:,}"


# ---- bytes and rates


def _draw_bytes(drawing: Drawing, box: Box, state: State) -> None:
    """Draw a token's bytes on each GPU, and on all GPUs together."""
    each = _curve(state.mine, lambda place: place.kv_bytes / KIB)
    whole = _curve(state.mine, lambda place: place.kv_bytes * place.tp / KIB)
    axes = Axes(drawing, box, GPUS, _span(each[1] + whole[1]))
    axes.frame("", "KV cache of a token, KiB", x_ticks=(), y_ticks=axes.y.powers(), y_format=short)
    hidden_note(drawing, box)
    with drawing.answer():
        axes.line(*whole, BLUE, width=1.8, dash="5 3")
        axes.line(*each, BLUE)
        for words, (gpus, sizes), end in (("all GPUs together", whole, 0), ("each GPU", each, -1)):
            if gpus:
                axes.label(axes.at(gpus[end], sizes[end]), words, BLUE, bold=False)
        axes.mark_x(state.tp, dash="")

    def tip(tp: int) -> str:
        size = state.mine.at(tp).kv_bytes
        return f"{tp} GPUs: a token takes {kib(size)} KiB on each, {kib(size * tp)} KiB in all"

    with drawing.answer():
        axes.tips([place.tp for place in state.mine.places if place.kv_bytes], tip)


def _draw_rates(drawing: Drawing, box: Box, state: State) -> None:
    """Draw the tokens per second of all GPUs, with as many of the required requests as fit."""
    kinds = (state.mine, *state.others)
    curves = [_curve(kind, lambda place: place.tokens_per_second) for kind in kinds]
    axes = Axes(drawing, box, GPUS, _span([rate for _, rates in curves for rate in rates]))
    label = f"tokens/s, up to {state.wanted:,} at once"
    axes.frame("GPUs", label, x_ticks=TPS, x_format="{:g}".format, y_ticks=axes.y.powers(), y_format=short)
    hidden_note(drawing, box)
    with drawing.answer():
        for kind, curve in zip(state.others, curves[1:], strict=True):
            colour, dash = style(kind)
            axes.line(*curve, colour, width=1.5, dash=dash)
        axes.line(*curves[0], BLUE)
        axes.also_here(state.tp)

    def tip(tp: int) -> str:
        place = state.mine.at(tp)
        batch = min(state.wanted, int(place.fits))
        return f"{tp} GPUs: {place.tokens_per_second:,.0f} tokens a second, {batch} at once"

    with drawing.answer():
        axes.tips(TPS, tip)


def _span(values: Sequence[float]) -> Scale:
    return Scale.around(0.8 * min(values, default=1), 1.25 * max(values, default=10))


# ---- the GPUs one by one


def _draw_ranks(drawing: Drawing, box: Box, state: State) -> float:
    """Draw what each GPU keeps of every token, with copies hatched; return the y below."""
    drawing.text((box.x, box.y), "GPU by GPU", size=HEADING, bold=True)
    y = drawing.paragraph((box.x, box.y + 19), rank_words(state), box.width)
    if not state.here.divisible:
        return y
    across = min(state.tp, ACROSS)
    room = box.width / across
    seen = set[int]()
    for rank, heads in enumerate(state.ranks):
        row, column = divmod(rank, across)
        place = Box(box.x + column * room, y + 9 + row * RANK_ROW, room - 3, RANK_ROW - 5)
        drawing.rect(place, IDLE, tip=_rank_tip(state, rank))
        _draw_heads(drawing, place, state, rank, seen)
        seen |= set(heads)
    return y + 9 + RANK_ROW * -(-state.tp // across)


def _draw_heads(drawing: Drawing, place: Box, state: State, rank: int, seen: set[int]) -> None:
    """Draw the KV heads of one GPU, hatched where an earlier GPU already keeps them."""
    heads = state.ranks[rank]
    wide = (place.width - 2) / len(heads)
    for index, head in enumerate(heads):
        part = Box(place.x + 1 + index * wide, place.y + 2, max(wide - (1 if wide > 3 else 0), 0.8), place.height - 4)
        copy = head in seen
        drawing.rect(part, MISSED if copy else BLUE)
        if copy:
            drawing.hatch(part, MID, gap=6)
        words = "latent" if state.latent else str(head)
        if text_width(words, SMALL) + 2 <= part.width and part.width >= LEAST_NUMBER:
            colour = INK if copy else CARD
            where = (part.x + part.width / 2, part.y + part.height / 2 + 4)
            drawing.text(where, words, size=SMALL, colour=colour, anchor="middle")
    drawing.rect(place, "transparent", tip=_rank_tip(state, rank))


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
    ridge = state.hardware.ridge()
    drawing.heading((box.x, box.y), "Operations per byte", "log scale" * (drawing.width >= WIDE))
    drawing.text((box.right, box.y), "KiB a token", size=SMALL, colour=QUIET, anchor="end")
    bars = Box(box.x + MODEL_NAMES, box.y + 9, box.width - MODEL_NAMES - MODEL_BYTES, MODEL_ROW * (1 + len(state.real)))
    across = Scale(0.7, 4 * max(ridge, *(operations for _, _, operations in state.real)), log=True)
    rows = [
        (name.removeprefix("Meta-").removesuffix("-hf"), kib, operations, GREY) for name, kib, operations in state.real
    ]
    if state.here.kv_bytes:
        rows.insert(0, ("yours, all GPUs", state.here.kv_bytes * state.tp, state.here.intensity, BLUE))
    x = bars.x + across.share(ridge) * bars.width
    for row, model in enumerate(rows):
        _draw_model(drawing, box, bars, across, row, model, x)
    drawing.line((x, bars.y), (x, bars.bottom), colour=GREEN, dash="4 3", width=1.5)
    words = f"ridge {ridge:.0f}"
    end = min(x + text_width(words, SMALL) / 2, box.right - text_width("KiB a token", SMALL) - 10)
    drawing.text((end, box.y), words, size=SMALL, colour=GREEN, anchor="end")
    return bars.bottom


def _draw_model(
    drawing: Drawing, box: Box, bars: Box, across: Scale, row: int, model: tuple[str, int, float, str], ridge: float
) -> None:
    """Draw one model's row, and move its number off the line at `ridge`."""
    name, size, operations, colour = model
    y = bars.y + row * MODEL_ROW
    mine = colour == BLUE
    tip = f"{name}: {operations:.3g} operations per byte, {kib(size)} KiB a token"
    wide = max(across.share(operations), 0.02) * bars.width
    drawing.text((box.x, y + 12), name, size=SMALL, bold=mine)
    drawing.rect(Box(bars.x, y + 3, wide, MODEL_ROW - 5), BLUE if mine else MID)
    words = f"{operations:.3g}"
    at = bars.x + wide + 5
    at = ridge + 5 if at - 4 < ridge < at + text_width(words, SMALL) + 4 else at
    drawing.text((at, y + 12), words, size=SMALL, bold=mine, halo=True)
    drawing.text((box.right, y + 12), kib(size), size=SMALL, bold=mine, anchor="end")
    drawing.rect(Box(box.x, y, box.width, MODEL_ROW), "transparent", tip=tip)

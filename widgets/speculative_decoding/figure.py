"""Draw lesson 07's picture: speed-up by batch size, where a step's time goes, and one step draft by
draft.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from minivllm_lab.palette import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILLION, YELLOW
from minivllm_lab.speculative_decoding.speculation import Cause
from widgets.shell.plot import MARGIN, WIDE, Axes, Key, Scale, counted, draw_keys, figures, hidden_note, percent, tokens
from widgets.shell.strip import draw_title
from widgets.shell.svg import QUIET, SMALL, Box, Drawing, Segment, legend, stacked_bar, without_room
from widgets.shell.theme import MID
from widgets.speculative_decoding.state import BATCHES, MOST_BATCH, MOST_K, State, sibling
from widgets.speculative_decoding.step import VOCABULARY, Place

BATCH = Scale(1, MOST_BATCH, log=True)
TICKS = (1, 4, 16, 64, 256)
DRAWN = sorted({*BATCHES, 3, 6, 12, 20, 40, 80, 112, 160, 224, 320, 448})
OTHERS = (1, 3, 6)
"""The numbers of drafts shown for comparison."""
STYLES = ((QUIET, "2 4"), (GREY, "7 4"))
COLUMN, TOKEN, ROW = 98, 46, 13
"""The least width in pixels of a position in the step that plays, and the width and height of a
token's name in it.
"""
PARTS = (
    ("overhead", "overhead", MID),
    ("weights", "weights", SKY),
    ("attention", "KV cache", PURPLE),
    ("compute", "extra arithmetic", YELLOW),
    ("draft", "drafter", ORANGE),
)
TIPS = {"compute": "arithmetic beyond reading the weights"}
CAUSES: dict[Cause, str] = {
    "compute": "arithmetic takes over",
    "draft": "the drafter takes too long",
    "wrong": "too many drafts are rejected",
}


def drafter_words(state: State) -> str:
    """Name the drafter."""
    if state.drafter in ("small", "large"):
        return sibling(state.model, state.drafter)
    return {"ngram": "n-grams", "head": "an EAGLE-3 head", "parallel": "a parallel head"}[state.drafter]


def rate_words(state: State) -> str:
    """Describe how often drafts are accepted, and the source of that number."""
    if state.recorded == "none":
        return f"acceptance {state.alpha:g}"
    shares = ", ".join(percent(rate) for rate in state.one.rates)
    return f"accepted {shares} (recorded; later drafts like the last)"


def milliseconds(seconds: float) -> str:
    """Format a time in milliseconds, with three significant digits."""
    return f"{figures(seconds * 1e3)} ms"


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw speed-up by batch size, a step's time and the speed-up by number of drafts beside it,
    and one step below.
    """
    drawing = Drawing(width, 0, "How much faster drafts make it", f"{state.model} on {state.gpu}, against the batch")
    served = f"{state.model} on {state.gpu}, contexts of {tokens(state.context)}"
    y = drawing.heading((MARGIN, 23), "How much faster drafts make it", served) + 18
    note = f"{drafter_words(state)}, {rate_words(state)}; modelled, off by {percent(state.error)} (median)"
    note_end = drawing.paragraph((MARGIN, y), f"{note[0].upper()}{note[1:]}", width - 2 * MARGIN)
    y = note_end + 20
    high = 162 - (note_end - 41) - 17 * bool(state.own)  # keeps the height of the whole picture
    wide = width >= WIDE
    left = Box(48, y + 30, round(width * (0.53 if wide else 1)) - 48 - (0 if wide else MARGIN), high)
    draw_keys(drawing, y, _keys(state))
    _draw_speedup(Axes(drawing, left, BATCH, _scale(state, pinned)), state, pinned)
    side = Box(left.right + 40, y, width - left.right - 40 - MARGIN, 212)
    if not wide:
        side = Box(MARGIN, left.bottom + 62, width - 2 * MARGIN, 212)
    below = _draw_times(drawing, side, state)
    by_k = Box(left.x, below + 19, left.width, 80)
    if wide:
        by_k = Box(side.x, below + 19, side.width, left.bottom - below - 13)
    _draw_by_k(drawing, by_k, state)
    y = (left.bottom + 58) if wide else by_k.bottom + 62
    drawing.height = _draw_step(drawing, state, y) + 10
    return drawing.render()


# ---- speed-up against the batch


def _curves(state: State) -> list[tuple[int, str, str]]:
    """Return the curves for the other numbers of drafts, each with its colour and dash pattern."""
    return [(k, *style) for k, style in zip((k for k in OTHERS if k != state.k), STYLES, strict=False)]


def _keys(state: State) -> list[Key]:
    others = [(f"k = {k}", colour, dash, 1.8) for k, colour, dash in _curves(state)]
    return [(f"k = {state.k}, your drafts a step", BLUE, "", 2.5), *others]


def _scale(state: State, pinned: State | None) -> Scale:
    """Return a scale from 0 to above all curves, in steps of a half so that it rarely changes."""
    values = [value for k in (state.k, *OTHERS) for _, value in _values(state, k)]
    values += [value for _, value in _values(pinned, pinned.k)] if pinned else []
    return Scale(0, math.ceil(2.6 * max([1.4, *values])) / 2)


def _values(state: State, k: int) -> list[tuple[int, float]]:
    """Return (batch, speed-up) up to the batch that fills the memory."""
    most = state.one.most_batch(k)
    batches = [batch for batch in DRAWN if batch <= most]
    if most < MOST_BATCH and most > 0:
        batches = sorted({*batches, most})
    return [(batch, state.one.speedup(batch, k)) for batch in batches]


def _draw_speedup(axes: Axes, state: State, pinned: State | None) -> None:
    name, ticks, form = "requests that decode together (batch)", axes.y.ticks(5), "{:g}".format
    axes.frame(name, "times as fast as without drafts", x_ticks=TICKS, x_format=form, y_ticks=ticks, y_format=form)
    with axes.drawing.answer():
        _draw_broken(axes, state)
    if pinned:
        axes.pinned(*_unzipped(_values(pinned, pinned.k)), pinned.batch)
    axes.mark_y(1, "break even", GREEN)
    hidden_note(axes.drawing, axes.box)
    with axes.drawing.answer():
        for k, colour, dash in _curves(state):
            axes.line(*_unzipped(_values(state, k)), colour, width=1.8, dash=dash)
        axes.line(*_unzipped(_values(state, state.k)), BLUE)
    axes.here(state.batch, "batch", f"{state.batch}")
    with axes.drawing.answer():
        _draw_tips(axes, state)


def _unzipped(pairs: Iterable[tuple[int, float]]) -> tuple[list[float], list[float]]:
    points = list(pairs)
    return [float(x) for x, _ in points], [y for _, y in points]


def _draw_broken(axes: Axes, state: State) -> None:
    """Shade where drafts lose, and where memory is full."""
    regions: list[tuple[float | None, float | None, str]] = []
    for low, high in state.losing:
        cause = state.one.cause(low, state.k)
        why = CAUSES[cause] if cause else ""
        ends = high >= min(state.most_batch, MOST_BATCH)
        if low > 1 or ends:
            words = f"loses from {low}: {why}" if low > 1 else f"loses: {why}"
            regions.append((None if low == 1 else low, None, words))
        else:
            regions.append((None, high + 1, f"loses below {high + 1}: {why}"))
    if state.most_batch < MOST_BATCH:
        regions.append((max(state.most_batch, 1), None, memory_words(state)))
    for region in regions:
        axes.broken(*region)


def memory_words(state: State) -> str:
    """Describe at which batch size memory is full."""
    lost = state.one.most_plain_batch - state.most_batch
    beside = f"; {state.most_batch + lost} without a drafter" if lost else ""
    return f"memory is full at {state.most_batch}{beside}"


def _draw_tips(axes: Axes, state: State) -> None:
    """Add a tooltip everywhere in the plot, with the results at the nearest batch size."""

    def tip(batch: int) -> str:
        plain = milliseconds(state.one.plain(batch).seconds)
        step = milliseconds(state.one.step(batch, state.k).seconds)
        faster = f"{state.one.speedup(batch, state.k):.2f} times as fast"
        return f"{counted(batch, 'request')}: {faster}, {state.tokens:.2f} tokens in {step} instead of one in {plain}."

    axes.tips([batch for batch, _ in _values(state, state.k)], tip)


# ---- a step's time


def _draw_times(drawing: Drawing, box: Box, state: State) -> float:
    """Draw a plain step and one with drafts as bars; return the y below."""
    drawing.text((box.x, box.y), f"time of one step at batch {state.batch}", size=SMALL, colour=QUIET)
    plain, step = state.one.plain(state.batch), state.one.step(state.batch, state.k)
    longest = max(plain.seconds, step.seconds)
    y = box.y + 8
    hidden_note(drawing, Box(box.x, y, box.width, 74))
    longer = [Segment(title, max(getattr(plain, name), getattr(step, name)), colour) for name, title, colour in PARTS]
    keys = without_room([part for part in longer if part.value], longest, box.width)
    keys.sort(key=lambda part: len(part.label))  # in two rows at most
    tokens_each = "1 token each, no drafts", f"{state.tokens:.2f} tokens each, k = {state.k}"
    with drawing.answer():
        for parts, yields in zip((plain, step), tokens_each, strict=True):
            segments = [
                Segment(title, value := getattr(parts, name), colour, f"{TIPS.get(name, title)}: {milliseconds(value)}")
                for name, title, colour in PARTS
            ]
            stacked_bar(drawing, Box(box.x, y, box.width, 16), segments, longest)
            drawing.text((box.x, y + 29), f"{milliseconds(parts.seconds)} for {yields}", size=SMALL)
            y += 37
        return legend(drawing, (box.x, y + 11), keys, box.width) - 8


def _draw_by_k(drawing: Drawing, box: Box, state: State) -> None:
    """Draw the speed-ups at this batch size by number of drafts, and write them below."""
    drafts = [float(k) for k in range(1, MOST_K + 1)]
    up = Scale(0.85 * min(1.0, *state.by_k), 1.15 * max(1.0, *state.by_k), log=True)
    axes = Axes(drawing, box, Scale(0.6, MOST_K + 0.4), up)
    axes.frame("", "speed-up by drafts a step (k)", x_ticks=drafts, y_ticks=axes.y.ticks(3))
    axes.mark_y(1, "", GREEN)
    hidden_note(drawing, box)
    with drawing.answer():
        axes.also_here(state.k)
        tips = [f"With k = {k:g}: {value:.2f} times as fast" for k, value in zip(drafts, state.by_k, strict=True)]
        axes.line(drafts, state.by_k, MID)
        axes.points(drafts, state.by_k, BLUE, tips=tips)
        for k, value in enumerate(state.by_k, 1):
            strong = k in (state.k, state.best_k)
            colour = GREEN if k == state.best_k else INK if strong else QUIET
            place = (axes.at(k, 1)[0], box.bottom + 32)
            drawing.text(place, f"{value:.2f}", size=SMALL, anchor="middle", bold=strong, colour=colour)


# ---- one step of a request


def _draw_step(drawing: Drawing, state: State, y: float) -> float:
    """Draw the positions of a step side by side, as many as fit; return the y below."""
    title = "A toy step of drafts"
    wide = drawing.width - 2 * MARGIN
    aside = drawing.width >= WIDE
    y = draw_title(drawing, title, [Segment("drafter's chance q", 0, ORANGE), Segment("model's p", 0, BLUE)], y)
    rule = "accepted if random < p/q"
    if aside:
        drawing.text((drawing.width - MARGIN, y), rule, size=SMALL, colour=QUIET, anchor="end")
    else:
        y = drawing.paragraph((MARGIN, y + 19), rule, wide)
    if state.own:
        y = drawing.paragraph((MARGIN, y + 17), own_words(state), wide)
    across = int(wide // COLUMN)
    shown = min(state.k + 1, across) if aside else state.k + 1  # beside the controls, the picture has room for one row
    room = wide / (max(shown, 4) if aside else across)
    tall = ROW * len(VOCABULARY) + 63
    checked = min(state.step.kept + 1, state.k)
    last = checked + 2
    largest = max(max(*place.p, *place.q) for place in state.step.places)
    scale = (room - 14 - TOKEN) / max(largest, *state.step.bonus)
    for index in range(shown):
        row, column = divmod(index, across)
        box = Box(MARGIN + column * room, y + 10 + row * tall, room - 14, tall)
        _draw_place(drawing, box, state, index, last, scale)
    bottom = y + 6 + tall * -(-shown // across)
    if shown < state.k + 1:
        with drawing.layer(at=f"{last} {last}"):
            rest = f"{state.k + 1 - shown} more positions are not drawn. All tokens: {' '.join(state.step.tokens)}"
            drawing.text((MARGIN, bottom + 10), rest, size=SMALL, colour=QUIET)
        bottom += 12
    drawing.play(_captions(state, checked))
    return bottom


def own_words(state: State) -> str:
    """Describe what the reader's rule accepts."""
    own = state.own
    assert own
    index = own.wrong
    if index is None:
        shares = ", ".join(percent(rate, 1) for rate in own.rates[:3])
        return f"Your accept accepts {shares}{' …' * (len(own.rates) > 3)} of the drafts: Σ min(p, q), as it must."
    return (
        f"Your accept accepts {percent(own.rates[index], 1)} of draft {index + 1}, but Σ min(p, q) is "
        f"{percent(own.right[index], 1)}. The output is off by {percent(own.off, 1)}."
    )


def _draw_place(drawing: Drawing, box: Box, state: State, index: int, last: int, scale: float) -> None:
    step = state.step
    place = step.places[index] if index < state.k else None
    name = f"{index + 1}: {VOCABULARY[place.draft]}" if place else "bonus"
    drawing.text((box.x, box.y + 10), name, size=SMALL, bold=True)
    p = place.p if place else step.bonus
    here = index == step.kept
    top = box.y + 16
    for token, word in enumerate(VOCABULARY):
        y = top + ROW * token
        is_draft = place is not None and token == place.draft
        drawing.text((box.x, y + 10), word, size=SMALL, bold=is_draft, colour=INK if is_draft else QUIET)
        tip = f"{word}: p {p[token]:.2f}"
        if place:
            drawing.rect(Box(box.x + TOKEN, y + 1, place.q[token] * scale, 5), ORANGE)
            tip += f", q {place.q[token]:.2f}, min {min(p[token], place.q[token]):.2f}"
        drawing.rect(Box(box.x + TOKEN, y + 6, p[token] * scale, 5), BLUE, at=f"1 {last}")
        drawing.rect(Box(box.x, y, box.width, ROW), "transparent", tip=tip)
    y = top + ROW * len(VOCABULARY) + 13
    if index > step.kept:
        with drawing.layer(at=f"{last} {last}"):
            drawing.text((box.x, y), "not checked", size=SMALL, colour=QUIET)
        return
    if place:
        with drawing.layer(at=f"{index + 2} {last}"):
            _draw_decision(drawing, (box.x, y), place, kept=not here)
    if here:
        word = VOCABULARY[step.token]
        with drawing.layer(at=f"{last} {last}"):
            words = f"recovered: {word}" if place else f"bonus: {word}"
            drawing.text((box.x, y + (30 if place else 0)), words, size=SMALL, bold=True, colour=GREEN)


def _draw_decision(drawing: Drawing, place: tuple[float, float], draft: Place, *, kept: bool) -> None:
    x, y = place
    sign = "<" if draft.uniform < draft.ratio else "≥"
    drawing.text((x, y), f"{draft.uniform:.2f} {sign} p/q {_ratio(draft)}", size=SMALL)
    words, colour = ("✓ accepted", GREEN) if kept else ("✕ rejected", VERMILLION)
    drawing.text((x, y + 15), words, size=SMALL, bold=True, colour=colour)


def _ratio(draft: Place) -> str:
    ratio = draft.p[draft.draft] / draft.q[draft.draft]
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.0f}"


def _captions(state: State, checked: int) -> list[str]:
    """Write a caption for each frame: the drafts, the forward pass, each checked draft, and the
    last token.
    """
    step = state.step
    k = state.k
    drafts = " ".join(VOCABULARY[place.draft] for place in step.places)
    captions = [
        f"The drafter proposes {counted(k, 'token')}: {drafts}",
        f"One forward pass of the model over {k + 1} positions gives its prediction at each of them",
    ]
    for index, place in enumerate(step.places[:checked]):
        kept = index < step.kept
        sign = "below" if place.uniform < place.ratio else "not below"
        result = "accepted" if kept else "rejected"
        captions.append(f"Draft {index + 1}: {place.uniform:.2f} is {sign} p/q = {_ratio(place)}, so it is {result}")
    source = "a recovered token from the residual distribution" if step.rejected else "a bonus token drawn from p"
    total = f"{counted(len(step.tokens), 'token')} from one pass"
    return [*captions, f"Then {VOCABULARY[step.token]}, {source}: {total}: {' '.join(step.tokens)}"]

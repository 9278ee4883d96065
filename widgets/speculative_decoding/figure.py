"""The picture of lesson 07's widget: speed-up over the batch, where a step's time goes, and one step draft by draft."""

from __future__ import annotations

import math
from collections.abc import Iterable

from minivllm_lab.drawing import text_width
from minivllm_lab.palette import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, VERMILLION, YELLOW
from minivllm_lab.speculative_decoding.speculation import Cause, StepParts
from widgets.shell.plot import MARGIN, WIDE, Axes, Key, Scale, draw_keys, tokens
from widgets.shell.svg import QUIET, SMALL, Box, Drawing, Segment, legend, stacked_bar
from widgets.shell.theme import MID
from widgets.speculative_decoding.state import BATCHES, MOST_BATCH, MOST_K, State, sibling
from widgets.speculative_decoding.step import VOCABULARY, Place

BATCH = Scale(1, MOST_BATCH, log=True)
TICKS = (1, 4, 16, 64, 256)
DRAWN = sorted({*BATCHES, 3, 6, 12, 20, 40, 80, 112, 160, 224, 320, 448})
OTHERS = (1, 3, 6)
"""Numbers of drafts that have a curve beside the reader's own."""
STYLES = ((ORANGE, "2 4"), (PURPLE, "7 4"))
COLUMN, ROW = 98, 13
"""Pixels of a place in the step that is played, at least, and of a token in it."""
PARTS = (
    ("overhead", "fixed", MID),
    ("weights", "weights", SKY),
    ("attention", "KV", BLUE),
    ("compute", "arithmetic", YELLOW),
    ("draft", "drafts", ORANGE),
)
CAUSES: dict[Cause, str] = {
    "compute": "arithmetic takes over",
    "draft": "the drafter takes too long",
    "wrong": "drafts are wrong too often",
}


def drafter_words(state: State) -> str:
    """Who drafts."""
    if state.drafter in ("small", "large"):
        return sibling(state.model, state.drafter)
    return {"ngram": "n-grams", "head": "an EAGLE-3 head", "parallel": "a parallel head"}[state.drafter]


def rate_words(state: State) -> str:
    """How often drafts are accepted, and how that is known."""
    if state.recorded == "none":
        return f"α {state.alpha:g}"
    shares = ", ".join(f"{rate:.0%}" for rate in state.one.rates)
    return f"accepted {shares} (recorded; the last one beyond too)"


def milliseconds(seconds: float) -> str:
    """A time, to three digits."""
    return f"{seconds * 1e3:.3g} ms"


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Speed-up over the batch; beside it a step's time, and other numbers of drafts; below, one step."""
    drawing = Drawing(width, 0, "How much faster drafts make it", f"{state.model} on {state.gpu}, over the batch")
    drawing.heading((MARGIN, 23), "How much faster drafts make it")
    note = (
        f"{state.model} on {state.gpu}, contexts of {tokens(state.context)}; {drafter_words(state)}, "
        f"{rate_words(state)}; modelled, off by {state.error:.0%} (median)"
    )
    noted = drawing.paragraph((MARGIN, 41), note, width - 2 * MARGIN)
    y, high = noted + 20, 150 - (noted - 41) - 17 * bool(state.own)  # the whole is as high, whatever is said
    wide = width >= WIDE
    left = Box(48, y + 30, round(width * (0.55 if wide else 1)) - 48 - (0 if wide else MARGIN), high)
    draw_keys(drawing, y, _keys(state))
    _draw_speedup(Axes(drawing, left, BATCH, _scale(state, pinned)), state, pinned)
    side = Box(left.right + 40, y, width - left.right - 40 - MARGIN, 212)
    if not wide:
        side = Box(MARGIN, left.bottom + 62, width - 2 * MARGIN, 212)
    below = _draw_times(drawing, side, state)
    bars = Box(side.x, below + 22, side.width, (left.bottom + 20 - below - 22) if wide else 60)
    _draw_by_k(drawing, bars, state)
    y = (left.bottom + 58) if wide else bars.bottom + 46
    drawing.height = _draw_step(drawing, state, y) + 10
    return drawing.render()


# ---- speed-up over the batch


def _curves(state: State) -> list[tuple[int, str, str]]:
    """Other numbers of drafts, each with its colour and dashes."""
    return [(k, *style) for k, style in zip((k for k in OTHERS if k != state.k), STYLES, strict=False)]


def _keys(state: State) -> list[Key]:
    others = [(f"k = {k}", colour, dash, 1.8) for k, colour, dash in _curves(state)]
    return [(f"k = {state.k}, yours", BLUE, "", 2.5), *others]


def _scale(state: State, pinned: State | None) -> Scale:
    """From 0 to above all curves, in halves, so that it changes seldom."""
    found = [value for k in (state.k, *OTHERS) for _, value in _values(state, k)]
    found += [value for _, value in _values(pinned, pinned.k)] if pinned else []
    return Scale(0, math.ceil(2.6 * max([1.4, *found])) / 2)


def _values(state: State, k: int) -> list[tuple[int, float]]:
    """(batch, speed-up) as far as memory reaches."""
    most = state.one.most_batch(k)
    batches = [batch for batch in DRAWN if batch <= most]
    if most < MOST_BATCH and most > 0:
        batches = sorted({*batches, most})
    return [(batch, state.one.speedup(batch, k)) for batch in batches]


def _draw_speedup(axes: Axes, state: State, pinned: State | None) -> None:
    axes.frame(
        "requests that decode together (batch)",
        "times as fast as without drafts",
        x_ticks=TICKS,
        x_format="{:g}".format,
        y_ticks=axes.y.ticks(5),
        y_format="{:g}".format,
    )
    with axes.drawing.answer():
        _draw_broken(axes, state)
    if pinned:
        axes.pinned(*_unzipped(_values(pinned, pinned.k)))
    with axes.drawing.on_top():
        axes.mark_y(1, "break even", GREEN, along=0.24, below=True)
    with axes.drawing.answer():
        for k, colour, dash in _curves(state):
            axes.line(*_unzipped(_values(state, k)), colour, width=1.8, dash=dash)
        axes.line(*_unzipped(_values(state, state.k)), BLUE)
    axes.here(state.batch, "batch", f"{state.batch}")
    with axes.drawing.answer():
        _draw_tips(axes, state)


def _unzipped(pairs: Iterable[tuple[int, float]]) -> tuple[list[float], list[float]]:
    found = list(pairs)
    return [float(x) for x, _ in found], [y for _, y in found]


def _draw_broken(axes: Axes, state: State) -> None:
    """Where drafts lose, and where memory ends."""
    regions: list[tuple[float | None, float | None, str]] = []
    for low, high in state.losing:
        cause = state.one.cause(low, state.k)
        why = CAUSES[cause] if cause else ""
        ends = high >= min(state.most_batch, MOST_BATCH)
        if low > 1 or ends:
            words = f"loses from {low} on: {why}" if low > 1 else f"loses: {why}"
            regions.append((None if low == 1 else low, None, words))
        else:
            regions.append((None, high + 1, f"loses below {high + 1}: {why}"))
    if state.most_batch < MOST_BATCH:
        regions.append((max(state.most_batch, 1), None, memory_words(state)))
    for region in regions:
        axes.shade(*region)
    for region in regions:
        axes.edge(*region)


def memory_words(state: State) -> str:
    """Where memory ends."""
    lost = state.one.most_plain_batch - state.most_batch
    beside = f"; {state.most_batch + lost} without a drafter" if lost else ""
    return f"memory ends at {state.most_batch}{beside}"


def _draw_tips(axes: Axes, state: State) -> None:
    """What the pointer asks for: the figures of the nearest batch, anywhere in the plot."""
    batches = [batch for batch, _ in _values(state, state.k)]
    for batch, strip in axes.strips(batches):
        one = state.one
        plain, step = one.plain(batch).seconds, one.step(batch, state.k).seconds
        said = (
            f"{batch} request{'s' * (batch > 1)}: {one.speedup(batch, state.k):.2f} times as fast; "
            f"{state.tokens:.2f} tokens in {milliseconds(step)}, or one in {milliseconds(plain)}."
        )
        axes.drawing.rect(strip, "transparent", tip=said)


# ---- a step's time


def _draw_times(drawing: Drawing, box: Box, state: State) -> float:
    """A plain step and one with drafts, as bars; returns the y below."""
    drawing.text((box.x, box.y), f"a step at batch {state.batch}", size=SMALL, colour=QUIET)
    plain, step = state.one.plain(state.batch), state.one.step(state.batch, state.k)
    y, longest = box.y + 8, max(plain.seconds, step.seconds)
    for parts, made in ((plain, "1 token"), (step, f"{state.tokens:.2f} tokens")):
        segments = [
            Segment("", getattr(parts, name), colour, f"{title}: {milliseconds(getattr(parts, name))}")
            for name, title, colour in PARTS
        ]
        stacked_bar(drawing, Box(box.x, y, box.width, 13), segments, longest)
        words = f"{milliseconds(parts.seconds)}, {made}"
        drawing.text((box.x, y + 26), words, size=SMALL)
        y += 33
    keys = [Segment(title, 0, colour) for name, title, colour in PARTS if _is_there(name, plain, step)]
    return legend(drawing, (box.x, y + 11), keys, box.width) - 8


def _is_there(name: str, plain: StepParts, step: StepParts) -> bool:
    return max(getattr(plain, name), getattr(step, name)) > 0


def _draw_by_k(drawing: Drawing, box: Box, state: State) -> None:
    """Speed-ups at this batch by the number of drafts, the fastest named."""
    best = state.best_k
    most = max(1.2, *state.by_k)
    words = f"by drafts (k): best {best}" if best else "by drafts (k): none pays"
    drawing.text((box.x, box.y - 6), words, size=SMALL, colour=QUIET)
    room, high = box.width / MOST_K, box.height - 16
    for index, value in enumerate(state.by_k):
        tall, x = high * value / most, box.x + index * room
        bar = Box(x + 2, box.y + high - tall, room - 4, tall)
        tip = f"{index + 1} draft{'s' * (index > 0)}: {value:.2f} times as fast"
        drawing.rect(bar, BLUE if index + 1 == state.k else MID, tip=tip)
        place = (x + room / 2, box.y + high + 14)
        mine = index + 1 in (state.k, best)
        drawing.text(place, f"{index + 1}", size=SMALL, anchor="middle", bold=mine, colour=INK if mine else QUIET)
    level = box.y + high - high / most
    drawing.line((box.x, level), (box.right, level), colour=GREEN, dash="4 3", width=1.5)


# ---- one step of a request


def _draw_step(drawing: Drawing, state: State, y: float) -> float:
    """The places of a step side by side, as many as there is room for; returns the y below."""
    title = "One request's step, draft by draft"
    drawing.text((MARGIN, y), title, size=14.5, bold=True)
    keys = [Segment("drafter, q", 0, ORANGE), Segment("model, p", 0, BLUE)]
    after, wide = MARGIN + text_width(title, 14.5) * 1.08 + 16, drawing.width - 2 * MARGIN
    aside = drawing.width >= WIDE
    y = legend(drawing, (after, y) if aside else (MARGIN, y + 20), keys, wide) - 19
    if aside:
        drawing.text((drawing.width - MARGIN, y), "accepted if u < p/q", size=SMALL, colour=QUIET, anchor="end")
    if state.own:
        y = drawing.paragraph((MARGIN, y + 17), own_words(state), wide)
    across = int(wide // COLUMN)
    shown = min(state.k + 1, across) if aside else state.k + 1  # beside its controls, a picture has one row of them
    room, tall = wide / (max(shown, 4) if aside else across), ROW * len(VOCABULARY) + 63
    checked = min(state.step.kept + 1, state.k)
    last = checked + 2
    for index in range(shown):
        row, column = divmod(index, across)
        box = Box(MARGIN + column * room, y + 10 + row * tall, room - 14, tall)
        _draw_place(drawing, box, state, index, last)
    bottom = y + 6 + tall * -(-shown // across)
    if shown < state.k + 1:
        with drawing.layer(at=f"{last} {last}"):
            rest = f"{state.k + 1 - shown} positions more, not drawn. In all: {' '.join(state.step.tokens)}"
            drawing.text((MARGIN, bottom + 10), rest, size=SMALL, colour=QUIET)
        bottom += 12
    drawing.play(_captions(state, checked))
    return bottom


def own_words(state: State) -> str:
    """What the reader's own rule accepts."""
    own = state.own
    assert own
    index = own.wrong
    if index is None:
        shares = ", ".join(f"{rate:.1%}" for rate in own.rates[:3])
        return f"Your accept takes {shares}{' …' * (len(own.rates) > 3)} of the drafts: Σ min(p, q), as it must."
    return (
        f"Your accept takes {own.rates[index]:.1%} of draft {index + 1}; Σ min(p, q) is {own.right[index]:.1%}. What "
        f"comes out is off by {own.off:.1%}."
    )


def _draw_place(drawing: Drawing, box: Box, state: State, index: int, last: int) -> None:
    step = state.step
    place = step.places[index] if index < state.k else None
    name = f"{index + 1}: {VOCABULARY[place.draft]}" if place else "bonus"
    drawing.text((box.x, box.y + 10), name, size=SMALL, bold=True)
    p = place.p if place else step.bonus
    here = index == step.kept
    names, top = 46, box.y + 16
    for token, word in enumerate(VOCABULARY):
        y, is_draft = top + ROW * token, place is not None and token == place.draft
        drawing.text((box.x, y + 10), word, size=SMALL, bold=is_draft, colour=INK if is_draft else QUIET)
        scale = box.width - names
        tip = f"{word}: p {p[token]:.2f}"
        if place:
            drawing.rect(Box(box.x + names, y + 1, place.q[token] * scale, 5), ORANGE)
            tip += f", q {place.q[token]:.2f}, the smaller {min(p[token], place.q[token]):.2f}"
        drawing.rect(Box(box.x + names, y + 6, p[token] * scale, 5), BLUE, at=f"1 {last}")
        drawing.rect(Box(box.x, y, box.width, ROW), "transparent", tip=tip)
    y = top + ROW * len(VOCABULARY) + 13
    if index > step.kept:
        with drawing.layer(at=f"{last} {last}"):
            drawing.text((box.x, y), "not looked at", size=SMALL, colour=QUIET)
        return
    if place:
        with drawing.layer(at=f"{index + 2} {last}"):
            _draw_decision(drawing, (box.x, y), place, kept=not here)
    if here:
        word = VOCABULARY[step.token]
        with drawing.layer(at=f"{last} {last}"):
            words = f"instead: {word}" if place else f"from p: {word}"
            drawing.text((box.x, y + (30 if place else 0)), words, size=SMALL, bold=True, colour=GREEN)


def _draw_decision(drawing: Drawing, place: tuple[float, float], one: Place, *, kept: bool) -> None:
    x, y = place
    drawing.text((x, y), f"u {one.uniform:.2f}, p/q {_ratio(one)}", size=SMALL)
    words, colour = ("✓ accepted", GREEN) if kept else ("✕ rejected", VERMILLION)
    drawing.text((x, y + 15), words, size=SMALL, bold=True, colour=colour)


def _ratio(one: Place) -> str:
    found = one.p[one.draft] / one.q[one.draft]
    return f"{found:.2f}" if found < 9.995 else f"{found:.0f}"


def _captions(state: State, checked: int) -> list[str]:
    """A caption for each frame: the drafts, the model's forward pass, each draft that is looked at, what follows."""
    step, k = state.step, state.k
    drafts = " ".join(VOCABULARY[place.draft] for place in step.places)
    said = [
        f"The drafter proposes {k} token{'s' * (k > 1)}: {drafts}",
        f"One forward pass of the model over {k + 1} positions: what it expects at each of them",
    ]
    for index, place in enumerate(step.places[:checked]):
        kept = index < step.kept
        sign = "below" if place.uniform < place.ratio else "not below"
        result = "accepted" if kept else "rejected"
        said.append(f"Draft {index + 1}: {place.uniform:.2f} is {sign} p/q, {_ratio(place)}; it is {result}")
    source = "drawn from what p has more than q" if step.rejected else "a bonus, drawn from p"
    count = len(step.tokens)
    total = f"{count} token{'s' * (count > 1)} from one pass"
    return [*said, f"Then {VOCABULARY[step.token]}, {source}: {total}: {' '.join(step.tokens)}"]

"""Draw lesson 07's picture: one step draft by draft, what it costs, and the speed-up by batch size
and by number of drafts.
"""

from __future__ import annotations

import math
from dataclasses import replace

from minivllm_lab.drawing import QUIET, arrow, text_width
from minivllm_lab.palette import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILLION, YELLOW
from minivllm_lab.speculative_decoding.speculation import Cause, StepParts
from widgets.shell.plot import MARGIN, WIDE, Axes, Scale, counted, figures, hidden_note, percent
from widgets.shell.svg import BOLD, SMALL, Box, Drawing, Segment, legend, stacked_bar, without_room
from widgets.shell.theme import CARD, IDLE, MID
from widgets.speculative_decoding.state import BATCHES, MOST_BATCH, MOST_K, State, sibling
from widgets.speculative_decoding.step import VOCABULARY, Place

BATCH = Scale(1, MOST_BATCH, log=True)
TICKS = (1, 8, 64, 512)
DRAWN = sorted({*BATCHES, 3, 6, 12, 20, 40, 80, 112, 160, 224, 320, 448})
NAMES, VALUE = 60, 104
"""The pixels of the name of a step beside its bar, and of its time."""
LIST, TOKEN, HIGH, DOT, COLUMNS = 238, 54, 150, 4, 16
"""The pixels of a position of the step, of a token, of the distributions (their height), of a random number's
radius, and of the columns' names.
"""
PARTS = (
    ("overhead", "overhead", MID),
    ("sampling", "rejection sampling", GREY),
    ("weights", "weights", SKY),
    ("attention", "KV cache", PURPLE),
    ("compute", "extra arithmetic", YELLOW),
    ("draft", "drafter", ORANGE),
)
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


def milliseconds(seconds: float) -> str:
    """Format a time in milliseconds, with three significant digits."""
    return f"{figures(seconds * 1e3)} ms"


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw one step of a request, below it the time that a step takes, and then the speed-up by
    batch size and by number of drafts, on one scale.
    """
    drawing = Drawing(width, 0, "How much faster drafts make it", f"{state.model} on {state.gpu}, against the batch")
    y = _draw_cost(drawing, state, _draw_step(drawing, state) + 27) + 41
    wide = width >= WIDE
    across = width - 48 - MARGIN - 26
    left = Box(48, y, across * (0.6 if wide else 0.57), max(427 - y, 92) if wide else 130)
    right = Box(left.right + 26, y, across - left.width, left.height)
    up = _scale(state, pinned)
    _draw_speedup(Axes(drawing, left, BATCH, up), state, pinned)
    _draw_by_k(Axes(drawing, right, Scale(0.5, MOST_K + 0.5), up), state)
    drawing.height = left.bottom + 42
    return drawing.render()


# ---- speed-up against the batch


def _scale(state: State, pinned: State | None) -> Scale:
    """Return a scale from 0 to above all curves, in steps of a half so that it rarely changes."""
    values = [*state.by_k, *_curve(state, state.k)[1], *_curve(state, 1)[1]]
    values += _curve(pinned, pinned.k)[1] if pinned else []
    return Scale(0, math.ceil(2.3 * max([1.4, *values])) / 2)


def _curve(state: State, k: int) -> tuple[list[int], list[float]]:
    """Return batches with their speed-ups, up to the batch that fills the memory."""
    most = state.one.most_batch(k)
    batches = [batch for batch in DRAWN if batch <= most]
    if most < MOST_BATCH and most > 0:
        batches = sorted({*batches, most})
    return batches, [state.one.speedup(batch, k) for batch in batches]


def _draw_speedup(axes: Axes, state: State, pinned: State | None) -> None:
    wide = axes.drawing.width >= WIDE
    ticks, form = axes.y.ticks(4), "{:g}".format
    name = "requests that decode together (batch)" if wide else "batch"
    axes.frame(name, "", x_ticks=TICKS, x_format=form, y_ticks=ticks, y_format=form)
    words = "times as fast as without drafts" if wide else "× without drafts"
    colour = GREEN if state.fits and state.speedup > 1 else VERMILLION
    number = f"{state.speedup:.2f}" if state.fits else "–"
    axes.drawing.number((axes.box.x, axes.box.y - 10), number, words, colour)
    with axes.drawing.answer():
        _draw_broken(axes, state)
    if pinned:
        axes.pinned(*_curve(pinned, pinned.k), pinned.batch)
    axes.mark_y(1, "break even", GREEN)
    hidden_note(axes.drawing, axes.box)
    with axes.drawing.answer():
        compared = [(1, GREY, "7 4")] if state.k > 1 and state.most_batch > 8 else []
        for k, colour, dash in (*compared, (state.k, BLUE, "")):
            batches, values = _curve(state, k)
            if values:
                axes.line(batches, values, colour, width=1.8 if dash else 2.5, dash=dash)
                flat = slice(5, 12) if dash else slice(9)
                axes.name(batches[flat], values[flat], f"k\u2009=\u2009{k}", colour, bold=not dash)
        axes.line([state.batch, MOST_BATCH], [state.speedup] * 2, INK, width=1, dash="1 3")
    axes.here(state.batch, "batch", f"{state.batch}")
    with axes.drawing.answer():
        axes.tips(_curve(state, state.k)[0], lambda batch: _tip(state, batch))


def _draw_broken(axes: Axes, state: State) -> None:
    """Shade where drafts lose, and where memory is full."""
    for low, high in state.losing:
        cause = state.one.cause(low, state.k)
        why = CAUSES[cause] if cause else ""
        if low > 1:
            axes.broken(low, None, f"loses from {low}: {why}")
        elif high >= min(state.most_batch, MOST_BATCH):
            axes.broken(None, None, f"loses: {why}")
        else:
            axes.broken(None, high + 1, f"loses below {high + 1}: {why}")
    if state.most_batch < MOST_BATCH:
        plain = state.one.most_plain_batch
        beside = f"; {plain} without a drafter" if plain > state.most_batch else ""
        axes.broken(max(state.most_batch, 1), None, f"memory is full at {state.most_batch}{beside}")


def _tip(state: State, batch: int) -> str:
    """Describe the results at a batch size."""
    plain, step = (milliseconds(parts.seconds) for parts in (state.one.plain(batch), state.one.step(batch, state.k)))
    speedup = f"{state.one.speedup(batch, state.k):.2f} times as fast"
    return f"{counted(batch, 'request')}: {speedup}, with steps of {step} instead of {plain}."


def _draw_by_k(axes: Axes, state: State) -> None:
    """Draw the speed-ups at this batch size by number of drafts."""
    drafts = [float(k) for k in range(1, MOST_K + 1)]
    where = f"at {counted(state.batch, 'request')}"
    axes.frame("drafts a step (k)", where, x_ticks=drafts, y_ticks=axes.y.ticks(4), y_format=lambda _: "")
    axes.mark_y(1, "", GREEN)
    hidden_note(axes.drawing, axes.box)
    with axes.drawing.answer():
        axes.also_here(state.k)
        axes.line([axes.x.low, state.k], [state.speedup] * 2, INK, width=1, dash="1 3")
        axes.line(drafts, state.by_k, MID)
        tips = [f"With k = {k:g}: {value:.2f} times as fast" for k, value in zip(drafts, state.by_k, strict=True)]
        axes.points(drafts, state.by_k, MID, radius=3.5, tips=tips)
        axes.points([state.k], [state.speedup], INK)
        if state.best_k not in (0, state.k):
            best = state.by_k[state.best_k - 1]
            axes.points([state.best_k], [best], GREEN, radius=5.5)
            axes.label(axes.at(state.best_k, best), f"{best:.2f}", GREEN)


# ---- a step's time


def _draw_cost(drawing: Drawing, state: State, y: float) -> float:
    """Draw a plain step and one with drafts as bars, and the time that the tokens of the second are
    worth; return the y below.
    """
    wide, aside = drawing.width - 2 * MARGIN, drawing.width >= WIDE
    note = f"modelled for {state.model} on {state.gpu} with {drafter_words(state)}"
    with drawing.layer(tip=f"The model is off by {percent(state.error)} (median)."):
        y = drawing.heading((MARGIN, y), f"A step of {counted(state.batch, 'request')}", note)
    plain, step = state.one.plain(state.batch), state.one.step(state.batch, state.k)
    worth = state.tokens * plain.seconds
    longest = max(plain.seconds, step.seconds, worth)
    box = Box(MARGIN + NAMES * aside, y + 8, wide - (NAMES + VALUE) * aside, 16)
    hidden_note(drawing, Box(box.x, box.y, box.width, 74))
    bars = [_segments(parts, plain.overhead) for parts in (plain, step)]
    longer = [max(pair, key=lambda part: part.value) for pair in zip(*bars, strict=True)]
    with drawing.answer():
        keys = without_room([part for part in longer if part.value], longest, box.width)
        y = legend(drawing, (MARGIN, y + 19), keys, wide) - 11 if keys else y + 8
        times = milliseconds(plain.seconds), f"{milliseconds(step.seconds)}, ×{state.longer:.2f}"
        for name, segments, words in zip(("no drafts", f"k = {state.k}"), bars, times, strict=True):
            y += 0 if aside else 20
            bar = Box(box.x, y, box.width, box.height)
            line = y + (12 if aside else -7)
            stacked_bar(drawing, bar, segments, longest)
            drawing.text((MARGIN, line), name, size=SMALL)
            drawing.text((drawing.width - MARGIN, line), words, size=SMALL, anchor="end")
            y += 22
        x = box.x + worth / longest * box.width
        end = box.x + step.seconds / longest * box.width
        drawing.line((x, y - 3), (end, y - 3), colour=GREEN if x > end else VERMILLION, width=3)
        for low, high in ((y - 25, y),) if x > end else ((y - 25, y - 20), (y - 5, y)):  # off the bar's labels
            drawing.line((x, low), (x, high), colour=GREEN, width=3)
        words = f"{state.tokens:.2f} tokens: pays up to ×{state.tokens:.2f}"
        over = round(state.longer, 2) - round(state.tokens, 2)
        late = f"{over:.2f} too long" * (over >= 0.005)
        right = drawing.width - MARGIN - BOLD * text_width(late, SMALL)
        x = max(MARGIN + text_width(words, SMALL), min(x + 4, right - 8 * bool(late)))
        drawing.text((x, y + 11), words, size=SMALL, colour=GREEN, anchor="end")
        drawing.text((min(x + 8, right), y + 11), late, size=SMALL, bold=True, colour=VERMILLION)
    return y + 11


def _segments(parts: StepParts, overhead: float) -> list[Segment]:
    """Return the parts of a step's bar; what its overhead exceeds a plain step's is rejection sampling."""
    shown = parts._asdict() | {"overhead": overhead, "sampling": parts.overhead - overhead}
    return [
        Segment(title, shown[name], colour, f"{title}: {milliseconds(shown[name])}") for name, title, colour in PARTS
    ]


# ---- one step of a request


def _draw_step(drawing: Drawing, state: State) -> float:
    """Draw the drafts of a step, their checks and its tokens, position by position, and the
    distributions at the position that is checked; return the y below.
    """
    step, aside = state.step, drawing.width >= WIDE
    wide = drawing.width - 2 * MARGIN
    y = drawing.heading((MARGIN, 23), "Draft, verify, accept", "the drafter's q, the model's p; the dot is random")
    if state.own:
        y = drawing.paragraph((MARGIN, y + 18), own_words(state), wide)
    captions = _captions(state, min(step.kept + 1, state.k))
    last = len(captions) - 1
    drawing.play(captions, still=True)
    y += 12 + COLUMNS
    count = max(state.k, step.kept + 1)
    high = max(17.0, min(30.0, (HIGH - COLUMNS + 4) / count))
    rows = [Box(MARGIN, y + high * index, LIST if aside else wide, high - 4) for index in range(count)]
    left = MARGIN + (LIST + 24) * aside
    panel = Box(left, y - COLUMNS if aside else rows[-1].bottom + 12, drawing.width - MARGIN - left, HIGH)
    heads = (0, "drafted", "start"), (TOKEN + 8, "kept if dot in green", "start"), (rows[0].width, "output", "end")
    for x, words, anchor in heads:
        drawing.text((MARGIN + x, y - 6), words, size=SMALL, colour=QUIET, anchor=anchor)
    for index, row in enumerate(rows):
        _draw_row(drawing, row, state, index, last, captions[min(index + 2, last)])
        if index <= step.kept:
            frame = min(index + 2, last)
            with drawing.layer(at=f"{frame} {last if index == step.kept else frame}"):
                if aside:
                    edge = [(panel.x, panel.bottom), (panel.x, panel.y)]
                    drawing.polygon([(row.right + 4, row.y), (row.right + 4, row.bottom), *edge], IDLE)
                _draw_distributions(drawing, panel, state, index)
    return max(panel.bottom, rows[-1].bottom)


def _draw_row(drawing: Drawing, row: Box, state: State, index: int, last: int, caption: str) -> None:
    """Draw one position: its draft, how likely it is accepted with its random number, and the token
    that comes out.
    """
    step = state.step
    draft, token = (replace(row, x=x, width=TOKEN) for x in (row.x, row.right - TOKEN))
    bar = Box(draft.right + 8, row.y + 3, row.width - 2 * TOKEN - 16, row.height - 6)
    if index < state.k:
        place = step.places[index]
        _draw_token(drawing, draft, VOCABULARY[place.draft], ORANGE, shade=0)
        if index <= step.kept:
            with drawing.layer(at=f"1 {last}"):
                _draw_part(drawing, bar, ORANGE)
                _draw_part(drawing, replace(bar, width=bar.width * place.ratio), GREEN)
            dot = (bar.x + bar.width * place.uniform, bar.y + bar.height / 2)
            drawing.circle(dot, DOT, INK, at=f"{index + 2} {last}")
    if index <= step.kept:
        kept = index < step.kept
        with drawing.layer(at=f"{index + 2 if kept else last} {last}"):
            _draw_token(drawing, token, step.tokens[index], GREEN if kept else BLUE)
        drawing.rect(row, "transparent", tip=caption)


def _draw_token(drawing: Drawing, box: Box, word: str, colour: str, *, shade: float = 0.25) -> None:
    drawing.rect(box, colour, opacity=shade, stroke=colour, radius=3)
    drawing.text((box.x + box.width / 2, box.y + box.height / 2 + 4), word, size=SMALL, anchor="middle")


def _draw_part(drawing: Drawing, box: Box, colour: str) -> None:
    """Draw a part of a bar; what is rejected is hatched."""
    drawing.rect(box, colour)
    if colour == ORANGE:
        drawing.hatch(box, CARD, gap=5)


def _draw_distributions(drawing: Drawing, box: Box, state: State, index: int) -> None:
    """Draw what q and p share at a position, what q has more, and what p has more; the draft's random
    number; and the token that is drawn instead.
    """
    step = state.step
    place = step.places[index] if index < state.k else None
    p, q = (place.p, place.q) if place else (step.bonus, (0.0,) * len(step.bonus))
    both = sum(map(min, p, q))
    names = {"both: kept": (GREEN, both), "q only: rejected": (ORANGE, sum(q) - both)}
    names["p only: instead" if place else "p: bonus token"] = BLUE, 1 - both
    drawing.rect(box, IDLE, radius=6)
    if place:
        drawing.text((box.x + 12, box.y + 15), "of all drafts at this position", size=SMALL, colour=QUIET)
    column, base = (box.width - 12) / len(p), box.bottom - 26
    scale = (base - box.y - 58) / max(*p, *q)
    for part, (name, (colour, share)) in enumerate(names.items()):
        if share > 0.001:
            x = box.x + 12 + part * (box.width - 12) / 3
            drawing.text((x, box.y + 34), percent(share), size=18, bold=True, colour=colour)
            drawing.text((x, box.y + 48), name, size=SMALL, colour=colour)
    for token, word in enumerate(VOCABULARY):
        bar = Box(box.x + 6 + column * token + 5, base, column - 10, 0)
        shared = min(p[token], q[token])
        for low, high, colour in ((0, shared, GREEN), (shared, q[token], ORANGE), (shared, p[token], BLUE)):
            _draw_part(drawing, replace(bar, y=base - high * scale, height=(high - low) * scale), colour)
        chosen, drafted = index == step.kept and token == step.token, place is not None and token == place.draft
        name = Box(bar.x, base + 4, bar.width, 18)
        _draw_token(drawing, name, word, BLUE if chosen else ORANGE if drafted else "none", shade=0.25 * chosen)
        tip = f"{word}: p {p[token]:.2f}, q {q[token]:.2f}"
        drawing.rect(Box(bar.x, box.y + 54, bar.width, box.bottom - box.y - 54), "transparent", tip=tip)
    if place:
        x, y = box.x + 6 + column * (place.draft + 0.5), base - place.uniform * q[place.draft] * scale
        if index == step.kept:
            top = (min(p[step.token], q[step.token]) + p[step.token]) / 2
            drawing.add(arrow((x, y), (box.x + 6 + column * (step.token + 0.5), base - top * scale), INK))
        drawing.circle((x, y), DOT + 1, INK)


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


def _ratio(draft: Place) -> str:
    ratio = draft.p[draft.draft] / draft.q[draft.draft]
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.0f}"


def _captions(state: State, checked: int) -> list[str]:
    """Write a caption for each frame: the drafts, the forward pass, each checked draft, and the
    last token.
    """
    step, k = state.step, state.k
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

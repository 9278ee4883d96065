"""Draw lesson 07's picture: one step draft by draft, what it costs, and the speed-up by batch size
and by number of drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from minivllm_lab.drawing import text_width
from minivllm_lab.palette import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILLION, YELLOW
from minivllm_lab.speculative_decoding.speculation import Cause
from widgets.shell.plot import MARGIN, WIDE, Axes, Scale, counted, figures, hidden_note, percent, tokens
from widgets.shell.strip import draw_title
from widgets.shell.svg import QUIET, SMALL, Box, Drawing, Segment, legend, stacked_bar, without_room
from widgets.shell.theme import CARD, IDLE, MID, RESERVED
from widgets.speculative_decoding.state import BATCHES, MOST_BATCH, MOST_K, State, sibling
from widgets.speculative_decoding.step import VOCABULARY, Place

BATCH = Scale(1, MOST_BATCH, log=True)
TICKS = (1, 8, 64, 512)
DRAWN = sorted({*BATCHES, 3, 6, 12, 20, 40, 80, 112, 160, 224, 320, 448})
NAMES, COLUMN, STRIP, PANEL, ROW, VALUE = 60, 42, 76, 158, 13, 104
"""The pixels of the names of a strip's rows, of a position at least, of a strip's height, of the last
token's distributions (their width, and the height of a row), and of a step's time beside its bar.
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
    """Draw one step of a request, below it the time that a step takes, and then the speed-up by
    batch size and by number of drafts, on one scale.
    """
    drawing = Drawing(width, 0, "How much faster drafts make it", f"{state.model} on {state.gpu}, against the batch")
    y = _draw_cost(drawing, state, _draw_step(drawing, state) + 26) + 36
    wide = width >= WIDE
    across = width - 48 - MARGIN - 26
    left = Box(48, y, across * (0.6 if wide else 0.57), max(426 - y, 112) if wide else 112)
    right = Box(left.right + 26, y, across - left.width, left.height)
    up = _scale(state, pinned)
    _draw_speedup(Axes(drawing, left, BATCH, up), state, pinned)
    _draw_by_k(Axes(drawing, right, Scale(0.5, MOST_K + 0.5), up), state)
    drawing.height = left.bottom + 42
    return drawing.render()


# ---- speed-up against the batch


def _scale(state: State, pinned: State | None) -> Scale:
    """Return a scale from 0 to above all curves, in steps of a half so that it rarely changes."""
    values = [*state.by_k, *(value for k in (state.k, 1) for _, value in _values(state, k))]
    values += [value for _, value in _values(pinned, pinned.k)] if pinned else []
    return Scale(0, math.ceil(2.3 * max([1.4, *values])) / 2)


def _values(state: State, k: int) -> list[tuple[int, float]]:
    """Return (batch, speed-up) up to the batch that fills the memory."""
    most = state.one.most_batch(k)
    batches = [batch for batch in DRAWN if batch <= most]
    if most < MOST_BATCH and most > 0:
        batches = sorted({*batches, most})
    return [(batch, state.one.speedup(batch, k)) for batch in batches]


def _draw_speedup(axes: Axes, state: State, pinned: State | None) -> None:
    wide = axes.drawing.width >= WIDE
    longest = "requests that decode together (batch)", "times as fast as without drafts"
    names = longest if wide else ("batch", "times as fast")
    ticks, form = axes.y.ticks(5), "{:g}".format
    axes.frame(*names, x_ticks=TICKS, x_format=form, y_ticks=ticks, y_format=form)
    with axes.drawing.answer():
        _draw_broken(axes, state)
    if pinned:
        axes.pinned(*_unzipped(_values(pinned, pinned.k)), pinned.batch)
    axes.mark_y(1, "break even", GREEN)
    hidden_note(axes.drawing, axes.box)
    with axes.drawing.answer():
        compared = [(1, GREY, "7 4")] if wide and state.k > 1 and state.most_batch > 8 else []
        for k, colour, dash in (*compared, (state.k, BLUE, "")):
            values = _values(state, k)
            if values:
                axes.line(*_unzipped(values), colour, width=1.8 if dash else 2.5, dash=dash)
                axes.label(axes.at(*values[len(values) // 3 if dash else 0]), f"k = {k}", colour, bold=not dash)
        axes.line([state.batch, MOST_BATCH], [state.speedup] * 2, INK, width=1, dash="1 3")
    axes.here(state.batch, "batch", f"{state.batch}")
    with axes.drawing.answer():
        _draw_tips(axes, state)


def _unzipped(points: Sequence[tuple[int, float]]) -> tuple[list[float], list[float]]:
    return [float(x) for x, _ in points], [y for _, y in points]


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


def _draw_tips(axes: Axes, state: State) -> None:
    """Add a tooltip everywhere in the plot, with the results at the nearest batch size."""
    one, k = state.one, state.k
    axes.tips(
        [batch for batch, _ in _values(state, k)],
        lambda batch: (
            f"{counted(batch, 'request')}: {one.speedup(batch, k):.2f} times as fast, with steps of "
            f"{milliseconds(one.step(batch, k).seconds)} instead of {milliseconds(one.plain(batch).seconds)}."
        ),
    )


def _draw_by_k(axes: Axes, state: State) -> None:
    """Draw the speed-ups at this batch size by number of drafts."""
    drafts = [float(k) for k in range(1, MOST_K + 1)]
    where = f"at {counted(state.batch, 'request')}"
    axes.frame("drafts a step (k)", where, x_ticks=drafts, y_ticks=axes.y.ticks(5), y_format=lambda _: "")
    axes.mark_y(1, "", GREEN)
    hidden_note(axes.drawing, axes.box)
    with axes.drawing.answer():
        axes.also_here(state.k)
        axes.line([axes.x.low, state.k], [state.speedup] * 2, INK, width=1, dash="1 3")
        axes.line(drafts, state.by_k, MID)
        tips = [f"With k = {k:g}: {value:.2f} times as fast" for k, value in zip(drafts, state.by_k, strict=True)]
        axes.points(drafts, state.by_k, BLUE, tips=tips)
        axes.label(axes.at(state.k, state.speedup), f"{state.speedup:.2f}")
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
    note = f"{state.model} on {state.gpu}, contexts of {tokens(state.context)}, {drafter_words(state)}"
    note = f"{note}, {rate_words(state)}; modelled"
    with drawing.layer(tip=f"The model is off by {percent(state.error)} (median)."):
        y = drawing.heading((MARGIN, y), f"What a step of {counted(state.batch, 'such request')} takes", note)
    plain, step = state.one.plain(state.batch), state.one.step(state.batch, state.k)
    worth = state.tokens * plain.seconds
    longest = max(plain.seconds, step.seconds, worth)
    box = Box(MARGIN + NAMES * aside, y + 8, wide - (NAMES + VALUE) * aside, 16)
    hidden_note(drawing, Box(box.x, box.y, box.width, 74))
    longer = [Segment(title, max(getattr(plain, name), getattr(step, name)), colour) for name, title, colour in PARTS]
    with drawing.answer():
        keys = without_room([part for part in longer if part.value], longest, box.width)
        y = legend(drawing, (MARGIN, y + 19), keys, wide) - 11 if keys else y + 8
        for name, parts in (("no drafts", plain), (f"k = {state.k}", step)):
            y += 0 if aside else 20
            bar = Box(box.x, y, box.width, box.height)
            line = y + (12 if aside else -7)
            segments = [
                Segment(title, value := getattr(parts, part), colour, f"{TIPS.get(part, title)}: {milliseconds(value)}")
                for part, title, colour in PARTS
            ]
            stacked_bar(drawing, bar, segments, longest)
            drawing.text((MARGIN, line), name, size=SMALL)
            words = milliseconds(parts.seconds) + ("" if parts is plain else f", ×{state.longer:.2f}")
            drawing.text((drawing.width - MARGIN, line), words, size=SMALL, anchor="end")
            y += 22
        x = box.x + worth / longest * box.width
        end = box.x + step.seconds / longest * box.width
        drawing.line((x, y - 3), (end, y - 3), colour=GREEN if x > end else VERMILLION, width=3)
        for low, high in ((y - 25, y),) if x > end else ((y - 25, y - 20), (y - 5, y)):  # off the bar's labels
            drawing.line((x, low), (x, high), colour=GREEN, width=3)
        over = round(state.longer, 2) - round(state.tokens, 2)
        words = f"{state.tokens:.2f} tokens: pays up to ×{state.tokens:.2f}"
        lost = f"×{over:.2f} too much" * (over > 0.005)
        room = text_width(lost, SMALL) + 12
        x = max(MARGIN + room + text_width(words, SMALL), min(x - 6 + room, drawing.width - MARGIN))
        drawing.text((x - room, y + 11), words, size=SMALL, colour=GREEN, anchor="end")
        drawing.text((x, y + 11), lost, size=SMALL, colour=VERMILLION, anchor="end")
    return y + 11


# ---- one step of a request


def _draw_step(drawing: Drawing, state: State) -> float:
    """Draw the drafts of a step, their checks and its tokens, position by position, and where its
    last token is drawn from; return the y below.
    """
    step = state.step
    wide = drawing.width - 2 * MARGIN
    aside = drawing.width >= WIDE
    colours = {"drafter's q": ORANGE, "model's p": RESERVED, "p beyond q": BLUE, "p/q": MID}
    keys = [Segment(name, 0, colour) for name, colour in colours.items()]
    y = draw_title(drawing, "Draft, verify, accept", keys, 23)
    if state.own:
        y = drawing.paragraph((MARGIN, y + 18), own_words(state), wide)
    captions = _captions(state, min(step.kept + 1, state.k))
    last = len(captions) - 1
    room = wide - NAMES - (PANEL + 12 if aside else 0)
    across = min(state.k + 1, int(room // COLUMN))
    column = min(room / across, 84)
    top = y + 13
    for index in range(state.k + 1):
        row, place = divmod(index, across)
        box = Box(MARGIN + NAMES + place * column, top + row * STRIP, column - 4, STRIP)
        if not place:
            _draw_rows(drawing, box.y, min(across, state.k + 1 - index) * column)
        _draw_place(drawing, box, state, index, last, captions[min(index + 2, last)])
    y = top + STRIP * -(-(state.k + 1) // across) + 12
    drawing.text((MARGIN, y - 3), "tick: random; in grey: accepted", size=SMALL, colour=QUIET)
    with drawing.answer():
        words = f"{counted(len(step.tokens), 'token')}, mean {state.tokens:.2f}"
        drawing.text((MARGIN + NAMES + room, y - 3), words, size=SMALL, colour=QUIET, anchor="end")
    with drawing.layer(at=f"{last} {last}"):
        panel = Box(drawing.width - MARGIN - PANEL, top, PANEL, 0) if aside else Box(MARGIN, y + 6, wide, 0)
        below = _draw_last(drawing, panel, state)
    drawing.play(captions)
    return max(y, below)


def _draw_rows(drawing: Drawing, y: float, wide: float) -> None:
    """Write the names of a strip's rows, with a band for the model's one pass."""
    drawing.rect(Box(MARGIN + NAMES - 4, y + 24, wide + 2, 20), IDLE, radius=4, tip="one forward pass of the model")
    for below, words in ((14, "drafts"), (38, "checks"), (62, "tokens")):
        drawing.text((MARGIN, y + below), words, size=SMALL, colour=QUIET)


def _draw_place(drawing: Drawing, box: Box, state: State, index: int, last: int, caption: str) -> None:
    """Draw one position: its draft, how likely it is accepted with its random number, and the token
    that comes out.
    """
    step = state.step
    place = step.places[index] if index < state.k else None
    if place:
        _draw_token(drawing, box, 0, VOCABULARY[place.draft], ORANGE, shade=0)
        likely = Box(box.x, box.y + 29, box.width * place.ratio, 10)
        drawing.rect(Box(box.x, likely.y, box.width, 10), CARD)
        drawing.rect(likely, MID, at=f"1 {last}")
    if index <= step.kept:
        _draw_outcome(drawing, box, state, index, last)
        drawing.rect(Box(box.x, box.y, box.width, 70), "transparent", tip=caption)
    elif place:
        fade = Box(box.x - 2, box.y - 2, box.width + 4, 44)
        drawing.rect(fade, CARD, opacity=0.7, at=f"{last} {last}", tip="not checked: an earlier draft was rejected")
    else:
        _draw_token(drawing, box, 48, "bonus", MID, shade=0, dash="3 3")


def _draw_outcome(drawing: Drawing, box: Box, state: State, index: int, last: int) -> None:
    """Draw a draft's random number, and the token that comes out at its position."""
    kept = index < state.step.kept
    if index < state.k:
        with drawing.layer(at=f"{index + 2} {last}"):
            x = box.x + box.width * state.step.places[index].uniform
            drawing.line((x, box.y + 26), (x, box.y + 42), colour=GREEN if kept else VERMILLION, width=3)
            if not kept:
                _draw_token(drawing, box, 0, "", VERMILLION)
    with drawing.layer(at=f"{index + 2 if kept else last} {last}"):
        _draw_token(drawing, box, 48, state.step.tokens[index], GREEN if kept else BLUE)


def _draw_token(
    drawing: Drawing, box: Box, below: float, word: str, colour: str, *, shade: float = 0.2, dash: str = ""
) -> None:
    frame = Box(box.x, box.y + below, box.width, 20)
    drawing.rect(frame, colour, opacity=shade, stroke=colour, radius=3, dash=dash)
    middle, ink = (box.x + box.width / 2, frame.y + 14), QUIET if dash else INK
    drawing.text(middle, word, size=SMALL, anchor="middle", colour=ink)


def _draw_last(drawing: Drawing, box: Box, state: State) -> float:
    """Draw the distributions behind the step's last token; return the y below."""
    step = state.step
    place = step.places[step.kept] if step.rejected else None
    p = place.p if place else step.bonus
    q = place.q if place else (0.0,) * len(p)
    name = "recovered where p > q" if place else "bonus, drawn from p"
    drawing.text((box.x, box.y + 10), name, size=SMALL, bold=True, colour=BLUE)
    left = box.x + 52
    scale = (box.right - left) / max(*p, *q)
    for token, word in enumerate(VOCABULARY):
        y = box.y + 16 + ROW * token
        drawn = token == step.token
        drawing.text((box.x, y + 10), word, size=SMALL, colour=BLUE if drawn else QUIET, bold=drawn)
        shared = min(p[token], q[token])
        drawing.rect(Box(left, y + 1, q[token] * scale, 5), ORANGE)
        drawing.rect(Box(left, y + 6, shared * scale, 5), RESERVED)
        drawing.rect(Box(left + shared * scale, y + 6, (p[token] - shared) * scale, 5), BLUE)
        tip = f"{word}: p {p[token]:.2f}, q {q[token]:.2f}"
        drawing.rect(Box(box.x, y, box.width, ROW), "transparent", tip=tip)
    return y + ROW


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

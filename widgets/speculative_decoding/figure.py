"""Draw lesson 07's first picture: how long the tokens of a step take with drafts and without, and
the speed-up by batch size.
"""

from __future__ import annotations

import math
from dataclasses import replace

from minivllm_lab.pictures.drawing import text_width
from minivllm_lab.pictures.palette import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION
from minivllm_lab.speculative_decoding.speculation import Cause
from widgets.shell.plot import MARGIN, Axes, Scale, counted, hidden_note, percent, seconds
from widgets.shell.svg import BOLD, SMALL, Box, Drawing, Segment, legend, stacked_bar, without_room
from widgets.shell.theme import BROKEN, CARD, MISSED, PINNED
from widgets.speculative_decoding.state import BATCHES, MOST_BATCH, State, sibling

BATCH = Scale(1, MOST_BATCH, log=True)
TICKS = (1, 8, 64, 512)
DRAWN = sorted({*BATCHES, 3, 6, 12, 20, 40, 80, 112, 160, 224, 320, 448})
BAR, ROW = 30, 62
"""The height of a bar, and the pixels from one bar to the next."""
FEW = 8
"""The requests of the pale bar: so few that reading hides all arithmetic on every GPU here."""
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


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw the time of a step's tokens, with drafts and without, and below it the speed-up by batch
    size.
    """
    drawing = Drawing(width, 0, "How much faster drafts make it", f"{state.model} on {state.gpu}, against the batch")
    y = _draw_times(drawing, state) + 56
    box = Box(48, y, width - 48 - MARGIN, 160)
    _draw_speedup(Axes(drawing, box, BATCH, _scale(state, pinned)), state, pinned)
    drawing.height = box.bottom + 42
    return drawing.render()


# ---- the time of a step's tokens


def _draw_times(drawing: Drawing, state: State) -> float:
    """Draw the plain steps that yield as many tokens as one with drafts, and below them that step;
    return the y below.
    """
    wide = drawing.width - 2 * MARGIN
    note = f"{counted(state.batch, 'request')}, {state.model} on {state.gpu}, modelled"
    with drawing.layer(tip=f"The model is off by {percent(state.error)} (median)."):
        y = drawing.heading((MARGIN, 23), f"Time for {state.tokens:.2f} tokens, on average", note)
    few = replace(state, batch=FEW)
    parts, longer = _parts(state), max(state.tokens, state.longer)
    longest = max(longer, few.longer)
    named = f"k = {counted(state.k, 'draft')} by {drafter_words(state)}"
    rows = (
        (y + 36, "no drafts", state.tokens, f"{state.tokens:.2f} plain steps", _plain_steps(state)),
        (y + 36 + ROW, named, state.longer, f"{state.longer:.2f} plain steps", parts),
    )
    bottom = y + 36 + ROW + BAR + 37
    hidden_note(drawing, Box(MARGIN, y + 36, wide, ROW + BAR))
    for top, name, steps, length, segments in rows:
        bar, end = Box(MARGIN, top, wide, BAR), MARGIN + wide * steps / longest
        drawing.text((MARGIN, top - 7), name, size=SMALL)
        with drawing.answer():
            rest = replace(bar, x=end, width=wide * (longer - steps) / longest)
            _draw_rest(drawing, rest, loses=segments is not parts)
            stacked_bar(drawing, bar, segments, longest)
            least = MARGIN + text_width(name, SMALL) + 10 + BOLD * text_width(length, SMALL)
            drawing.text((max(end, least), top - 7), length, size=SMALL, anchor="end", bold=True)
    keys = without_room([part for part in parts if part.value], longest, wide)
    with drawing.answer():
        faster, end = f"{few.speedup:.2f} times as fast", MARGIN + wide * few.longer / longest
        place = min(end + 8, MARGIN + wide - text_width(faster, SMALL)), bottom - 2
        drawing.text((MARGIN, bottom - 18), f"at {FEW} requests, reading weights hides the arithmetic", size=SMALL)
        drawing.add('<g opacity="0.5">')
        bare = [replace(part, label="") for part in _parts(few)]
        stacked_bar(drawing, Box(MARGIN, bottom - 12, wide, 12), bare, longest)
        drawing.add("</g>")
        drawing.text(place, faster, size=SMALL, bold=True, halo=True)
        return legend(drawing, (MARGIN, bottom + 19), keys, wide) - 19 if keys else bottom


def _draw_rest(drawing: Drawing, rest: Box, *, loses: bool) -> None:
    """Draw the time that the other bar takes longer."""
    result, colour, ground = ("lose", VERMILLION, BROKEN) if loses else ("win", GREEN, CARD)
    drawing.rect(rest, ground)
    drawing.hatch(rest, MISSED if loses else GREEN, gap=9)
    if BOLD * text_width("drafts", SMALL) + 4 < rest.width:
        for word, down in (("drafts", 12), (result, 25)):
            place = rest.x + rest.width / 2, rest.y + down
            drawing.text(place, word, size=SMALL, colour=colour, anchor="middle", bold=True, halo=ground)


def _plain_steps(state: State) -> list[Segment]:
    """Return the steps without drafts: whole ones, and the part of one more."""
    tip = f"a plain step: {seconds(state.one.plain(state.batch).seconds)}"
    whole = [Segment("1 token", 1, SKY, tip)] * math.floor(state.tokens)
    return [*whole, Segment("", state.tokens % 1, SKY, tip)]


def _parts(state: State) -> list[Segment]:
    """Return the parts of a step with drafts, in plain steps; rejection sampling is the drafter's."""
    plain, step = state.one.plain(state.batch), state.one.step(state.batch, state.k)
    drafter = step.draft + step.overhead - plain.overhead
    more = step.seconds - plain.seconds - drafter
    parts = {"a plain step": (plain.seconds, SKY), "extra arithmetic": (more, PURPLE), "drafter": (drafter, ORANGE)}
    return [
        Segment(name, part / plain.seconds, colour, f"{name}: {seconds(part)}")
        for name, (part, colour) in parts.items()
    ]


# ---- speed-up against the batch


def _scale(state: State, pinned: State | None) -> Scale:
    """Return a scale from 0 to above all curves, in steps of a half so that it rarely changes."""
    values = [speedup for each in (state, pinned) if each for speedup in _curve(each)[1]]
    return Scale(0, math.ceil(2.3 * max([1.4, *values, state.best_speedup(state.batch)])) / 2)


def _curve(state: State) -> tuple[list[int], list[float]]:
    """Return batches with their speed-ups, up to the batch that fills the memory."""
    most = state.most_batch
    batches = sorted({batch for batch in (*DRAWN, min(most, MOST_BATCH)) if 0 < batch <= most})
    return batches, [state.one.speedup(batch, state.k) for batch in batches]


def _draw_speedup(axes: Axes, state: State, pinned: State | None) -> None:
    form = "{:g}".format
    name = "requests that decode together (batch)"
    axes.frame(name, "", x_ticks=TICKS, x_format=form, y_ticks=axes.y.ticks(4), y_format=form)
    colour = GREEN if state.fits and state.speedup > 1 else VERMILLION
    number = f"{state.speedup:.2f}" if state.fits else "–"
    axes.drawing.number((MARGIN, axes.box.y - 14), number, "times as fast as without drafts", colour)
    with axes.drawing.answer():
        _draw_broken(axes, state)
    if pinned:
        axes.pinned(*_curve(pinned), pinned.batch)
    axes.mark_y(1, "", GREEN)
    axes.label(axes.at(1, 1), "break even", GREEN, bold=False)
    hidden_note(axes.drawing, axes.box)
    with axes.drawing.answer():
        batches, values = _curve(state)
        best = [state.best_speedup(batch) for batch in batches]
        axes.line(batches, best, PINNED, width=1.8, dash="7 4")
        axes.line(batches, values, BLUE)
        axes.name(batches[:9], values[:9], f"k\u2009=\u2009{state.k}", BLUE)
        better = [each for each, most, now in zip(batches, best, values, strict=True) if most > max(1.0, now + 0.05)]
        for each in better[:1]:
            x, y = axes.at(each, state.best_speedup(each))
            axes.label((x, y - 24), "best k", PINNED, bold=False)
        if state.fits:
            best_here = axes.at(state.batch, state.best_speedup(state.batch))
            axes.drawing.circle(best_here, 4.5, PINNED)
            if state.best_k:
                axes.label(best_here, f"k\u2009=\u2009{state.best_k}\n{state.best_speedup(state.batch):.2f}", PINNED)
            axes.points([state.batch], [state.speedup], BLUE)
    axes.here(state.batch, "batch", f"{state.batch}")


def _draw_broken(axes: Axes, state: State) -> None:
    """Shade where drafts lose, and where memory is full."""
    most, plain = state.most_batch, state.one.most_plain_batch
    for low, high in state.losing:
        cause = state.one.cause(low, state.k)
        why = f": {CAUSES[cause]}" if cause else ""
        if low > 1:
            axes.shade(low, None, f"loses from {low}{why}")
            axes.explain(None, low, f"loses from {low}{why} →")
        elif high < min(most, MOST_BATCH):
            axes.broken(None, high + 1, f"loses below {high + 1}{why}")
        else:
            axes.broken(None, None, f"loses{why}")
    if most < MOST_BATCH:
        axes.broken(max(most, 1), None, f"memory is full at {most}" + f"; {plain} without a drafter" * (plain > most))

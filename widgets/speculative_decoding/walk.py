"""Draw lesson 07's second picture: one step of a request, draft by draft."""

from __future__ import annotations

from dataclasses import replace

from minivllm_lab.pictures.drawing import QUIET, arrow
from minivllm_lab.pictures.palette import BLUE, GREEN, INK, ORANGE
from widgets.shell.plot import MARGIN, ROW, balanced, counted, figures, percent
from widgets.shell.svg import SMALL, Box, Drawing, Segment, legend
from widgets.shell.theme import CARD, IDLE, WORDS
from widgets.speculative_decoding.state import State
from widgets.speculative_decoding.step import VOCABULARY, Place

TOKEN, NAMES, ROWS, PANEL, DOT = 54, 72, 178, 212, 5
"""The widths of a token and of the curves' names, the heights of all rows and of the distributions, a dot's radius."""


def detail(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw the drafts of a step, their checks and its tokens, position by position, and the
    distributions at the position that is checked.
    """
    step, wide = state.step, width - 2 * MARGIN
    drawing = Drawing(width, 0, "One step of one request", "Its drafts, which of them are accepted, and its tokens")
    y = drawing.heading((MARGIN, 23), "One step of one request")
    if state.own:
        y = drawing.paragraph((MARGIN, y + 18), own_words(state), wide)
    captions = _captions(state, min(step.kept + 1, state.k))
    last = len(captions) - 1
    drawing.play(captions, still=True)
    heads = (0, "drafted", "start"), (TOKEN + 8, "kept if its random dot is in green", "start"), (wide, "output", "end")
    for x, words, anchor in heads:
        drawing.text((MARGIN + x, y + 24), words, size=SMALL, colour=QUIET, anchor=anchor)
    count = max(state.k, step.kept + 1)
    high = min(32.0, ROWS / count)
    rows = [Box(MARGIN, y + 32 + high * index, wide, high - 4) for index in range(count)]
    panel = Box(MARGIN, rows[-1].bottom + 16, wide, PANEL)
    for index, row in enumerate(rows):
        if index <= step.kept:
            frame = min(index + 2, last)
            with drawing.layer(at=f"{frame} {last if index == step.kept else frame}"):
                drawing.rect(Box(row.x - 6, row.y - 3, row.width + 12, row.height + 6), IDLE, radius=6)
                _draw_distributions(drawing, panel, state, index)
        _draw_row(drawing, row, state, index, last)
    drawing.height = panel.bottom + MARGIN
    return drawing.render()


def _draw_row(drawing: Drawing, row: Box, state: State, index: int, last: int) -> None:
    """Draw one position: its draft, how likely it is accepted with its random number, and the token
    that comes out.
    """
    step = state.step
    draft, token = (replace(row, x=x, width=TOKEN) for x in (row.x, row.right - TOKEN))
    bar = Box(draft.right + 8, row.y + row.height / 4, row.width - 2 * TOKEN - 16, row.height / 2)
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


def _draw_token(drawing: Drawing, box: Box, word: str, colour: str, *, shade: float = 0.25) -> None:
    drawing.rect(box, colour, opacity=shade, stroke=colour, radius=3)
    drawing.text((box.x + box.width / 2, box.y + box.height / 2 + 4), word, size=SMALL, anchor="middle")


def _draw_part(drawing: Drawing, box: Box, colour: str) -> None:
    """Draw a part of a bar; what is rejected is hatched."""
    drawing.rect(box, colour)
    if colour == ORANGE:
        drawing.hatch(box, CARD, gap=5)


def _draw_distributions(drawing: Drawing, box: Box, state: State, index: int) -> None:
    """Draw q and p over the words at a position: what both share, and what only one has; the draft's
    random number; and the token that is drawn instead.
    """
    step = state.step
    place = step.places[index] if index < state.k else None
    p, q = (place.p, place.q) if place else (step.bonus, (0.0,) * len(step.bonus))
    drawing.rect(box, IDLE, radius=6)
    _draw_shares(drawing, box, place, index)
    left, base = box.x + 8, box.bottom - 30
    column, scale = (box.width - 8 - NAMES) // len(p), (base - box.y - 80) / max(*p, *q)
    for token, word in enumerate(VOCABULARY):
        bar = Box(left + column * token, base, column, 0)
        shared = min(p[token], q[token])
        for low, high, colour in ((0, shared, GREEN), (shared, q[token], ORANGE), (shared, p[token], BLUE)):
            _draw_part(drawing, replace(bar, y=base - high * scale, height=(high - low) * scale), colour)
        chosen, drafted = index == step.kept and token == step.token, place is not None and token == place.draft
        name = Box(bar.x + 1, base + 5, column - 2, 18)
        _draw_token(drawing, name, word, BLUE if chosen else ORANGE if drafted else "none", shade=0.25 * chosen)
        tip = f"{word}: p {p[token]:.2f}, q {q[token]:.2f}"
        drawing.rect(Box(bar.x, box.y + 54, column, box.bottom - box.y - 54), "transparent", tip=tip)
    apart = max(0.0, 15 - abs(p[-1] - q[-1]) * scale) / 2 * (1 if p[-1] < q[-1] else -1)
    names = (q, "drafter q", WORDS[ORANGE], "5 3", -apart), (p, "model p", INK, "", apart)
    for chances, words, colour, dash, down in names if place else names[1:]:
        tops = [base - chance * scale for chance in chances]
        ends = [(left + column * (side + token), top) for token, top in enumerate(tops) for side in (0, 1)]
        drawing.polyline(ends, colour, dash=dash)
        x, y = ends[-1]
        drawing.text((x + 6, y + 4 + down), words, size=SMALL, colour=colour, bold=True)
    if place:
        x, y = left + column * (place.draft + 0.5), base - place.uniform * q[place.draft] * scale
        if index == step.kept:
            top = (min(p[step.token], q[step.token]) + p[step.token]) / 2
            drawing.add(arrow((x, y), (left + column * (step.token + 0.5), base - top * scale), INK))
            lines = balanced("rejected: drawn again from blue", 3 * column)
            first = min(max((place.draft + step.token) // 2 - 1, 0), len(p) - 3)
            above = base - max(*p[first : first + 3], *q[first : first + 3]) * scale - 5 - ROW * len(lines)
            for line, words in enumerate(lines, 1):
                drawing.text((left + column * (first + 1.5), above + ROW * line), words, size=SMALL, anchor="middle")
        drawing.circle((x, y), DOT, INK)


def _draw_shares(drawing: Drawing, box: Box, place: Place | None, index: int) -> None:
    """Write that what is rejected of all drafts at a position is drawn again, so that p comes out."""
    title = "All drafts are kept: p gives a bonus token"
    if place:
        title, again = f"All words at draft {index + 1}: kept + drawn again = p", percent(1 - place.agreement)
        keys = ("kept", GREEN), (f"{again} rejected =", ORANGE), (f"{again} drawn again", BLUE)
        entries = [Segment(words, 0, colour, hatched=colour == ORANGE) for words, colour in keys]
        legend(drawing, (box.x + 8, box.y + 44), entries, box.width)
    drawing.text((box.x + 8, box.y + 22), title, size=SMALL, bold=True)


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
        result, ratio = "accepted" if kept else "rejected", figures(place.p[place.draft] / place.q[place.draft])
        captions.append(f"Draft {index + 1}: {place.uniform:.2f} is {sign} p/q = {ratio}, so it is {result}")
    source = "a recovered token from the residual distribution" if step.rejected else "a bonus token drawn from p"
    total = f"{counted(len(step.tokens), 'token')} from one pass"
    return [*captions, f"Then {VOCABULARY[step.token]}, {source}: {total}: {' '.join(step.tokens)}"]

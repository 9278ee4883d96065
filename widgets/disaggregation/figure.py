"""Draw lesson 08's picture: requests in time by rate, each split's goodput, and where the time
goes.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace

from minivllm_lab.disaggregation.goodput import SHARE
from minivllm_lab.palette import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION
from minivllm_simulate.load_sweep import within
from widgets.disaggregation.state import RATES, TUNED, Side, State
from widgets.shell.plot import MARGIN, WIDE, Axes, Key, Scale, draw_head, figures, hidden_note, percent, seconds, tokens
from widgets.shell.svg import SMALL, Box, Drawing, Segment, legend, stacked_bar
from widgets.shell.theme import MID

RATE = Scale(RATES[0], RATES[-1], log=True)
SHARES = Scale(0, 1)
TICKS = (1, 3, 10, 30, 100, 300)
ROW, NAMES = 19, 92
TIMES = (
    ("queue", "wait for a GPU", MID),
    ("prefill", "prefill in shared steps", BLUE),
    ("room", "wait for blocks", PURPLE),
    ("link", "link, with waiting", VERMILLION),
    ("decode", "first step", SKY),
)


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw requests in time by rate, each split's goodput beside it, and the time to first token
    below.
    """
    many = state.mine.gpus
    description = f"Requests in time against the rate, {state.mine.name} GPUs"
    drawing = Drawing(width, 0, f"{state.model} on {many} {state.gpu}", description)
    note = (
        f"{state.model} on {many} {state.gpu}, {tokens(state.work.prompt)} tokens in and {state.work.output} out; "
        f"in time: first token within {seconds(state.objective.ttft)}, then one every {seconds(state.objective.tpot)}; "
        f"GPUs that do both take {chunk_words(state)}"
    )
    y = draw_head(drawing, "Requests in time", note, state.error, _keys(state)) - 20
    wide = width >= WIDE
    left = Box(52, y + 50, round(width * (0.56 if wide else 1)) - 52 - (0 if wide else MARGIN), 170)
    _draw_shares(Axes(drawing, left, RATE, SHARES), state, pinned)
    side = Box(left.right + 36, y + 44, width - left.right - 36 - MARGIN, 0)
    if not wide:
        side = Box(MARGIN, left.bottom + 66, width - 2 * MARGIN, 0)
    below = _draw_splits(drawing, state, side)
    drawing.height = _draw_times(drawing, state, max(left.bottom + 62, below + 30)) + 12
    return drawing.render()


def chunk_words(state: State) -> str:
    """Name the chunk size of the GPUs that do both."""
    chunk = f"chunks of {tokens(state.both.budget)}"
    if state.budget != TUNED:
        return chunk
    return f"{chunk}, the best size" if state.is_tuned else "the best chunk, still being searched"


def _keys(state: State) -> list[Key]:
    return [
        (f"{state.mine.name} GPUs: prefill + decode", BLUE, "", 2.5),
        (f"all {state.mine.gpus} do both", ORANGE, "7 4", 2.0),
        (f"at least {percent(SHARE)}", GREEN, "4 3", 1.5),
    ]


# ---- the share in time, over the rate


def _draw_shares(axes: Axes, state: State, pinned: State | None) -> None:
    name, ticks = "requests a second, over all GPUs", (0, 0.25, 0.5, 0.75, 1)
    axes.frame(name, "requests in time", x_ticks=TICKS, x_format="{:g}".format, y_ticks=ticks, y_format=percent)
    mine = state.mine
    if mine.refused:
        axes.broken(None, None, f"{state.model} does not fit: {mine.refused}")
    elif mine.is_found and mine.edge[1] < math.inf:
        axes.broken(max(mine.goodput, RATES[0]), None, edge_words(mine, state))
    if pinned and pinned.mine.points:
        axes.pinned(pinned.mine.rates, [pinned.mine.share(rate) for rate in pinned.mine.rates], pinned.rate)
    axes.mark_y(SHARE, "", GREEN)
    with axes.drawing.answer():  # both lines together answer the guess
        both = state.both
        _draw_line(axes, both, ORANGE, "7 4", 2.0)
        if state.is_tuned and RATES[0] < both.goodput < RATES[-1]:
            words = f"{both.gpus} break at {figures(both.goodput)}"
            x, y = axes.at(both.goodput, 0.75)
            right = x + 104 < axes.box.right
            place, anchor = ((x + 9, y), "start") if right else ((x - 6, y), "end")
            axes.drawing.text(place, words, size=SMALL, colour=ORANGE, anchor=anchor, halo=True)
        _draw_tips(axes, state)
    _draw_line(axes, mine, BLUE, "", 2.5)
    axes.here(state.rate, "rate", f"{state.rate:g} a second")


def _draw_line(axes: Axes, side: Side, colour: str, dash: str, wide: float) -> None:
    if side.points:
        axes.line(side.rates, [side.share(rate) for rate in side.rates], colour, dash=dash, width=wide)


def _draw_tips(axes: Axes, state: State) -> None:
    """Add a tooltip everywhere in the plot, with the results at the nearest rate."""
    rates = sorted({*state.mine.points, *state.both.points})
    axes.tips(rates, lambda rate: f"{rate:g} requests a second. {_share_words(state, rate)}")


def _share_words(state: State, rate: float) -> str:
    parts = []
    for side in (state.mine, state.both):
        if rate in side.points:
            first, later = side.points[rate].late(state.objective)
            late = f"first tokens late for {percent(first)}, later ones for {percent(later)}"
            parts.append(f"{side.name}: {percent(side.share(rate))} in time; {late}.")
    return " ".join(parts)


def edge_words(side: Side, state: State) -> str:
    """Describe where a split breaks, and why."""
    where = f"at {figures(side.goodput)}" if side.goodput > RATES[0] else f"below {RATES[0]:g}"
    return f"breaks {where}: {cause_words(side.cause, state)}"


def cause_words(cause: str, state: State) -> str:
    """Describe what goes wrong."""
    return {
        "queue": "prompts wait for a GPU that prefills",
        "prefill": f"a prefill alone takes over {seconds(state.objective.ttft)}",
        "room": "the decode GPUs have no free blocks",
        "link": "the link is too slow",
        "decode": "all seats of the decode GPUs are taken",
        "tpot": f"decoding takes over {seconds(state.objective.tpot)} a token",
        "ttft": f"first tokens take over {seconds(state.objective.ttft)}",
        "": "nothing breaks",
    }[cause]


# ---- each split's goodput


def _draw_splits(drawing: Drawing, state: State, box: Box) -> float:
    """Draw a bar for each split, and one for the GPUs that do both, also with chunks of 8,192;
    return the y below.
    """
    y = drawing.heading((box.x, box.y), "Goodput")
    y = drawing.paragraph((box.x, y + 18), "requests a second in time, by GPUs that prefill + decode", box.width)
    sides = [*state.splits, state.both] + [state.default] * (state.default.budget != state.both.budget)
    most = max([side.goodput for side in sides if side.is_found] + [1e-9])
    hidden_note(drawing, Box(box.x + NAMES, y + 8, box.width - NAMES, ROW * len(sides)))
    for row, side in enumerate(sides):
        top = y + 8 + ROW * row + 5 * (side.prefill == 0)
        _draw_bar(drawing, state, side, Box(box.x, top, box.width, ROW), most)
    return y + 13 + ROW * len(sides)


def _draw_bar(drawing: Drawing, state: State, side: Side, box: Box, most: float) -> None:
    mine = side.prefill == state.mine.prefill
    other = side is state.default and side is not state.both
    name = f"{side.gpus}, {tokens(side.budget)} chunks" if other else side.name
    drawing.text((box.x, box.y + 13), name, size=SMALL, bold=mine)
    room = box.width - NAMES - 46
    with drawing.answer():
        wide = side.goodput / most * room if side.is_found else 0.0
        colour = BLUE if mine else ORANGE if side is state.both else MID
        tip = f"{name}: {figures(side.goodput)} requests a second in all, until {cause_words(side.cause, state)}"
        drawing.rect(Box(box.x + NAMES, box.y + 3, wide, ROW - 6), colour, tip=tip)
        drawing.text((box.x + NAMES + wide + 6, box.y + 13), goodput_words(side), size=SMALL)


def goodput_words(side: Side) -> str:
    """Format the goodput."""
    if side.refused:
        return "does not fit"
    if not side.is_found:
        return "…"
    return figures(side.goodput) if side.goodput else "none"


# ---- times as shares of their limits


def _draw_times(drawing: Drawing, state: State, y: float) -> float:
    """Draw the parts of the time to first token at this rate, and the time per token of both ways;
    return the y of the last line.
    """
    title = f"At {state.rate:g} a second"
    if state.rate not in state.mine.points:
        words = "Nothing is served." if state.mine.refused else "Still serving the requests."
        return drawing.paragraph((MARGIN, drawing.heading((MARGIN, y), title) + 20), words, drawing.width - 2 * MARGIN)
    served = state.mine.points[state.rate]
    parts = [
        Segment("", served.mean(part), colour, f"{name}: {seconds(served.mean(part))}") for part, name, colour in TIMES
    ]
    note = f"first token: mean; per token: {percent(SHARE)} within"
    y = drawing.heading((MARGIN, y), title, note) + 8
    rows = [(f"first token, {state.mine.name}", parts, state.objective.ttft)]
    for side, colour in ((state.mine, BLUE), (state.both, ORANGE)):
        if state.rate in side.points:
            slow = within(sorted(client.tpot for client in side.points[state.rate].clients), SHARE)
            rows.append((f"per token, {side.name}", [Segment("", slow, colour)], state.objective.tpot))
    room = Box(MARGIN + 158, y, drawing.width - 2 * MARGIN - 158 - 130, 12)
    longest = max(1.25, *(sum(part.value for part in row) / limit for _, row, limit in rows))
    for index, (name, row, limit) in enumerate(rows):
        top = y + index * 17
        with drawing.answer() if index == 2 else nullcontext():
            drawing.text((MARGIN, top + 10), name, size=SMALL)
            total = sum(part.value for part in row)
            end = room.x + total / limit / longest * room.width
            least = 2.5 * total / (end - room.x)  # pixels, so that each part is seen
            seen = [replace(part, value=max(part.value, least)) if part.value else part for part in row]
            stacked_bar(drawing, Box(room.x, top, end - room.x, 12), seen, total)
            words = f"{seconds(total)}, limit {seconds(limit)}"
            drawing.text((max(end, room.x + room.width / longest) + 6, top + 10), words, size=SMALL)
    at = room.x + room.width / longest
    drawing.line((at, y - 2), (at, y + 17 * len(rows) - 3), colour=GREEN, width=2)
    keys = [Segment(f"{name} {seconds(served.mean(part))}", 0, colour) for part, name, colour in TIMES]
    return legend(drawing, (MARGIN, y + 17 * len(rows) + 12), keys, drawing.width - 2 * MARGIN) - 19

"""Draw lesson 08's picture: requests in time by rate, and how full the GPUs of both designs are at
this rate.
"""

from __future__ import annotations

import math
from dataclasses import replace

from minivllm_lab.disaggregation.goodput import SHARE
from minivllm_lab.drawing import QUIET, Point
from minivllm_lab.palette import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, VERMILLION, YELLOW
from minivllm_simulate.load_sweep import within
from widgets.disaggregation.state import MOST_OF_A_KIND, RATES, TUNED, Side, State
from widgets.shell.plot import MARGIN, WIDE, Axes, Key, Scale, draw_head, figures, hidden_note, percent, seconds, tokens
from widgets.shell.svg import SMALL, Box, Drawing, Segment, stacked_bar
from widgets.shell.theme import IDLE, MID, MISSED

RATE = Scale(RATES[0], RATES[-1], log=True)
SHARES = Scale(0, 1)
TICKS = (3, 10, 30, 100, 300)
STAGES = {"prefill": PURPLE, "link": YELLOW, "decode": SKY}
NAMES = {"prefill": "prefill", "link": "KV link", "decode": "decode", "both": "prefill and decode"}
TIMES = (
    ("queue", "wait for a GPU", MID),
    ("prefill", "prefill in shared steps", STAGES["prefill"]),
    ("room", "wait for blocks", MID),
    ("link", "link, with waiting", STAGES["link"]),
    ("decode", "first step", STAGES["decode"]),
)
TANK, DEEP, PILE, QUEUE, LINK, DOT = 26, 48, 16, 26, 112, 8
"""Pixels: a GPU with its gap, how deep it is, what piles up on it, queue, link, and a dot."""
BLOCKS = 13
LONGEST = 2.0
"""The longest bar, as a multiple of its limit."""


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw requests in time by rate, the times of both designs beside it, and their GPUs below."""
    many = state.mine.gpus
    description = f"Requests in time against the rate, {state.mine.name} GPUs"
    drawing = Drawing(width, 0, f"{state.model} on {many} {state.gpu}", description)
    note = (
        f"{state.model}, {many} {state.gpu}, {tokens(state.work.prompt)} tokens in, {state.work.output} out; "
        f"in time: first token within {seconds(state.objective.ttft)}, then one every {seconds(state.objective.tpot)}"
    )
    y = draw_head(drawing, "Requests in time", note, state.error, _keys(state)) - 20
    wide = width >= WIDE
    left = Box(52, y + 50, round(width * (0.53 if wide else 1)) - 52 - (0 if wide else MARGIN), 150)
    _draw_shares(Axes(drawing, left, RATE, SHARES), state, pinned)
    y = left.bottom + 62
    if state.rate not in state.mine.points:
        words = "Nothing is served." if state.mine.refused else "Still serving the requests."
        drawing.height = drawing.paragraph((MARGIN, y), words, width - 2 * MARGIN) + 12
        return drawing.render()
    below = _draw_pools(drawing, state, (MARGIN, y))
    place = (round(width * 0.57), y) if wide else (MARGIN, below + 22)
    hidden_note(drawing, Box(place[0], place[1], width - place[0] - MARGIN, below - y))
    with drawing.answer():
        below = _draw_both(drawing, state, place)
    times = Box(left.right + 30, left.y + 2, width - left.right - 30 - MARGIN, 12)
    if not wide:
        times = Box(MARGIN, below + 22, width - 2 * MARGIN, 12)
    drawing.height = max(below, _draw_times(drawing, state, times)) + 12
    return drawing.render()


def chunk_words(state: State) -> str:
    """Name the chunk size of the GPUs that do both."""
    if state.budget != TUNED:
        return f"chunks of {tokens(state.both.budget)}"
    return f"best chunks: {tokens(state.both.budget) if state.is_tuned else '…'}"


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
        _draw_line(axes, state.both, ORANGE, "7 4", 2.0)
        if state.is_tuned and RATES[0] < state.both.goodput < RATES[-1]:
            axes.label(axes.at(state.both.goodput, 0.8), f"at {figures(state.both.goodput)}", ORANGE)
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


# ---- both designs at this rate


def _draw_pools(drawing: Drawing, state: State, place: Point) -> float:
    """Draw the two pools and the link between them; return the y below."""
    mine = state.mine
    decode = mine.gpus - mine.prefill
    drawing.text(place, f"{mine.prefill} prefill, {decode} decode", colour=BLUE, bold=True)
    drawing.text((place[0] + 144, place[1]), "green: the limit", size=SMALL, colour=QUIET)
    middle = place[0] + QUEUE + MOST_OF_A_KIND * TANK
    top = place[1] + PILE + 9
    _draw_queue(drawing, state, (middle - mine.prefill * TANK, top + DEEP))
    _draw_pool(drawing, state, mine, "prefill", (middle - mine.prefill * TANK, top), mine.prefill)
    _draw_link(drawing, state, Box(middle, top, LINK, DEEP))
    return _draw_pool(drawing, state, mine, "decode", (middle + LINK, top), decode)


def _draw_both(drawing: Drawing, state: State, place: Point) -> float:
    """Draw the GPUs that do both; return the y below."""
    both = state.both
    drawing.text(place, f"{both.name}, {chunk_words(state)}", colour=ORANGE, bold=True)
    return _draw_pool(drawing, state, both, "both", (place[0] + 3, place[1] + PILE + 9), both.gpus)


def _draw_pool(drawing: Drawing, state: State, side: Side, part: str, place: Point, count: int) -> float:
    """Draw GPUs as tanks, filled as far as they are busy; what they cannot do in time piles up above
    the brim. Return the y below.
    """
    load = side.load(part, state.rate)
    tip = f"{side.name}, {NAMES[part]}: {full_words(load)} of the requests a second that they handle in time"
    colours = [STAGES[part]] if part in STAGES else [STAGES["prefill"], STAGES["decode"]]
    (x, brim), bottom = place, place[1] + DEEP
    wide, high, pile = (TANK - 4) / len(colours), min(load, 1) * DEEP, min(max(load - 1, 0) * DEEP, PILE)
    for left in (x + index * TANK for index in range(count)):
        drawing.rect(Box(left, brim, TANK - 4, DEEP), IDLE, tip=tip)
        for index, colour in enumerate(colours):
            drawing.rect(Box(left + index * wide, bottom - high, wide, high), colour, tip=tip)
        _draw_excess(drawing, Box(left, brim - pile, TANK - 4, pile), tip)
    right = x + count * TANK - 4
    drawing.line((x - 3, brim), (right + 3, brim), colour=GREEN, width=2)
    at, anchor = (right, "end") if part == "prefill" else (x, "start")
    _draw_load(drawing, (at, bottom + 16), NAMES[part], load, anchor)
    return bottom + 18


def _draw_excess(drawing: Drawing, box: Box, tip: str) -> None:
    drawing.rect(box, MISSED, tip=tip)
    drawing.hatch(box, VERMILLION, gap=5)


def _draw_load(drawing: Drawing, place: Point, name: str, load: float, anchor: str) -> None:
    colour = VERMILLION if load > 1 else INK
    drawing.text(place, f"{name} {full_words(load)}", size=SMALL, colour=colour, anchor=anchor, bold=load > 1)


def full_words(load: float) -> str:
    """Format how full a part is."""
    return percent(load) if load < 9.995 else "999+ %"


def _draw_queue(drawing: Drawing, state: State, corner: Point) -> None:
    """Draw a dot for each prompt that waits for a GPU on average, by Little's law."""
    waiting = state.rate * state.mine.points[state.rate].mean("queue")
    rows = int(DEEP // DOT)
    for index in range(min(round(waiting), rows * int((corner[0] - MARGIN) // DOT))):
        column, row = divmod(index, rows)
        centre = (corner[0] - (column + 1) * DOT, corner[1] - (row + 0.5) * DOT)
        drawing.circle(centre, 3, MID, tip=f"{waiting:.0f} prompts wait for a GPU, on average")


def _draw_link(drawing: Drawing, state: State, box: Box) -> None:
    """Draw the blocks of keys and values on the links between the pools."""
    load, sent = state.mine.load("link", state.rate), state.transfer
    tip = (
        f"Keys and values of a prompt: {sent.num_bytes / 1e6:,.0f} MB in {seconds(sent.seconds)} over {state.link}; "
        f"the links are busy {full_words(load)} of the time"
    )
    y = box.y + box.height / 2
    for index in range(BLOCKS):
        block = Box(box.x + 6 + index * 7, y - 5, 6, 10)
        drawing.rect(block, STAGES["link"] if index < load * BLOCKS else IDLE, tip=tip)
        if load > 1:
            _draw_excess(drawing, block, tip)
    tail = box.x + 8 + BLOCKS * 7
    drawing.polygon([(tail, y - 6), (tail + 9, y), (tail, y + 6)], QUIET)
    _draw_load(drawing, (box.x + box.width / 2 - 4, box.bottom + 16), NAMES["link"], load, "middle")


def _draw_times(drawing: Drawing, state: State, box: Box) -> float:
    """Draw the times of both designs' requests as shares of their limits; return the y below."""
    drawing.text((box.x, box.y), f"{percent(SHARE)} of the requests have it within", size=SMALL, colour=QUIET)
    y = _draw_design(drawing, state, state.mine, replace(box, y=box.y + 22))
    with drawing.answer():
        return _draw_design(drawing, state, state.both, replace(box, y=y + 26))


def _draw_design(drawing: Drawing, state: State, side: Side, box: Box) -> float:
    """Draw the time to first token and the time per token of one design; return the y below."""
    drawing.text((box.x, box.y), side.name, size=SMALL, colour=BLUE if side.prefill else ORANGE, bold=True)
    if state.rate not in side.points:
        return box.y
    clients = side.points[state.rate].clients
    late = sorted(clients, key=lambda client: client.ttft)[math.ceil(SHARE * len(clients)) - 1]
    parts = [Segment("", late.ttft, STAGES["prefill"], "prefill, with the wait for it")]
    if late.parts:
        spent = [(late.parts[part], name, colour) for part, name, colour in TIMES]
        parts = [Segment("", value, colour, f"{name}: {seconds(value)}") for value, name, colour in spent]
    slow = within(sorted(client.tpot for client in clients), SHARE)
    alone = slow if side.prefill else min(state.undisturbed, slow)
    steps = [
        Segment("", alone, STAGES["decode"], f"steps with decodes alone: {seconds(alone)}"),
        Segment("", slow - alone, STAGES["prefill"], f"prompts in the same steps: {seconds(slow - alone)}"),
    ]
    _draw_time(drawing, "first token", parts, state.objective.ttft, replace(box, y=box.y + 8))
    return _draw_time(drawing, "each next one", steps, state.objective.tpot, replace(box, y=box.y + 26))


def _draw_time(drawing: Drawing, name: str, parts: list[Segment], limit: float, box: Box) -> float:
    """Draw a time beside the line that marks its limit; return the y below."""
    drawing.text((box.x, box.y + 10), name, size=SMALL)
    total = sum(part.value for part in parts)
    room = Box(box.x + 92, box.y, box.width - 92 - 56, box.height)
    wide = min(total / limit, LONGEST) / LONGEST * room.width
    if total < math.inf:
        stacked_bar(drawing, replace(room, width=wide), parts, total)
    at = room.x + room.width / LONGEST
    drawing.line((at, room.y - 2), (at, room.bottom + 2), colour=GREEN, width=2)
    words = seconds(total) if total < math.inf else "not yet"
    colour = VERMILLION if total > limit else INK
    drawing.text((max(room.x + wide, at) + 6, room.y + 10), words, size=SMALL, colour=colour, bold=total > limit)
    return room.bottom

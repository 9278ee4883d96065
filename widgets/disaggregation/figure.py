"""Draw lesson 08's picture: how full the GPUs of both designs are at this rate, with a step of each,
and requests in time by rate.
"""

from __future__ import annotations

import math

from minivllm_lab.disaggregation.goodput import SHARE
from minivllm_lab.drawing import QUIET, Point, ink_on, text_width
from minivllm_lab.palette import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILLION, YELLOW
from minivllm_simulate.load_sweep import within
from widgets.disaggregation.state import MOST_OF_A_KIND, RATES, Side, State, Step
from widgets.shell.plot import MARGIN, VALUE, WIDE, Axes, Scale, counted, figures, hidden_note, percent, seconds, tokens
from widgets.shell.svg import BOLD, SMALL, Box, Drawing
from widgets.shell.theme import IDLE, MID, MISSED

RATE = Scale(RATES[0], RATES[-1], log=True)
TICKS = (3, 10, 30, 100, 300)
STAGES = {"prefill": PURPLE, "link": YELLOW, "decode": SKY}
NAMES = {"prefill": "prefill", "link": "KV link", "decode": "decode", "both": "prefill and decode"}
TANK, DEEP, PILE, ASIDE, LINK, STEP, ROW = 32, 56, 30, 40, 98, 204, 18
"""Pixels: a GPU with its gap, its depth, what piles up on it, words beside it, a link, a step, and its bars."""
BLOCKS = 11


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw the GPUs of both designs with a step of each, and requests in time by rate."""
    mine, many = state.mine, state.mine.gpus
    drawing = Drawing(width, 0, f"{state.model} on {many} {state.gpu}", f"Requests in time by rate, {mine.name} GPUs")
    note = (
        f"{state.model}, {tokens(state.work.prompt)} tokens in, {state.work.output} out; in time up to 100 %: "
        f"first token {seconds(state.objective.ttft)}, then {seconds(state.objective.tpot)} each"
    )
    y = drawing.heading((MARGIN, 23), f"{mine.name} {state.gpu} at {state.rate:g} requests a second") + 18
    y = drawing.paragraph((MARGIN, y), note, width - 2 * MARGIN) + 20
    error = f", {state.error}" if state.error else ""
    drawing.rect(Box(MARGIN, 30, width - 2 * MARGIN, y - 44), "transparent", tip=f"Times are modelled{error}.")
    if state.rate in mine.points:
        top = y + 8
        y = _draw_pools(drawing, state, (MARGIN, top)) + 8
        place = (round(width * 0.57), top) if width >= WIDE else (MARGIN, y + 20)
        hidden_note(drawing, Box(place[0], place[1], width - place[0] - MARGIN, y - top))
        with drawing.answer():
            y = _draw_both(drawing, state, place) + 8
    else:
        drawing.text((MARGIN, y), "Nothing is served." if mine.refused else "Still serving the requests.", size=SMALL)
    plot = Box(52, y + 28, width - 52 - MARGIN, 116)
    _draw_shares(Axes(drawing, plot, RATE, Scale(0, 1)), state, pinned)
    drawing.height = plot.bottom + 42
    return drawing.render()


# ---- the share in time, over the rate


def _draw_shares(axes: Axes, state: State, pinned: State | None) -> None:
    name, ticks = "requests a second, over all GPUs", (0, 0.5, SHARE)
    axes.frame(name, "requests in time", x_ticks=TICKS, x_format="{:g}".format, y_ticks=ticks, y_format=percent)
    mine = state.mine
    if mine.refused:
        axes.broken(None, None, f"{state.model} does not fit: {mine.refused}")
    elif mine.is_found and mine.edge[1] < math.inf:
        words = f"{mine.name} break {limit_words(mine, 'at')}: {cause_words(mine.cause, state)}"
        axes.broken(max(mine.goodput, RATES[0]), None, words, SHARE)
    if pinned and pinned.mine.points:
        axes.pinned(pinned.mine.rates, [pinned.mine.share(rate) for rate in pinned.mine.rates], pinned.rate)
    axes.mark_y(SHARE, "", GREEN)
    with axes.drawing.answer():  # both lines together answer the guess
        _draw_line(axes, state.both, ORANGE, "7 4", 2.0)
        after = state.both.edge[1]
        if state.is_tuned and state.both.goodput and after < math.inf and state.both.share(after) < SHARE:
            x, y = axes.at(state.both.goodput, SHARE)
            axes.drawing.circle((x, y), 4.5, ORANGE)
            words = figures(state.both.goodput)
            axes.drawing.text((x, axes.box.y - 6), words, size=SMALL, colour=ORANGE, anchor="middle", bold=True)
        rates = sorted({*mine.points, *state.both.points})
        axes.tips(rates, lambda rate: f"{rate:g} requests a second. {_share_words(state, rate)}")
    _draw_line(axes, mine, BLUE, "", 2.5)
    axes.here(state.rate, "rate")


def _draw_line(axes: Axes, side: Side, colour: str, dash: str, wide: float) -> None:
    if side.points:
        axes.line(side.rates, [side.share(rate) for rate in side.rates], colour, dash=dash, width=wide)


def _share_words(state: State, rate: float) -> str:
    parts = []
    for side in (state.mine, state.both):
        if rate in side.points:
            first, later = side.points[rate].late(state.objective)
            late = f"first tokens late for {percent(first)}, later ones for {percent(later)}"
            parts.append(f"{side.name}: {percent(side.share(rate))} in time; {late}.")
    return " ".join(parts)


def limit_words(side: Side, preposition: str) -> str:
    """Name the highest rate that a design handles."""
    return f"{preposition} {figures(side.goodput)}" if side.goodput > RATES[0] else f"below {RATES[0]:g}"


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
    _draw_name(drawing, place, f"{mine.prefill} prefill, {decode} decode", mine, mine.is_found, BLUE)
    middle = place[0] + ASIDE + MOST_OF_A_KIND * TANK
    top = place[1] + PILE + 9
    left = middle - mine.prefill * TANK
    _draw_pool(drawing, state, mine, "prefill", (left, top), mine.prefill)
    _draw_link(drawing, state, Box(middle, top, LINK, DEEP))
    below = _draw_pool(drawing, state, mine, "decode", (middle + LINK, top), decode)
    return _draw_step(drawing, state, mine, state.steps[0], (place[0], below + 16))


def _draw_both(drawing: Drawing, state: State, place: Point) -> float:
    """Draw the GPUs that do both; return the y below."""
    both = state.both
    _draw_name(drawing, place, both.name, both, state.is_tuned, ORANGE)
    below = _draw_pool(drawing, state, both, "both", (place[0] + 3, place[1] + PILE + 9), both.gpus)
    return _draw_step(drawing, state, both, state.steps[1], (place[0], below + 16))


def _draw_name(drawing: Drawing, place: Point, words: str, side: Side, known: bool, colour: str) -> None:
    """Write the name of a design, and what it handles, after a piece of its line."""
    (x, y), dash = place, "" if side.prefill else "7 4"
    drawing.line((x, y - 4), (x + 18, y - 4), colour, width=2.5, dash=dash)
    words += ": up to" * (known and side.goodput > RATES[0])
    drawing.text((x + 24, y), words, size=SMALL, colour=colour, bold=True)
    if known:
        after = x + 34 + BOLD * text_width(words, SMALL)
        drawing.text((after, y + 3), f"{limit_words(side, '')}/s".strip(), size=VALUE, colour=colour, bold=True)


def _slow(state: State, side: Side) -> float:
    """Return the seconds a token that 90 % of the answers stay within; 0 before this rate has been run."""
    point = side.points.get(state.rate)
    return within(sorted(client.tpot for client in point.clients), SHARE) if point else 0.0


def _longest(state: State) -> float:
    """Return the seconds at which the bars of both designs' steps end."""
    slow = [time for side in (state.mine, state.both) if (time := _slow(state, side)) < math.inf]
    computed = [max(step.weights, (step.decodes + step.chunk) * step.token) for step in state.steps]
    return min(max(*slow, *computed, state.objective.tpot), 3 * state.objective.tpot)


def _draw_step(drawing: Drawing, state: State, side: Side, step: Step, place: Point) -> float:
    """Draw how long a step takes, beneath it how long it computes, and the limit; return the y below."""
    (x, y), limit, longest, slow = place, state.objective.tpot, _longest(state), _slow(state, side)
    decodes, chunk = step.decodes * step.token, step.chunk * step.token
    words = f" with a full chunk: {step.chunk:,.0f} tokens" if step.chunk else f": {counted(step.decodes, 'answer')}"
    drawing.text((x, y), f"a step{words}", size=SMALL, colour=QUIET)
    tip = (
        f"Reading the weights takes {seconds(step.weights)}, the arithmetic beneath {seconds(decodes + chunk)} "
        f"(modelled). {percent(SHARE)} of the answers take at most {seconds(slow)} a token."
    )
    free = ("chunk is free", "free") if decodes + chunk < step.weights else ("chunk is slow", "slow")
    idle = step.weights - decodes - chunk
    end, edge = (x + min(time / longest, 1) * STEP for time in (max(slow, step.weights), limit))
    rows = (
        ((("reads weights", "reads"), step.weights, GREY), (("rest",), min(slow, limit) - step.weights, MID)),
        (((), decodes, SKY), (free, chunk, PURPLE), (("computing idles", "idle"), idle, IDLE)),
    )
    for row, parts in enumerate(rows):
        start = 0.0
        for names, time, colour in parts:
            left, right = (x + min(end / longest, 1) * STEP for end in (start, start + max(time, 0)))
            bar = Box(left, y + 7 + row * ROW, right - left, ROW - 1)
            drawing.rect(bar, colour, tip=tip)
            name = next((name for name in names if BOLD * text_width(name, SMALL) + 4 <= bar.width), "")
            at, bold = (bar.x + bar.width / 2, bar.bottom - 4), colour == PURPLE
            drawing.text(at, name, size=SMALL, colour=ink_on(colour), anchor="middle", bold=bold)
            start += max(time, 0)
    late, height = slow > limit, y + 7 + 2 * ROW
    if late:
        _draw_excess(drawing, Box(edge, y + 7, end - edge, ROW - 1), tip)
    words = seconds(slow) if slow < math.inf else "no token"
    after = min((edge if end < edge < end + 64 else end) + 6, drawing.width - BOLD * text_width(words, SMALL) - 4)
    drawing.text((after, y + 20), words * (slow > 0), size=SMALL, colour=VERMILLION if late else INK, bold=True)
    drawing.line((edge, y + 4), (edge, height + 2), colour=GREEN, width=2)
    drawing.text((edge, height + 14), f"limit {seconds(limit)}", size=SMALL, colour=GREEN, anchor="middle")
    return height + 15


def _draw_pool(drawing: Drawing, state: State, side: Side, part: str, place: Point, count: int) -> float:
    """Draw GPUs as tanks, filled as far as they are busy; what they cannot do in time piles up above
    the brim. Return the y below.
    """
    load = side.load(part, state.rate)
    tip = f"{side.name}, {NAMES[part]}: {full_words(load)} of the rate that they handle in time"
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
    at, anchor, beside = (right, "end", x - 6) if part == "prefill" else (x, "start", right + 6)
    words = "100 %" * (part != "decode")  # which stands beside prefill
    drawing.text((beside, brim + 4), words, size=SMALL, colour=GREEN, anchor=anchor)
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
    return percent(load) if load < 9.995 else "10+ ×"


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

"""Draw lesson 04's picture: the seats under both policies, and below them both policies by load."""

from __future__ import annotations

from collections.abc import Sequence

from minivllm_lab.pictures.palette import BLUE, GREEN, INK, PURPLE, VERMILLION
from widgets.continuous_batching.curves import LOADS, SERVICE, Curve, State, share
from widgets.continuous_batching.runs import REQUESTS, Stay
from widgets.shell.plot import MARGIN, WIDE, Axes, Scale, counted, hidden_note, seconds
from widgets.shell.strip import NAMES, draw_title, frame_ends, pixels
from widgets.shell.svg import BOLD, QUIET, SMALL, Box, Drawing, Segment, text_width
from widgets.shell.theme import BROKEN, CARD, IDLE, MID, MISSED, WORDS

COLOURS = {"static": PURPLE, "continuous": BLUE, "yours": BLUE}
TTFT = Scale(0.004, 12, log=True)
LOAD = Scale(LOADS[0], LOADS[-1])
TICKS = (0.1, 0.25, 0.5, 0.75, 1, 1.25, 1.5)
SEATS, QUEUE, PLOT, HEIGHT = 72, 26, 84, 470
"""The heights of a policy's seats, of its queue, of the plot on a narrow page, and of all on a wide one."""


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw the seats and the queue under both policies, and below them TTFT by load."""
    drawing = Drawing(width, 0, f"Load on {state.seats} seats", "Static and continuous batching on the same arrivals")
    keys = [Segment("empty seat, though requests wait", 0, BROKEN, hatched=True), Segment("free seat", 0, IDLE)]
    shown = [stay.request + 1 for curve in state.curves for stay in curve.stretch.stays]
    y = draw_title(drawing, f"Load {state.load:g}: requests {min(shown)}–{max(shown)} of {REQUESTS}", keys, 23)
    if state.note:
        y = drawing.paragraph((MARGIN, y + 17), state.note, width - 2 * MARGIN)
    across = Scale(state.start, state.start + state.window)
    y += 32 if width >= WIDE else 24
    for curve in state.curves:
        y = _draw_policy(drawing, y, curve, state, across)
    drawing.play([_caption(state, end) for end in frame_ends(across)], still=True)
    y = drawing.heading(
        (MARGIN, y + 9),
        "Time to first token by load",
        f"for 95 % of {REQUESTS} requests; limit {seconds(state.limit)}; modelled",
    )
    left, high = (MARGIN + NAMES, HEIGHT - 74 - y) if width >= WIDE else (60, PLOT)
    axes = Axes(drawing, Box(left, y + (30 if width >= WIDE else 45), width - MARGIN - left, high), LOAD, TTFT)
    _draw_ttft(axes, state, pinned)
    drawing.height = axes.box.bottom + 44
    return drawing.render()


# ---- the seats


def _draw_policy(drawing: Drawing, y: float, curve: Curve, state: State, across: Scale) -> float:
    """Draw a policy's time to first token beside its seats and its queue, and return the y below."""
    wide = drawing.width >= WIDE
    left = MARGIN + NAMES * wide
    box = Box(left, y if wide else y + 38, drawing.width - MARGIN - left, SEATS)
    _draw_outcome(drawing, y, curve, state)
    drawing.rect(box, IDLE)
    for start, end in curve.stretch.missed(state.seats):
        x, right = pixels(box, across, start, end)
        drawing.rect(Box(x, box.y, right - x, box.height), BROKEN)
        drawing.hatch(Box(x, box.y, right - x, box.height), MISSED, gap=10)
    high = box.height / curve.stretch.rows
    batch = [stay for stay in curve.stretch.stays if curve.name == "static" and stay.start == state.start]
    longest = max(batch, key=lambda stay: stay.end, default=None)
    for stay in curve.stretch.stays:
        x, right = pixels(box, across, stay.start, stay.end)
        bar = Box(x, box.y + stay.seat * high, max(0.4, right - x - 0.6), high - (1.5 if high > 6 else 0.8))
        colour = WORDS[PURPLE] if stay == longest else COLOURS[curve.name]
        drawing.rect(bar, colour, tip=_stay_tip(stay), group=f"r{stay.request}")
    if longest and batch[1:]:
        x, right = pixels(box, across, longest.start, longest.end)
        drawing.rect(Box(x - 1, box.y - 2, right - x + 1, box.height + 3), "none", stroke=INK)
        drawing.text((box.x, box.y - 8), "one batch waits for its longest answer", size=SMALL)
    elif curve.name == "continuous":
        drawing.text((box.x, box.y - 8), "a free seat takes the next request", size=SMALL)
    base = _draw_queue(drawing, Box(box.x, box.bottom + 3, box.width, QUEUE), curve, state, across)
    if curve.name == "static" and curve.ceiling:
        words = f"a full batch uses {curve.ceiling:.2f} of its seats"
        place = box.right, box.y - 8 if wide else base + 14
        with drawing.answer():
            drawing.text(place, words, size=SMALL, colour=PURPLE, bold=True, anchor="end")
    for frame, end in enumerate(frame_ends(across)):  # hide what is still to come
        x, right = pixels(box, across, end, across.high)
        drawing.rect(Box(x, box.y, right - x, base - box.y), CARD, at=f"{frame} {frame}")
    return base + 40


def _draw_outcome(drawing: Drawing, y: float, curve: Curve, state: State) -> None:
    """Write a policy's name and its time to first token at the handle."""
    wide = drawing.width >= WIDE
    drawing.text((MARGIN, y + 11), curve.name, size=14.5, bold=True, colour=COLOURS[curve.name])
    point = curve.points.get(state.load)
    if point:
        words = seconds(float(f"{point.ttft(SERVICE):.2g}"))
        colour = VERMILLION if curve.broken(state.load) else GREEN
        with drawing.layer(answer="1" if curve.name == "static" else ""):
            right = drawing.width - MARGIN
            place, anchor = ((MARGIN, y + 37), "start") if wide else ((right, y + 14), "end")
            drawing.text(place, words, size=22, bold=True, colour=colour, anchor=anchor)
            beside = right - 8 - BOLD * text_width(words, 22)
            for row, line in enumerate(("to first token", f"for {share(SERVICE)} of {REQUESTS}")):
                place = (MARGIN, y + 53 + 15 * row) if wide else (beside, y + 2 + 14 * row)
                drawing.text(place, line, size=SMALL, colour=QUIET, anchor=anchor)


def _draw_queue(drawing: Drawing, box: Box, curve: Curve, state: State, across: Scale) -> float:
    """Draw how many requests wait, and return the y of its base."""
    moments = curve.stretch.moments
    most = max([8, *(moment.waiting for other in state.curves for moment in other.stretch.moments)])
    peak = max((moment.waiting for moment in moments), default=0)
    base = box.bottom if peak else box.y + 2
    corners = [(box.x, base)]
    for moment in moments:
        height = base - moment.waiting / most * box.height
        corners += [(x, height) for x in pixels(box, across, moment.start, moment.end)]
    drawing.polygon([*corners, (corners[-1][0], base)], MID)
    drawing.line((box.x, base), (box.right, base))
    place, anchor = (box.x, base + 14), "start"
    if peak:
        x, _ = pixels(box, across, next(each.start for each in moments if each.waiting == peak), 0)
        drawing.circle((x, base - peak / most * box.height), 3, INK)
        place, anchor = (x - 6, base - 6), "end" if x > box.x + 60 else "start"
    drawing.text(place, f"{peak or 'none'} wait", size=SMALL, anchor=anchor)
    if curve is state.curves[-1]:
        drawing.text((box.right, base + 14), f"time, {seconds(state.window)} →", size=SMALL, colour=QUIET, anchor="end")
    return base


def _stay_tip(stay: Stay) -> str:
    waited = f"waited {seconds(stay.waited)}" if stay.waited >= 5e-4 else "did not wait"
    prompt = f"a prompt of {counted(stay.prompt_tokens, 'token')}"
    return f"Request {stay.request + 1}: {prompt}, {waited}, then {counted(stay.output_tokens, 'output token')}."


def _caption(state: State, now: float) -> str:
    moments = [(curve.name, curve.stretch.at(now)) for curve in state.curves]
    held = "; ".join(f"{name}: {moment.taken} seated, {moment.waiting} waiting" for name, moment in moments)
    return f"{seconds(now)}: {held}"


# ---- the loads


def _draw_ttft(axes: Axes, state: State, pinned: State | None) -> None:
    ticks = [tick for tick in (0.01, 0.1, 1, 10) if abs(axes.at(0, tick)[1] - axes.at(0, state.limit)[1]) > 14]
    here = axes.at(state.load, 1)[0]
    x = {"x_ticks": [tick for tick in TICKS if abs(axes.at(tick, 1)[0] - here) > 32], "x_format": "{:g}".format}
    axes.drawing.text((here, axes.box.bottom + 18), f"{state.load:g}", size=SMALL, anchor="middle", bold=True)
    axes.frame("load (1: all that full seats could serve)", "", **x, y_ticks=ticks, y_format=seconds)
    with axes.drawing.answer():
        _draw_walls(axes, state.curves)
    for curve in pinned.curves if pinned else ():
        if pinned and curve.points:
            axes.pinned(curve.loads, curve.ttfts(SERVICE), pinned.load)
    axes.mark_y(state.limit, "", GREEN)
    place = (axes.box.x - 7, axes.at(0, state.limit)[1] + 4)
    axes.drawing.text(place, seconds(state.limit), size=SMALL, colour=GREEN, anchor="end")
    for curve in state.curves[::-1]:
        with axes.drawing.layer(answer="1" if curve.name == "static" else ""):
            axes.line(curve.loads, curve.ttfts(SERVICE), COLOURS[curve.name])
    axes.here(state.load, "load")
    for curve in state.curves if state.known else ():
        with axes.drawing.layer(answer="1" if curve.name == "static" else ""):
            axes.points([state.load], [curve.points[state.load].ttft(SERVICE)], COLOURS[curve.name])
    hidden_note(axes.drawing, axes.box)


def _draw_walls(axes: Axes, curves: Sequence[Curve]) -> None:
    """Tint where only one policy's queue grows, hatch where every policy's does, and write both loads above."""
    end, y, higher = axes.box.right, axes.box.y - 8, 0.0
    for load, policy in sorted(((curve.ceiling, curve.name) for curve in curves if curve.ceiling), reverse=True):
        words = f"{policy}: queue grows from {load:.2g}" if policy == "static" else f"{policy}: from {load:.2g}"
        if higher:
            axes.tint(load, higher, words, COLOURS[policy])
        else:
            axes.shade(load, None, words)
        x = min(axes.at(load, 1)[0], end - BOLD * text_width(words, SMALL))
        axes.drawing.text((x, y), words, size=SMALL, bold=True, colour=COLOURS[policy])
        end, y = (x - 10, y) if axes.drawing.width >= WIDE else (end, y - 15)
        higher = load

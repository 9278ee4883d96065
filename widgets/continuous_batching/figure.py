"""Draw lesson 04's picture: both policies by load, and below them the animated seats."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from minivllm_lab.drawing import number
from minivllm_lab.palette import BLUE, GREEN, INK, PURPLE
from widgets.continuous_batching.curves import LOADS, SERVICE, Curve, Knee, State, share
from widgets.continuous_batching.runs import REQUESTS, Stay, Stretch
from widgets.shell.plot import MARGIN, WIDE, Axes, Key, Scale, counted, draw_keys, hidden_note, seconds, two_boxes
from widgets.shell.strip import FRAMES, NAMES, draw_times, frame_ends
from widgets.shell.svg import HEADING, QUIET, SMALL, Box, Drawing, Segment, legend
from widgets.shell.theme import BROKEN, IDLE, MISSED

COLOURS = {"static": PURPLE, "continuous": BLUE, "yours": BLUE}
LAST = FRAMES - 1
TTFT = Scale(0.004, 12, log=True)
LOAD = Scale(LOADS[0], LOADS[-1])
TICKS = (0.1, 0.25, 0.5, 0.75, 1, 1.25, 1.5)


def figure(state: State, width: int = 640, pinned: State | None = None) -> str:
    """Draw TTFT and queue by load, and below them the seats under both policies."""
    drawing = Drawing(width, 0, f"Load on {state.seats} seats", "Static and continuous batching on the same arrivals")
    note = f"{REQUESTS} requests at each load, {state.seats} seats; all times are modelled"
    y = drawing.heading((MARGIN, 23), "Load that each policy handles", note)
    if state.note:
        y = drawing.paragraph((MARGIN, y + 17), state.note, width - 2 * MARGIN)
    y = draw_keys(drawing, y + 20, _keys(state))
    main, queue = two_boxes(width, y + 33, 122 if state.note else 134, large=0.62)
    _draw_ttft(Axes(drawing, main, LOAD, TTFT), state, pinned)
    most = max([40, *(point.queue for curve in state.curves for point in curve.points.values())])
    _draw_queue(Axes(drawing, queue, LOAD, Scale(0, most * 1.1)), state)
    drawing.height = _draw_seats(drawing, state, queue.bottom + 57)
    return drawing.render()


def _keys(state: State) -> list[Key]:
    keys: list[Key] = [(curve.name, COLOURS[curve.name], "", 2.5) for curve in state.curves]
    return [*keys, (f"limit: {seconds(state.limit)}", GREEN, "4 3", 1.5)]


def _draw_ttft(axes: Axes, state: State, pinned: State | None) -> None:
    x = {"x_ticks": TICKS, "x_format": "{:g}".format}
    name = "time within which 95 % have their first token"
    axes.frame("load (1: all that full seats could serve)", name, **x, y_ticks=(0.01, 0.1, 1, 10), y_format=seconds)
    static, other = state.curves
    with axes.drawing.answer():
        _draw_knees(axes, _knees(state))
    for curve in pinned.curves if pinned else ():
        if pinned and curve.points:
            axes.pinned(curve.loads, curve.ttfts(SERVICE), pinned.load)
    axes.mark_y(state.limit, "", GREEN)
    axes.line(other.loads, other.ttfts(SERVICE), COLOURS[other.name])
    with axes.drawing.answer():
        axes.line(static.loads, static.ttfts(SERVICE), COLOURS[static.name])
    axes.here(state.load, "load")
    for curve in state.curves if state.known else ():
        ttft = curve.points[state.load].ttft(SERVICE)
        with axes.drawing.layer(answer="1" if curve is static else ""):
            axes.points([state.load], [ttft], COLOURS[curve.name])
            axes.label(axes.at(state.load, ttft), seconds(float(f"{ttft:.2g}")), COLOURS[curve.name])
    box = axes.box
    hidden_note(axes.drawing, Box(box.x + 0.5 * box.width, box.y, 0.5 * box.width, 0.4 * box.height))
    with axes.drawing.answer():
        _draw_tips(axes, state, _ttft_tip)


def _knees(state: State) -> list[tuple[Knee, str]]:
    """Find where each policy breaks, ordered by load; return one entry, "both", if they break together."""
    knees = [(curve.knee, curve.name) for curve in state.curves if curve.knee]
    knees.sort(key=lambda entry: entry[0].load)
    together = len(knees) == 2 and knees[1][0].load - knees[0][0].load < 0.03
    return [(knees[0][0], "both")] if together else knees


def _draw_knees(axes: Axes, knees: Sequence[tuple[Knee, str]]) -> None:
    """Tint where only one policy breaks, and shade where no policy is left."""
    for knee, policy in knees:
        if knee is knees[0][0] and policy != "both":
            end = knees[1][0].load if knees[1:] else None
            axes.tint(knee.load, end, f"{policy}: {_cause(knee)}", COLOURS[policy])
        else:
            axes.broken(knee.load, None, f"{policy}: {_cause(knee)}")


def _cause(knee: Knee) -> str:
    cause = "its queue grows" if knee.queue_grows else "late"
    return f"{cause} {f'from {knee.load:.2g}' if knee.load > LOADS[0] else f'already at {LOADS[0]:g}'}"


def _draw_queue(axes: Axes, state: State) -> None:
    x = {"x_ticks": TICKS[::2], "x_format": "{:g}".format}
    axes.frame("dashed: grows without end", "queue at the last arrival", **x, y_ticks=axes.y.ticks(3))
    for curve in state.curves[::-1]:
        with axes.drawing.layer(answer="1" if curve.name == "static" else ""):
            queues = [curve.points[load].queue for load in curve.loads]
            axes.line(curve.loads, queues, COLOURS[curve.name], width=2)
            if curve.ceiling is not None:
                axes.mark_x(curve.ceiling, COLOURS[curve.name])
    axes.also_here(state.load)
    with axes.drawing.answer():
        _draw_tips(axes, state, lambda curve, load: f"{curve.points[load].queue} of {REQUESTS} waiting")


def _ttft_tip(curve: Curve, load: float) -> str:
    point = curve.points[load]
    within = f"half within {seconds(point.ttft(0.5))}, 95 % within {seconds(point.ttft(SERVICE))}"
    return f"{within}, {share(point.goodput(curve.limit))} in time"


def _draw_tips(axes: Axes, state: State, words: Callable[[Curve, float], str]) -> None:
    """Add a tooltip everywhere in the plot, with the results at the nearest load."""
    loads = sorted(set(state.curves[0].points) & set(state.curves[1].points))

    def tip(load: float) -> str:
        figures = ". ".join(f"{curve.name.capitalize()}: {words(curve, load)}" for curve in state.curves)
        return f"Load {load:g}. {figures}."

    axes.tips(loads, tip)


# ---- the seats


def _draw_seats(drawing: Drawing, state: State, y: float) -> float:
    """Draw both policies' seats below the arrivals, over the same stretch of time; return the y
    below.
    """
    drawing.text((MARGIN, y), f"The first {seconds(state.window)}, seat by seat", size=HEADING, bold=True)
    wide = drawing.width >= WIDE
    left = MARGIN + NAMES * wide
    arrivals = Box(left, y + (8 if wide else 24), drawing.width - MARGIN - left, 17)
    name, high = (20, 48) if wide else (40, 84)
    first = Box(arrivals.x, arrivals.bottom + name, arrivals.width, high)
    second = Box(first.x, first.bottom + name, first.width, high)
    across = Scale(0, state.window)
    ends = frame_ends(across)
    _draw_arrivals(drawing, arrivals, state, ends)
    for curve, box in zip(state.curves, (first, second), strict=True):
        _draw_stretch(drawing, box, curve, state, ends)
    below = draw_times(drawing, second, across) + 5
    drawing.play([_caption(state, end) for end in ends])
    return below


def _draw_stretch(drawing: Drawing, box: Box, curve: Curve, state: State, ends: Sequence[float]) -> None:
    stretch, colour = curve.stretch, COLOURS[curve.name]
    drawing.text((MARGIN, box.y - (6 if drawing.width >= WIDE else 24)), curve.name, size=13, bold=True, colour=colour)
    place = (box.x, box.y - 6)
    if (idle := round(1 - stretch.used_while_waiting(state.seats), 3)) > 0:
        words = f"{share(idle)} of the seats idle while requests wait"
        legend(drawing, place, [Segment(words, 0, BROKEN, hatched=True)], box.width)
    else:
        waits = any(moment.waiting for moment in stretch.moments)
        words = "no seat is idle while requests wait" if waits else "no request waits"
        drawing.text(place, words, size=SMALL, colour=QUIET)
    drawing.rect(box, IDLE)
    scale, high = box.width / state.window, box.height / stretch.rows
    _draw_missed(drawing, box, stretch, state, ends)
    growing: list[list[str]] = [[] for _ in ends]
    for stay in stretch.stays:
        left, right = box.x + stay.start * scale + 0.6, box.x + min(stay.end, state.window) * scale
        top = box.y + stay.seat * high
        thick = high - (1.5 if high > 6 else 0.8)
        begins = bisect_left(ends, stay.start + 1e-12)
        done = min(bisect_left(ends, stay.end - 1e-12), LAST)
        for frame in range(begins, done):
            growing[frame].append(_bar(left, top, max(0.4, box.x + ends[frame] * scale - left), thick))
        bar = Box(left, top, max(0.4, right - left), thick)
        drawing.rect(bar, colour, tip=_stay_tip(stay), group=f"r{stay.request}", at=f"{done} {LAST}")
    for frame, bars in enumerate(growing):
        if bars:
            drawing.add(f'<path fill="{colour}" d="{"".join(bars)}" data-at="{frame} {frame}"/>')


def _bar(x: float, y: float, wide: float, high: float) -> str:
    return f"M{number(x)} {number(y)}h{number(wide)}v{number(high)}h-{number(wide)}z"


def _draw_missed(drawing: Drawing, box: Box, stretch: Stretch, state: State, ends: Sequence[float]) -> None:
    """Hatch the background, frame by frame, where a seat is empty while a request waits."""
    scale = box.width / state.window
    before = 0.0
    spans = stretch.missed(state.seats)
    for frame, end in enumerate(ends):
        for start, stop in spans:
            left, right = max(start, before), min(stop, end)
            if right > left:
                part = Box(box.x + left * scale, box.y, (right - left) * scale, box.height)
                with drawing.layer(at=f"{frame} {LAST}"):
                    drawing.rect(part, BROKEN)
                    drawing.hatch(part, MISSED, gap=10)
        before = end


def _stay_tip(stay: Stay) -> str:
    waited = f"waited {seconds(stay.waited)}" if stay.waited >= 5e-4 else "did not wait"
    prompt = f"a prompt of {counted(stay.prompt_tokens, 'token')}"
    return f"Request {stay.request + 1}: {prompt}, {waited}, then {counted(stay.output_tokens, 'output token')}."


def _draw_arrivals(drawing: Drawing, box: Box, state: State, ends: Sequence[float]) -> None:
    """Draw a tick for each arrival, the same for both policies."""
    drawing.text((MARGIN, box.y + (13 if drawing.width >= WIDE else -3)), "arrivals", size=SMALL, colour=QUIET)
    for time in state.arrivals:
        x = box.x + time / state.window * box.width
        at = f"{bisect_left(ends, time)} {LAST}"
        drawing.polyline([(x, box.y + 4), (x, box.y + 13)], INK, width=1.2, at=at)


def _caption(state: State, now: float) -> str:
    arrived = sum(time <= now for time in state.arrivals)
    moments = [(curve.name, curve.stretch.at(now)) for curve in state.curves]
    held = "; ".join(f"{name}: {moment.taken} seated, {moment.waiting} waiting" for name, moment in moments)
    return f"{seconds(now)}: {arrived} have arrived; {held}"

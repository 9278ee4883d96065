"""Draw the upper part of lesson 10's picture: each step as a bar, as high as its requests wait."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from minivllm_lab.pictures.drawing import Point, text_width
from minivllm_lab.pictures.palette import BLUE, INK, ORANGE
from minivllm_simulate.cost_model import StepShape
from widgets.chunked_prefill.runs import CHAT, Step
from widgets.chunked_prefill.state import ALL_GAPS, State
from widgets.shell.plot import MARGIN, Axes, Scale, balanced, counted, hidden_note, percent, seconds, tokens
from widgets.shell.strip import draw_times, draw_title, frame_ends, frames_from
from widgets.shell.svg import BOLD, SMALL, Box, Drawing, Segment, text_box
from widgets.shell.theme import BROKEN, MID

TITLE = "Each step is a bar, as wide as its time"
MOST_STEPS = 120
COLOURS = (BLUE, ORANGE, MID)


def two_digits(value: float) -> str:
    """Format a time with two significant digits."""
    return seconds(float(f"{value:.2g}"))


def draw_steps(drawing: Drawing, state: State, note: str) -> float:
    """Draw how long each step in a time window takes, and why, below a note; return the y below."""
    wide = drawing.width - 2 * MARGIN
    if state.budget not in state.points:
        words = "Nothing is served." if state.refused else "Still serving the requests."
        return drawing.paragraph((MARGIN, drawing.heading((MARGIN, 23), TITLE) + 18), f"{note}. {words}", wide)
    strip = state.points[state.budget].strip[:MOST_STEPS]
    parts = [parts_of(step, state) for step in strip]
    keys = [Segment("decodes", 0, BLUE), Segment("prompts", 0, ORANGE)]
    keys += [Segment("steps before", 0, MID)] * any(before > 0 for *_, before in parts)
    y = drawing.paragraph((MARGIN, draw_title(drawing, TITLE, keys, 23) + 18), note, wide)
    box = Box(60, y + 32, drawing.width - 60 - MARGIN, 116)
    tallest = max(map(sum, parts), default=0.0)
    across = Scale(strip[0].start, strip[-1].end) if strip else Scale(*state.serving.window)
    axes = Axes(drawing, box, across, Scale(0, 1.25 * max(1.4 * state.gap, tallest)))
    ticks = [0.0] * (state.gap > 0.12 * axes.y.high) + [state.gap] + [tallest] * (tallest > 1.3 * state.gap)
    axes.frame(
        "", "gap: the wait for the next token", x_ticks=(), y_ticks=ticks,
        y_format=lambda value: two_digits(value) if value else "0",
    )  # fmt: skip
    bottom = draw_times(drawing, box, across)
    with drawing.answer():
        top = axes.at(0, state.gap)[1]
        drawing.rect(Box(box.x, box.y, box.width, top - box.y), BROKEN)
        for at, steps in groupby(zip(strip, parts, strict=True), key=lambda each: frames_from(each[0].end, across)):
            with drawing.layer(at=at):
                _draw_bars(axes, list(steps))
        _draw_limits(axes, state, strip)
    hidden_note(drawing, box)
    drawing.play([_caption(strip, across.low, end) for end in frame_ends(across)])
    return bottom


def parts_of(step: Step, state: State) -> tuple[float, float, float]:
    """Divide the wait for a step's tokens into the seconds that its decodes alone would take, those
    that prompts add, and those of the steps before without these decodes.
    """
    took = step.end - step.start
    plain = state.serving.cost.seconds(StepShape.of([(1, CHAT)] * step.decodes)) if step.decodes else 0.0
    plain = min(plain, took) if step.long + step.chat else took
    return plain, took - plain, max(0.0, step.gap - took - 1e-9)


def _draw_bars(axes: Axes, bars: Sequence[tuple[Step, Sequence[float]]]) -> None:
    """Draw the bars of one frame: one shape for each colour."""
    shapes = dict.fromkeys(COLOURS, "")
    for step, parts in bars:
        (x, y), (end, _) = axes.at(step.start, 0), axes.at(step.end, 0)
        wide = max(end - x - 1, 0.7 * (end - x))
        for colour, part in zip(COLOURS, parts, strict=True):
            high = part / axes.y.high * axes.box.height
            if high > 0:
                shapes[colour] += f"M{x:.1f} {y:.1f}v-{high:.1f}h{wide:.1f}v{high:.1f}z"
                y -= high
    for colour, shape in shapes.items():
        if shape:
            axes.drawing.add(f'<path d="{shape}" fill="{colour}"/>')


def _draw_limits(axes: Axes, state: State, strip: Sequence[Step]) -> None:
    """Draw the gap limit; say how few steps exceed it, or in how many steps a late prompt is cut."""
    x, height = axes.at(axes.x.low, state.gap)
    axes.drawing.line((x, height), (axes.box.right, height), colour=BLUE, dash="4 3", width=1.5)
    over = [step.gap for step in strip if step.decodes and step.gap > state.gap]
    if over:
        x, y = _draw_prompt(axes, state, strip) or (axes.box.x, axes.at(0, max(over))[1] - 15)
        pooled, room = state.here.gap(ALL_GAPS), max(axes.box.right - x - 8, 90) / BOLD
        said = [f"{counted(len(over), 'step')} stall{'s' * (len(over) == 1)} everyone"]
        said += [f"yet {percent(ALL_GAPS)} of gaps ≤ {seconds(pooled)}"] * (pooled <= state.gap)
        for words in said:
            for line in balanced(words, room):
                _write(axes, (x + 8, y + 9), line, bold=words == said[0])
                y += 16
    elif {"queue", "chunks"} & {*state.causes(state.budget)}:
        steps = math.ceil(state.serving.prompt / state.budget)
        axes.label(axes.at(axes.x.low, 0.8 * state.gap), f"each long prompt takes {counted(steps, 'step')}")
    words, place = f"limit {seconds(state.gap)}", (axes.box.right - 6, height - 6)
    if any(text_box(place, words, SMALL, "end").overlaps(other) for other in axes.drawing.words):
        place = place[0], height + 15
    axes.drawing.text(place, words, size=SMALL, colour=BLUE, anchor="end")


def _draw_prompt(axes: Axes, state: State, strip: Sequence[Step]) -> Point | None:
    """Brace the first long prompt that is cut into chunks of which one is longer than the limit, and
    return the brace's right end.
    """
    runs = [list(group) for long, group in groupby(strip, key=lambda step: step.long > 0) if long]
    for run in runs:
        highest = max(step.gap for step in run)
        if sum(step.long for step in run) == state.serving.prompt and highest > state.gap:
            (left, top), right = axes.at(run[0].start, highest), axes.at(run[-1].end, 0)[0]
            brace = [(left, top - 1), (left, top - 4), (right, top - 4), (right, top - 1)]
            axes.drawing.polyline(brace, INK, width=1.5)
            chunks = f", in {counted(len(run), 'chunk')} of {tokens(state.budget)}" * (len(run) > 1)
            _write(axes, (left, top - 11), f"one {tokens(state.serving.longest)} prompt{chunks}")
            return right, top
    return None


def _write(axes: Axes, place: Point, words: str, *, bold: bool = False) -> None:
    """Write words above the limit, farther to the left if they would leave the plot."""
    x = min(place[0], axes.box.right - BOLD * text_width(words, SMALL))
    axes.drawing.text((x, place[1]), words, size=SMALL, bold=bold, halo=BROKEN)


def _caption(strip: Sequence[Step], start: float, now: float) -> str:
    done = [step for step in strip if step.end <= now + 1e-12]
    longest = max((step.end - step.start for step in done if step.decodes), default=0.0)
    progress = f"{len(done)} steps, {sum(step.long for step in done):,} tokens of long prompts"
    return f"{seconds(now - start)}: {progress}; the longest step took {seconds(longest)}"

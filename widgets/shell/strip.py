"""Draw the animated part of a picture: rows over a time window, in frames."""

from __future__ import annotations

import math
from collections.abc import Sequence

from minivllm_lab.pictures.drawing import text_width
from widgets.shell.plot import MARGIN, Scale, seconds
from widgets.shell.svg import BOLD, HEADING, QUIET, SMALL, Box, Drawing, Segment, legend

NAMES = 104
"""Pixels left of the rows, for their names."""
FRAMES = 24


def draw_title(drawing: Drawing, title: str, keys: Sequence[Segment], y: float) -> float:
    """Write the title with the colour keys beside or below it, and return the y of the last
    baseline.
    """
    drawing.text((MARGIN, y), title, size=HEADING, bold=True)
    after = MARGIN + text_width(title, HEADING) * BOLD + 12
    room = sum(34 + text_width(key.label, SMALL) for key in keys)
    place = (after, y) if after + room <= drawing.width else (MARGIN, y + 20)
    return legend(drawing, place, keys, drawing.width - 2 * MARGIN) - 19


def pixels(box: Box, across: Scale, start: float, end: float) -> tuple[float, float]:
    """Return the left and right x of a time span, clipped to the box."""
    left, right = (box.x + min(max(across.share(time), 0.0), 1.0) * box.width for time in (start, end))
    return left, right


def frames_from(time: float, across: Scale) -> str:
    """Return the frames that show an event at this time, as a mark's `at`."""
    frame = math.ceil(across.share(time) * FRAMES - 1e-9) - 1
    return f"{min(max(frame, 0), FRAMES - 1)} {FRAMES - 1}"


def frame_ends(across: Scale) -> list[float]:
    """Return the time at the end of each frame."""
    return [across.low + (across.high - across.low) * (frame + 1) / FRAMES for frame in range(FRAMES)]


def draw_times(drawing: Drawing, box: Box, across: Scale) -> float:
    """Draw the time axis below the rows, and return the y of its labels."""
    for value in Scale(0, across.high - across.low).ticks(6 if box.width > 300 else 4):
        x = box.x + across.share(across.low + value) * box.width
        drawing.line((x, box.bottom), (x, box.bottom + 4), colour=QUIET)
        label = seconds(value) if value else "0"
        anchor = "middle" if x + text_width(label, SMALL) / 2 < drawing.width else "end"
        drawing.text((x, box.bottom + 17), label, size=SMALL, colour=QUIET, anchor=anchor)
    return box.bottom + 17

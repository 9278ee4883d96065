"""Lesson 05's picture of a captured graph: the average layer of a decode on an H200.

The times are those of benchmarks/PERFORMANCE.md, "On a GPU": 12 ms for the launches of a short
prefill, as many as a decode has, 3.8 ms of a decode's matmuls, 0.27 of them the head's, and 0.8 ms
of other kernels. Matmuls share theirs by the sizes of their weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from minivllm_lab.pictures.drawing import BLANK, BORDER, QUIET, legend, line, rect, svg, text
from minivllm_lab.pictures.palette import BLUE, GREEN, ORANGE

LAYERS = 32
OTHER = 800 / LAYERS / 6  # µs
MATMULS = {"qkv": 12.7, "out": 8.5, "up": 59.2, "down": 29.6}  # µs
NAMES = ("norm", "qkv", "rotate", "write", "attend", "out", "norm", "up", "silu", "down")
LAUNCH = 12_000 / LAYERS / len(NAMES)  # µs
WIDTH, LEFT, END, SCALE, TALL = 700, 66, 420, 1.46, 26
LEGEND = (("launch", ORANGE), ("matmul", BLUE), ("other kernel", GREEN), ("idle", BLANK))


def picture() -> str:
    """Draw what host and GPU do, without a graph and with one."""
    each = [(index + 1) * LAUNCH for index in range(len(NAMES))]
    layer = sum(MATMULS.get(name, OTHER) for name in NAMES)
    title = "The average layer of a decode, Llama-3.1-8B on an H200"
    parts = [
        text(16, 28, title, size=15, bold=True),
        *_scale(),
        *_lanes(70, f"Launched one by one: {each[-1]:.0f} µs a layer", NAMES, each),
        *_lanes(178, f"A captured graph: {layer:.0f} µs a layer", ("replay",), [LAUNCH] * 3 * len(NAMES)),
        *legend(LEFT - 30, 274, 150, LEGEND, stroke=BORDER),
    ]
    return svg(WIDTH, 304, *parts, label=title)


def _scale() -> list[str]:
    """Draw how long 100 µs are."""
    left, right, y = WIDTH - 16 - 100 * SCALE, WIDTH - 16, 36
    ends = [line((x, y - 4), (x, y + 4), QUIET) for x in (left, right)]
    return [
        line((left, y), (right, y), QUIET),
        *ends,
        text((left + right) / 2, y - 8, "100 µs", size=12, anchor="middle"),
    ]


def _lanes(y: float, title: str, launches: Sequence[str], ready: Sequence[float]) -> list[str]:
    """Draw the host's launches, and the kernels: each begins when it is `ready` and the one before
    it has ended. Several layers have a name and a line each.
    """
    below = y + TALL + 6
    parts = [
        text(LEFT, y - 8, title),
        text(LEFT - 10, y + 18, "host", size=12, colour=QUIET, anchor="end"),
        text(LEFT - 10, below + 18, "GPU", size=12, colour=QUIET, anchor="end"),
        rect(LEFT, below, END * SCALE, TALL, BLANK),
    ]
    for index, name in enumerate(launches):
        x = LEFT + index * LAUNCH * SCALE
        parts.append(rect(x, y, LAUNCH * SCALE, TALL, ORANGE, stroke="#FFFFFF", label=name, size=11))
    now = 0.0
    for index, at in enumerate(ready):
        name = NAMES[index % len(NAMES)]
        start = max(now, at)
        now = min(start + MATMULS.get(name, OTHER), END)
        x, width = LEFT + start * SCALE, (now - start) * SCALE
        fill = BLUE if name in MATMULS else GREEN
        label = name if width > 40 else ""
        parts.append(rect(x, below, width, TALL, fill, stroke="#FFFFFF", stroke_width=0.5, label=label, size=11))
        if index % len(NAMES) == 0 and len(ready) > len(NAMES):
            parts.append(line((x, below), (x, below + TALL + 14)))
            parts.append(text(x + 5, below + TALL + 14, f"layer {index // len(NAMES) + 1}", size=12))
    return parts

"""Draw a roofline: the rate that a GPU can reach over the operations that it does for each byte it
reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from minivllm.config.units import TERA
from minivllm_lab.pictures.drawing import QUIET, RULE, Point, arrow, line, rect, svg, text, tint
from minivllm_lab.pictures.palette import BLUE, VERMILLION
from minivllm_simulate.hardware import HARDWARE

WIDTH, HEIGHT = 700, 412
LEFT, RIGHT, TOP, BOTTOM = 76, 670, 64, 330
LOWEST_X, HIGHEST_X = 0.5, 2048.0
LOWEST_Y, HIGHEST_Y = 1.0, 2048.0
GPU = "H100"

Dot = tuple[str, float, str, Point, str]
"""Words, operations per byte, colour, where the words stand from the dot, and their anchor."""


def roofline(dots: Sequence[Dot], legend: Sequence[tuple[str, str]], *, growing_batch: bool = False) -> str:
    """Draw the roof of an H100 by its data sheet, and what a step reads as dots on it.

    `legend` explains the dots' colours; `growing_batch` adds an arrow from a batch of 1 to one of 64.
    """
    gpu = HARDWARE[GPU]
    peak = gpu.flops_of("bfloat16") / TERA
    slope = gpu.bandwidth / TERA
    ridge = gpu.ridge()
    title = f"How fast can an {GPU} be? By its data sheet, 16 bits"
    parts = [
        text(16, 28, title, size=15, bold=True),
        rect(LEFT, TOP, _x(ridge) - LEFT, BOTTOM - TOP, tint(BLUE, 0.1)),
        rect(_x(ridge), TOP, RIGHT - _x(ridge), BOTTOM - TOP, tint(VERMILLION, 0.12)),
        text(LEFT + 12, TOP + 22, "memory-bound: the units wait for bytes", size=13),
        text(RIGHT - 8, BOTTOM - 14, "compute-bound", size=13, anchor="end"),
        *_axes(),
        line((_x(LOWEST_X), _y(LOWEST_X * slope)), (_x(ridge), _y(peak)), QUIET, width=3),
        line((_x(ridge), _y(peak)), (RIGHT, _y(peak)), QUIET, width=3),
        line((_x(ridge), _y(peak)), (_x(ridge), BOTTOM), QUIET, dash="4 3"),
        text(_x(ridge) - 8, BOTTOM - 14, f"ridge: {ridge:.0f}", anchor="end"),
    ]
    for words, intensity, colour, (right, down), anchor in dots:
        x, y = _x(intensity), _y(min(peak, intensity * slope))
        parts += [_dot(x, y, colour), text(x + right, y + down, words, size=12, anchor=anchor)]
    for index, (words, colour) in enumerate(legend):
        x = LEFT + 20 + index * 220
        parts += [_dot(x, HEIGHT - 20, colour), text(x + 14, HEIGHT - 15, words, size=12)]
    if growing_batch:
        x, y = _x(64), _y(64 * slope)
        parts.append(arrow((_x(1) - 4, _y(slope) - 14), (x - 14, y - 6), BLUE, dash="4 3"))
        parts.append(text(_x(5), _y(34), "a larger batch", size=12, colour=BLUE, anchor="end"))
    rates = "; ".join(f"{words}: {min(peak, intensity * slope):.0f}" for words, intensity, *_ in dots)
    return svg(WIDTH, HEIGHT, *parts, label=f"{title}. Bounds in TFLOP/s. {rates}.")


def _axes() -> list[str]:
    parts = []
    for value in (1, 4, 16, 64, 256, 1024):
        parts.append(line((_x(value), BOTTOM), (_x(value), BOTTOM + 5), QUIET))
        parts.append(text(_x(value), BOTTOM + 20, f"{value:,}", size=12, anchor="middle"))
    for value in (1, 10, 100, 1000):
        parts.append(line((LEFT, _y(value)), (RIGHT, _y(value)), RULE, width=1))
        parts.append(text(LEFT - 10, _y(value) + 4, f"{value:,}", size=12, anchor="end"))
    parts.append(text((LEFT + RIGHT) / 2, BOTTOM + 44, "operations for each byte read", anchor="middle"))
    parts.append(text(16, TOP - 12, "10¹² operations a second", size=12))
    parts += [line((LEFT, BOTTOM), (RIGHT, BOTTOM), QUIET), line((LEFT, TOP), (LEFT, BOTTOM), QUIET)]
    return parts


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.2f}" cy="{y:.2f}" r="7" fill="{colour}" stroke="#FFFFFF" stroke-width="2"/>'


def _x(intensity: float) -> float:
    return LEFT + (RIGHT - LEFT) * math.log(intensity / LOWEST_X) / math.log(HIGHEST_X / LOWEST_X)


def _y(rate: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * math.log(rate / LOWEST_Y) / math.log(HIGHEST_Y / LOWEST_Y)

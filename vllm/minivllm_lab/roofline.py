"""A roofline: the rate that a GPU can reach over the operations that it does for each byte it
reads, with dots for what reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from minivllm.config.units import TERA
from minivllm_lab.drawing import QUIET, RULE, line, rect, svg, text, tint
from minivllm_lab.palette import BLUE, VERMILLION
from minivllm_simulate.hardware import HARDWARE

WIDTH, HEIGHT = 700, 412
LEFT, RIGHT, TOP, BOTTOM = 76, 670, 64, 330
LOWEST_X, HIGHEST_X = 0.5, 2048.0
LOWEST_Y, HIGHEST_Y = 1.0, 2048.0
GPU = "H100"


@dataclass(frozen=True)
class Dot:
    """What reads: its name, operations per byte, colour, and where the words stand from the dot."""

    words: str
    intensity: float
    colour: str
    shift: tuple[float, float] = (12, 16)


def roofline(title: str, dots: Sequence[Dot], legend: Sequence[tuple[str, str]], *more: str) -> str:
    """Draw the roof of an H100 by its data sheet, dots below it, and `more` elements on top."""
    gpu = HARDWARE[GPU]
    peak = gpu.flops_of("bfloat16") / TERA
    slope = gpu.bandwidth / TERA
    ridge = gpu.ridge()
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
    for dot in dots:
        x, y = place(dot.intensity)
        parts.append(_dot(x, y, dot.colour))
        parts.append(text(x + dot.shift[0], y + dot.shift[1], dot.words, size=12))
    for index, (words, colour) in enumerate(legend):
        x = LEFT + 20 + index * 220
        parts += [_dot(x, HEIGHT - 20, colour), text(x + 14, HEIGHT - 15, words, size=12)]
    rates = (f"{dot.words}: {min(peak, dot.intensity * slope):.0f}" for dot in dots)
    return svg(WIDTH, HEIGHT, *parts, *more, label=f"{title}. Bounds in TFLOP/s. {'; '.join(rates)}.")


def place(intensity: float) -> tuple[float, float]:
    """Return the point under the roof for so many operations per byte."""
    gpu = HARDWARE[GPU]
    rate = min(gpu.flops_of("bfloat16"), intensity * gpu.bandwidth) / TERA
    return _x(intensity), _y(rate)


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

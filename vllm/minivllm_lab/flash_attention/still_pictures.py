"""Lesson 03's pictures that stand alone: what HBM can feed, a GPU's memories, and a sum that
shrinks.
"""

from __future__ import annotations

import math

from minivllm.config.units import TERA
from minivllm_lab.drawing import BLANK, QUIET, arrow, line, rect, svg, swatch, text, tint
from minivllm_lab.palette import GREY, INK, ORANGE, SKY, VERMILLION, YELLOW
from minivllm_simulate.hardware import HARDWARE

WIDTH, LEFT, RIGHT = 700, 60, 670
QUERIES = 128
"""Queries of a tile of FlashAttention-3, and so the operations for each byte of K and V."""
PEAK = HARDWARE["H100"].flops_of("bfloat16") / TERA
REACHED = 616
"""FlashAttention-3 on an H100, heads of 128, causal, 16k, in TFLOP/s (chart of arXiv 2407.08608)."""
L2_RATES = (7, 10)
"""TB/s of the L2 of a PCIe H100, and of an H200, whose chip is the H100's (github.com/te42kyfo/gpu-benches)."""

LAYERS = (
    ("registers", "256 KiB each", "faster still", YELLOW),
    ("shared memory", "227 KiB each", "about 31 TB/s", YELLOW),
    ("L2 cache", "50 MB", f"{L2_RATES[0]} to {L2_RATES[1]} TB/s", SKY),
    ("HBM", "80 GB", "3.35 TB/s", GREY),
)
"""Name, size, speed and colour of an H100's memories.

Shared memory: 132 multiprocessors, 128 bytes a cycle, 1.83 GHz.
"""
OWNERS = (("each of 132 multiprocessors has its own", YELLOW), ("on the chip, for all", SKY), ("beside the chip", GREY))


def stills() -> dict[str, str]:
    """Draw all of them, by the name of their file."""
    return {"bet": _bet(), "reveal": _reveal(), "shrink": _shrink()}


def _bet() -> str:
    """Draw the rates that the HBM of two GPUs can feed, and the peak that they share."""
    title = f"Attention in tiles of {QUERIES} queries: the rate that HBM can feed"
    parts = [text(16, 30, title, size=15, bold=True), *_axis(150)]
    for gpu, y in (("H100", 80), ("H200", 120)):
        rate = HARDWARE[gpu].bandwidth / TERA
        x = _x(QUERIES * rate)
        parts.append(text(16, y + 5, gpu, bold=True))
        parts.append(rect(x, y - 12, _x(PEAK) - x, 24, BLANK, label="the chip idles", size=12))
        parts.append(f'<circle cx="{x:.2f}" cy="{y}" r="8" fill="{GREY}"/>')
        words = f"{rate:.2f} TB/s feed {QUERIES * rate:.0f}"
        parts.append(text(x - 16, y + 5, words, anchor="end"))
    return svg(WIDTH, 210, *parts, label=title)


def _reveal() -> str:
    """Draw an H100's memories, how large and how fast, and the rate that attention needs."""
    title = f"{REACHED} TFLOP/s take {REACHED / QUERIES:.1f} TB/s: HBM cannot give them, L2 can"
    parts = [text(16, 30, title, size=15, bold=True)]
    for x, words in ((390, "size"), (520, "all of them, a second")):
        parts.append(text(x, 62, words, size=12, colour=QUIET))
    for index, (name, size, speed, colour) in enumerate(LAYERS):
        y = 74 + 46 * index + 24 * (index == 3)
        wide = 130 + 70 * index
        parts.append(rect(190 - wide / 2, y, wide, 40, tint(colour, 0.6), label=name))
        parts += [text(390, y + 25, size), text(520, y + 25, speed)]
    parts.append(line((16, 224), (500, 224), VERMILLION, dash="4 3"))
    parts.append(text(520, 229, f"needed: {REACHED / QUERIES:.1f} TB/s", colour=VERMILLION))
    places = zip(OWNERS, (16, 340, 520), strict=True)
    parts += [swatch(x, 296, tint(colour, 0.6), words) for (words, colour), x in places]
    return svg(WIDTH, 326, *parts, label=title)


def _shrink() -> str:
    """Draw the weights of the example by hand, after its first tile and after its second."""
    title = "A larger score arrives, and what was summed shrinks by one factor"
    scores = (math.log(2), 0.0, math.log(4), 0.0)
    parts = [text(16, 30, title, size=15, bold=True)]
    for seen, x, words in ((2, 50, "m = ln 2,  l = 1.5"), (4, 380, "m = ln 4,  l = 2")):
        weights = [math.exp(score - max(scores[:seen])) for score in scores[:seen]]
        for key, weight in enumerate(weights):
            left = x + 66 * key
            if seen == 4 and key < 2:
                old = 100 * math.exp(scores[key] - scores[0])
                parts.append(rect(left, 180 - old, 50, old, stroke=VERMILLION, dash="4 3"))
            label = {1: "1", 0.5: "½", 0.25: "¼"}[round(weight, 2)]
            parts.append(rect(left, 180 - 100 * weight, 50, 100 * weight, ORANGE, label=label))
            parts.append(text(left + 25, 198, f"key {key + 1}", size=12, anchor="middle"))
        parts.append(text(x, 60, words))
    parts += [
        arrow((226, 130), (340, 130), VERMILLION, width=2),
        text(283, 118, "× ½", anchor="middle"),
        swatch(50, 216, ORANGE, "a key's weight, exp(score − m)", stroke=None),
        swatch(380, 216, "none", "its weight under the old m", stroke=VERMILLION, dash="4 3"),
    ]
    return svg(WIDTH, 246, *parts, label=title)


def _axis(y: float) -> list[str]:
    """Draw the axis of rates, with the peak that both GPUs share."""
    parts = [line((LEFT, y), (RIGHT, y)), line((_x(PEAK), 56), (_x(PEAK), y), INK, dash="4 3")]
    for rate in (0, 200, 400, 600, 800):
        parts += [line((_x(rate), y), (_x(rate), y + 5)), text(_x(rate), y + 20, f"{rate}", anchor="middle")]
    parts.append(text(_x(PEAK), y + 20, f"peak: {PEAK:.0f}", anchor="middle", size=12))
    parts.append(text((LEFT + RIGHT) / 2, y + 42, "TFLOP/s, 16 bits", size=12, anchor="middle"))
    return parts


def _x(rate: float) -> float:
    return LEFT + (RIGHT - LEFT) * rate / 1000

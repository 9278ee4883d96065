"""Lesson 03's pictures that stand alone: what HBM can feed, a GPU's memories, and two sums that
shrink.
"""

from __future__ import annotations

from minivllm.config.units import TERA
from minivllm_lab.pictures.drawing import BLANK, QUIET, arrow, line, rect, svg, swatch, text, tint
from minivllm_lab.pictures.palette import GREY, INK, ORANGE, SKY, VERMILLION, YELLOW
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
OWNERS = (("each of 132 multiprocessors has its own", YELLOW), ("shared by all", SKY), ("beside the chip", GREY))
LAYER_TOPS, PROGRAMS, WHOLE = (74, 112, 176, 262), ((28, 140), (212, 140)), ((28, 324),)
"""Where each of LAYERS begins; x and width of a box on each of two multiprocessors, and of one for the whole chip."""
SUMS = (("l", 1.5, 1.25), ("O", 16, 34))
"""The example by hand: the sums of its first tile, under m = ln 2, and of its second alone, under m = ln 4."""


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
    """Draw an H100's memories, how large and how fast, and a key that two programs want: from HBM it comes once."""
    title = f"{REACHED} TFLOP/s take {REACHED / QUERIES:.1f} TB/s: HBM cannot give them, L2 can"
    parts = [
        text(16, 30, title, size=15, bold=True),
        text(190, 62, "two programs, on two multiprocessors", size=12, anchor="middle"),
    ]
    for x, words in ((390, "size"), (520, "all of them, a second")):
        parts.append(text(x, 62, words, size=12, colour=QUIET))
    for (name, size, speed, colour), y, boxes in zip(
        LAYERS, LAYER_TOPS, (PROGRAMS, PROGRAMS, WHOLE, WHOLE), strict=True
    ):
        parts += [rect(x, y, wide, 36, tint(colour, 0.6), label=name) for x, wide in boxes]
        parts += [text(390, y + 23, size), text(520, y + 23, speed)]
    parts.append(line((16, 236), (500, 236), VERMILLION, dash="4 3"))
    parts.append(text(520, 241, f"needed: {REACHED / QUERIES:.1f} TB/s", colour=VERMILLION))
    for x, start, end in ((190, 262, 214), (98, 178, 150), (282, 178, 150)):
        parts += [
            arrow((x, start), (x, end), INK, width=2),
            rect(x + 8, start - 23, 58, 16, ORANGE, label="key 7", size=12),
        ]
    places = zip(OWNERS, (16, 340, 520), strict=True)
    parts += [swatch(x, 322, tint(colour, 0.6), words) for (words, colour), x in places]
    return svg(WIDTH, 352, *parts, label=title)


def _shrink() -> str:
    """Draw both sums of the example by hand, after its first tile and after its second."""
    title = "A larger score arrives: both sums shrink by one factor, then the tile is added"
    parts = [text(16, 30, title, size=15, bold=True), text(50, 60, "m = ln 2"), text(380, 60, "m = ln 4")]
    for place, (name, first, second) in enumerate(SUMS):
        unit, x, then = 120 / (first / 2 + second), 50 + 120 * place, 380 + 120 * place
        parts += _stack(x, f"{name} = {first:g}", unit, first)
        parts.append(rect(then - 6, 194 - unit * first, 82, unit * first, stroke=VERMILLION, dash="4 3"))
        parts += _stack(then, f"{name} = {first / 2 + second:g}", unit, first / 2, second)
    parts += [
        arrow((270, 140), (350, 140), VERMILLION, width=2),
        text(310, 128, "× ½", anchor="middle"),
        swatch(50, 232, ORANGE, "keys 1 and 2"),
        swatch(210, 232, tint(ORANGE, 0.4), "keys 3 and 4"),
        swatch(380, 232, "none", "the sum under the old m", stroke=VERMILLION, dash="4 3"),
    ]
    return svg(WIDTH, 262, *parts, label=title)


def _stack(x: float, words: str, unit: float, *parts: float) -> list[str]:
    """Draw a sum as a stack of its parts, the first tile's at the bottom, `unit` pixels for each 1."""
    shapes, top = [text(x + 35, 212, words, anchor="middle")], 194.0
    for part, fill in zip(parts, (ORANGE, tint(ORANGE, 0.4)), strict=False):
        top -= unit * part
        shapes.append(rect(x, top, 70, unit * part, fill, label=f"{part:g}"))
    return shapes


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

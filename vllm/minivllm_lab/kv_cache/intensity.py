"""Lesson 01's roofline: what a step reads, and how often it uses each byte."""

from __future__ import annotations

from minivllm_lab.drawing import arrow, text
from minivllm_lab.palette import BLUE, ORANGE
from minivllm_lab.roofline import Dot, place, roofline

DOTS = (
    Dot("1 decode", 1, BLUE),
    Dot("4 query heads to a KV head", 4, ORANGE),
    Dot("64 decodes", 64, BLUE),
    Dot("prefill of 512 tokens", 512, BLUE, (-34, 26)),
)


def reads_of_a_step() -> str:
    """Draw the reads of a step on the roof of an H100."""
    (left, low), (right, high), (_, above) = place(1), place(64), place(34)
    larger = [
        arrow((left - 4, low - 14), (right - 14, high - 6), BLUE, dash="4 3"),
        text(place(5)[0], above, "a larger batch", size=12, colour=BLUE, anchor="end"),
    ]
    legend = (("weights, read once a step", BLUE), ("KV cache, one for each sequence", ORANGE))
    return roofline("How fast can an H100 be? By its data sheet, 16 bits", DOTS, legend, *larger)

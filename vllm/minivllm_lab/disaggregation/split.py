"""Lesson 08's pictures of its bet: the same four GPUs as one pool and as two, with one number turned;
and prefill and decode on one roofline.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from minivllm_lab.pictures.drawing import INK, QUIET, RULE, line, rect, svg, text, tint
from minivllm_lab.pictures.palette import BLUE, ORANGE, SKY
from minivllm_lab.pictures.roofline import Dot, roofline

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "08_disaggregation.cpu.json"
WIDTH, LEFT, TOP, BAR, GAP = 700, 262, 62, 32, 20
MOST = 10
TASKS = ((186, "does both", ORANGE), (286, "reads prompts", BLUE), (412, "writes answers", SKY))
"""For each entry of the legend: where it begins, what such a GPU does, and its colour, as in the roofline."""
ONE_POOL, TWO_POOLS = (ORANGE,) * 4, (BLUE, BLUE, BLUE, SKY)


Setup = tuple[str, str, Sequence[str], float | None]
"""A name, the number that is turned, the colours of four GPUs, and the rate, or None in the bet."""


def bet() -> str:
    """Draw one pool by default and two pools; one pool with another budget is the bet."""
    return _bars("Can one pool catch up?", [*_setups()[:2], ("one pool", "? tokens a step", ONE_POOL, None)])


def reveal() -> str:
    """Draw all three."""
    return _bars("One number was enough", _setups())


def on_one_roof() -> str:
    """Draw decode and prefill on the roof of an H100."""
    decodes: list[Dot] = [(name, x, SKY, (12, 16), "start") for name, x in (("one answer", 1), ("64 answers", 64))]
    prefill: Dot = ("a 1,000-token prompt", 1000, BLUE, (48, 26), "end")
    return roofline([*decodes, prefill], (("decode", SKY), ("prefill", BLUE)))


def _setups() -> list[Setup]:
    """Return the three setups with the requests a second and GPU that the script found for long
    prompts and short answers.
    """
    ratio = json.loads(RESULTS.read_text())["figures"]["ratio"]
    rates, budget = ratio["pools"], ratio["best"]["budget"]
    return [
        ("one pool", "8,192 tokens a step", ONE_POOL, rates["one pool, 8192 tokens a step"]),
        ("two pools", "3 GPUs and 1", TWO_POOLS, rates["two pools, 3 : 1"]),
        ("one pool", f"{budget} tokens a step", ONE_POOL, rates["one pool, its best budget"]),
    ]


def _bars(title: str, setups: Sequence[Setup]) -> str:
    scale = (WIDTH - LEFT - 60) / MOST
    bottom = TOP + len(setups) * (BAR + GAP)
    label, parts = title, [text(16, 28, title, size=15, bold=True)]
    for value in range(0, MOST + 1, 2):
        x = LEFT + value * scale
        parts += [line((x, TOP - 8), (x, bottom), RULE), text(x, bottom + 16, str(value), size=12, anchor="middle")]
    for index, (name, number, gpus, rate) in enumerate(setups):
        y = TOP + index * (BAR + GAP)
        parts += [rect(16 + 23 * gpu, y + 6, 19, 19, colour, radius=3) for gpu, colour in enumerate(gpus)]
        parts += [text(118, y + 13, name, bold=True), text(118, y + 29, number, size=12)]
        known = "not known yet" if rate is None else f"{rate:.1f}"
        label += f" {name}, {number}: {known}."
        if rate is None:
            parts.append(rect(LEFT, y, MOST * scale, BAR, "#FFFFFF", stroke=QUIET, dash="4 3", label="?", size=16))
        else:
            end = LEFT + rate * scale
            parts += [rect(LEFT, y, end - LEFT, BAR, tint(INK, 0.5)), text(end + 8, y + 21, known, bold=True)]
    parts.append(text(LEFT, bottom + 36, "requests a second and GPU that are in time, modelled", size=12, colour=QUIET))
    parts.append(text(16, bottom + 66, "each square is a GPU that", size=12))
    for x, name, colour in TASKS:
        parts += [rect(x, bottom + 55, 13, 13, colour, radius=3), text(x + 20, bottom + 66, name, size=12)]
    return svg(WIDTH, bottom + 80, *parts, label=label)

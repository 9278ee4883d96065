"""Lesson 08's pictures of its bet: the same four GPUs as one pool and as two, with one number turned;
and prefill and decode on one roofline.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from minivllm_lab.drawing import QUIET, RULE, line, rect, svg, text
from minivllm_lab.palette import BLUE, ORANGE, SKY
from minivllm_lab.roofline import Dot, roofline

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "08_disaggregation.cpu.json"
WIDTH, LEFT, TOP, BAR, GAP = 700, 190, 62, 30, 18
MOST = 10
DASH = "4 3"


def sustained() -> dict[str, float]:
    """Return the requests a second and GPU that the script found for long prompts and short
    answers.
    """
    pools = json.loads(RESULTS.read_text())["figures"]["ratio"]["pools"]
    names = {
        "one pool, by default": "one pool, 8192 tokens a step",
        "two pools, 3 : 1": "two pools, 3 : 1",
        "one pool, tuned": "one pool, its best budget",
    }
    return {name: pools[key]["long prompts"] for name, key in names.items()}


def bet() -> str:
    """Draw one pool by default and two pools; one pool with another budget is the bet."""
    default, two, tuned = sustained().items()
    return _bars("Can one pool catch up?", [default, two, (tuned[0], None)])


def reveal() -> str:
    """Draw all three."""
    return _bars("One number was enough", list(sustained().items()))


def on_one_roof() -> str:
    """Draw decode and prefill on the roof of an H100."""
    dots: list[Dot] = [
        ("one answer", 1, SKY, (12, 16), "start"),
        ("64 answers", 64, SKY, (12, 16), "start"),
        ("a prompt of 1,000 tokens", 1000, BLUE, (48, 26), "end"),
    ]
    return roofline(dots, (("decode", SKY), ("prefill", BLUE)))


def _bars(title: str, rows: Sequence[tuple[str, float | None]]) -> str:
    scale = (WIDTH - LEFT - 60) / MOST
    bottom = TOP + len(rows) * (BAR + GAP)
    parts = [text(16, 28, title, size=15, bold=True)]
    for value in range(0, MOST + 1, 2):
        x = LEFT + value * scale
        parts += [line((x, TOP - 8), (x, bottom), RULE), text(x, bottom + 16, str(value), size=12, anchor="middle")]
    for index, (name, value) in enumerate(rows):
        y = TOP + index * (BAR + GAP)
        parts.append(text(LEFT - 12, y + 20, name, anchor="end"))
        if value is None:
            parts.append(rect(LEFT, y, MOST * scale, BAR, "#FFFFFF", stroke=QUIET, dash=DASH, label="?", size=16))
        else:
            parts.append(rect(LEFT, y, value * scale, BAR, BLUE if name.startswith("two") else ORANGE))
            parts.append(text(LEFT + value * scale + 8, y + 20, f"{value:.1f}"))
    words = "requests a second and GPU that are in time, modelled"
    parts.append(text(LEFT, bottom + 36, words, size=12, colour=QUIET))
    known = ". ".join(f"{name}: {'not known yet' if value is None else f'{value:.1f}'}" for name, value in rows)
    return svg(WIDTH, bottom + 50, *parts, label=f"{title} {known}.")

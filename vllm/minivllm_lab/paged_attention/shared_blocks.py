"""Lesson 02's pictures of shared blocks: what one forgotten reference does, and copy-on-write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

from minivllm_lab.pictures.drawing import BLANK, QUIET, arrow, block, rect, svg, swatch, text, tint
from minivllm_lab.pictures.palette import BLUE, ORANGE

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "02_paged_attention.cpu.json"
WIDTH, LEFT = 700, 20
ADA, BOB = tint(BLUE, 0.35), tint(ORANGE, 0.45)
FIRST = 104
"""The left edge of the first block, where labels stand beside it."""
LINE = 92
"""Characters of a line of quoted text."""
COPIED = "8"
MOMENTS = {
    "prompt of A": (("A", "0123"), ("A", "4567"), ("A", "8"), ("", "")),
    "fork: B": (("AB", "0123"), ("AB", "4567"), ("AB", "8"), ("", "")),
    "A writes 9": (("AB", "0123"), ("AB", "4567"), ("B", "8"), ("A", "89")),
    "B writes 9": (("AB", "0123"), ("AB", "4567"), ("B", "89"), ("A", "89")),
    "A ends": (("B", "0123"), ("B", "4567"), ("B", "89"), ("", "")),
}
"""For each event, the readers of blocks 1 to 4, and the positions in each."""


def bet() -> str:
    """Draw four blocks at four moments; the last one is open."""
    moments = (
        ("Ada's prompt is stored once. Answers 1 and 2 read it.", "Ada", ADA, "count: 1"),
        ("Answer 1 ends, and gives its blocks back.", "Ada", BLANK, "count: 0, so free"),
        ("Bob's prompt arrives, and takes free blocks.", "Bob", BOB, "count: 1"),
        ("Answer 2 needs its next token. It reads on in its blocks:", "?", "#FFFFFF", "count: 1"),
    )
    parts = [text(LEFT, 30, "Four blocks, and a count that forgets answer 2", size=16, bold=True)]
    for index, (sentence, name, fill, count) in enumerate(moments):
        y = 64 + index * 64
        parts.append(text(LEFT, y, f"{index + 1}. {sentence}"))
        dash = "4 3" if fill == BLANK else None
        for x in range(LEFT, LEFT + 4 * 130, 130):
            parts.append(rect(x, y + 10, 122, 28, fill, stroke=QUIET, dash=dash, label=name))
        parts.append(text(LEFT + 4 * 130 + 6, y + 29, count))
    return svg(WIDTH, 310, *parts, label=" ".join(f"{sentence} {count}." for sentence, _, _, count in moments))


def reveal() -> str:
    """Quote what the second answer read and wrote in the script's run, counted and forgotten."""
    broken = json.loads(RESULTS.read_text())["figures"]["broken"]
    parts = [text(LEFT, 30, "Answer 2 reads Bob's text, and goes on with it", size=16, bold=True)]
    rows = (
        ("Counted: answer 2 reads Ada's prompt,", "counted", ADA),
        ("Forgotten: answer 2 reads Bob's prompt, its blocks in another order,", "forgotten", BOB),
    )
    for index, (title, name, fill) in enumerate(rows):
        y = 60 + index * 138
        parts += [text(LEFT, y, title), *_quoted(y + 8, broken[name]["reads"], fill)]
        parts += [text(LEFT, y + 73, "and goes on:"), *_quoted(y + 81, broken[name]["writes"], "#FFFFFF")]
    return svg(WIDTH, 322, *parts, label="What Ada's second answer reads and writes, with its reference and without")


def _quoted(y: float, content: str, fill: str) -> list[str]:
    """Draw a box with a text in it, its spaces and newlines as single spaces."""
    lines = wrap(" ".join(content.split()), LINE)
    box = rect(LEFT, y, WIDTH - 2 * LEFT, 8 + 18 * len(lines), fill, stroke=QUIET)
    return [box, *(text(LEFT + 8, y + 17 + 18 * row, words, size=11, mono=True) for row, words in enumerate(lines))]


def copy_on_write() -> str:
    """Draw two sequences that share a prompt: its blocks at five moments."""
    parts = [text(LEFT, 30, "Copy-on-write: a number is a position in the text", size=15, bold=True)]
    before: Sequence[str] = ("", "", "", "")
    for row, (label, moment) in enumerate(MOMENTS.items()):
        y = 64 + row * 58
        parts.append(text(FIRST - 12, y + 18, label, size=12, anchor="end"))
        for number, (readers, positions) in enumerate(moment, start=1):
            written = [new not in before[number - 1] and (row == 0 or new != COPIED) for new in positions]
            fills = [BLUE if now else ADA for now in written] + [BLANK] * (4 - len(positions))
            slots = [*positions, *[None] * (4 - len(positions))]
            words = f"{number}: {' and '.join(readers) or 'free'}, count {len(readers)}"
            parts.append(block(FIRST + 148 * (number - 1), y, slots, width=34, height=26, fill=fills, name=words))
        before = [positions for _, positions in moment]
    keys = ((FIRST, BLUE, "written now"), (260, ADA, "written before, or copied"), (490, BLANK, "empty"))
    parts += [swatch(x, 346, fill, words) for x, fill, words in keys]
    parts.append(arrow((FIRST + 313, 214), (FIRST + 461, 214), QUIET))
    parts.append(text(FIRST + 470, 218, "copied first", size=11, colour=QUIET))
    return svg(WIDTH, 374, *parts, label="Blocks 1 to 4 with readers and counts, at five moments")

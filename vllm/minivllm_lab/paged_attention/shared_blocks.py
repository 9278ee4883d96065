"""Lesson 02's pictures of shared blocks: what one forgotten reference does, and copy-on-write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from textwrap import wrap

from minivllm.core.block_pool import BlockPool
from minivllm_lab.block_tables import BlockTable
from minivllm_lab.drawing import BLANK, QUIET, arrow, block, rect, svg, text, tint
from minivllm_lab.palette import BLUE, ORANGE

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "02_paged_attention.cpu.json"
WIDTH, LEFT = 700, 20
ADA, BOB = tint(BLUE, 0.35), tint(ORANGE, 0.45)
SLOT, TALL, GAP, LABEL = 34, 26, 12, 104
LINE = 92
"""Characters of a line of quoted text."""


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
        for x in range(LEFT, LEFT + 4 * 130, 130):
            parts.append(rect(x, y + 10, 122, 28, fill, stroke=QUIET, dash="4 3" if fill == BLANK else None, label=name))
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
        y = 60 + index * 156
        parts += [text(LEFT, y, title), *_quoted(y + 8, broken[name]["reads"], fill)]
        parts += [text(LEFT, y + 88, "and goes on:"), *_quoted(y + 96, broken[name]["writes"], "#FFFFFF")]
    return svg(WIDTH, 354, *parts, label="What Ada's second answer reads and writes, with its reference and without")


def _quoted(y: float, content: str, fill: str) -> list[str]:
    """Draw a box with a text in it, its spaces and newlines as single spaces."""
    lines = wrap(" ".join(content.split()), LINE)
    box = rect(LEFT, y, WIDTH - 2 * LEFT, 8 + 18 * len(lines), fill, stroke=QUIET)
    return [box, *(text(LEFT + 8, y + 17 + 18 * row, words, size=11, mono=True) for row, words in enumerate(lines))]


def copy_on_write() -> str:
    """Draw two sequences that share a prompt: its blocks at five moments."""
    pool = BlockPool(5, enable_caching=False)
    a = BlockTable(pool, 4)
    a.append(9)
    parts = _moment(0, "prompt of A", pool, {"A": a}, "A", range(9))
    b = a.fork()
    parts += _moment(1, "fork: B", pool, {"A": a, "B": b})
    a.append(1)
    parts += _moment(2, "A writes 9", pool, {"A": a, "B": b}, "A", range(9, 10))
    b.append(1)
    parts += _moment(3, "B writes 9", pool, {"A": a, "B": b}, "B", range(9, 10))
    a.free()
    parts += _moment(4, "A ends", pool, {"B": b})
    copied, bottom = _y(2) + TALL + 8, _y(5)
    parts += [
        text(LEFT, 30, "Copy-on-write: a number is a position in the text", size=15, bold=True),
        arrow((_x(2) + SLOT / 2, copied), (_x(3) + SLOT / 2, copied), QUIET),
        text(_x(3) + SLOT, copied + 4, "copied first", size=11, colour=QUIET),
    ]
    for x, fill, words in ((LABEL, BLUE, "written now"), (260, ADA, "written before, or copied"), (490, BLANK, "empty")):
        parts += [rect(x, bottom - 8, 22, 14, fill, stroke=QUIET), text(x + 30, bottom + 4, words, size=12)]
    return svg(WIDTH, bottom + 20, *parts, label="Blocks 1 to 4 with readers and counts, at five moments")


def _moment(
    index: int, label: str, pool: BlockPool, tables: Mapping[str, BlockTable], writer: str = "", new: range = range(0)
) -> list[str]:
    """Draw four blocks: who reads each, its count, and the positions in it, those that `writer` has
    just written in a strong colour.
    """
    parts = [text(LABEL - 12, _y(index) + 18, label, size=12, anchor="end")]
    for number in range(1, 5):
        slots: list[str | None] = [None] * 4
        fills, readers = [BLANK] * 4, []
        for name, table in tables.items():
            entry = next((entry for entry, held in enumerate(table.blocks) if held.block_id == number), None)
            if entry is None:
                continue
            readers.append(name)
            for position in range(4 * entry, min(4 * entry + 4, table.num_tokens)):
                slots[position % 4] = str(position)
                fills[position % 4] = BLUE if name == writer and position in new else ADA
        words = f"{number}: {' and '.join(readers) or 'free'}, count {pool.blocks[number].ref_cnt}"
        parts.append(block(_x(number - 1), _y(index), slots, width=SLOT, height=TALL, fill=fills, name=words))
    return parts


def _x(column: int) -> float:
    return LABEL + column * (4 * SLOT + GAP)


def _y(index: int) -> float:
    return 64 + index * 58

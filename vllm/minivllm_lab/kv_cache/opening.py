"""Lesson 01's opening figure: the followed request's cache grows by a slot a step, and its query
reads all slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm.config import EMBEDDED_MODEL, ModelConfig
from minivllm.memory import kv_bytes_per_token
from minivllm_lab.drawing import BLANK, QUIET, RULE, arrow, line, rect, svg, text, tint
from minivllm_lab.followed import Row, Token, followed
from minivllm_lab.frames import Frames
from minivllm_lab.palette import BLUE, GREEN, GREY, ORANGE, VERMILLION

WIDTH, HEIGHT = 872, 296
LEFT, CELL, CELL_HEIGHT = 88, 52, 28
TOKENS_Y, KEYS_Y, VALUES_Y, BARS_Y = 40, 118, 150, 238
BAR_WIDTH = 480
ORANGE_INK, GREEN_INK = "#8A5A00", "#00664A"
"""Darker forms for text on white, with a contrast of at least 4.5 : 1."""


def frames() -> Frames:
    """Draw a still for each step of the request: its prefill, then its decodes."""
    run = followed()
    rows = [row for step in run.steps if (row := step.row()) is not None]
    captions = [_caption(rows, index) for index in range(len(rows))]
    return Frames([_still(run.request.tokens, rows, index) for index in range(len(rows))], captions)


def _still(tokens: Sequence[Token], rows: Sequence[Row], index: int) -> str:
    row = rows[index]
    slots = len(tokens) - 1  # the last token never goes through the model
    parts = [*_tokens(tokens, row), *_cache(slots, row), *_query(row.seq_len), *_passes(rows, index)]
    return svg(WIDTH, HEIGHT, *parts, label=_caption(rows, index))


def _tokens(tokens: Sequence[Token], row: Row) -> list[str]:
    """Draw the text so far, the tokens that this step feeds in colour, and the token that it
    chooses.
    """
    middle = (_x(row.positions[0]) + _x(row.positions[-1] + 1)) / 2
    parts = [text(16, TOKENS_Y + 19, "tokens"), text(middle, 26, "fed", size=12, colour=ORANGE_INK, anchor="middle")]
    for position, token in enumerate(tokens[: row.seq_len]):
        fed = position in row.positions
        fill, stroke = (ORANGE, ORANGE) if fed else ("#FFFFFF", RULE)
        parts.append(_cell(position, TOKENS_Y, fill, stroke, token.shown))
        if fed:
            middle = _x(position) + CELL / 2
            parts.append(arrow((middle, TOKENS_Y + CELL_HEIGHT + 3), (middle, KEYS_Y - 4), VERMILLION))
    parts.append(_cell(row.seq_len, TOKENS_Y, tint(GREEN), GREEN, tokens[row.seq_len].shown, dash="4 3"))
    parts.append(text(_x(row.seq_len) + CELL / 2, 26, "next", size=12, colour=GREEN_INK, anchor="middle"))
    return parts


def _cache(slots: int, row: Row) -> list[str]:
    """Draw keys and values: slots that were full, slots that this step fills, and empty ones."""
    parts = [text(16, KEYS_Y + 19, "keys"), text(16, VALUES_Y + 19, "values")]
    parts.append(text(16, VALUES_Y + 43, "slot", size=11, colour=QUIET))
    for slot in range(slots):
        full = slot < row.seq_len
        fill = VERMILLION if slot in row.positions else tint(BLUE, 0.35) if full else BLANK
        for y, name in ((KEYS_Y, "k"), (VALUES_Y, "v")):
            parts.append(_cell(slot, y, fill, "#FFFFFF", name if full else ""))
        parts.append(text(_x(slot) + CELL / 2, VALUES_Y + 43, str(slot), size=11, colour=QUIET, anchor="middle"))
    return parts


def _query(seq_len: int) -> list[str]:
    """Mark the slots that the last token's query reads."""
    y, start, end = VALUES_Y + 52, LEFT, _x(seq_len) - 3
    ends = [line((x, y), (x, y - 6), BLUE, width=2) for x in (start, end)]
    words = f"the last token's query reads {seq_len} keys and values"
    return [line((start, y), (end, y), BLUE, width=2), *ends, text(start, y + 16, words, size=12, colour=BLUE)]


def _passes(rows: Sequence[Row], index: int) -> list[str]:
    """Draw the tokens fed so far, with a cache and without one, and the memory of the cache."""
    lengths = [row.seq_len for row in rows]
    without, cached = sum(lengths[: index + 1]), lengths[index]
    scale = BAR_WIDTH / sum(lengths)
    bars = ((cached, ORANGE, "with a cache"), (without, GREY, "without: each step feeds the whole text"))
    parts = [text(16, BARS_Y + 13, "fed so far")]
    for y, (count, colour, name) in zip((BARS_Y, BARS_Y + 22), bars, strict=True):
        parts.append(rect(LEFT, y, count * scale, 16, colour))
        parts.append(text(LEFT + count * scale + 8, y + 13, f"{count} {name}", size=12))
    size = kv_bytes_per_token(ModelConfig.from_pretrained(EMBEDDED_MODEL), "bfloat16")
    memory = f"cache: {cached} × {size:,} bytes"
    return [*parts, text(WIDTH - 16, BARS_Y + 13, memory, size=12, colour=QUIET, anchor="end")]


def _caption(rows: Sequence[Row], index: int) -> str:
    row = rows[index]
    fed, slot, count = row.tokens[0].shown, row.positions[0], len(row.tokens)
    if index == 0:
        return (
            f"Prefill: the {count} tokens of the prompt go through the model together. Each leaves its key and value."
        )
    if index == len(rows) - 1:
        return (
            f"After the last step {row.seq_len} slots are full. The token it chose never has to go through the model."
        )
    return f"Decode: only {fed} goes through the model, and fills slot {slot}. Nothing in the slots before it changes."


def _x(position: int) -> float:
    return LEFT + position * CELL


def _cell(position: int, y: float, fill: str, stroke: str, label: str, dash: str | None = None) -> str:
    """Draw a slot or a token with its label."""
    size = 11 if len(label) > 5 else 12
    style: dict[str, Any] = {"stroke": stroke, "dash": dash, "radius": 3, "mono": True, "size": size}
    return rect(_x(position), y, CELL - 3, CELL_HEIGHT, fill, label=label, **style)

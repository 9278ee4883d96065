"""Lesson 01's pictures. The moving one: the followed request's cache grows by a slot a step, and its
query reads all slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm.config import EMBEDDED_MODEL, ModelConfig
from minivllm.memory import kv_bytes_per_token
from minivllm_lab.kv_cache import card
from minivllm_lab.kv_cache.cone import cone
from minivllm_lab.pictures.drawing import BLANK, QUIET, RULE, arrow, line, rect, svg, text, tint
from minivllm_lab.pictures.followed import Row, Token, followed
from minivllm_lab.pictures.frames import Frames
from minivllm_lab.pictures.palette import BLUE, GREEN, GREY, ORANGE, VERMILLION
from minivllm_lab.pictures.roofline import roofline

WIDTH, HEIGHT = 700, 296
LEFT, CELL, CELL_HEIGHT = 88, 40, 28
TOKENS_Y, KEYS_Y, VALUES_Y, BARS_Y = 40, 118, 150, 238
BAR_WIDTH = 280
ORANGE_INK, GREEN_INK = "#8A5A00", "#00664A"
"""Darker forms for text on white, with a contrast of at least 4.5 : 1."""
READS = (
    ("1 decode", 1, BLUE, (12, 16), "start"),
    ("4 query heads to a KV head", 4, ORANGE, (12, 16), "start"),
    ("64 decodes", 64, BLUE, (12, 16), "start"),
    ("prefill of 512 tokens", 512, BLUE, (-34, 26), "start"),
)
"""The parts that a step reads, as dots on the roofline."""
READS_LEGEND = (("weights, read once a step", BLUE), ("KV cache, one for each sequence", ORANGE))


def frames() -> Frames:
    """Draw a still for each step of the request, its prefill and its decodes, and one that sums
    them up.
    """
    run = followed()
    rows = [row for step in run.steps if (row := step.row()) is not None]
    stills = [_still(run.request.tokens, rows, index) for index in range(len(rows))]
    captions = [_caption(rows, index) for index in range(len(rows))]
    return Frames([*stills, _summary(run.request.tokens, rows)], [*captions, _summed_up(rows)])


def stills() -> dict[str, str]:
    """Draw the pictures that stand alone in the text, by the name of their file."""
    roof = roofline(READS, READS_LEGEND, growing_batch=True)
    return {"bet": card.bet(), "reveal": card.reveal(), "cone": cone(), "roofline": roof}


def _still(tokens: Sequence[Token], rows: Sequence[Row], index: int) -> str:
    row = rows[index]
    slots = len(tokens) - 1  # the last token never goes through the model
    parts = [
        *_tokens(tokens, row),
        *_cache(slots, row.seq_len, row.positions),
        *_query(row.seq_len),
        *_passes(rows, index),
    ]
    return svg(WIDTH, HEIGHT, *parts, label=_caption(rows, index))


def _summary(tokens: Sequence[Token], rows: Sequence[Row]) -> str:
    """Draw all steps in one: the step in which each token was fed stands above it."""
    last = rows[-1]
    parts = [text(16, 26, "fed in step", size=12, colour=ORANGE_INK), text(16, TOKENS_Y + 19, "tokens")]
    for step, row in enumerate(rows, start=1):
        for position in row.positions:
            middle = _x(position) + CELL / 2
            parts.append(text(middle, 26, str(step), size=12, colour=ORANGE_INK, anchor="middle"))
            parts.append(_cell(position, TOKENS_Y, ORANGE, ORANGE, tokens[position].shown))
            parts.append(arrow((middle, TOKENS_Y + CELL_HEIGHT + 3), (middle, KEYS_Y - 4), VERMILLION))
    parts.append(_cell(last.seq_len, TOKENS_Y, tint(GREEN), GREEN, tokens[last.seq_len].shown, dash="4 3"))
    parts.append(text(_x(last.seq_len) + CELL / 2, 26, "never", size=12, colour=GREEN_INK, anchor="middle"))
    parts += [*_cache(last.seq_len, last.seq_len), *_query(last.seq_len), *_passes(rows, len(rows) - 1)]
    return svg(WIDTH, HEIGHT, *parts, label=_summed_up(rows))


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


def _cache(slots: int, seq_len: int, new: Sequence[int] = ()) -> list[str]:
    """Draw keys and values: slots that are full, the `new` ones of this step, and empty ones."""
    parts = [text(16, KEYS_Y + 19, "keys"), text(16, VALUES_Y + 19, "values")]
    parts.append(text(16, VALUES_Y + 43, "slot", size=11, colour=QUIET))
    for slot in range(slots):
        full = slot < seq_len
        fill = VERMILLION if slot in new else tint(BLUE, 0.35) if full else BLANK
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


def _summed_up(rows: Sequence[Row]) -> str:
    lengths = [row.seq_len for row in rows]
    counts = f"{lengths[-1]} tokens, and {sum(lengths)} without a cache"
    return f"All steps: each token was fed once and filled one slot: {counts}."


def _caption(rows: Sequence[Row], index: int) -> str:
    row = rows[index]
    fed, slot, count = row.tokens[0].shown, row.positions[0], len(row.tokens)
    if index == 0:
        return f"Prefill: the {count} tokens of the prompt go through together. Each leaves a key and a value."
    if index == len(rows) - 1:
        return f"The last step fills slot {slot}. The token that it predicts never goes through the model."
    return f"Decode: only {fed} goes through the model, and fills slot {slot}. Older slots never change."


def _x(position: int) -> float:
    return LEFT + position * CELL


def _cell(position: int, y: float, fill: str, stroke: str, label: str, dash: str | None = None) -> str:
    """Draw a slot or a token with its label."""
    size = 11 if len(label) > 5 else 12
    style: dict[str, Any] = {"stroke": stroke, "dash": dash, "radius": 3, "mono": True, "size": size}
    return rect(_x(position), y, CELL - 3, CELL_HEIGHT, fill, label=label, **style)

"""Draw lesson 09's opening: the followed request's eight query heads, with fewer and fewer keys and
values for them.

The attention weights are those of the prompt's last token in one layer of the embedded model, which
has two KV heads. The bars count the numbers that the layer would keep with eight, two or one KV
heads, and that DeepSeek-V3's layer keeps as a latent.
"""

from __future__ import annotations

from minivllm.config import EMBEDDED_MODEL, ModelConfig
from minivllm_lab.drawing import BLANK, QUIET, RULE, arrow, line, rect, svg, text, tint
from minivllm_lab.followed import followed
from minivllm_lab.frames import Frames
from minivllm_lab.palette import BLUE, GREEN, INK, ORANGE, VERMILLION

LAYER, KV_HEAD = 2, 1
"""The layer and KV head of the weights, counted from 0."""
WEIGHTS = (
    (0.00, 0.00, 0.01, 0.00, 0.02, 0.01, 0.90, 0.04, 0.01),
    (0.02, 0.04, 0.02, 0.78, 0.01, 0.10, 0.03, 0.02, 0.00),
    (0.25, 0.19, 0.33, 0.05, 0.02, 0.04, 0.09, 0.03, 0.01),
    (0.02, 0.07, 0.01, 0.31, 0.00, 0.59, 0.00, 0.00, 0.00),
)
"""The weights of the last token's heads 4 to 7 for each token, to two digits."""
HEADS, HEAD_DIM, LAYERS = 8, 32, 4

WIDTH, HEIGHT = 860, 392
GRID, CELL, TOP, ROW = 176, 54, 84, 28
SIDE = GRID + 9 * CELL + 16
BARS, SCALE = 340, 0.9
KEYS, VALUES, QUERY, LATENTS = tint(ORANGE, 0.6), tint(GREEN, 0.45), tint(BLUE, 0.75), tint(VERMILLION, 0.35)

CAPTIONS = (
    "The last token of the prompt has eight query heads in each layer. If each head had its own keys and values, a "
    "token would take 512 numbers in a layer's cache.",
    "This model has two KV heads. Query heads 0 to 3 use the first, 4 to 7 the second: 128 numbers, a quarter.",
    "The same keys, but four different answers: heads 4 to 7 share the keys, each with its own query.",
    "With a program for each query head, all four read the same keys and values. The cache is smaller, but as many "
    "bytes are read as before.",
    "With one program for the group, its four queries are rows of one matmul, and keys and values are read once. A "
    "matmul has at least 16 rows; twelve are empty.",
    "One KV head for all is multi-query attention: 64 numbers, and eight query heads for each key that is read.",
    "Another way: one latent a token, from which each head could make its own keys and values. But no head has to: the "
    "query is mapped to latent space.  DeepSeek-V3 keeps 512 + 64 numbers for 128 heads.",
    "Four GPUs have two query heads each, but there are two KV heads: each is kept twice, because both GPUs of a pair "
    "need it. From here on, more GPUs make no GPU's cache smaller.",
)


def frames() -> Frames:
    """Draw the steps of the figure."""
    config = ModelConfig.from_pretrained(EMBEDDED_MODEL)
    shape = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.num_hidden_layers
    assert shape == (HEADS, 2, HEAD_DIM, LAYERS), "captions and bars count this model's heads"
    stills = (
        _shared(0, 8), _shared(1, 2), _looked_at(2), _read(3, 4), _read(4, 1), _shared(5, 1), _latents(6), _ranks(7),
    )  # fmt: skip
    return Frames(stills, CAPTIONS)


# ---- the stills ----------------------------------------------------------------------------------


def _shared(step: int, kv_heads: int) -> str:
    """Draw eight query heads, and the keys and values of their KV heads."""
    group, parts = HEADS // kv_heads, [*_tokens(), *_queries(range(HEADS))]
    for kv_head in range(kv_heads):
        parts += _kept(TOP + kv_head * group * ROW, group * ROW - 4)
        if kv_heads > 1 or group > 1:
            parts.append(text(SIDE, _middle(kv_head * group, group), f"KV head {kv_head}", size=12, colour=QUIET))
    for head in range(HEADS):
        parts.append(arrow((GRID - 40, _middle(head, 1) - 5), (GRID - 4, _middle(head, 1) - 5), QUIET))
    return _still(step, *parts, *_bars(kv_heads))


def _looked_at(step: int) -> str:
    """Draw the attention weights that a group's heads give each token."""
    parts = [*_tokens(), *_queries(range(4, 8), start=1)]
    for index, weights in enumerate(WEIGHTS):
        y = TOP + (1 + index) * ROW
        for place, weight in enumerate(weights):
            fill = tint(BLUE, 0.06 + 0.94 * weight)
            shown = f"{weight:.0%}" if weight >= 0.03 else ""
            parts.append(rect(GRID + place * CELL, y, CELL - 4, ROW - 4, fill, radius=2, label=shown, size=11.5))
    below = TOP + 6 * ROW
    parts += _kept(below, 2 * ROW - 4)
    parts.append(text(SIDE, below + ROW + 2, f"KV head {KV_HEAD}", size=12, colour=QUIET))
    parts.append(text(GRID - 12, below + ROW + 2, "all four use this", size=12, colour=QUIET, anchor="end"))
    parts.append(text(SIDE, TOP + 3 * ROW, f"layer {LAYER}", size=12, colour=QUIET))
    return _still(step, *parts, *_bars(2))


def _read(step: int, programs: int) -> str:
    """Draw a group's keys and values, and the programs that read them."""
    parts, shown = _tokens(), 4 // programs
    parts += _kept(TOP, 2 * ROW - 4)
    parts.append(text(SIDE, TOP + ROW, f"KV head {KV_HEAD}", size=12, colour=QUIET))
    wide = 9 * CELL / programs
    for program in range(programs):
        x, y = GRID + program * wide, TOP + 4 * ROW
        name = f"program {program}"
        parts.append(rect(x, y, wide - 8, 4 * ROW - 14, stroke=INK, radius=6))
        parts.append(text(x + 8, y + 16, name, size=11.5))
        for row in range(shown):
            label = f"q {4 + program * shown + row}"
            parts.append(rect(x + 8, y + 24 + row * 17, 60, 14, QUERY, radius=2, label=label, size=11, mono=True))
        if shown > 1:
            rows = f"rows {shown} to 15: empty"
            parts.append(text(x + 80, y + 24 + 4 * 17 - 6, rows, size=11.5, colour=QUIET))
            parts.append(text(x + 80, y + 38, "16 rows × 32 numbers, times 32 × 9 keys: one matmul", size=11.5))
        middle = x + (wide - 8) / 2
        parts.append(arrow((middle, TOP + 2 * ROW), (middle, y - 3), VERMILLION, width=2.5))
    read = 2 * HEAD_DIM * 9 * programs
    parts.append(text(SIDE, TOP + 3 * ROW + 4, f"{read:,} numbers", size=13, bold=True, colour=INK))
    parts.append(text(SIDE, TOP + 3 * ROW + 20, "read", size=12, colour=QUIET))
    return _still(step, *parts, *_bars(2))


def _latents(step: int) -> str:
    """Draw one latent per token, to which the queries of all heads attend."""
    parts = [*_tokens(), *_queries(range(HEADS))]
    y, tall = TOP + 2.5 * ROW, 3 * ROW
    for place in range(9):
        x = GRID + place * CELL
        parts.append(rect(x, y, CELL - 4, tall * 0.78, LATENTS, radius=2, label="latent", size=11))
        parts.append(rect(x, y + tall * 0.8, CELL - 4, tall * 0.2, KEYS, radius=2))
    parts.append(text(SIDE, y + tall * 0.45, "for all heads", size=12, colour=QUIET))
    parts.append(text(SIDE, y + tall * 0.97, "a rotary key", size=12, colour=QUIET))
    for head in range(HEADS):
        start, end = (GRID - 66, _middle(head, 1) - 5), (GRID - 4, y + tall * (0.1 + 0.1 * head))
        parts.append(arrow(start, end, QUIET, width=1))
    for rows, words in (
        (1.7, "each query, times its head's weights, is compared with the latents"),
        (6.6, "the sum of latents, times the head's weights, is its answer"),
    ):
        parts.append(text(GRID + 4.5 * CELL, TOP + rows * ROW, words, size=12, anchor="middle"))
    parts.append(line((16, BARS - 18), (WIDTH - 16, BARS - 18), RULE))
    for row, words in enumerate(("kept per token", "in DeepSeek-V3's layer")):
        parts.append(text(16, BARS + 12 + 16 * row, words, size=12, colour=QUIET))
    for index, (numbers, words) in enumerate(((40960, "with 128 KV heads"), (576, "latent and key"))):
        y, wide = BARS - 4 + index * 24, numbers * SCALE / 80
        parts.append(rect(GRID, y, wide, 16, VERMILLION if index else tint(BLUE, 0.3), radius=2))
        parts.append(text(GRID + 8 + wide, y + 12.5, f"{numbers:,} {words}", size=11.5, bold=index == 1))
    return _still(step, *parts)


def _ranks(step: int) -> str:
    """Draw four GPUs, each with two query heads and the KV head that it keeps."""
    parts, wide = [], (WIDTH - 32) / 4
    for rank in range(4):
        x, kept = 16 + rank * wide, rank // 2
        parts.append(rect(x, 66, wide - 12, 190, stroke=INK, radius=8))
        parts.append(text(x + 12, 88, f"GPU {rank}", bold=True))
        for index in range(2):
            label = f"head {2 * rank + index}"
            parts.append(rect(x + 12 + index * 84, 100, 78, ROW - 4, QUERY, radius=3, label=label, mono=True, size=12))
        copied = rank % 2 == 1
        stroke, dash = (VERMILLION, "4 3") if copied else (None, None)
        parts.append(rect(x + 12, 146, wide - 36, 40, KEYS, radius=3, label=f"keys of KV head {kept}", size=12))
        parts.append(rect(x + 12, 190, wide - 36, 40, VALUES, radius=3, label=f"values of KV head {kept}", size=12))
        if stroke:
            parts.append(rect(x + 8, 142, wide - 28, 92, stroke=stroke, stroke_width=2, dash=dash, radius=4))
            parts.append(text(x + (wide - 12) / 2, 250, "a copy", size=12, anchor="middle", colour="#A63D00"))
        for index in range(2):
            middle = x + 51 + index * 84
            parts.append(arrow((middle, 126), (middle, 143), QUIET))
    parts.append(text(16, 290, "numbers kept per token and layer, on all GPUs together", size=12, colour=QUIET))
    for index, (gpus, numbers) in enumerate(((1, 128), (2, 128), (4, 256), (8, 512))):
        y, fill = 302 + index * 20, VERMILLION if gpus == 4 else tint(BLUE, 0.4)
        parts.append(text(60, y + 12, f"{gpus} GPU{'s' * (gpus > 1)}", size=11.5, anchor="end"))
        parts.append(rect(72, y, numbers * SCALE, 15, fill, radius=2))
        parts.append(text(80 + numbers * SCALE, y + 12, str(numbers), size=11.5))
    return _still(step, *parts)


# ---- their parts ---------------------------------------------------------------------------------


def _still(step: int, *parts: str) -> str:
    titles = (
        "multi-head: keys and values for each", "grouped: two KV heads", "one group's weights",
        "one program per query head", "one program per group", "multi-query: one KV head", "one latent for all",
        "more GPUs than KV heads",
    )  # fmt: skip
    return svg(WIDTH, HEIGHT, text(16, 30, titles[step], size=15, bold=True), *parts, label=CAPTIONS[step])


def _tokens() -> list[str]:
    """Draw the prompt, with a column for each token."""
    parts = [text(GRID - 12, TOP - 14, "the cache holds", size=12, colour=QUIET, anchor="end")]
    for place, token in enumerate(followed().request.prompt):
        x = GRID + place * CELL
        parts.append(rect(x, TOP - 32, CELL - 4, ROW - 4, BLANK, radius=3, label=token.shown, mono=True, size=11))
    return parts


def _queries(heads: range, start: int = 0) -> list[str]:
    """Draw the query heads, with a row for each."""
    return [
        rect(16, TOP + (start + row) * ROW, 92, ROW - 4, QUERY, radius=3, label=f"head {head}", mono=True, size=12)
        for row, head in enumerate(heads)
    ]


def _kept(y: float, tall: float) -> list[str]:
    """Draw the keys and values of one KV head for all tokens."""
    parts = []
    for place in range(9):
        x, key, value = GRID + place * CELL, "k" if tall > 20 else "", "v" if tall > 20 else ""
        half = (CELL - 4) / 2
        parts.append(rect(x, y, half - 1, tall, KEYS, radius=2, label=key, size=11, mono=True))
        parts.append(rect(x + half, y, half, tall, VALUES, radius=2, label=value, size=11, mono=True))
    return parts


def _bars(kv_heads: int) -> list[str]:
    """Draw bars for the numbers that a layer keeps per token with eight, two and one KV heads;
    highlight `kv_heads`.
    """
    parts = [line((16, BARS - 18), (WIDTH - 16, BARS - 18), RULE)]
    parts.append(text(16, BARS + 12, "kept per token", size=12, colour=QUIET))
    parts.append(text(16, BARS + 28, "in a layer", size=12, colour=QUIET))
    for index, count in enumerate((8, 2, 1)):
        y, numbers = BARS - 8 + index * 18, 2 * count * HEAD_DIM
        fill = VERMILLION if count == kv_heads else tint(BLUE, 0.3)
        parts.append(rect(GRID, y, numbers * SCALE, 14, fill, radius=2))
        words = f"{numbers} with {count} KV head{'s' * (count > 1)}"
        parts.append(text(GRID + 8 + numbers * SCALE, y + 11.5, words, size=11.5, bold=count == kv_heads))
    return parts


def _middle(row: float, rows: float) -> float:
    """Return the baseline that centres text vertically in these rows."""
    return TOP + (row + rows / 2) * ROW + 3

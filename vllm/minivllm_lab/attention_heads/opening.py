"""Draw lesson 09's opening: the followed request's eight query heads, with fewer and fewer keys and
values for them.

The attention weights are those of the prompt's last token in one layer of the embedded model, which
has two KV heads. The bars count the numbers that the layer would keep with eight, two or one KV
heads.
"""

from __future__ import annotations

from minivllm_lab.attention_heads import plan
from minivllm_lab.attention_heads.absorption import absorption
from minivllm_lab.attention_heads.siblings import decode_intensity
from minivllm_lab.pictures.drawing import BLANK, QUIET, RULE, arrow, line, rect, svg, text, tint
from minivllm_lab.pictures.followed import followed
from minivllm_lab.pictures.frames import Frames
from minivllm_lab.pictures.palette import BLUE, GREEN, INK, ORANGE, PURPLE, VERMILLION
from minivllm_lab.pictures.roofline import Dot, roofline
from minivllm_simulate.known_models import known_model

LAYER, KV_HEAD = 2, 1
"""The layer and KV head of the weights, counted from 0."""
WEIGHTS = (
    (0.00, 0.00, 0.01, 0.00, 0.02, 0.01, 0.90, 0.04, 0.01),
    (0.02, 0.04, 0.02, 0.78, 0.01, 0.10, 0.03, 0.02, 0.00),
    (0.25, 0.19, 0.33, 0.05, 0.02, 0.04, 0.09, 0.03, 0.01),
    (0.02, 0.07, 0.01, 0.31, 0.00, 0.59, 0.00, 0.00, 0.00),
)
"""The weights of the last token's heads 4 to 7 for each token, to two digits."""
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 32

WIDTH, HEIGHT = 700, 400
GRID, CELL, TOP, ROW = 140, 52, 84, 28
SIDE = GRID + 9 * CELL + 12
BARS, SCALE = 350, 0.75
KEYS, VALUES, QUERY = tint(ORANGE, 0.6), tint(GREEN, 0.45), tint(BLUE, 0.75)
TWICE = "#A63D00"
"""A dark vermillion for words about what is kept or read more than once."""

KINDS = (("multi-head", 8), ("grouped-query", 2), ("multi-query", 1))
TITLES = (
    "Multi-head: keys and values for each", "Grouped-query: two KV heads", "One group's weights",
    "One program per query head", "One program per group", "Multi-query: one KV head",
    "More GPUs than KV heads", "Three ways to serve eight query heads",
)  # fmt: skip
CAPTIONS = (
    "With eight KV heads, each query head has its own: a token leaves 512 numbers in a layer.",
    "Two KV heads: query heads 0 to 3 share one, 4 to 7 the other. 128 numbers.",
    "Heads 4 to 7 share their keys and still see different things: their queries differ.",
    "A program for each query head reads the same keys and values four times.",
    "One program for the group reads them once: four queries are the rows of one matmul.",
    "One KV head for all is multi-query attention: 64 numbers, and eight heads for each key.",
    "Four GPUs, two KV heads: each is kept twice. From here, no GPU's cache gets smaller.",
    "Own keys, shared by four, shared by all: the heads stay, and the cache shrinks.",
)


def frames() -> Frames:
    """Draw the steps of the figure, and one still that sums them up."""
    kinds = [_shared(0, 8), _shared(1, 2), _weights(2), _read(3, 4), _read(4, 1), _shared(5, 1)]
    return Frames([*kinds, _ranks(6), _summary(7)], CAPTIONS)


def stills() -> dict[str, str]:
    """Draw the pictures that stand alone in the text, by the name of their file."""
    dots = (
        ("Llama-2-7B: each head its own", "Llama-2-7b-hf", ORANGE, (12, 16), "start"),
        ("Llama-3.1-8B: groups of 4", "Llama-3.1-8B", ORANGE, (12, 16), "start"),
        ("Llama-3-70B: groups of 8", "Meta-Llama-3-70B", ORANGE, (12, 16), "start"),
        ("DeepSeek-V2-Lite", "DeepSeek-V2-Lite", PURPLE, (12, 16), "start"),
        ("DeepSeek-V3", "DeepSeek-V3", PURPLE, (-14, -4), "end"),
    )
    placed: list[Dot] = [
        (words, decode_intensity(known_model(name)), colour, shift, anchor)
        for words, name, colour, shift, anchor in dots
    ]
    legend = (("keys and values of KV heads", ORANGE), ("a latent for all heads: part two", PURPLE))
    return {
        "bet": plan.bet(),
        "reveal": plan.reveal(),
        "weights": _weights(2),
        "roofline": roofline(placed, legend),
        "copies": _ranks(6),
        "absorption": absorption(),
    }


# ---- the stills ----------------------------------------------------------------------------------


def _shared(step: int, kv_heads: int) -> str:
    """Draw eight query heads, and the keys and values of their KV heads."""
    group = HEADS // kv_heads
    parts = [*_tokens(), *_queries(range(HEADS))]
    for kv_head in range(kv_heads):
        parts += _kept(TOP + kv_head * group * ROW, group * ROW - 4)
        parts.append(text(SIDE, _middle(kv_head * group, group), f"KV head {kv_head}", size=12, colour=QUIET))
    for head in range(HEADS):
        parts.append(arrow((GRID - 28, _middle(head, 1) - 5), (GRID - 4, _middle(head, 1) - 5), QUIET))
    return _still(step, *parts, *_bars(kv_heads))


def _weights(step: int) -> str:
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
    words = "The darker, the more weight a head gives the token; below 3 % without a number."
    return _still(step, *parts, text(GRID, BARS - 2, words, size=12, colour=QUIET))


def _read(step: int, programs: int) -> str:
    """Draw a group's keys and values, and the programs that read them."""
    parts = [*_tokens(), *_kept(TOP, 2 * ROW - 4)]
    shown = 4 // programs
    parts.append(text(SIDE, TOP + ROW, f"KV head {KV_HEAD}", size=12, colour=QUIET))
    wide = 9 * CELL / programs
    y = TOP + 4 * ROW
    for program in range(programs):
        x = GRID + program * wide
        parts.append(rect(x, y, wide - 8, 4 * ROW - 14, stroke=INK, radius=6))
        parts.append(text(x + 8, y + 16, f"program {program}", size=12))
        for row in range(shown):
            label = f"q {4 + program * shown + row}"
            parts.append(rect(x + 8, y + 24 + row * 17, 60, 14, QUERY, radius=2, label=label, size=11, mono=True))
        if shown > 1:
            parts.append(text(x + 84, y + 52, "four rows of a tensor core's 16; twelve are empty", size=12))
        middle = x + (wide - 8) / 2
        colour = VERMILLION if programs > 1 else INK
        parts.append(arrow((middle, TOP + 2 * ROW), (middle, y - 3), colour, width=2.5))
    read = 2 * HEAD_DIM * 9 * programs
    parts.append(text(16, TOP + 3 * ROW, f"{read:,} numbers", bold=True))
    parts.append(text(16, TOP + 3 * ROW + 18, "are read", size=12, colour=QUIET))
    return _still(step, *parts, *_bars(2))


def _ranks(step: int) -> str:
    """Draw four GPUs, each with two query heads and the KV head that it keeps."""
    parts = []
    wide = (WIDTH - 32) / 4
    for rank in range(4):
        x = 16 + rank * wide
        parts += [rect(x, 66, wide - 12, 190, stroke=INK, radius=8), text(x + 12, 88, f"GPU {rank}", bold=True)]
        for index in range(2):
            label = f"head {2 * rank + index}"
            left = x + 12 + index * 70
            parts.append(rect(left, 100, 66, ROW - 4, QUERY, radius=3, label=label, mono=True, size=12))
            parts.append(arrow((left + 33, 126), (left + 33, 143), QUIET))
        for y, fill, kind in ((146, KEYS, "keys"), (190, VALUES, "values")):
            label = f"{kind} of KV head {rank // 2}"
            parts.append(rect(x + 12, y, wide - 36, 40, fill, radius=3, label=label, size=11.5))
        if rank % 2:
            parts.append(rect(x + 7, 141, wide - 26, 94, stroke=VERMILLION, stroke_width=2, dash="4 3", radius=4))
            parts.append(text(x + (wide - 12) / 2, 250, "a copy", size=12, anchor="middle", colour=TWICE))
    parts.append(text(16, 290, "numbers that all GPUs together keep of a token, in a layer", size=12, colour=QUIET))
    for index, (gpus, numbers) in enumerate(((1, 128), (2, 128), (4, 256), (8, 512))):
        words = f"{numbers}: {numbers - 128} are copies" if numbers > 128 else str(numbers)
        parts += _bar(300 + index * 20, numbers, f"{gpus} GPU{'s' * (gpus > 1)}", words)
    return _still(step, *parts)


def _summary(step: int) -> str:
    """Draw the three kinds of attention side by side, with what a token leaves in each."""
    parts = []
    for place, (kind, kv_heads) in enumerate(KINDS):
        left = 20 + place * 230
        parts.append(text(left, 78, kind, bold=True))
        group = HEADS // kv_heads
        for head in range(HEADS):
            x = left + head * 26
            kept = left + (head // group * group + (group - 1) / 2) * 26
            parts += [rect(x, 92, 20, 34, QUERY, radius=3), line((x + 10, 128), (kept + 10, 172), QUIET)]
        for kv_head in range(kv_heads):
            x = left + (kv_head * group + (group - 1) / 2) * 26
            parts += [rect(x, 174, 20, 34, KEYS, radius=3), rect(x, 210, 20, 34, VALUES, radius=3)]
        parts.append(text(left, 278, f"{2 * kv_heads * HEAD_DIM} numbers a token, in a layer"))
        parts.append(text(left, 300, f"{group} heads use each of them" if group > 1 else "1 head uses each of them"))
        parts.append(text(left, 322, f"up to {kv_heads} GPU{'s' * (kv_heads > 1)} without copies"))
    return _still(step, *parts)


# ---- their parts ---------------------------------------------------------------------------------


def _still(step: int, *parts: str) -> str:
    legend = []
    for index, (fill, word) in enumerate(((QUERY, "query"), (KEYS, "keys"), (VALUES, "values"))):
        x = WIDTH - 232 + index * 76
        legend += [rect(x, 19, 20, 14, fill, radius=2), text(x + 26, 31, word, size=12)]
    title = text(16, 30, TITLES[step], size=15, bold=True)
    return svg(WIDTH, HEIGHT, title, *legend, *parts, label=CAPTIONS[step])


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
    half = (CELL - 4) / 2
    for place in range(9):
        x = GRID + place * CELL
        parts.append(rect(x, y, half - 1, tall, KEYS, radius=2, label="k", size=11, mono=True))
        parts.append(rect(x + half, y, half, tall, VALUES, radius=2, label="v", size=11, mono=True))
    return parts


def _bars(kv_heads: int) -> list[str]:
    """Draw bars for the numbers that a layer keeps of a token with eight, two and one KV heads;
    write those of `kv_heads` in bold.
    """
    parts = [line((16, BARS - 18), (WIDTH - 16, BARS - 18), RULE)]
    parts.append(text(16, BARS - 24, "kept of a token, in a layer", size=12, colour=QUIET))
    for index, count in enumerate((8, 2, 1)):
        numbers = 2 * count * HEAD_DIM
        parts += _bar(BARS - 10 + index * 18, numbers, f"KV heads: {count}", f"{numbers} numbers", count == kv_heads)
    return parts


def _bar(y: float, numbers: int, name: str, words: str, bold: bool = False) -> list[str]:
    """Draw a bar whose halves are keys and values, with its name on the left."""
    half = numbers * SCALE / 2
    return [
        text(GRID - 12, y + 12, name, size=12, anchor="end", bold=bold),
        rect(GRID, y, half, 15, KEYS, radius=2),
        rect(GRID + half, y, half, 15, VALUES, radius=2),
        text(GRID + 2 * half + 8, y + 12, words, size=12, bold=bold),
    ]


def _middle(row: float, rows: float) -> float:
    """Return the baseline that centres text vertically in these rows."""
    return TOP + (row + rows / 2) * ROW + 3

"""Lesson 01's cone of dependence: what a key of the third layer is made of, and what an appended
token can change.
"""

from __future__ import annotations

from minivllm_lab.pictures.drawing import BLANK, BORDER, QUIET, line, rect, svg, swatch, text, tint
from minivllm_lab.pictures.followed import Token, followed
from minivllm_lab.pictures.palette import BLUE, VERMILLION

WIDTH, HEIGHT = 700, 330
LEFT, CELL, TALL = 96, 59, 30
LAYERS = ("text", "layer 1", "layer 2", "layer 3")
BOTTOM_Y, STEP = 236, 62
KEY = 6
"""The position whose key of layer 3 is followed."""


def cone() -> str:
    """Draw the tokens from the bottom up, and the lines along which attention carries them."""
    run = followed()
    prompt = run.request.prompt
    appended = len(prompt)
    parts = [text(16, 28, "What is this key made of?", size=15, bold=True)]
    parts += _lines(appended, len(LAYERS) - 1, VERMILLION, dash="3 4", start=appended)
    parts += _lines(KEY, len(LAYERS) - 1, BLUE)
    for layer, name in enumerate(LAYERS):
        parts.append(text(LEFT - 14, _y(layer) + 20, name, anchor="end"))
        for position, token in enumerate((*prompt, run.request.output[0])):
            parts.append(_cell(layer, position, token, appended))
    parts.append(text(_middle(KEY), _y(len(LAYERS) - 1) - 8, "this key", size=12, anchor="middle", colour=BLUE))
    parts.append(text(_middle(appended), _y(len(LAYERS) - 1) - 8, "appended", size=12, anchor="middle"))
    y = BOTTOM_Y + TALL + 20
    for x, colour, words in (
        (LEFT, tint(BLUE, 0.45), "the key is made of it"),
        (LEFT + 170, VERMILLION, "the appended token's own"),
        (LEFT + 420, BLANK, "plays no part in it"),
    ):
        parts.append(swatch(x, y, colour, words, stroke=BORDER))
    label = "A key of layer 3 depends on the tokens up to its own, in every layer. Lines go to the right and up only, "
    return svg(WIDTH, HEIGHT, *parts, label=f"{label}so the appended token reaches nothing but its own column.")


def _lines(position: int, top: int, colour: str, dash: str | None = None, start: int = 0) -> list[str]:
    """Draw the lines into `position` from what it attends to, and so on down to the text."""
    parts = []
    for layer in range(top, 0, -1):
        ends = [position] if layer == top else range(start, position + 1)
        parts += [
            line((_middle(source), _y(layer - 1)), (_middle(end), _y(layer) + TALL), colour, width=1, dash=dash)
            for end in ends
            for source in (range(start, end + 1) if layer > 1 else [end])
        ]
    return parts


def _cell(layer: int, position: int, token: Token, appended: int) -> str:
    top = layer == len(LAYERS) - 1
    if position == appended:
        fill = VERMILLION
    elif position <= KEY and (not top or position == KEY):
        fill = BLUE if top else tint(BLUE, 0.45)
    else:
        fill = BLANK
    label = token.shown if layer == 0 else "k, v"
    return rect(
        LEFT + position * CELL, _y(layer), CELL - 6, TALL, fill, stroke=QUIET, radius=3, label=label, mono=True, size=11
    )


def _middle(position: int) -> float:
    return LEFT + position * CELL + (CELL - 6) / 2


def _y(layer: int) -> float:
    return BOTTOM_Y - layer * STEP

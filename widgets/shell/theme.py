"""Every colour that a widget's picture is drawn in, on a light page and on a dark one.

A picture is drawn once, in the light colours; on a dark page the shell's style puts the others in their place. The
marks' colours are the palette's on both. Words are drawn in colours that have a contrast of at least 4.5 : 1 on the
card, as WCAG 2 AA asks.
"""

from __future__ import annotations

from minivllm_lab.drawing import BLANK, QUIET, RULE
from minivllm_lab.palette import BLUE, GREEN, GREY, INK, ORANGE, PALE, PURPLE, SERIES, SKY, VERMILLION, YELLOW

CARD = "#FFFFFF"
MID = "#B5B8BC"
PINNED = "#7A7F85"
"""The state that was pinned, drawn behind the present one."""
HELD, RESERVED, TINT, NOT_OURS = BLUE, "#C5DBEB", "#F1F7FB", "#F4F4F4"
IDLE = "#EFEFEF"
"""A slot in which nobody is."""
MISSED = "#F3C29B"
"""What stands empty though somebody wants it."""
BROKEN = "#FBE9DF"
"""The ground of a plot where the system is broken."""
RAMP = ("#EDF3F9", "#D3E3F1", "#AFCDE6", "#86B4DA", "#2A75B0", "#005A94")
"""Cells of a map, from little to much, in one hue."""
RAMP_WORDS = (INK, INK, INK, INK, "#FFFFFF", "#FFFFFF")
"""The words in them: as light or as dark as the cell asks, on a dark page too."""

WORDS = {
    BLUE: "#00639B",
    ORANGE: "#8A5A00",
    GREEN: "#00704F",
    VERMILLION: "#B34700",
    PURPLE: "#A2457A",
    SKY: "#1F6FA8",
    GREY: "#6B6B6B",
    YELLOW: "#6F6600",
    MID: QUIET,
    PINNED: "#5F6368",
}
"""Colour of marks -> the colour of words about them."""

DARK = {
    CARD: "#1B1D20",
    INK: "#E8EAED",
    QUIET: "#AEB4BA",
    RULE: "#3D4146",
    MID: "#6A7078",
    PINNED: "#9AA0A6",
    PALE: "#3A3E43",
    BLANK: "#2B2E32",
    IDLE: "#2F3337",
    RESERVED: "#24465E",
    TINT: "#20272D",
    NOT_OURS: "#26292D",
    MISSED: "#7A4A25",
    BROKEN: "#3B251A",
    "#00639B": "#6CB8EE",
    "#8A5A00": "#E8B04A",
    "#00704F": "#4CCFA4",
    "#B34700": "#F59A62",
    "#A2457A": "#E6A3C5",
    "#1F6FA8": "#82C7F2",
    "#6B6B6B": "#ADADAD",
    "#6F6600": "#E6DD62",
    **dict(zip(RAMP, ("#22282E", "#24384A", "#25486A", "#27557A", "#2B679A", "#3079B4"), strict=True)),
}
"""Light colour -> the colour on a dark page; the palette's own colours and black and white words on them stay."""

DARK_LINES = {BLUE: "#3B95D6"}
"""The same for lines only: a thin one needs 3 : 1 on the dark ground of what is broken, too."""

COLOURS = frozenset({*DARK, *SERIES, "#000000"})
"""All that a picture may be drawn in."""


def dark_style(scope: str) -> str:
    """Style rules that turn a picture inside `scope` (a CSS selector) into its dark form."""
    rules = []
    for light, dark in DARK.items():
        marks = ":not(text)" if light == CARD else ""  # white words stand on coloured marks, dark page or not
        rules.append(f'{scope} svg [fill="{light}" i]{marks} {{ fill: {dark} }}')
    for light, dark in {**DARK, **DARK_LINES}.items():
        rules.append(f'{scope} svg [stroke="{light}" i] {{ stroke: {dark} }}')
    return "\n".join(rules)

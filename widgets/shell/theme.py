"""Define every colour of a widget's picture, on light and dark pages.

A picture is drawn once, in the light colours; on a dark page, the shell's style replaces them.
Marks keep the palette's colours on both pages. Text has a contrast of at least 4.5 : 1 on the card,
as WCAG 2 AA requires.
"""

from __future__ import annotations

from minivllm_lab.pictures.drawing import BLANK, QUIET, RULE
from minivllm_lab.pictures.palette import BLUE, GREEN, GREY, INK, ORANGE, PALE, PURPLE, SERIES, SKY, VERMILLION, YELLOW

CARD = "#FFFFFF"
MID = "#B5B8BC"
PINNED = "#7A7F85"
"""The pinned state, drawn behind the current one."""
HELD, RESERVED, TINT, NOT_OURS = BLUE, "#C5DBEB", "#F1F7FB", "#F4F4F4"
IDLE = "#EFEFEF"
"""An empty slot or seat."""
MISSED = "#F3C29B"
"""Space that stays empty while a request waits for it."""
BROKEN = "#FBE9DF"
"""The background of a plot where the system is broken."""
RAMP = ("#EDF3F9", "#D3E3F1", "#AFCDE6", "#86B4DA", "#2A75B0", "#005A94")
"""From little to much, in one hue."""

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
"""The colour of text about marks of each colour."""

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
"""The dark page's form of each light colour; the palette's colours, and black and white text on
them, stay.
"""

DARK_LINES = {BLUE: "#3B95D6"}
"""The same for lines only: a thin line needs 3 : 1 on the dark background of a broken region,
too.
"""

COLOURS = frozenset({*DARK, *SERIES, "#000000"})
"""All colours that a picture may use."""


def dark_style(scope: str) -> str:
    """Return the CSS rules that turn pictures inside the selector `scope` dark."""
    rules = []
    for light, dark in DARK.items():
        marks = ":not(text)" if light == CARD else ""  # white text stands on coloured marks on both pages
        rules.append(f'{scope} svg [fill="{light}" i]{marks} {{ fill: {dark} }}')
    for light, dark in {**DARK, **DARK_LINES}.items():
        rules.append(f'{scope} svg [stroke="{light}" i] {{ stroke: {dark} }}')
    return "\n".join(rules)

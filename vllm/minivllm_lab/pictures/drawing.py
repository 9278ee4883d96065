"""Shapes as SVG text: functions that each return one element, and `svg` that puts them on a white
card.

Coordinates are pixels from the top left corner. Text is at least 11 pixels high. No shape has an
`id`, so that several drawings can share one page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from html import escape

from minivllm_lab.pictures.palette import INK

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
MONO_GLYPH = 0.61
"""The width of a monospaced glyph as a fraction of the font size."""
QUIET = "#5F6368"
"""Axis labels and notes: less loud than INK, and still 5.9 : 1 against white."""
RULE = "#DADCE0"
"""Borders and grid lines."""
BORDER = "#80868B"
"""The outline of blocks, bars and most legends."""
BLANK = "#F1F3F4"
"""The fill of a slot that holds nothing."""
BODY = 13

Point = tuple[float, float]


def svg(width: float, height: float, *elements: str, label: str = "") -> str:
    """Return a white card of this size with `elements` on it, later ones on top; screen readers
    read out `label`.
    """
    size = f'width="{number(width)}" height="{number(height)}" viewBox="0 0 {number(width)} {number(height)}"'
    card = '<rect width="100%" height="100%" rx="8" fill="#FFFFFF"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(label)}" '
        f'font-family="{FONT}">{card}{"".join(elements)}</svg>'
    )


def rect(
    x: float, y: float, width: float, height: float, fill: str = "none", *, stroke: str | None = None,
    stroke_width: float | None = None, radius: float = 0, dash: str | None = None, opacity: float | None = None,
    label: str = "", mono: bool = False, size: float = BODY,
) -> str:  # fmt: skip
    """Return a rectangle with its top left corner at (x, y); `label` is written in its middle,
    black or white by `fill`.
    """
    style = attributes(fill=fill, stroke=stroke, stroke_width=stroke_width, stroke_dasharray=dash, fill_opacity=opacity)
    shape = f"<rect{attributes(x=x, y=y, width=width, height=height, rx=radius or None)}{style}/>"
    if not label:
        return shape
    colour = ink_on(fill) if fill.startswith("#") and opacity is None else INK
    middle = (x + width / 2, y + height / 2 + size * 0.36)
    return shape + text(*middle, label, size=size, colour=colour, anchor="middle", mono=mono, room=width - 4)


def text(
    x: float, y: float, content: str, *, size: float = BODY, colour: str = INK, anchor: str = "start",
    bold: bool = False, mono: bool = False, room: float | None = None,
) -> str:  # fmt: skip
    """Return one line of text with its baseline at y and its `anchor` (start, middle or end) at x.
    Spaces are kept. A monospaced text wider than `room` keeps its height and is condensed.
    """
    style = attributes(font_size=size, fill=colour, text_anchor=None if anchor == "start" else anchor)
    style += attributes(font_weight=600 if bold else None, font_family=MONO if mono else None)
    if mono and room is not None and len(content) * MONO_GLYPH * size > room:
        style += f' textLength="{number(room)}" lengthAdjust="spacingAndGlyphs"'
    kept = ' xml:space="preserve"' if "  " in content or content != content.strip() else ""
    return f"<text{attributes(x=x, y=y)}{style}{kept}>{escape(content, quote=False)}</text>"


def paragraph(x: float, y: float, content: str, width: float, *, size: float = BODY, colour: str = INK) -> str:
    """Return text wrapped into lines no wider than `width`; the first baseline is at y."""
    lines = enumerate(wrapped(content, width, size))
    return "".join(text(x, y + index * size * 1.4, line, size=size, colour=colour) for index, line in lines)


def line(
    start: Point, end: Point, colour: str = QUIET, *, width: float = 1.5, dash: str | None = None, opacity: float = 1
) -> str:
    """Return a straight line."""
    shape = attributes(x1=start[0], y1=start[1], x2=end[0], y2=end[1])
    style = attributes(stroke=colour, stroke_width=width, stroke_dasharray=dash)
    return f"<line{shape}{style}{attributes(stroke_opacity=None if opacity == 1 else opacity)}/>"


def arrow(
    start: Point, end: Point, colour: str = QUIET, *, width: float = 1.5, dash: str | None = None, head: float = 7
) -> str:
    """Return a straight line with a head of `head` pixels at `end`."""
    turn = math.atan2(end[1] - start[1], end[0] - start[0])
    base = (end[0] - head * math.cos(turn), end[1] - head * math.sin(turn))
    side = (head * 0.45 * math.sin(turn), -head * 0.45 * math.cos(turn))
    corners = (end, (base[0] + side[0], base[1] + side[1]), (base[0] - side[0], base[1] - side[1]))
    return line(start, base, colour, width=width, dash=dash) + f'<polygon points="{points(corners)}" fill="{colour}"/>'


def block(
    x: float, y: float, slots: Sequence[str | None], *, width: float = 44, height: float = 28,
    fill: str | Sequence[str] = BLANK, stroke: str = BORDER, name: str = "",
) -> str:  # fmt: skip
    """Return a block of the KV cache: slots side by side, each `width` wide with its token's piece
    of text (None: empty).

    `fill` is one colour for the slots that hold a token, or one for each slot. `name` is written
    above the block.
    """
    fills = [fill] * len(slots) if isinstance(fill, str) else list(fill)
    cells = [
        rect(x + index * width, y, width, height, BLANK if slot is None else colour, stroke="#FFFFFF")
        + (_piece(x + index * width, y, width, height, slot, colour) if slot else "")
        for index, (slot, colour) in enumerate(zip(slots, fills, strict=True))
    ]
    frame = rect(x, y, width * len(slots), height, stroke=stroke, stroke_width=1.5, radius=2)
    title = text(x, y - 5, name, size=11, colour=QUIET) if name else ""
    return "".join(cells) + frame + title


def swatch(x: float, y: float, fill: str, words: str, *, stroke: str | None = QUIET, dash: str | None = None) -> str:
    """Return an entry of a legend: a box in a colour, with its top left corner at (x, y), and what
    the colour means.
    """
    return rect(x, y, 22, 14, fill, stroke=stroke, dash=dash) + text(x + 30, y + 12, words, size=12)


def legend(
    x: float, y: float, apart: float, entries: Iterable[tuple[str, str | None]], *, stroke: str | None = QUIET
) -> list[str]:
    """Return a legend's entries (words, colour) side by side, `apart` pixels from one to the next; what has no
    colour is an empty box with a dashed border.
    """
    return [
        swatch(x + place * apart, y, fill or "#FFFFFF", words, stroke=stroke, dash=None if fill else "4 3")
        for place, (words, fill) in enumerate(entries)
    ]


def _piece(x: float, y: float, width: float, height: float, content: str, fill: str) -> str:
    """Return text in the middle of a slot; as large as fits, from 13 down to 11 pixels."""
    size = max(11.0, min(float(BODY), (width - 4) / max(len(content), 1) / MONO_GLYPH))
    middle = (x + width / 2, y + height / 2 + 4.5)
    return text(*middle, content, size=size, colour=ink_on(fill), anchor="middle", mono=True, room=width - 4)


def tint(colour: str, share: float = 0.25) -> str:
    """Return a pale form of `#RRGGBB`: `share` of it on white, so that black text is legible on it."""
    channels = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(255 + (channel - 255) * share):02X}" for channel in channels)


def wrapped(content: str, width: float, size: float = BODY) -> list[str]:
    """Return the words of `content` in lines no wider than `width`; a unit stays beside its number."""
    lines: list[str] = []
    for word in re.findall(r"\S*\d (?:[%×]|(?:ms|s|GiB)\b)\S*|\S+", content):
        if lines and text_width(f"{lines[-1]} {word}", size) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def number(value: float) -> str:
    """Return a coordinate with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def points(corners: Iterable[Point]) -> str:
    """Return the coordinates of a polygon or a line, as SVG writes them."""
    return " ".join(f"{number(x)},{number(y)}" for x, y in corners)


def attributes(**values: float | str | None) -> str:
    """Return an element's attributes, omitting those that are None; `stroke_width` becomes
    `stroke-width`.
    """
    named: Mapping[str, float | str] = {
        name.replace("_", "-"): value for name, value in values.items() if value is not None
    }
    return "".join(f' {name}="{value if isinstance(value, str) else number(value)}"' for name, value in named.items())


@lru_cache(maxsize=4096)
def text_width(content: str, size: float = BODY) -> float:
    """Return the approximate width of a text in pixels, close enough to decide whether a label
    fits.
    """
    return size * sum(_glyph_width(glyph) for glyph in content)


def _glyph_width(glyph: str) -> float:
    """Return a glyph's width as a fraction of the font size, after DejaVu Sans, the widest font
    that FONT may resolve to.
    """
    if glyph in "iljtfrI.,:;|'()[] !/":
        return 0.36
    if glyph in "mwMW%@":
        return 0.9
    return 0.7 if glyph.isupper() else 0.62


def ink_on(colour: str) -> str:
    """Return black or white, whichever has the higher WCAG 2 contrast ratio on `colour`
    (#RRGGBB).
    """
    light = luminance(colour) + 0.05
    return "#000000" if light / 0.05 > 1.05 / light else "#FFFFFF"


def luminance(colour: str) -> float:
    """Return the relative luminance of `#RRGGBB`, from 0 (black) to 1 (white), as WCAG 2 defines
    it.
    """
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

"""Drawings as SVG text: bars, axes with curves, grids of cells, legends. No dependency, and fast.

Coordinates are pixels from the top left corner, as in SVG. Every drawing is a white card with a title and a
description that a screen reader can say; shapes carry tooltips where they are given a `tip`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from minivllm.lab.drawing import BODY, FONT, QUIET, RULE, Point, attributes, ink_on, number, text_width
from minivllm.lab.drawing import points as corners
from minivllm.lab.palette import INK

MID = "#B5B8BC"
SMALL, HEADING = 11.5, 14


def short(value: float) -> str:
    """A count as people say it: 950, 1.5k, 32k, 2M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def tokens(value: float) -> str:
    """A number of tokens: powers of two as in 512, 8K, 128K, 1M (K = 1024); others as in 1,366 or 12.4K."""
    if value >= 2**20:
        return f"{value / 2**20:.3g}M"
    if value >= 2**13 or (value >= 1024 and value % 1024 == 0):
        return f"{value / 1024:.3g}K" if value < 1000 * 1024 else f"{value / 1024:.0f}K"
    return f"{value:,.0f}"


@dataclass(frozen=True)
class Box:
    """A rectangle: its top left corner and its size."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """The x of its right edge."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """The y of its lower edge."""
        return self.y + self.height


class Drawing:
    """A white card that shapes are put on, one after the other; `render()` gives the SVG text."""

    def __init__(self, width: float, height: float, title: str, description: str = "") -> None:
        self.width, self.height = width, height
        self.title, self.description = title, description
        self._parts: list[str] = []

    def add(self, markup: str) -> None:
        """Put any SVG markup on top."""
        self._parts.append(markup)

    def rect(
        self,
        box: Box,
        fill: str,
        *,
        tip: str = "",
        stroke: str = "none",
        radius: float = 0,
        dash: str = "",
        opacity: float = 1,
    ) -> None:
        """A filled rectangle; one with no width or height is left out."""
        if box.width <= 0 or box.height <= 0:
            return
        shape = attributes(x=box.x, y=box.y, width=box.width, height=box.height, rx=radius or None)
        style = attributes(fill=fill, stroke=stroke, stroke_dasharray=dash or None, fill_opacity=_unless_one(opacity))
        self.add(_element("rect", shape + style, tip))

    def line(self, start: Point, end: Point, colour: str = RULE, *, width: float = 1, dash: str = "") -> None:
        """A straight line."""
        shape = attributes(x1=start[0], y1=start[1], x2=end[0], y2=end[1])
        self.add(_element("line", shape + attributes(stroke=colour, stroke_width=width, stroke_dasharray=dash or None)))

    def polyline(
        self, points: Iterable[Point], colour: str, *, width: float = 2, dash: str = "", tip: str = ""
    ) -> None:
        """A line through `points`."""
        style = attributes(stroke=colour, stroke_width=width, stroke_dasharray=dash or None)
        style += ' fill="none" stroke-linejoin="round" stroke-linecap="round"'
        self.add(_element("polyline", f' points="{corners(points)}"' + style, tip))

    def polygon(self, points: Iterable[Point], fill: str, *, opacity: float = 1, tip: str = "") -> None:
        """A filled shape with these corners."""
        style = attributes(fill=fill, fill_opacity=_unless_one(opacity))
        self.add(_element("polygon", f' points="{corners(points)}"' + style, tip))

    def circle(self, centre: Point, radius: float, fill: str, *, stroke: str = "#FFFFFF", tip: str = "") -> None:
        """A dot, with a white rim unless told otherwise, so that it stands out on a line."""
        shape = attributes(cx=centre[0], cy=centre[1], r=radius)
        self.add(_element("circle", shape + attributes(fill=fill, stroke=stroke, stroke_width=1.5), tip))

    def text(
        self,
        place: Point,
        content: str,
        *,
        size: float = BODY,
        colour: str = INK,
        anchor: str = "start",
        bold: bool = False,
        turn: float = 0,
        halo: bool = False,
    ) -> None:
        """One line of text; `place` is on its baseline, `anchor` start, middle or end, `halo` a white rim."""
        shape = attributes(x=place[0], y=place[1], font_size=size, fill=colour)
        shape += attributes(text_anchor=None if anchor == "start" else anchor, font_weight=600 if bold else None)
        if turn:
            shape += f' transform="rotate({number(turn)} {number(place[0])} {number(place[1])})"'
        if halo:
            shape += ' stroke="#FFFFFF" stroke-width="4" paint-order="stroke" stroke-linejoin="round"'
        self.add(f"<text{shape}>{escape(content, quote=False)}</text>")

    def heading(self, place: Point, content: str, note: str = "") -> None:
        """The title of a part of the picture, with a quieter note after it."""
        rest = attributes(dx=10, font_size=SMALL, fill=QUIET, font_weight=400)
        quieter = f"<tspan{rest}>{escape(note, quote=False)}</tspan>" if note else ""
        shape = attributes(x=place[0], y=place[1], font_size=HEADING, fill=INK, font_weight=600)
        self.add(f"<text{shape}>{escape(content, quote=False)}{quieter}</text>")

    def hatch(self, box: Box, colour: str, *, gap: float = 7) -> None:
        """Slanted lines over `box`: sets an area apart for those who cannot go by colour."""
        lines = []
        offset = gap - box.height
        while offset < box.width:
            left, right = max(offset, 0.0), min(offset + box.height, box.width)
            lower, upper = box.bottom - (left - offset), box.bottom - (right - offset)
            lines.append(f"M{number(box.x + left)} {number(lower)}L{number(box.x + right)} {number(upper)}")
            offset += gap
        if lines and box.height > 0:
            self.add(f'<path d="{"".join(lines)}"{attributes(stroke=colour, stroke_width=1)}/>')

    def render(self) -> str:
        """The whole picture as one `<svg>` element.

        How it shrinks with a page is for the page's style to say: viewers without one take the root's `height: auto`
        for no height, and show nothing.
        """
        size = f'width="{number(self.width)}" height="{number(self.height)}"'
        view = f'viewBox="0 0 {number(self.width)} {number(self.height)}"'
        label = escape(f"{self.title}. {self.description}" if self.description else self.title)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} role="img" aria-label="{label}" '
            f'font-family="{FONT}">'
            f'<rect width="100%" height="100%" rx="8" fill="#FFFFFF"/>{"".join(self._parts)}</svg>'
        )


def _unless_one(value: float) -> float | None:
    return None if value == 1 else value


def _element(name: str, attributes: str, tip: str = "") -> str:
    if not tip:
        return f"<{name}{attributes}/>"
    return f"<{name}{attributes}><title>{escape(tip, quote=False)}</title></{name}>"


@dataclass(frozen=True)
class Segment:
    """A part of a stacked bar, or an entry of a legend."""

    label: str
    value: float
    colour: str
    tip: str = ""
    hatched: bool = False
    outlined: bool = False


def stacked_bar(drawing: Drawing, box: Box, segments: Sequence[Segment], total: float) -> None:
    """A horizontal bar of `segments`; `total` fills the box, what goes beyond it sticks out on the right.

    Labels that fit are written into their segment; a legend must say the others.
    """
    x = box.x
    for segment in segments:
        part = Box(x, box.y, max(segment.value, 0) / total * box.width, box.height)
        drawing.rect(part, segment.colour, tip=segment.tip or segment.label, stroke="#FFFFFF")
        if segment.hatched:
            drawing.hatch(part, MID)
        if text_width(segment.label, SMALL) + 12 <= part.width:
            place = (part.x + part.width / 2, part.y + part.height / 2 + 4)
            drawing.text(place, segment.label, size=SMALL, colour=ink_on(segment.colour), anchor="middle")
        x = part.right


def legend(drawing: Drawing, place: Point, entries: Sequence[Segment], width: float) -> float:
    """Colour keys with labels, flowing into rows no wider than `width`; returns the y below the last row."""
    x, y = place
    for entry in entries:
        room = 18 + text_width(entry.label, SMALL) + 16
        if x > place[0] and x + room - 16 > place[0] + width:
            x, y = place[0], y + 19
        key = Box(x, y - 10, 12, 12)
        stroke = MID if entry.outlined else "none"
        drawing.rect(key, entry.colour, tip=entry.tip, stroke=stroke, radius=2)
        if entry.hatched:
            drawing.hatch(key, MID, gap=5)
        drawing.text((x + 18, y), entry.label, size=SMALL, colour=QUIET)
        x += room
    return y + 19


def cells(
    drawing: Drawing, box: Box, colours: Sequence[str], columns: int, *, gap: float = 1, tips: Sequence[str] = ()
) -> None:
    """A grid of equal cells, filled row by row. Without `tips`, cells of a colour are one shape, which is cheap."""
    rows = math.ceil(len(colours) / columns)
    wide, high = box.width / columns, box.height / max(rows, 1)
    if tips:
        for index, (colour, tip) in enumerate(zip(colours, tips, strict=True)):
            cell = Box(box.x + index % columns * wide, box.y + index // columns * high, wide - gap, high - gap)
            drawing.rect(cell, colour, tip=tip)
        return
    shape = f"h{number(wide - gap)}v{number(high - gap)}h-{number(wide - gap)}z"
    paths: dict[str, list[str]] = {}
    for index, colour in enumerate(colours):
        x, y = box.x + index % columns * wide, box.y + index // columns * high
        paths.setdefault(colour, []).append(f"M{number(x)} {number(y)}{shape}")
    for colour, steps in paths.items():
        drawing.add(f'<path fill="{colour}" d="{"".join(steps)}"/>')


@dataclass(frozen=True)
class Scale:
    """A range of values along an axis, linear or logarithmic."""

    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """Where `value` lies: 0 at `low`, 1 at `high`; outside of both it is below 0 or above 1."""
        if self.log:
            value = max(value, 1e-300)
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values in the range, at most about `most` of them: 1, 2 or 5 times a power of ten."""
        if self.log:
            return self._decades(most)
        span = self.high - self.low
        rough = span / max(most - 1, 1)
        power = 10 ** math.floor(math.log10(rough))
        # No step is wider than the range: one that is may have no multiple inside.
        steps = [power * factor for factor in (1, 2, 5, 10) if power * factor <= span]
        step = next((step for step in steps if step >= rough * 0.999), steps[-1])
        first = math.ceil(self.low / step - 1e-9)
        return [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def doublings(self, most: int = 8) -> list[float]:
        """Powers of two in the range, every second, third ... one where there would be more than `most`."""
        powers = range(math.ceil(math.log2(self.low) - 1e-9), math.floor(math.log2(self.high) + 1e-9) + 1)
        return [float(2**power) for power in powers[:: max(1, math.ceil(len(powers) / most))]]

    def _decades(self, most: int) -> list[float]:
        exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for factors in ((1, 2, 5), (1, 3), (1,)):
            values = [10.0**exponent * factor for exponent in exponents for factor in factors]
            inside = [value for value in values if self.low * 0.999 <= value <= self.high * 1.001]
            if len(inside) <= most:
                return inside
        return inside[:: math.ceil(len(inside) / most)]


class Axes:
    """A plot inside `box`: two scales, and curves that are clipped to them."""

    def __init__(self, drawing: Drawing, box: Box, x: Scale, y: Scale) -> None:
        self.drawing, self.box, self.x, self.y = drawing, box, x, y

    def at(self, x: float, y: float) -> Point:
        """The pixel where the values (`x`, `y`) lie."""
        return self.box.x + self.x.share(x) * self.box.width, self.box.bottom - self.y.share(y) * self.box.height

    def frame(
        self,
        x_label: str,
        y_label: str,
        *,
        x_format: Callable[[float], str] = short,
        y_format: Callable[[float], str] = short,
        x_ticks: Sequence[float] | None = None,
        y_ticks: Sequence[float] | None = None,
    ) -> None:
        """Grid lines, tick labels and the names of both axes; the y name, if any, stands above its axis."""
        box = self.box
        for value in self.y.ticks(5) if y_ticks is None else y_ticks:
            height = self.at(self.x.low, value)[1]
            self.drawing.line((box.x, height), (box.right, height))
            place = (box.x - 7, height + 4)
            self.drawing.text(place, y_format(value), size=SMALL, colour=QUIET, anchor="end")
        for value in self.x.ticks() if x_ticks is None else x_ticks:
            across = self.at(value, self.y.low)[0]
            self.drawing.line((across, box.bottom), (across, box.bottom + 4), colour=QUIET)
            self.drawing.text((across, box.bottom + 17), x_format(value), size=SMALL, colour=QUIET, anchor="middle")
        self.drawing.line((box.x, box.bottom), (box.right, box.bottom), colour=QUIET)
        self.drawing.text((box.x + box.width / 2, box.bottom + 35), x_label, size=SMALL, colour=QUIET, anchor="middle")
        if y_label:
            self.drawing.text((box.x, box.y - 10), y_label, size=SMALL, colour=QUIET)

    def line(
        self,
        xs: Sequence[float],
        ys: Sequence[float],
        colour: str,
        *,
        width: float = 2.5,
        dash: str = "",
        tip: str = "",
    ) -> None:
        """A curve through the values."""
        points = [self.at(x, y) for x, y in zip(xs, ys, strict=True)]
        self._clipped(lambda: self.drawing.polyline(points, colour, width=width, dash=dash, tip=tip))

    def step(
        self,
        xs: Sequence[float],
        ys: Sequence[float],
        colour: str,
        *,
        width: float = 2.5,
        dash: str = "",
        tip: str = "",
    ) -> None:
        """A curve that keeps each value until the next x."""
        stepped_x = [x for x in xs for _ in range(2)][1:]
        stepped_y = [y for y in ys for _ in range(2)][:-1]
        self.line(stepped_x, stepped_y, colour, width=width, dash=dash, tip=tip)

    def area(
        self,
        xs: Sequence[float],
        lows: Sequence[float],
        highs: Sequence[float],
        colour: str,
        *,
        opacity: float = 0.18,
        tip: str = "",
    ) -> None:
        """The surface between two curves; several of them on top of each other make a stacked plot."""
        upper = [self.at(x, y) for x, y in zip(xs, highs, strict=True)]
        lower = [self.at(x, y) for x, y in zip(xs, lows, strict=True)]
        self._clipped(lambda: self.drawing.polygon([*upper, *reversed(lower)], colour, opacity=opacity, tip=tip))

    def bars(
        self, xs: Sequence[float], heights: Sequence[float], colour: str, *, width: float = 12, tips: Sequence[str] = ()
    ) -> None:
        """Upright bars of `width` pixels, standing on the lower edge, each around its x."""
        for index, (x, height) in enumerate(zip(xs, heights, strict=True)):
            across, top = self.at(x, min(height, self.y.high))
            bar = Box(across - width / 2, top, width, self.box.bottom - top)
            self.drawing.rect(bar, colour, tip=tips[index] if tips else "", radius=1)

    def points(
        self, xs: Sequence[float], ys: Sequence[float], colour: str, *, radius: float = 4.5, tips: Sequence[str] = ()
    ) -> None:
        """Dots at the values."""
        for index, (x, y) in enumerate(zip(xs, ys, strict=True)):
            self.drawing.circle(self.at(x, y), radius, colour, tip=tips[index] if tips else "")

    def mark_x(self, value: float, text: str, colour: str = INK, *, dash: str = "4 3", before: bool = False) -> None:
        """A dashed upright line at `value`; its text stands on top, right of it, or left if `before` or out of room.

        Each line break in the text starts a new line.
        """
        across = self.at(value, self.y.low)[0]
        self.drawing.line((across, self.box.y), (across, self.box.bottom), colour=colour, dash=dash, width=1.5)
        rows = text.split("\n")
        wide = max(text_width(row, SMALL) for row in rows) + 8
        left = (before and across - wide > self.box.x) or across + wide > self.box.right
        for index, row in enumerate(rows):
            place = (across - 5 if left else across + 5, self.box.y + 11 + 15 * index)
            self.drawing.text(place, row, size=SMALL, colour=colour, anchor="end" if left else "start", halo=True)

    def mark_y(self, value: float, text: str, colour: str = INK, *, dash: str = "4 3", along: float = 1) -> None:
        """A dashed level line at `value` with its text above it, ending at `along`: 1 is the right end."""
        height = self.at(self.x.low, value)[1]
        self.drawing.line((self.box.x, height), (self.box.right, height), colour=colour, dash=dash, width=1.5)
        place = (self.box.x + along * self.box.width - 2, height - 5)
        self.drawing.text(place, text, size=SMALL, colour=colour, anchor="end", halo=True)

    def _clipped(self, draw: Callable[[], None]) -> None:
        """Draw inside a nested `<svg>`, which cuts off what lies outside, and needs no id as a clip path does."""
        rim = 4
        left, top = number(self.box.x - rim), number(self.box.y - rim)
        wide, high = number(self.box.width + 2 * rim), number(self.box.height + 2 * rim)
        place = f'x="{left}" y="{top}" width="{wide}" height="{high}" viewBox="{left} {top} {wide} {high}"'
        self.drawing.add(f"<svg {place}>")
        draw()
        self.drawing.add("</svg>")

"""Draw axes and curves with conventions that all widgets share.

One axis is swept. Where the system is broken, the plot is shaded and hatched, and words at the edge
name the cause and the service level that is missed. A handle marks the knob's value; dragging it
sets the knob.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from minivllm_lab.drawing import QUIET, Point, number, text_width, wrapped
from minivllm_lab.palette import INK, VERMILLION
from widgets.shell.svg import SMALL, Box, Drawing
from widgets.shell.theme import BROKEN, CARD, MISSED, PINNED

HIT = 9
"""Radius in pixels within which the pointer hits a point of a curve."""
LEAST_ROOM = 110
"""The least width in pixels of a broken region that holds its words."""
ROW, STRIDE, LEVEL_STRIDE = 15, 4, 16
"""Pixels between lines of words, between the points of a curve that words avoid, and between those
of a level line. Covering a level line loses less, so its points lie farther apart.
"""
Number = TypeVar("Number", int, float)
MARGIN, WIDE = 16, 600
"""Pixels around a picture, and the width from which its parts stand side by side."""


def short(value: float) -> str:
    """Format a count: 950, 1.5k, 32k, 2M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def tokens(value: float) -> str:
    """Format a number of tokens: 512, 8K, 128K, 1M for powers of two (K = 1024); 1,366 or 12.4K
    for others.
    """
    if value >= 2**20:
        return f"{value / 2**20:.3g}M"
    if value >= 2**13 or (value >= 1024 and value % 1024 == 0):
        return f"{value / 1024:.3g}K" if value < 1000 * 1024 else f"{value / 1024:.0f}K"
    return f"{value:,.0f}"


def seconds(value: float) -> str:
    """Format a time in a suitable unit: 7.5 ms, 1.2 s, 3,600 s."""
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 999.5 else f"{value:,.0f} s"


def figures(value: float) -> str:
    """Format a number with three significant digits and no exponent: 0.42, 12.3, 1,230."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def counted(count: float, noun: str) -> str:
    """Format a count with its noun: 1 slot, 1,000 slots."""
    return f"{count:,.0f} {noun}{'s' * (round(count) != 1)}"


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic map from values to positions along an axis."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def around(cls, low: float, high: float) -> Scale:
        """Return a logarithmic scale around both values, with ends at thirds of a decade so that it
        rarely changes.
        """
        ends = math.floor(3 * math.log10(low)) / 3, math.ceil(3 * math.log10(high)) / 3
        return cls(10 ** ends[0], 10 ** ends[1], log=True)

    def share(self, value: float) -> float:
        """Return 0 for a value at `low`, 1 at `high`, and less or more outside that range."""
        if self.log:
            value = max(value, 1e-300)
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = 6) -> list[float]:
        """List about `most` round values in the range: 1, 2 or 5 times a power of ten."""
        if self.log:
            return self._decades(most)
        span = self.high - self.low
        rough = span / max(most - 1, 1)
        power = 10 ** math.floor(math.log10(rough))
        # A step wider than the range may have no multiple inside.
        steps = [power * factor for factor in (1, 2, 5, 10) if power * factor <= span]
        step = next((step for step in steps if step >= rough * 0.999), steps[-1])
        first = math.ceil(self.low / step - 1e-9)
        return [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def doublings(self, most: int = 8) -> list[float]:
        """List the powers of two in the range, skipping some if there are more than `most`."""
        powers = range(math.ceil(math.log2(self.low) - 1e-9), math.floor(math.log2(self.high) + 1e-9) + 1)
        return [float(2**power) for power in powers[:: max(1, math.ceil(len(powers) / most))]]

    def powers(self) -> list[float]:
        """List the powers of ten in the range."""
        low, high = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        return [10.0**power for power in range(low, high + 1)]

    def _decades(self, most: int) -> list[float]:
        exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for factors in ((1, 2, 5), (1, 3), (1,)):
            values = [10.0**exponent * factor for exponent in exponents for factor in factors]
            inside = [value for value in values if self.low * 0.999 <= value <= self.high * 1.001]
            if len(inside) <= most:
                return inside
        return inside[:: math.ceil(len(inside) / most)]


class Axes:
    """A plot inside `box`, with curves clipped to it."""

    def __init__(self, drawing: Drawing, box: Box, x: Scale, y: Scale) -> None:
        self.drawing = drawing
        self.box = box
        self.x, self.y = x, y
        self._drawn: list[Point] = []
        self._written: list[Box] = []

    def at(self, x: float, y: float) -> Point:
        """Return the position of (`x`, `y`) in pixels."""
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
        """Draw grid lines, tick labels and the names of both axes; the name of the y axis is above
        it.
        """
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
        tips: Sequence[str] = (),
        group: str = "",
    ) -> None:
        """Draw a curve; with `tips`, the pointer and the arrow keys reach one tooltip for each
        value.
        """
        points = [self.at(x, y) for x, y in zip(xs, ys, strict=True)]
        self._drawn += _along(points)
        self._clipped(lambda: self.drawing.polyline(points, colour, width=width, dash=dash, group=group))
        for point, tip in zip(points, tips, strict=bool(tips)):
            if self.box.y - 1 <= point[1] <= self.box.bottom + 1:
                self.drawing.circle(point, HIT, "transparent", stroke="none", tip=tip, group=group)

    def strips(self, xs: Sequence[Number]) -> Iterator[tuple[Number, Box]]:
        """Yield each value of a logarithmic axis with the strip of the plot that is nearest to it,
        for tooltips.
        """
        edges = [self.x.low, *(math.sqrt(low * high) for low, high in pairwise(xs)), self.x.high]
        for value, low, high in zip(xs, edges, edges[1:], strict=False):
            left, right = (self.at(edge, self.y.low)[0] for edge in (low, high))
            yield value, Box(left, self.box.y, max(0.0, right - left), self.box.height)

    def points(
        self, xs: Sequence[float], ys: Sequence[float], colour: str, *, radius: float = 4.5, tips: Sequence[str] = ()
    ) -> None:
        """Draw dots at the values."""
        for index, (x, y) in enumerate(zip(xs, ys, strict=True)):
            self.drawing.circle(self.at(x, y), radius, colour, tip=tips[index] if tips else "")

    def mark_x(self, value: float, colour: str = INK, *, dash: str = "4 3") -> None:
        """Draw a dashed vertical line at `value`."""
        across = self.at(value, self.y.low)[0]
        self.drawing.line((across, self.box.y), (across, self.box.bottom), colour=colour, dash=dash, width=1.5)

    def mark_y(
        self, value: float, text: str, colour: str = INK, *, dash: str = "4 3", along: float = 1, below: bool = False
    ) -> None:
        """Draw a dashed horizontal line at `value`, with text above or below it that ends at
        `along` (1: right end).
        """
        height = self.at(self.x.low, value)[1]
        self._drawn += _along([(self.box.x, height), (self.box.right, height)], LEVEL_STRIDE)
        self.drawing.line((self.box.x, height), (self.box.right, height), colour=colour, dash=dash, width=1.5)
        place = (self.box.x + along * self.box.width - 2, height + 14 if below else height - 5)
        self.drawing.text(place, text, size=SMALL, colour=colour, anchor="end", halo=True)

    def broken(self, low: float | None, high: float | None, words: str) -> None:
        """Shade the values from `low` to `high` of the swept axis, where the system breaks; None
        stands for an end of the axis.

        `words` at the edge name the cause and the service level that is missed. Nothing is drawn if
        no value of the axis is broken. Call it before drawing the curves.
        """
        self.shade(low, high, words)
        area = self._region(low, high)
        if area.width > 0:
            self._edge_words(area, words, high is None)

    def shade(self, low: float | None, high: float | None, words: str) -> None:
        """Shade a broken region without its label; where regions overlap, shade all of them before
        drawing any `edge`.
        """
        area = self._region(low, high)
        if area.width <= 0:
            return
        with self.drawing.layer(broken=words):
            self.drawing.rect(area, BROKEN)
            self.drawing.hatch(area, MISSED, gap=9)
            self._edge_line(area, high is None)

    def edge(self, low: float | None, high: float | None, words: str) -> None:
        """Draw the edge of a shaded region with its words, on top of the shading of others."""
        area = self._region(low, high)
        if area.width > 0:
            self._edge_line(area, high is None)
            self._edge_words(area, words, high is None)

    def _edge_line(self, area: Box, after: bool) -> None:
        edge = area.x if after else area.right
        self.drawing.line((edge, area.y), (edge, area.bottom), colour=VERMILLION, width=2)

    def _region(self, low: float | None, high: float | None) -> Box:
        left = self.at(self.x.low if low is None else max(low, self.x.low), self.y.low)[0]
        right = self.at(self.x.high if high is None else min(high, self.x.high), self.y.low)[0]
        return Box(left, self.box.y, right - left, self.box.height)

    def _edge_words(self, area: Box, words: str, after: bool) -> None:
        """Write the words inside the broken region or, if it is too narrow, beside it with an
        arrow.
        """
        edge = area.x if after else area.right
        if words and area.width < LEAST_ROOM:
            words, after = f"{words} →" if after else f"← {words}", not after
        room = (self.box.right - edge if after else edge - self.box.x) - 14
        self.write(words, edge + 7 if after else edge - 7, room, after=after)

    def write(self, words: str, x: float, room: float, *, after: bool) -> None:
        """Write why the system breaks, in lines no wider than `room` pixels that begin or end at
        `x`.

        The lines are placed where no other words are and the fewest curves run, including curves
        drawn later, and as high as possible.
        """
        lines = wrapped(words, max(room, 60) * 0.92, SMALL)
        if lines:
            self.drawing.last(lambda: self._write(lines, x, after))

    def keep_clear(self, box: Box) -> None:
        """Keep this box free of the words that `write` draws."""
        self._written.append(box)

    def _write(self, lines: Sequence[str], x: float, after: bool) -> None:
        widths = [text_width(line, SMALL) * (1 if row == 0 else 0.93) for row, line in enumerate(lines)]
        wide, high = max(widths) + 6, ROW * len(lines) + 3
        left = x - 3 if after else x + 3 - wide
        heights = sorted(y for at, y in self._drawn if left <= at <= left + wide)

        def in_the_way(box: Box) -> tuple[bool, int]:
            crossed = bisect(heights, box.bottom) - bisect(heights, box.y)
            return any(_overlap(box, other) for other in self._written), crossed

        lowest = max(0, int(self.box.height - high - 2))
        tops = range(1, lowest + 2, STRIDE)
        place = min((Box(left, self.box.y + top, wide, high) for top in tops), key=in_the_way)
        self.keep_clear(place)
        for row, long in enumerate(widths):
            ground = Box(x - 3 if after else x - long - 3, place.y + ROW * row, long + 6, ROW + 2)
            self.drawing.rect(ground, CARD, opacity=0.88)
        for row, line in enumerate(lines):
            at, anchor = (x, place.y + 13 + ROW * row), "start" if after else "end"
            self.drawing.text(at, line, size=SMALL, colour=VERMILLION, anchor=anchor, bold=row == 0)

    def here(self, value: float, knob: str, words: str = "") -> None:
        """Draw the handle at `value`. Dragging it in the plot sets `knob`, an argument of the
        widget's sweep.

        Call it after drawing the curves; an axis has one handle.
        """
        scale = {"low": f"{self.x.low!r}", "high": f"{self.x.high!r}", "log": "1" if self.x.log else "0"}
        with self.drawing.layer(drag=knob, **scale):
            self.drawing.rect(self.box, "transparent")
        x = min(max(self.at(value, self.y.low)[0], self.box.x), self.box.right)
        self.drawing.line((x, self.box.y), (x, self.box.bottom), colour=INK, width=2)
        self.drawing.circle((x, self.box.bottom), 7, INK)
        if words:
            wide = text_width(words, SMALL) + 12
            left = x + wide > self.box.right
            self.keep_clear(Box(x - wide if left else x, self.box.bottom - 20, wide, 20))
            place_ = (x - 8 if left else x + 8, self.box.bottom - 8)
            self.drawing.text(place_, words, size=SMALL, anchor="end" if left else "start", bold=True, halo=True)

    def also_here(self, value: float) -> None:
        """Mark the handle's value in a smaller plot, which has no handle of its own."""
        x = self.at(value, self.y.low)[0]
        self.drawing.line((x, self.box.y), (x, self.box.bottom), colour=INK, width=1.5)

    def pinned(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        """Draw a curve of the pinned state, thin and dashed, behind the current one."""
        self.line(xs, ys, PINNED, width=1.5, dash="5 4", group="pinned")

    def _clipped(self, draw: Callable[[], None]) -> None:
        """Draw inside a nested `<svg>`, which clips without the id that a clip path would need."""
        rim = 4
        left, top = number(self.box.x - rim), number(self.box.y - rim)
        wide, high = number(self.box.width + 2 * rim), number(self.box.height + 2 * rim)
        place = f'x="{left}" y="{top}" width="{wide}" height="{high}" viewBox="{left} {top} {wide} {high}"'
        self.drawing.add(f"<svg {place}>")
        draw()
        self.drawing.add("</svg>")


def _along(points: Sequence[Point], stride: int = STRIDE) -> Iterator[Point]:
    """Yield points on a line through `points`, at most `stride` pixels apart."""
    for (x, y), (to_x, to_y) in pairwise(points):
        count = min(int(math.hypot(to_x - x, to_y - y) // stride) + 1, 400)
        for part in range(count):
            yield x + (to_x - x) * part / count, y + (to_y - y) * part / count


def _overlap(box: Box, other: Box) -> bool:
    return box.x < other.right and other.x < box.right and box.y < other.bottom and other.y < box.bottom


Key = tuple[str, str, str, float]
"""A curve's name, colour, dashes and width."""


def draw_keys(drawing: Drawing, y: float, keys: Iterable[Key]) -> float:
    """Draw the key of the curves in as many rows as needed, and return the y of the last."""
    x: float = MARGIN
    for words, colour, dash, wide in keys:
        room = 22 + text_width(words, SMALL)
        if x > MARGIN and x + room > drawing.width - MARGIN:
            x, y = MARGIN, y + 17
        drawing.line((x, y - 4), (x + 18, y - 4), colour=colour, dash=dash, width=wide)
        drawing.text((x + 22, y), words, size=SMALL, colour=QUIET)
        x += room + 9
    return y


def three_boxes(width: float, y: float, high: float, *, large: float) -> tuple[Box, Box, Box]:
    """Place a large plot with two small ones beside it, or all three in one column if the picture
    is narrow.
    """
    if width >= WIDE:
        left = round(width * large)
        right = left + 66
        small = (high - 36) / 2
        upper = Box(right, y, width - right - MARGIN, small)
        return Box(60, y, left - 60, high), upper, Box(right, y + high - small, upper.width, small)
    whole = width - 60 - MARGIN
    return Box(60, y, whole, 170), Box(60, y + 240, whole, 70), Box(60, y + 344, whole, 70)

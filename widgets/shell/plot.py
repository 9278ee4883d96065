"""Draw axes and curves with conventions that all widgets share.

One axis is swept. Where the system is broken, the plot is shaded and hatched, and words at the edge
name the cause and the service level that is missed. A handle marks the knob's value; dragging it
sets the knob.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

from minivllm_lab.pictures.drawing import QUIET, Point, number, text_width, wrapped
from minivllm_lab.pictures.palette import INK, VERMILLION
from widgets.shell.svg import BOLD, SMALL, Box, Drawing, text_box
from widgets.shell.theme import BROKEN, CARD, MISSED, PINNED

HIT = 9
"""Radius in pixels within which the pointer hits a point of a curve."""
ROW, STRIDE, LEVEL_STRIDE = 15, 4, 16
"""Pixels between lines of words, between the points of a curve that words avoid, and between those
of a level line. Covering a level line loses less, so its points lie farther apart.
"""
LABELS, MARKS, EDGES, NOTES = range(4)
"""The order in which words look for a place: the last have the most places to choose from."""
Number = TypeVar("Number", int, float)
VALUE = 24
"""The text size of the value at the handle, the largest in a picture."""
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


def percent(share: float, digits: int = 0) -> str:
    """Format a share as a percentage that is never rounded to 0 % or 100 %: 90 %, 99.5 %."""
    if 0 < share < 1 and not 0 < round(share, digits + 2) < 1:
        share, digits = min(max(share, 1e-4), 1 - 1e-4), 2
    return f"{share * 100:.{digits}f} %"


def figures(value: float) -> str:
    """Format a number with three significant digits and no exponent: 0.42, 12.3, 1,230."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def modelled(error: str | None) -> str:
    """Say that times are modelled and, once it is known, how far off the model is."""
    return f"modelled, {error}" if error else "modelled"


def counted(count: float, noun: str) -> str:
    """Format a count with its noun: 1 slot, 1,000 slots."""
    return f"{count:,.0f} {noun}{'s' * (round(count) != 1)}"


def counted_rate(rate: float) -> str:
    """Format a rate of requests: 1 request a second, 1,000 requests a second."""
    return f"{rate:,g} request{'s' * (rate != 1)} a second"


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


@dataclass(frozen=True)
class Lines:
    """Lines of words that begin, end or have their middle at `x`, from `top` downwards."""

    lines: Sequence[str]
    x: float
    top: float
    anchor: str
    bold: int = 99
    """The number of lines that are bold."""
    size: float = SMALL

    @property
    def box(self) -> Box:
        """Return the rectangle that the lines take."""
        longest = max(self.lines, key=lambda line: text_width(line, self.size))
        first = text_box((self.x, self.top + self.size), longest, self.size, self.anchor, bold=True)
        return Box(first.x, first.y, first.width, first.height + ROW * (len(self.lines) - 1))


class Axes:
    """A plot inside `box`, with curves clipped to it."""

    def __init__(self, drawing: Drawing, box: Box, x: Scale, y: Scale) -> None:
        self.drawing = drawing
        self.box = box
        self.x, self.y = x, y
        self._drawn: dict[int, list[float]] = {}
        """The heights of lines, by column of STRIDE pixels."""
        self.edges: list[float] = []
        """The left and right ends of broken regions, in pixels."""
        self._grounds: list[tuple[Box, str]] = []
        """Regions with the colour of words' rims in them; "" stands for no rim."""

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
            words = x_format(value)
            place = (min(across, self.drawing.width - 5 - text_width(words, SMALL) / 2), box.bottom + 17)
            self.drawing.text(place, words, size=SMALL, colour=QUIET, anchor="middle")
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
        self._note(points)
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

    def tips(self, xs: Sequence[Number], words: Callable[[Number], str]) -> None:
        """Add a tooltip everywhere in the plot, with the words about the nearest value."""
        for value, strip in self.strips(xs):
            self.drawing.rect(strip, "transparent", tip=words(value))

    def points(self, xs: Sequence[float], ys: Sequence[float], colour: str, *, radius: float = 4.5) -> None:
        """Draw dots at the values."""
        for x, y in zip(xs, ys, strict=True):
            self.drawing.circle(self.at(x, y), radius, colour)

    def mark_y(self, value: float, text: str, colour: str = INK, *, dash: str = "4 3") -> None:
        """Draw a dashed horizontal line at `value`, with text above or below it where there is room."""
        height = self.at(self.x.low, value)[1]
        self._note([(self.box.x, height), (self.box.right, height)], LEVEL_STRIDE)
        self.drawing.line((self.box.x, height), (self.box.right, height), colour=colour, dash=dash, width=1.5)
        places = [
            Lines([text], self.box.right - 2 - back / 20 * self.box.width, top, "end")
            for back in range(15)
            for top in (height - ROW - 2, height + 2)
        ]
        shown = [place for place in places if place.box.bottom <= self.box.bottom and place.box.x >= self.box.x]
        self.drawing.last(lambda: self._put(shown if text else [], colour, bold=False), MARKS)

    def broken(self, low: float | None, high: float | None, words: str) -> None:
        """Shade the values from `low` to `high` of the swept axis, where the system breaks; None stands for
        an end of the axis.

        `words` name the cause and the service level that is missed. Nothing is drawn if no value of
        the axis is broken. Call it before drawing the curves.
        """
        self.shade(low, high, words)
        self.explain(low, high, words)

    def shade(self, low: float | None, high: float | None, words: str = "", above: float | None = None) -> None:
        """Shade a broken region, perhaps only above a value, without writing the words, which are only attached
        to it.
        """
        area = self._region(low, high)
        if above is not None:
            area = replace(area, height=self.at(self.x.low, above)[1] - area.y)
        if area.width <= 0:
            return
        with self.drawing.layer(broken=words):
            self.drawing.rect(area, BROKEN)
            self.drawing.hatch(area, MISSED, gap=9)
        self._grounds.append((area, BROKEN))
        edges = [area.x] * (low is not None) + [area.right] * (high is not None)
        self.edges += edges
        for x in edges:
            self._note([(x, area.y), (x, area.bottom)])
        self.drawing.last(lambda: self._draw_edges(area, edges))

    def _draw_edges(self, area: Box, edges: Sequence[float]) -> None:
        for x in edges:
            self.drawing.line((x, area.y), (x, area.bottom), colour=VERMILLION, width=2)

    def tint(self, low: float | None, high: float | None, words: str, colour: str) -> None:
        """Shade a region where the system runs but at a loss, in a colour of its own, with words attached to it."""
        area = self._region(low, high)
        if area.width <= 0:
            return
        self._grounds.append((area, ""))
        with self.drawing.layer(broken=words):
            self.drawing.rect(area, colour, opacity=0.16)
        for value in (low, high):
            if value is not None:
                across = self.at(value, self.y.low)[0]
                self._note([(across, area.y), (across, area.bottom)], LEVEL_STRIDE)
                self.drawing.line((across, area.y), (across, area.bottom), colour=colour, dash="4 3", width=1.5)

    def explain(self, low: float | None, high: float | None, words: str, colour: str = VERMILLION) -> None:
        """Write words about a region inside it or, if there is no room, beside it with an arrow."""
        area = self._region(low, high)
        if area.width > 0 and words:
            self.drawing.last(lambda: self._put(self._region_places(area, words), colour), EDGES)

    def _region(self, low: float | None, high: float | None) -> Box:
        left = self.at(self.x.low if low is None else max(low, self.x.low), self.y.low)[0]
        right = self.at(self.x.high if high is None else min(high, self.x.high), self.y.low)[0]
        return Box(left, self.box.y, right - left, self.box.height)

    def _region_places(self, area: Box, words: str) -> Iterator[Lines]:
        """Yield the places for words about a region, the best first: beside its own edge, up to the
        next edge inside it; anywhere inside it; outside its edge with an arrow. Words that need many
        lines there give way to the first words alone.
        """
        ends = sorted([self.box.x, *self.edges, self.box.right])
        within = [x for x in ends if area.x + 1 < x < area.right - 1]
        before = max((x for x in ends if x < area.x - 1), default=area.x)
        after = min((x for x in ends if x > area.right + 1), default=area.right)
        from_left = area.x > self.box.x + 1
        own = [(area.x, within[0]) if from_left else (within[-1], area.right)] if within else []
        inside = [("{}", *part, from_left) for part in (*own, (area.x, area.right))]
        beside = [("← {}", area.right, after, True), ("{} →", before, area.x, False)]
        for parts in (inside, beside):
            for content, most in dict.fromkeys([(words, 4), (re.split("[:;]", words)[0], 4), (words, 99)]):
                for shape, left, right, near in parts:
                    places = self._wrapped_places(shape.format(content), left, right, near)
                    far = "" if parts is inside else "end" if near else "start"
                    yield from (each for each in places if len(each.lines) <= most and each.anchor != far)

    def _wrapped_places(self, words: str, left: float, right: float, after: bool) -> Iterator[Lines]:
        """Yield lines that begin at the left or end at the right, in few lines or in many, from the
        top down.
        """
        room = right - left - 12
        ends = [(left + 7, "start"), (right - 7, "end")]
        for wide in (room, *(wide for wide in (240.0, 170.0, 120.0, 80.0) if wide < room - 20)):
            lead = re.split("(?<=[:;])", words)[0]
            lines = balanced(lead, wide / BOLD)
            bold = len(lines)
            lines = [*lines, *balanced(words[len(lead) :], wide / BOLD)]
            if max((BOLD * text_width(line, SMALL) for line in lines), default=math.inf) > room:
                continue
            for x, anchor in ends if after else ends[::-1]:
                tops = range(2, int(self.box.height - ROW * len(lines)), 2 * STRIDE)
                yield from (Lines(lines, x, self.box.y + top, anchor, bold) for top in tops)

    def _put(self, places: Iterable[Lines], colour: str, *, bold: bool = True) -> None:
        """Write the lines at the first place that touches no other words and no curve, or at the one
        that crosses curves least; write nothing if each place touches other words.
        """
        best: tuple[int, Lines | None] = (1_000_000, None)
        around = Box(self.box.x, self.box.y - 2 * ROW, self.box.width, self.box.height + 4 * ROW)
        near = [other for other in self.drawing.words if other.overlaps(around)]
        for place in places:
            box = place.box
            if any(box.overlaps(other) for other in near):
                continue
            crossed = self._crossed(box, best[0])
            if crossed < best[0]:
                best = (crossed, place)
            if not crossed:
                break
        if best[1]:
            self._write(best[1], colour, bold)

    def _write(self, place: Lines, colour: str, bold: bool) -> None:
        """Write the lines with a rim in the colour of the ground, which wipes out hatching."""
        ground = next((colour for area, colour in self._grounds if place.box.overlaps(area)), CARD)
        for row, line in enumerate(place.lines):
            at, strong = (place.x, place.top + place.size + ROW * row), bold and row < place.bold
            self.drawing.text(at, line, size=place.size, colour=colour, anchor=place.anchor, bold=strong, halo=ground)

    def _note(self, points: Sequence[Point], stride: int = STRIDE) -> None:
        """Note where a line runs, so that words keep off it."""
        for x, y in _along(points, stride):
            self._drawn.setdefault(int(x // STRIDE), []).append(y)

    def _crossed(self, box: Box, most: int) -> int:
        """Count the points of lines inside a box, and stop at `most`."""
        low, high = box.y - 2, box.bottom + 2
        count = 0
        for column in range(int((box.x - 2) // STRIDE), int((box.right + 2) // STRIDE) + 1):
            count += sum(low < y < high for y in self._drawn.get(column, ()))
            if count >= most:
                break
        return count

    def label(self, point: Point, words: str, colour: str = INK, *, bold: bool = True, size: float = SMALL) -> None:
        """Write words beside a point, in pixels, wherever there is room in the plot; only the first line is bold."""
        x, y = point
        lines = words.split("\n")
        high = 1.25 * size + ROW * (len(lines) - 1)
        sides = [(x + 10, "start"), (x - 10, "end"), (x, "middle")]
        tops = (y + 6, y - high - 6, y - high / 2, y + 16, y - high - 16)
        places = [Lines(lines, at, top, anchor, 1, size) for top in tops for at, anchor in sides]
        inside = [place for place in places if self._holds(place.box)]
        self.drawing.last(lambda: self._put(inside, colour, bold=bold), LABELS)

    def name(self, xs: Sequence[float], ys: Sequence[float], words: str, colour: str, *, bold: bool = True) -> None:
        """Write a curve's name on the curve, where it covers the least of the others."""
        points = [self.at(x, y) for x, y in zip(xs, ys, strict=True)]
        places = [Lines([words], x, y - 0.6 * SMALL, "middle") for x, y in points]
        inside = [place for place in places if self._holds(place.box)]
        self.drawing.last(lambda: self._put(inside, colour, bold=bold), LABELS)

    def _holds(self, box: Box) -> bool:
        across = self.box.x <= box.x and box.right <= self.box.right
        return across and self.box.y <= box.y and box.bottom <= self.box.bottom

    def here(self, value: float, knob: str, words: str = "", *, line: bool = True) -> None:
        """Draw the handle at `value`, by default on a line. Dragging it in the plot sets `knob`, an argument of the
        widget's sweep.

        Call it after drawing the curves; an axis has one handle.
        """
        scale = {"low": f"{self.x.low!r}", "high": f"{self.x.high!r}", "log": "1" if self.x.log else "0"}
        with self.drawing.layer(drag=knob, **scale):
            self.drawing.rect(self.box, "transparent")
        x = min(max(self.at(value, self.y.low)[0], self.box.x), self.box.right)
        if line:
            self.drawing.line((x, self.box.y), (x, self.box.bottom), colour=INK, width=2)
            self._note([(x, self.box.y), (x, self.box.bottom)])
        self.drawing.circle((x, self.box.bottom), 7, INK)
        sides = [(x + 8, "start"), (x - 8, "end")]
        places = [
            Lines([words], at, top, anchor)
            for top in (self.box.bottom - 20, self.box.y + 2, self.box.y + self.box.height / 2)
            for at, anchor in sides
        ]
        inside = [place for place in places if words and self._holds(place.box)]
        self.drawing.last(lambda: self._put(inside, INK), LABELS)

    def also_here(self, value: float) -> None:
        """Mark the handle's value in a smaller plot, which has no handle of its own."""
        x = self.at(value, self.y.low)[0]
        self._note([(x, self.box.y), (x, self.box.bottom)])
        self.drawing.line((x, self.box.y), (x, self.box.bottom), colour=INK, width=1.5)

    def pinned(self, xs: Sequence[float], ys: Sequence[float], here: float) -> None:
        """Draw the pinned state's curve and handle, thin and dashed, behind the current ones."""
        self.line(xs, ys, PINNED, width=1.5, dash="5 4", group="pinned")
        top, bottom = self.at(here, self.y.high), self.at(here, self.y.low)
        self._note([top, bottom], LEVEL_STRIDE)
        self.drawing.line(top, bottom, colour=PINNED, dash="2 4", width=1.5)
        self.drawing.circle(bottom, 5, PINNED)

    def _clipped(self, draw: Callable[[], None]) -> None:
        """Draw inside a nested `<svg>`, which clips without the id that a clip path would need."""
        rim = 4
        left, top = number(self.box.x - rim), number(self.box.y - rim)
        wide, high = number(self.box.width + 2 * rim), number(self.box.height + 2 * rim)
        place = f'x="{left}" y="{top}" width="{wide}" height="{high}" viewBox="{left} {top} {wide} {high}"'
        self.drawing.add(f"<svg {place}>")
        draw()
        self.drawing.add("</svg>")


@lru_cache(maxsize=4096)
def balanced(words: str, width: float) -> list[str]:
    """Wrap words into as few lines as `width` allows, of about equal width."""
    lines = wrapped(words, width, SMALL)
    tried = (wrapped(words, narrower, SMALL) for narrower in range(40, int(width), 8))
    return next((even for even in tried if len(even) <= len(lines)), lines)


def _along(points: Sequence[Point], stride: int = STRIDE) -> Iterator[Point]:
    """Yield points on a line through `points`, at most `stride` pixels apart."""
    for (x, y), (to_x, to_y) in pairwise(points):
        count = min(int(math.hypot(to_x - x, to_y - y) // stride) + 1, 400)
        for part in range(count):
            yield x + (to_x - x) * part / count, y + (to_y - y) * part / count


def hidden_note(drawing: Drawing, box: Box) -> None:
    """Write in the middle of a box, or where other words leave room, that its content is hidden
    until the reader guesses, unless the box is too small. Call it outside `drawing.answer()`.
    """
    words, middle = "hidden until you guess", box.x + box.width / 2
    if text_width(words, SMALL) > box.width:
        return
    tops = sorted(
        range(round(box.y), round(box.bottom) - ROW, STRIDE), key=lambda top: abs(top - box.y - box.height / 2)
    )

    def draw() -> None:
        places = [text_box((middle, top + 12), words, SMALL, "middle") for top in tops]
        free = (place for place in places if not any(place.overlaps(other) for other in drawing.words))
        y = next(free, places[0]).bottom - 0.2 * SMALL
        drawing.add('<g data-asking="1" visibility="hidden">')
        drawing.text((middle, y), words, size=SMALL, colour=QUIET, anchor="middle", halo=True)
        drawing.add("</g>")

    drawing.last(draw, NOTES)

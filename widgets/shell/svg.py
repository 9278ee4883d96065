"""Drawings as SVG text: shapes, stacked bars, legends. No dependency, and fast.

Coordinates are pixels from the top left corner, as in SVG. A drawing has a title and a description that a screen
reader can say. What the shell does with a drawing is written into it as data attributes, and no viewer without the
shell is disturbed by them:

    data-tip      what is said where the pointer or the arrow keys stand
    data-group    marks of one group light up together, while the others fade
    data-at       the first and the last frame in which a mark is seen, when the drawing plays
    data-answer   hidden until the reader has guessed
    data-drag     a plot in which the pointer sets a knob
    data-broken   a region in which the system breaks, and why
    data-frames   on the whole drawing: the captions of its frames

Colours are those of `theme.COLOURS`, each with the form that it takes on a dark page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from html import escape

from minivllm_lab.drawing import BODY, FONT, QUIET, RULE, Point, attributes, ink_on, number, text_width, wrapped
from minivllm_lab.drawing import points as corners
from minivllm_lab.palette import INK
from widgets.shell.theme import CARD, DARK, MID, WORDS

SMALL, HEADING = 12, 14.5
"""Sizes of text in pixels; drawings are not scaled down, but drawn for the width that there is."""

AT, HIDDEN = re.compile(r' data-at="\d+ (\d+)"'), ' style="display:none"'


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
    """A card that shapes are put on, one after the other; `render()` gives the SVG text."""

    def __init__(self, width: float, height: float, title: str, description: str = "") -> None:
        self.width, self.height = width, height
        self.title, self.description = title, description
        self._parts: list[str] = []
        self._layers: list[str] = []
        self._on_top: list[str] = []
        self._last: list[tuple[list[str], Callable[[], None]]] = []
        self._frames: tuple[str, ...] = ()
        self._still = False

    def add(self, markup: str) -> None:
        """Put any SVG markup on top."""
        self._parts.append(markup)

    @contextmanager
    def layer(self, **data: str) -> Iterator[None]:
        """What is drawn inside belongs together: `layer(group="7")`, `layer(at="3 9")`."""
        self._layers.append(f"<g{_data(data)}>")
        self.add(self._layers[-1])
        yield
        self._layers.pop()
        self.add("</g>")

    @contextmanager
    def on_top(self) -> Iterator[None]:
        """What is drawn inside lies above all else, also above what is drawn later, and stays in its layers."""
        below, self._parts = self._parts, []
        yield
        self._on_top += [*self._layers, *self._parts, "</g>" * len(self._layers)]
        self._parts = below

    def last(self, draw: Callable[[], None]) -> None:
        """Have `draw` called when all else is drawn, and so is known. It draws on top, in the layers of now."""
        self._last.append((list(self._layers), draw))

    def answer(self) -> AbstractContextManager[None]:
        """What is drawn inside is hidden until the reader has answered the widget's question."""
        return self.layer(answer="1")

    def play(self, frames: Sequence[str], *, still: bool = False) -> None:
        """The drawing has these frames, one caption each: it can be played and stepped through.

        A mark with `at="3 9"` is seen from frame 3 to frame 9; one without is always seen. Without the shell all marks
        are seen, so those of a drawing that also stands still must not cover each other; or, with `still`, only those
        of the last frame are seen.
        """
        self._frames, self._still = tuple(frames), still

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
        group: str = "",
        at: str = "",
    ) -> None:
        """A filled rectangle; one with no width or height is left out."""
        if box.width <= 0 or box.height <= 0:
            return
        shape = attributes(x=box.x, y=box.y, width=box.width, height=box.height, rx=radius or None)
        style = attributes(fill=fill, stroke=stroke, stroke_dasharray=dash or None)
        style += attributes(fill_opacity=None if opacity == 1 else opacity)
        self.add(f"<rect{shape}{style}{_data({'tip': tip, 'group': group, 'at': at})}/>")

    def line(self, start: Point, end: Point, colour: str = RULE, *, width: float = 1, dash: str = "") -> None:
        """A straight line."""
        shape = attributes(x1=start[0], y1=start[1], x2=end[0], y2=end[1])
        self.add(f"<line{shape}{attributes(stroke=colour, stroke_width=width, stroke_dasharray=dash or None)}/>")

    def polyline(
        self,
        points: Iterable[Point],
        colour: str,
        *,
        width: float = 2,
        dash: str = "",
        tip: str = "",
        group: str = "",
        at: str = "",
    ) -> None:
        """A line through `points`."""
        style = attributes(stroke=colour, stroke_width=width, stroke_dasharray=dash or None)
        style += ' fill="none" stroke-linejoin="round" stroke-linecap="round"'
        self.add(f'<polyline points="{corners(points)}"{style}{_data({"tip": tip, "group": group, "at": at})}/>')

    def polygon(self, points: Iterable[Point], fill: str) -> None:
        """A filled shape with these corners."""
        self.add(f'<polygon points="{corners(points)}"{attributes(fill=fill)}/>')

    def circle(
        self,
        centre: Point,
        radius: float,
        fill: str,
        *,
        stroke: str = CARD,
        tip: str = "",
        group: str = "",
        at: str = "",
    ) -> None:
        """A dot, with a rim of the card's colour unless told otherwise, so that it stands out on a line."""
        shape = attributes(cx=centre[0], cy=centre[1], r=radius)
        style = attributes(fill=fill, stroke=stroke, stroke_width=1.5)
        self.add(f"<circle{shape}{style}{_data({'tip': tip, 'group': group, 'at': at})}/>")

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
        group: str = "",
        at: str = "",
    ) -> None:
        """One line of text; `place` is on its baseline, `anchor` start, middle or end, `halo` a rim of the card's.

        A colour that is too light for words on the card is taken in its darker form.
        """
        shape = attributes(x=place[0], y=place[1], font_size=size, fill=WORDS.get(colour, colour))
        shape += attributes(text_anchor=None if anchor == "start" else anchor, font_weight=600 if bold else None)
        if turn:
            shape += f' transform="rotate({number(turn)} {number(place[0])} {number(place[1])})"'
        if halo:
            shape += f' stroke="{CARD}" stroke-width="4" paint-order="stroke" stroke-linejoin="round"'
        self.add(f"<text{shape}{_data({'group': group, 'at': at})}>{escape(content, quote=False)}</text>")

    def heading(self, place: Point, content: str, note: str = "") -> float:
        """The title of a part of the picture, with a quieter note after it, or below it where it is too long.

        Returns:
            The y of the last baseline.
        """
        self.text(place, content, size=HEADING, bold=True)
        after = place[0] + text_width(content, HEADING) * 1.06 + 10
        if not note:
            return place[1]
        if after + text_width(note, SMALL) <= self.width:
            self.text((after, place[1]), note, size=SMALL, colour=QUIET)
            return place[1]
        return self.paragraph((place[0], place[1] + 18), note, self.width - place[0] - 8)

    def paragraph(self, place: Point, content: str, width: float, *, colour: str = QUIET, size: float = SMALL) -> float:
        """Words in lines no wider than `width`; returns the y of the last baseline."""
        y = place[1]
        for index, line in enumerate(wrapped(content, width, size)):
            y = place[1] + index * size * 1.4
            self.text((place[0], y), line, size=size, colour=colour)
        return y

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
        while self._last:
            self._layers, draw = self._last.pop(0)
            with self.on_top():
                draw()
        size = f'width="{number(self.width)}" height="{number(self.height)}"'
        view = f'viewBox="0 0 {number(self.width)} {number(self.height)}"'
        label = escape(f"{self.title}. {self.description}" if self.description else self.title)
        frames = _data({"frames": json.dumps(self._frames)}) if self._frames else ""
        parts = "".join([*self._parts, *self._on_top])
        if self._still:
            parts = AT.sub(lambda at: at[0] + HIDDEN * (int(at[1]) < len(self._frames) - 1), parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} role="img" aria-label="{label}" '
            f'font-family="{FONT}"{frames}>'
            f'<rect width="100%" height="100%" rx="8" fill="{CARD}"/>{parts}</svg>'
        )


def _data(values: Mapping[str, str]) -> str:
    """Data attributes, those without a value left out."""
    return "".join(f' data-{name}="{escape(value)}"' for name, value in values.items() if value)


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
        drawing.rect(part, segment.colour, tip=segment.tip or segment.label, stroke=CARD)
        if segment.hatched:
            drawing.hatch(part, MID)
        if text_width(segment.label, SMALL) + 12 <= part.width:
            place = (part.x + part.width / 2, part.y + part.height / 2 + 4)
            colour = (
                INK if segment.colour in DARK else ink_on(segment.colour)
            )  # the ground turns dark, and the words light
            drawing.text(place, segment.label, size=SMALL, colour=colour, anchor="middle")
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

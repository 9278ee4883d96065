"""Draw shapes, stacked bars and legends as SVG text, fast and without dependencies.

Coordinates are pixels from the top left corner, as in SVG. A drawing has a title and a description
for screen readers. Data attributes tell the shell what to do with a mark; other viewers ignore
them:

    data-tip      the tooltip, for the pointer and the arrow keys
    data-group    marks of one group light up together, while the others fade
    data-at       the first and the last frame that show a mark, when the drawing plays
    data-answer   hidden until the reader has guessed
    data-asking   shown only until then
    data-drag     a plot in which the pointer sets a knob
    data-broken   a region in which the system breaks, and why
    data-frames   on the whole drawing: the captions of its frames

Colours come from `theme.COLOURS`, which has a dark form of each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from html import escape

from minivllm_lab.pictures.drawing import (
    BODY,
    FONT,
    QUIET,
    RULE,
    Point,
    attributes,
    ink_on,
    number,
    text_width,
    wrapped,
)
from minivllm_lab.pictures.drawing import points as corners
from minivllm_lab.pictures.palette import INK
from widgets.shell.theme import CARD, DARK, MID, WORDS

SMALL, HEADING, NUMBER = 12, 14.5, 26
"""Text sizes in pixels. Drawings are never scaled: each is drawn for the width of its page."""

AT = re.compile(r' data-at="\d+ (\d+)"')
HIDDEN = ' style="display:none"'


@dataclass(frozen=True)
class Box:
    """A rectangle, given by its top left corner and its size."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """Return the x of the right edge."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """Return the y of the lower edge."""
        return self.y + self.height

    def overlaps(self, other: Box) -> bool:
        """Return whether the two rectangles share an area."""
        across = self.x < other.right and other.x < self.right
        return across and self.y < other.bottom and other.y < self.bottom


BOLD = 1.12
"""How much wider bold text is."""


def text_box(place: Point, content: str, size: float = BODY, anchor: str = "start", bold: bool = False) -> Box:
    """Return the rectangle that a line of text takes, with its baseline at `place`."""
    wide = text_width(content, size) * (BOLD if bold else 1)
    left = place[0] - {"start": 0.0, "middle": wide / 2, "end": wide}[anchor]
    return Box(left, place[1] - 0.8 * size, wide, size)


class Drawing:
    """A card that collects shapes, later ones on top; `render()` returns the SVG text."""

    def __init__(self, width: float, height: float, title: str, description: str = "") -> None:
        self.width, self.height = width, height
        self.title, self.description = title, description
        self._parts: list[str] = []
        self._layers: list[str] = []
        self._on_top: list[str] = []
        self._last: list[tuple[int, list[str], Callable[[], None]]] = []
        self.words: list[Box] = []
        """The rectangles of all texts so far."""
        self._frames: tuple[str, ...] = ()
        self._still = False

    def add(self, markup: str) -> None:
        """Add raw SVG markup on top."""
        self._parts.append(markup)

    @contextmanager
    def layer(self, **data: str) -> Iterator[None]:
        """Attach data to everything drawn inside: `layer(group="7")`, `layer(at="3 9")`."""
        self._layers.append(f"<g{_data(data)}>")
        self.add(self._layers[-1])
        yield
        self._layers.pop()
        self.add("</g>")

    @contextmanager
    def on_top(self) -> Iterator[None]:
        """Put everything drawn inside above all other shapes, even later ones, within the current
        layers.
        """
        below, self._parts = self._parts, []
        yield
        self._on_top += [*self._layers, *self._parts, "</g>" * len(self._layers)]
        self._parts = below

    def last(self, draw: Callable[[], None], rank: int = 0) -> None:
        """Call `draw` after everything else is drawn, lower ranks first; it draws on top, within the
        current layers.
        """
        self._last.append((rank, list(self._layers), draw))

    def answer(self) -> AbstractContextManager[None]:
        """Hide everything drawn inside until the reader has answered the widget's question."""
        return self.layer(answer="1")

    def play(self, frames: Sequence[str], *, still: bool = False) -> None:
        """Give the drawing frames that can be played, each with a caption.

        A mark with `at="3 9"` shows from frame 3 to frame 9; a mark without `at` always shows.
        Without the shell all marks show, so they must not cover each other; with `still`, only the
        marks of the last frame show.
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
        """Draw a filled rectangle, unless it has no width or height."""
        if box.width <= 0 or box.height <= 0:
            return
        shape = attributes(x=box.x, y=box.y, width=box.width, height=box.height, rx=radius or None)
        style = attributes(fill=fill, stroke=stroke, stroke_dasharray=dash or None)
        style += attributes(fill_opacity=None if opacity == 1 else opacity)
        self.add(f"<rect{shape}{style}{_data({'tip': tip, 'group': group, 'at': at})}/>")

    def line(self, start: Point, end: Point, colour: str = RULE, *, width: float = 1, dash: str = "") -> None:
        """Draw a straight line."""
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
        """Draw a line through `points`."""
        style = attributes(stroke=colour, stroke_width=width, stroke_dasharray=dash or None)
        style += ' fill="none" stroke-linejoin="round" stroke-linecap="round"'
        self.add(f'<polyline points="{corners(points)}"{style}{_data({"tip": tip, "group": group, "at": at})}/>')

    def polygon(self, points: Iterable[Point], fill: str) -> None:
        """Draw a filled shape with these corners."""
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
        """Draw a dot, by default with a rim in the card's colour so that it stands out on a line."""
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
        halo: bool | str = False,
        group: str = "",
        at: str = "",
    ) -> None:
        """Write one line with its baseline at `place`; `anchor` is start, middle or end, and `halo`
        draws a rim in the card's colour, or in its own.

        Colours too light for text on the card are darkened.
        """
        shape = attributes(x=place[0], y=place[1], font_size=size, fill=WORDS.get(colour, colour))
        shape += attributes(text_anchor=None if anchor == "start" else anchor, font_weight=600 if bold else None)
        if not turn:
            self.words.append(text_box(place, content, size, anchor, bold))
        else:
            flat = text_box((0, 0), content, size, anchor, bold)
            self.words.append(Box(place[0] + flat.y - 2, place[1] - flat.right, flat.height + 4, flat.width))
            shape += f' transform="rotate({number(turn)} {number(place[0])} {number(place[1])})"'
        if halo:
            rim = CARD if halo is True else halo
            shape += f' stroke="{rim}" stroke-width="5" paint-order="stroke" stroke-linejoin="round"'
        self.add(f"<text{shape}{_data({'group': group, 'at': at})}>{escape(content, quote=False)}</text>")

    def number(self, place: Point, value: str, words: str, colour: str) -> None:
        """Write the picture's one number in large type, hidden until the reader has guessed, with words after it."""
        with self.answer():
            self.text(place, value, size=NUMBER, bold=True, colour=colour)
        self.text((place[0] + text_width(value, NUMBER) * BOLD + 7, place[1]), words, size=SMALL)

    def heading(self, place: Point, content: str, note: str = "") -> float:
        """Write the title of a part, with a quieter note after it, or below it if there is no room.

        Returns:
            The y of the last baseline.
        """
        self.text(place, content, size=HEADING, bold=True)
        after = place[0] + text_width(content, HEADING) * BOLD + 10
        if not note:
            return place[1]
        if after + text_width(note, SMALL) <= self.width:
            self.text((after, place[1]), note, size=SMALL, colour=QUIET)
            return place[1]
        return self.paragraph((place[0], place[1] + 18), note, self.width - place[0] - 8)

    def paragraph(self, place: Point, content: str, width: float, *, colour: str = QUIET, size: float = SMALL) -> float:
        """Write lines no wider than `width`, and return the y of the last baseline."""
        y = place[1]
        for index, line in enumerate(wrapped(content, width, size)):
            y = place[1] + index * size * 1.4
            self.text((place[0], y), line, size=size, colour=colour)
        return y

    def hatch(self, box: Box, colour: str, *, gap: float = 7) -> None:
        """Draw slanted lines over `box`, so that readers who cannot see its colour can tell it
        apart.
        """
        lines = []
        offset = gap - box.height - box.x % gap  # so that the lines of neighbouring boxes continue
        while offset < box.width:
            left, right = max(offset, 0.0), min(offset + box.height, box.width)
            lower, upper = box.bottom - (left - offset), box.bottom - (right - offset)
            lines.append(f"M{number(box.x + left)} {number(lower)}L{number(box.x + right)} {number(upper)}")
            offset += gap
        if lines and box.height > 0:
            self.add(f'<path d="{"".join(lines)}"{attributes(stroke=colour, stroke_width=1)}/>')

    def render(self) -> str:
        """Return the whole picture as one `<svg>` element.

        The page's style decides how the picture shrinks: with `height: auto` on the root, viewers
        without that style would show nothing.
        """
        for _, layers, draw in sorted(self._last, key=lambda entry: entry[0]):
            self._layers = layers
            with self.on_top():
                self.add('<g pointer-events="none">')  # the marks below have the tips
                draw()
                self.add("</g>")
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
    """Write data attributes, except those without a value."""
    return "".join(f' data-{name}="{escape(value)}"' for name, value in values.items() if value)


@dataclass(frozen=True)
class Segment:
    """One part of a stacked bar, or one entry of a legend."""

    label: str
    value: float
    colour: str
    tip: str = ""
    hatched: bool = False
    outlined: bool = False
    dash: str = ""
    """For the key of a line: its dashes, or "none"."""
    draw: Callable[[Point], None] | None = None
    """For the key of a mark: draws it around this point."""


def stacked_bar(drawing: Drawing, box: Box, segments: Sequence[Segment], total: float) -> None:
    """Draw a horizontal bar of `segments`; `total` fills the box, and any excess sticks out on the
    right.

    Labels that fit are written into their segments; the others need a legend.
    """
    x = box.x
    for segment in segments:
        part = Box(x, box.y, max(segment.value, 0) / total * box.width, box.height)
        drawing.rect(part, segment.colour, tip=segment.tip or segment.label, stroke=CARD)
        if segment.hatched:
            drawing.hatch(part, MID)
        if text_width(segment.label, SMALL) + 12 <= part.width:
            place = (part.x + part.width / 2, part.y + part.height / 2 + 4)
            turns_dark = segment.colour in DARK
            colour = INK if turns_dark else ink_on(segment.colour)
            drawing.text(place, segment.label, size=SMALL, colour=colour, anchor="middle")
        x = part.right


def without_room(segments: Sequence[Segment], total: float, width: float) -> list[Segment]:
    """List the segments of a stacked bar that are too short for their labels."""
    return [part for part in segments if text_width(part.label, SMALL) + 12 > part.value / total * width]


def legend(drawing: Drawing, place: Point, entries: Sequence[Segment], width: float) -> float:
    """Draw colour keys with labels in rows no wider than `width`, and return the y below the
    last row.
    """
    x, y = place
    for entry in entries:
        room = 18 + text_width(entry.label, SMALL) + 16
        if x > place[0] and x + room - 16 > place[0] + width:
            x, y = place[0], y + 19
        key = Box(x, y - 10, 12, 12)
        stroke = MID if entry.outlined else "none"
        if entry.draw:
            entry.draw((x + 6, y - 4))
        elif entry.dash:
            drawing.line((x, y - 4), (x + 14, y - 4), entry.colour, width=2.5, dash=entry.dash)
        else:
            drawing.rect(key, entry.colour, tip=entry.tip, stroke=stroke, radius=2)
        if entry.hatched:
            drawing.hatch(key, MID, gap=5)
        drawing.text((x + 18, y), entry.label, size=SMALL, colour=QUIET)
        x += room
    return y + 19

"""The opening figures are what `minivllm_lab/*/opening.py` draw, and are readable on any page."""

import re
import xml.etree.ElementTree as ET

import openings
import pytest
from refusals import assert_refused

from minivllm_lab.paged_attention import opening
from minivllm_lab.pictures.drawing import svg, text
from minivllm_lab.pictures.frames import Frames

EVERY_OPENING = pytest.mark.parametrize("name", openings.names())


@EVERY_OPENING
def test_the_figure_is_as_it_is_drawn(name):
    assert openings.stale(name) == []


@EVERY_OPENING
def test_its_text_is_large_enough_on_a_page_of_700_pixels(name):
    for drawn in openings.drawings(name).values():
        sizes = [float(size) for size in re.findall(r'font-size="([\d.]+)"', drawn)]
        assert sizes
        assert min(sizes) * min(1, 700 / float(ET.fromstring(drawn).get("width", 0))) >= 11


@EVERY_OPENING
def test_nothing_in_it_is_cut_off(name):
    """A row of tokens that grows from still to still must fit in the last one, too."""
    for root in map(ET.fromstring, openings.drawings(name).values()):
        size = {axis: float(root.get(axis, 0)) for axis in ("width", "height")}
        boxes = [part for part in root.iter("{http://www.w3.org/2000/svg}rect") if part.get("x")]
        assert boxes
        for start, axis in (("x", "width"), ("y", "height")):
            assert all(0 <= float(box.get(start, 0)) <= size[axis] - float(box.get(axis, 0)) for box in boxes)


@pytest.fixture
def figure(tmp_path, monkeypatch):
    """Return a figure's path, and what would be drawn there now."""
    frames = Frames([svg(100, 50, text(5, 20, "14 slots"))], ["A caption."])
    path = tmp_path / "figure.svg"
    monkeypatch.setattr(openings, "drawings", lambda _name: {path: frames.animated()})
    return path, frames.animated()


@pytest.mark.parametrize(("old", "new"), [("14 slots", "15 slots"), ("A caption.", "Another."), ('x="5"', 'x="6"')])
def test_a_stale_figure_is_seen(figure, old, new):
    path, drawn = figure
    path.write_text(drawn.replace(old, new))
    assert openings.stale("it")


def test_a_missing_figure_is_seen_and_a_fresh_one_is_fresh(figure):
    path, drawn = figure
    assert openings.stale("it") == ["figure.svg is missing"]
    path.write_text(drawn)
    assert openings.stale("it") == []


def test_an_unknown_figure_is_refused():
    assert_refused("no opening figure", openings.drawings, "nobody")


def test_every_block_that_a_caption_of_lesson_02_names_is_drawn():
    frames = opening.frames()
    named = re.compile(r"(?:[Bb]locks?|table is|begins with) (\d+(?:, \d+)*)")
    for still, caption in zip(frames.stills, frames.captions, strict=True):
        blocks = [number for numbers in named.findall(caption) for number in numbers.split(", ")]
        assert blocks
        assert [number for number in blocks if f"block {number}:" not in still] == [], caption

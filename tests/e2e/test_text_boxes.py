"""No two texts of a widget's picture touch, at any width. Light and dark pictures have the same
texts at the same places.
"""

import pytest
from e2e.browser import emptied_page
from e2e.text_boxes import drawn, random_settings, touching
from lesson_widgets.test_every_widget import NAMES, spec_of
from playwright.sync_api import Browser

from widgets.shell.plot import Axes, Scale
from widgets.shell.svg import Box, Drawing

pytestmark = pytest.mark.browser
HANDFUL = 2
"""Random settings of each widget here; `python -m e2e.text_boxes` takes as many as you like."""


@pytest.mark.parametrize("name", NAMES)
def test_no_two_texts_of_a_picture_touch(name: str, browser: Browser):
    spec = spec_of(name)
    settings = [{}, *spec.presets.values(), *random_settings(spec, HANDFUL, seed=1)]
    pictures = list(drawn(spec, settings))
    assert len(pictures) > 3
    pairs = touching(emptied_page(browser, 1300, 900), [each.picture for each in pictures])
    found = {(each.width, str(each.values)): pair for each, pair in zip(pictures, pairs, strict=True) if pair}
    assert found == {}


def test_texts_that_touch_or_stick_out_are_found(browser: Browser):
    drawing = Drawing(200, 100, "t")
    drawing.text((10, 20), "first")
    drawing.text((14, 24), "second")
    drawing.text((10, 60), "one frame", at="0 1")
    drawing.text((10, 60), "another frame", at="2 3")
    drawing.text((170, 90), "beyond the edge")
    Axes(drawing, Box(20, 30, 100, 20), Scale(0, 1), Scale(0, 1)).line([0, 1], [0, 1], "#0072B2")
    pairs = touching(emptied_page(browser, 1300, 900), [drawing.render()])
    assert pairs == [[["first", "second"], ["beyond the edge", "the edge"]]]

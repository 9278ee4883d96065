"""Every widget on a page: it fits any screen, every control works by keyboard, and nothing is in
the way.
"""

import pytest
from e2e.browser import box_of, serious_violations
from e2e.widget_page import GROUNDS, WidgetPage, widget_page
from lesson_widgets.test_every_widget import NAMES, spec_of
from patience import eventually
from playwright.sync_api import Browser, Page, ViewportSize

pytestmark = pytest.mark.browser
ARROWS = ("ArrowRight", "ArrowLeft")
KEYS = {"choice": ("ArrowDown", "ArrowUp"), "steps": ARROWS, "slider": ARROWS, "switch": ("Space",)}
"""For each kind of knob, the key that turns it and, at the end of its range, the one that turns it back."""
JUPYTERLAB: ViewportSize = {"width": 1018, "height": 650}
"""What a window of 1366 × 768 leaves to a notebook."""


def assert_nothing_sticks_out(widget: WidgetPage, width: int) -> None:
    """Resize the window; the page must fit, and its picture must be drawn for the width, not
    scaled.
    """
    drawn = widget.session.width
    widget.page.set_viewport_size({"width": width, "height": 900})

    def redrawn() -> bool:
        widget.settled()
        return widget.session.width != drawn

    assert eventually(redrawn)
    assert widget.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    shown = widget.page.evaluate("document.querySelector('.lw-picture > svg').getBoundingClientRect().width")
    assert shown == pytest.approx(widget.session.width, rel=0.02), "the picture is scaled"


def assert_seen(widget: WidgetPage, *parts: str) -> None:
    """Expect these parts to be visible at the same time in a window of the size `JUPYTERLAB`."""
    for part in parts:
        box = box_of(widget.page.locator(part))
        assert box["y"] + box["height"] <= JUPYTERLAB["height"], part


def turn_by_key(widget: WidgetPage, name: str, kind: str) -> None:
    before = widget.session.values[name]

    def turned() -> bool:
        widget.settled()
        return widget.session.values[name] != before

    widget.control(name).focus()
    for key in KEYS[kind]:
        if widget.session.values[name] == before:
            widget.page.keyboard.press(key)
            eventually(turned, seconds=1)
    assert turned(), f"no key turns {name}"


def darken(page: Page) -> None:
    """Give the page a dark background, and wait until the widget follows."""
    page.evaluate("ground => { document.body.style.background = ground }", GROUNDS["dark"])
    page.wait_for_selector(".lw-dark")


@pytest.mark.parametrize("name", NAMES)
def test_it_fits_any_screen_stands_in_nobodys_way_and_all_its_controls_answer_to_keys(name: str, browser: Browser):
    with widget_page(browser, spec_of(name), **JUPYTERLAB, whole=False) as widget:
        for width in (600, 683):
            assert_nothing_sticks_out(widget, width)
        widget.page.set_viewport_size(JUPYTERLAB)
        widget.settled()
        assert_seen(widget, ".lw-guess", ".lw-picture", ".lw-controls")
        widget.page.get_by_role("button", name="Show me").click()
        assert_seen(widget, ".lw-says", ".lw-picture", ".lw-controls")
        assert serious_violations(widget.page) == []
        darken(widget.page)
        assert serious_violations(widget.page, "color-contrast") == []
        for number in (1, 2, 3):
            widget.page.get_by_role("button", name=f"Challenge {number}").click()
            assert_seen(widget, ".lw-picture", ".lw-controls")
        for knob_name, knob in widget.session.spec.flat().items():
            if knob.kind != "entry":
                turn_by_key(widget, knob_name, knob.kind)

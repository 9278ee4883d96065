"""Every widget on a page: it fits a screen, every control answers to keys, and nothing stands in anyone's way."""

import importlib
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from e2e.widget_page import widget_page
from lesson_widgets.test_every_widget import NAMES
from playwright.sync_api import Browser

from widgets.spec import Spec

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]
OUT = Path(__file__).resolve().parents[2] / "out" / "widgets"
TURNED = {"choice": "ArrowDown", "steps": "ArrowRight", "slider": "ArrowRight", "switch": "Space"}
TURNED_BACK = {"choice": "ArrowUp", "steps": "ArrowLeft", "slider": "ArrowLeft", "switch": "Space"}


def spec_of(name: str) -> Spec:
    return importlib.import_module(f"widgets.{name}").SPEC


@pytest.mark.parametrize("name", NAMES)
def test_it_fits_one_screen_and_all_its_controls_answer_to_keys(name: str, browser: Browser):
    spec = spec_of(name)
    with widget_page(browser, spec, width=1018, height=650) as widget:  # JupyterLab's page at 1366 × 768
        widget.page.screenshot(path=OUT / f"{name}_light.png")
        for part in (".lw-picture", ".lw-controls", ".lw-says"):
            box = widget.page.locator(part).bounding_box()
            assert box
            assert box["y"] + box["height"] <= 650, part
        for knob_name, knob in spec.flat().items():
            if knob.kind == "entry":
                continue
            before = widget.session.values[knob_name]
            widget.control(knob_name).focus()
            for keys in (TURNED, TURNED_BACK):
                widget.page.keyboard.press(keys[knob.kind])
                widget.settled()
                if widget.session.values[knob_name] != before:
                    break
            assert widget.session.values[knob_name] != before, knob_name
        assert widget.seen.errors == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_serious_stands_in_anyones_way(name: str, theme: str, browser: Browser):
    with widget_page(browser, spec_of(name), theme=theme, width=1018, height=650) as widget:
        widget.page.get_by_role("button", name="Show me").click()
        widget.settled()
        found = Axe().run(widget.page).response["violations"]
        serious = [
            (one["id"], one["nodes"][0]["html"][:200]) for one in found if one["impact"] in ("serious", "critical")
        ]
        widget.page.screenshot(path=OUT / f"{name}_{theme}_answer.png")
        assert serious == []


@pytest.mark.parametrize("width", [600, 683])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_sticks_out_of_a_narrow_page(name: str, width: int, browser: Browser):
    with widget_page(browser, spec_of(name), width=width, height=900) as widget:
        widget.page.screenshot(path=OUT / f"{name}_{width}.png", full_page=True)
        assert widget.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        scale = "document.querySelector('.lw-picture > svg').getBoundingClientRect().width"
        assert widget.page.evaluate(scale) == pytest.approx(widget.session.width, rel=0.02), "the picture is scaled"

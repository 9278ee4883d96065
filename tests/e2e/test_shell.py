"""The widgets' front end in a real browser: every control by keyboard, tooltips, player, dragging,
themes.
"""

from dataclasses import replace

import pytest
from e2e.browser import box_of, serious_violations
from e2e.widget_page import WidgetPage, widget_page
from lesson_widgets.sizes import SPEC, State
from playwright.sync_api import Browser

from widgets.shell.svg import Drawing

pytestmark = pytest.mark.browser


@pytest.fixture
def sizes(browser: Browser):
    with widget_page(browser, SPEC) as widget:
        yield widget


def press(widget: WidgetPage, knob: str, *keys: str) -> None:
    widget.control(knob).focus()
    for key in keys:
        widget.page.keyboard.press(key)
        widget.settled()


def test_every_kind_of_control_is_driven_by_keys_and_says_its_value(sizes: WidgetPage):
    press(sizes, "size", "ArrowRight")
    assert sizes.page.locator("[data-answer] polyline").first.is_visible(), "who turns a knob sees the answer too"
    assert not sizes.page.locator(".lw-guess").is_visible()
    press(sizes, "block", "ArrowRight")
    press(sizes, "kind", "ArrowDown")
    press(sizes, "on", "Space")
    press(sizes, "name", "x", "y", "Enter")
    assert sizes.session.values == {"size": 2.5, "kind": "square", "block": 8, "name": "xy", "on": False}
    assert sizes.words() == "The size is 2.5 < 100."
    assert sizes.control("block").get_attribute("aria-valuetext") == "8"
    assert sizes.control("size").get_attribute("aria-valuetext") == "2.5"


def test_what_takes_the_focus_keeps_the_pages_shortcuts_off(sizes: WidgetPage):
    sizes.page.locator("summary").last.click()
    reached = []
    sizes.page.locator(".lw").evaluate("widget => { widget.setAttribute('tabindex', '-1'); widget.focus(); }")
    for _ in range(40):
        sizes.page.keyboard.press("Tab")
        active = "document.activeElement"
        here = sizes.page.evaluate(f"[{active}.tagName, {active}.dataset.lmSuppressShortcuts]")
        if here[0] == "BODY":
            break
        reached.append(here)
    assert len(reached) > 15
    assert {kept for _, kept in reached} == {"true"}
    sizes.page.locator("h4").click()
    assert sizes.page.evaluate("document.activeElement.dataset.lmSuppressShortcuts") == "true", "a click on its words"


def test_the_answer_is_hidden_until_one_has_guessed(sizes: WidgetPage):
    curve = sizes.page.locator("[data-answer] polyline").first
    note = sizes.page.locator("[data-asking] text")
    assert not curve.is_visible()
    assert note.is_visible()
    assert not sizes.page.locator(".lw-says").is_visible()
    assert not sizes.page.locator(".lw-progress").is_visible()
    sizes.page.get_by_role("button", name="Pin to compare").click()
    sizes.settled()
    assert not sizes.page.locator(".lw-compared").is_visible(), "a pinned state would give the answer away"
    sizes.page.get_by_role("button", name="5", exact=True).click()
    assert curve.is_visible()
    assert not note.is_visible()
    assert sizes.page.locator(".lw-compared").is_visible()
    assert sizes.page.locator(".lw-because").inner_text() == "No, 6. Five still fits."
    assert sizes.words() == "The size is 2 < 100."
    press(sizes, "size", "ArrowRight")
    assert not sizes.page.locator(".lw-because").is_visible(), "it is about the knobs as they were"


def test_what_cannot_be_loaded_says_so_before_the_guess_too_and_stays(sizes: WidgetPage):
    sizes.page.locator("summary", has_text="As a command").click()
    load(sizes, '{"widget": "sizes", ')
    assert sizes.words().startswith("this is not a saved state")
    assert sizes.page.locator("textarea").input_value() == '{"widget": "sizes", '


def load(widget: WidgetPage, text: str) -> None:
    widget.page.locator("textarea").fill(text)
    widget.page.get_by_role("button", name="Load").click()
    widget.settled()


def test_a_kernel_that_has_ended_is_told(sizes: WidgetPage):
    """The picture stays and the knobs still turn, so without a message it would seem to show
    another setting.
    """
    sizes.page.evaluate(
        """async (parts) => {
          const { default: shell } = await import("./shell.js");
          const el = document.querySelector("main").appendChild(document.createElement("div"));
          const send = () => { throw new Error("Cannot send"); };
          shell.render({ el, model: { get: (name) => parts[name], on: () => {}, off: () => {}, send } });
        }""",
        {"described": sizes.session.described(), "view": {**sizes.session.settle(), "serial": 0}},
    )
    other = sizes.page.locator(".lw").last
    words = other.locator(".lw-says > span")
    other.get_by_role("button", name="Pin to compare").click()
    assert "Run this cell again" in words.inner_text()
    other.locator("input[type=range]").first.focus()
    for _ in range(2):
        sizes.page.keyboard.press("ArrowRight")
        assert "Run this cell again" in words.inner_text()
    assert other.locator(".lw-picture.lw-stale").count() == 1


def test_marks_are_told_by_pointer_and_by_arrow_keys(sizes: WidgetPage):
    sizes.page.get_by_role("button", name="Show me").click()
    tip = sizes.page.locator(".lw-tip")
    sizes.page.locator("[data-tip='5 of 10']").hover()
    assert tip.inner_text() == "5 of 10"
    assert sizes.page.locator("svg.lw-grouped").count() == 1
    sizes.page.locator(".lw-picture").focus()
    sizes.page.keyboard.press("Home")
    assert tip.inner_text() == "0 of 10"
    sizes.page.keyboard.press("ArrowRight")
    assert tip.inner_text() == "5 of 10"
    sizes.page.wait_for_function("document.querySelector('.lw-spoken').textContent === '5 of 10'")
    sizes.page.keyboard.press("Escape")
    assert not tip.is_visible()


def test_the_handle_is_dragged_in_the_plot(sizes: WidgetPage):
    area = box_of(sizes.page.locator("[data-drag]"))
    middle = area["y"] + area["height"] / 2
    sizes.page.mouse.move(area["x"] + area["width"] * 0.2, middle)
    sizes.page.mouse.down()
    sizes.page.mouse.move(area["x"] + area["width"] * 0.62, middle, steps=5)
    sizes.page.mouse.up()
    sizes.settled()
    assert sizes.session.values["size"] == 6.0
    sizes.page.mouse.move(area["x"] + area["width"] * 0.9, middle)
    sizes.settled()
    assert sizes.session.values["size"] == 6.0, "the button is up"


def test_dragging_needs_nobody_where_pictures_were_drawn_ahead(sizes: WidgetPage):
    for view in filter(None, sizes.session.ahead()):
        sizes.page.evaluate("([view, width]) => window.ahead(view, width)", [view, sizes.session.width])
    sizes.page.evaluate(
        """() => { window.pictures = []; new MutationObserver(() =>
             window.pictures.push(document.querySelector(".lw-picture > svg").getAttribute("aria-label"))
           ).observe(document.querySelector(".lw-picture"), { childList: true }); window.real = window.ask;
           window.ask = () => new Promise(() => {}); }"""
    )
    press(sizes, "size", "ArrowRight", "ArrowRight", "ArrowRight")
    assert sizes.page.evaluate("window.pictures") == ["Sizes. size 2.5", "Sizes. size 3", "Sizes. size 3.5"]
    assert sizes.words() == "The size is 3.5 < 100."


def test_the_player_plays_steps_and_scrubs(sizes: WidgetPage):
    sizes.page.get_by_role("button", name="Show me").click()
    caption = sizes.page.locator(".lw-caption")
    shown = "[...document.querySelectorAll('[data-at]')].filter(mark => mark.style.display !== 'none').length"
    assert caption.inner_text() == "frame 3"
    sizes.page.get_by_label("Step back").click()
    assert (caption.inner_text(), sizes.page.evaluate(shown)) == ("frame 2", 2)
    scrub = sizes.page.get_by_label("Step", exact=True)
    scrub.focus()
    sizes.page.keyboard.press("Home")
    assert (caption.inner_text(), sizes.page.evaluate(shown)) == ("frame 0", 1)
    assert scrub.get_attribute("aria-valuetext") == "1 of 4: frame 0"
    sizes.page.get_by_label("Play").click()
    sizes.page.wait_for_function("document.querySelector('.lw-caption').textContent === 'frame 3'")
    sizes.page.get_by_label("Play").wait_for()


def test_a_challenge_says_what_is_missing_and_stays_met(sizes: WidgetPage):
    progress = sizes.page.locator(".lw-progress")
    sizes.page.get_by_role("button", name="Show me").click()
    assert progress.inner_text() == "Not yet. It is 2. Size is wrong."
    for size in ("6.5", "7", "7.5"):
        sizes.control("size").fill(size)
        sizes.settled()
    sizes.page.wait_for_timeout(1000)
    assert sizes.page.get_by_role("button", name="Challenge 1, met").count() == 0, "one has only passed through it"
    sizes.control("size").fill("7")
    sizes.settled()
    assert progress.inner_text() == "✓ Met. It is 7. So it was."
    sizes.page.get_by_role("button", name="Challenge 1, met").wait_for()
    sizes.page.get_by_role("button", name="Start again").click()
    sizes.settled()
    assert sizes.page.get_by_role("button", name="Challenge 1, met").count() == 1
    sizes.page.get_by_role("button", name="Challenge 2").click()
    assert sizes.page.locator(".lw-goal").inner_text() == "Make it 8."


def test_a_state_is_pinned_compared_exported_and_loaded(sizes: WidgetPage):
    label, shown = sizes.page.locator(".lw-picture > svg"), sizes.page.get_by_role("button", name="Show pinned")
    sizes.page.get_by_role("button", name="Pin to compare").click()
    press(sizes, "size", "ArrowRight")
    assert sizes.page.locator(".lw-compared").inner_text() == "Pinned (Size 2): ✓ The size is 2 < 100."
    shown.click()
    assert label.get_attribute("aria-label") == "Sizes. size 2"
    press(sizes, "size", "ArrowRight")
    assert shown.get_attribute("aria-pressed") == "false", "the present state is shown again once it changes"
    shown.click()
    sizes.page.locator("summary", has_text="As a command").click()
    assert sizes.page.locator(".lw-command").inner_text() == "vllm serve model --size 3"
    load(sizes, '{"widget": "sizes", "knobs": {"size": 9.5}}')
    assert sizes.words() == "The size is 9.5 < 100."
    assert shown.get_attribute("aria-pressed") == "false", "the present picture is back"
    shown.click()
    sizes.page.get_by_role("button", name="Unpin").click()
    sizes.settled()
    assert label.get_attribute("aria-label") == "Sizes. size 9.5"


def test_what_breaks_is_said_with_its_place(sizes: WidgetPage):
    press(sizes, "name", "b", "u", "g", "Enter")
    assert sizes.words() == "The widget broke. ZeroDivisionError: a bug"
    assert sizes.page.locator(".lw-stale").count() == 1
    assert "sizes.py" in (sizes.page.locator(".lw-says pre").text_content() or "")


def test_nothing_serious_stands_in_anyones_way(browser: Browser):
    with widget_page(browser, SPEC, theme="dark") as widget:
        widget.page.locator("summary", has_text="As a command").click()
        assert serious_violations(widget.page) == []
        assert "lw-dark" in (widget.page.locator(".lw").get_attribute("class") or "")


def test_a_narrow_page_has_the_picture_first(browser: Browser):
    with widget_page(browser, SPEC, width=600) as widget:
        picture, controls = (box_of(widget.page.locator(part)) for part in (".lw-picture", ".lw-controls"))
        assert picture["y"] + picture["height"] <= controls["y"]


def test_a_refusal_is_mended_by_one_click(browser: Browser):
    spec = replace(SPEC, starts=lambda state: state.size <= 3, mends=("size",))
    with widget_page(browser, spec, size=5) as widget:
        assert not widget.page.locator(".lw-guess").is_visible(), "the guess is about another size"
        widget.page.get_by_role("button", name="Lower the size to 3 (now 5).").click()
        widget.settled()
        assert widget.session.values["size"] == 3
        assert not widget.page.locator(".lw-mend").is_visible()


def test_two_pictures_have_a_tab_each(browser: Browser):
    def detail(state: State, width: float, pinned: State | None = None) -> str:
        drawing = Drawing(width, 100, "More", "of it")
        return drawing.render()

    with widget_page(browser, replace(SPEC, detail=detail, tabs=("Sizes", "More"))) as widget:
        first, second = (widget.page.locator(".lw-picture > svg").nth(index) for index in (0, 1))
        assert (first.is_visible(), second.is_visible()) == (True, False)
        assert widget.page.locator(".lw-player").count() == 1
        widget.page.get_by_role("button", name="More").click()
        assert (first.is_visible(), second.is_visible()) == (False, True)
        press(widget, "size", "ArrowRight")
        assert second.is_visible(), "a knob does not turn the page"


def test_the_verdict_stands_above_the_picture(sizes: WidgetPage):
    sizes.page.get_by_role("button", name="Show me").click()
    says, picture = (box_of(sizes.page.locator(part)) for part in (".lw-says", ".lw-picture"))
    assert says["y"] + says["height"] <= picture["y"]


def test_a_preset_stops_the_player(sizes: WidgetPage):
    sizes.page.get_by_role("button", name="Show me").click()
    sizes.page.get_by_label("Play").click()
    sizes.page.get_by_role("button", name="Break it").click()
    sizes.settled()
    assert sizes.page.get_by_label("Play", exact=True).is_visible(), "not Pause"

"""The site from a server in Chromium: Python takes the table's place, every knob turns, and no
request leaves the machine.
"""

import pytest
from e2e.browser import Visit, box_of, serious_violations
from playwright.sync_api import Locator

pytestmark = pytest.mark.browser
WIDGET = ".lesson-widget[data-table=tiny]"
SENT = """
window.sent = [];
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message) { window.sent.push(message); post.call(this, message); };
"""

BACK_AND_PIN = """slider => {
  slider.stepDown();
  slider.dispatchEvent(new Event("input", { bubbles: true }));
  const buttons = [...slider.closest(".lesson-widget").querySelectorAll("button")];
  buttons.find(button => button.textContent === "Pin to compare").click();
}"""
"""Pin a state whose view the page knows, before the kernel has been told of it."""


class Lesson:
    """The lesson's page, and the tiny widget on it."""

    def __init__(self, visit: Visit) -> None:
        self.page = visit.page

    def part(self, selector: str) -> Locator:
        return self.page.locator(f"{WIDGET} {selector}")

    def press(self, knob: str, key: str) -> None:
        self.part(f"[id$='-{knob}']").focus()
        self.page.keyboard.press(key)

    def says(self, words: str) -> None:
        """Wait until the verdict has these words."""
        self.part(".lw-says span").filter(has_text=words).wait_for()

    def start_again(self) -> None:
        if self.page.locator(".docked").count():
            self.part(".dock").click()
        self.part("button").filter(has_text="Start again").click()
        self.says("At load 0.5 this is fine.")


@pytest.fixture(scope="module")
def lesson(visit: Visit) -> Lesson:
    """Open the lesson with a link that sets a knob which the table does not turn, once for all
    tests.
    """
    visit.page.add_init_script(SENT)
    visit.page.goto(f"{visit.address}/lessons/01_kv_cache.html#tiny?load=0.9&loud=true")
    visit.page.locator(f"{WIDGET}[data-live]").wait_for()
    return Lesson(visit)


@pytest.fixture
def at_start(lesson: Lesson) -> Lesson:
    lesson.start_again()
    return lesson


def test_a_link_sets_knobs_that_the_table_does_not_have(lesson: Lesson):
    hash_before = lesson.page.evaluate("location.hash")
    lesson.page.evaluate("location.hash = '#tiny?load=1.3&loud=true'")
    lesson.says("At load 1.3 this is broken.")
    assert hash_before.startswith("#tiny?")
    assert lesson.part("[id$='-loud']").is_checked()
    assert "How long one waits!" in lesson.part(".lw-picture").inner_text()
    lesson.page.locator("a.knob", has_text="a load of 1.5").click()
    lesson.says("At load 1.5 this is broken.")
    assert not lesson.part("[id$='-loud']").is_checked(), "a link begins at the start"


def test_every_knob_turns_by_keyboard_and_the_address_follows(at_start: Lesson):
    assert at_start.part(".lw-controls :disabled").count() == 0
    assert not at_start.page.locator(f"{WIDGET} + .widget-note").is_visible()
    at_start.press("loud", "Space")
    at_start.press("servers", "ArrowDown")
    at_start.press("note", "d")
    at_start.page.keyboard.insert_text("one")
    at_start.page.keyboard.press("Enter")
    at_start.press("load", "End")
    at_start.says("At load 1.5 this is fine.")
    at_start.page.wait_for_function("location.hash === '#tiny?load=1.5&note=done&servers=2&loud=true'")
    at_start.part("button").filter(has_text="3").first.click()
    assert at_start.part(".lw-progress").inner_text() == "✓ Met. The note is 'done'. No page without a kernel can."


def test_pins_and_saved_states_work_as_in_the_notebook(at_start: Lesson):
    at_start.press("load", "ArrowRight")
    at_start.says("At load 0.7 this is fine.")
    at_start.page.wait_for_timeout(500)  # meanwhile the neighbours are drawn ahead
    at_start.part("[id$='-load']").evaluate(BACK_AND_PIN)
    at_start.press("load", "ArrowRight")
    at_start.part(".lw-compared").filter(has_text="Pinned (Load 0.5)").wait_for()
    at_start.part("summary").filter(has_text="As a command").click()
    at_start.part("textarea").fill('{"widget": "tiny", "knobs": {"load": 1.1}}')
    at_start.part("button").filter(has_text="Load").last.click()
    at_start.says("At load 1.1 this is broken.")
    at_start.part("button").filter(has_text="Unpin").click()
    at_start.part("summary").filter(has_text="As a command").click()


def test_only_a_widget_that_is_seen_computes(at_start: Lesson):
    at_start.page.evaluate("window.sent.length = 0")
    at_start.page.evaluate("scrollTo(0, 0)")
    at_start.page.wait_for_function("""() => window.sent.some(text => `${text}`.includes('"rest"'))""")
    at_start.part(".lw-picture").scroll_into_view_if_needed()
    at_start.page.wait_for_function("""() => window.sent.some(text => `${text}`.includes('"turn"'))""")


def test_a_widget_that_hangs_is_started_again(at_start: Lesson):
    at_start.page.evaluate("window.patience = 500")
    at_start.part("[id$='-note']").fill("hang")
    at_start.page.keyboard.press("Enter")
    at_start.part(".lw-says span").filter(has_text="That took too long").wait_for(timeout=120_000)
    at_start.page.evaluate("delete window.patience")
    at_start.press("load", "End")
    at_start.says("At load 1.5 this is broken.")


def test_a_widget_can_stay_beside_the_text(at_start: Lesson):
    at_start.page.set_viewport_size({"width": 1366, "height": 768})
    at_start.part(".dock").click()
    at_start.page.evaluate("scrollTo(0, 0)")
    picture, text = box_of(at_start.part(".lw-picture")), box_of(at_start.page.locator("article p").first)
    assert 0 <= picture["y"] < 768
    assert picture["x"] > text["x"] + text["width"], "the widget covers the text"
    assert serious_violations(at_start.page, "scrollable-region-focusable") == []
    at_start.part(".dock").click()
    assert at_start.part(".dock").inner_text() == "Keep beside the text"

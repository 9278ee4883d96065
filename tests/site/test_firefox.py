"""The site from a server in Firefox: Python takes the table's place, a knob changes the picture, an
exercise is solved, and no request leaves the machine.
"""

from collections.abc import Iterator

import pytest
import site_exercises
from e2e.firefox import Tab, find_firefox, firefox
from lessons.page_solutions import ROOT, solution

pytestmark = pytest.mark.firefox
LESSON = "09_attention_heads"
WIDGET = ".lesson-widget[data-widget=attention_heads]"
PICTURE = f"() => document.querySelector('{WIDGET} .lw-picture > svg').outerHTML"
TURNED = """([widget, picture, value]) => document.querySelector(`${widget} .lw-picture > svg`).outerHTML !== picture
  && document.activeElement.getAttribute("aria-valuetext") !== value"""
FOCUS = "(selector) => document.querySelector(selector).focus()"
IS_THERE = "(selector) => !!document.querySelector(selector)"
SAYS = "(words) => document.querySelector('.exercise-says').textContent.includes(words)"
RIGHT = "() => [...document.querySelectorAll('.exercise-list .right')].map((line) => line.textContent)"
ASKS_ELSEWHERE = """(address) => new Promise((done) => {
  const source = `fetch("${address}", { mode: "no-cors" }).then(() => postMessage(""), () => postMessage(""))`;
  new Worker(URL.createObjectURL(new Blob([source]))).onmessage = () => done();
})"""


@pytest.fixture(scope="module")
def tab(live_site: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    executable = find_firefox()
    assert executable
    with firefox(executable, tmp_path_factory.mktemp("firefox")) as tab:
        tab.open(f"{live_site}/lessons/{LESSON}.html#attention_heads?")
        yield tab


def test_python_takes_the_tables_place_and_a_knob_changes_the_picture(tab: Tab):
    assert tab.reaches(IS_THERE, f"{WIDGET}[data-live]")
    assert not tab.evaluate(IS_THERE, f"{WIDGET} .lw-controls :disabled")
    tab.evaluate(FOCUS, f"{WIDGET} .lw-controls input[type=range]")
    picture, value = tab.evaluate(PICTURE), tab.evaluate("() => document.activeElement.ariaValueText")
    tab.press("ArrowRight")
    assert tab.reaches(TURNED, [WIDGET, picture, value])


def test_an_exercise_is_solved_in_its_editor(tab: Tab):
    part = site_exercises.exercises(ROOT)[LESSON]
    tab.evaluate("() => document.querySelector('.exercise').scrollIntoView()")
    assert tab.reaches(IS_THERE, ".exercise[data-ready]")
    tab.evaluate(FOCUS, ".exercise .cm-content")
    tab.paste(solution(LESSON[:2], part.text))
    tab.press("Control", "Enter")
    assert tab.reaches(SAYS, f"All {len(part.statements)} checks pass")
    assert tab.evaluate(RIGHT) == [f"✓ {line}" for line in part.statements]


def test_no_other_host_was_asked_and_a_worker_that_asks_one_is_noticed(tab: Tab):
    assert (tab.asked, tab.errors) == ([], [])
    tab.evaluate(ASKS_ELSEWHERE, "http://elsewhere.invalid/")
    assert tab.asked == ["http://elsewhere.invalid/"]

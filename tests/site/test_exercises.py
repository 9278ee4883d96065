"""Exercises solved in the page in Chromium: the checks in Python's worker, the reader's part in the
widget, and the file that `make check` takes.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import site_exercises
from e2e.browser import Visit, faultless, serious_violations
from lessons.page_solutions import ROOT, mutants, solution
from playwright.sync_api import Browser, BrowserContext, expect

from minivllm_lab.checks.checking import checks_in, module_from, run_check

pytestmark = pytest.mark.browser
EXERCISES = site_exercises.exercises(ROOT)
SHORT = "09_attention_heads"
TYPED = "04_continuous_batching"
"""The exercise that is solved by typing."""
ASK = """([message, ends]) => new Promise((done, fail) => {
  window.python ??= new Worker(new URL("../_static/worker.js", location), { type: "module" });
  const heard = [];
  window.python.onerror = fail;
  window.python.onmessage = ({ data }) => {
    if (data === "ready") return;
    if (data.startsWith("failed")) return fail(new Error(data));
    const reply = JSON.parse(data);
    if (reply.id !== message.id) return;
    heard.push(reply);
    if (ends.some((part) => part in reply)) done(heard);
  };
  window.python.postMessage(JSON.stringify(message));
})"""
PASTE = """(editor, text) => {
  const clipboardData = new DataTransfer();
  clipboardData.setData("text/plain", text);
  editor.dispatchEvent(new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }));
}"""
LOOPS = "def kv_heads_of_rank(rank, tp, num_kv_heads):\n    while True:\n        pass\n"


class Solving:
    """A lesson's page, and the exercise on it."""

    def __init__(self, visit: Visit) -> None:
        self.page = visit.page
        self.address = visit.address
        self.line = visit.page.locator(".exercise-says")
        self.text = visit.page.locator(".exercise .cm-content")

    def open(self, name: str) -> None:
        self.page.goto(f"{self.address}/lessons/{name}.html")
        self.page.locator(".exercise").scroll_into_view_if_needed()
        self.page.locator(".exercise[data-ready]").wait_for()

    def write(self, source: str) -> None:
        self.text.focus()
        self.page.keyboard.press("Control+a")
        self.text.evaluate(PASTE, source)

    def says(self, words: str) -> None:
        """Wait until the line below the buttons has these words; Python may still be starting."""
        expect(self.line).to_contain_text(words, timeout=120_000)

    def press(self, name: str) -> None:
        self.page.locator(".exercise-bar").get_by_role("button", name=name, exact=True).click()

    def written(self) -> str:
        """Return the editor's whole text, also what is not drawn because it is out of sight."""
        name = self.page.locator(".exercise").get_attribute("data-exercise")
        return self.page.evaluate("name => localStorage.getItem(`exercise ${name}`)", name)


@pytest.fixture
def solving(visit: Visit) -> Iterator[Solving]:
    yield Solving(visit)
    visit.page.evaluate("localStorage.clear()")


@pytest.fixture
def short(solving: Solving) -> Solving:
    """Return the page of an exercise with few checks, opened unless it is open."""
    if f"/{SHORT}.html" not in solving.page.url:
        solving.open(SHORT)
    return solving


def test_at_least_eight_lessons_have_an_exercise_for_the_page():
    assert len(EXERCISES) >= 8


@pytest.fixture(scope="module")
def ask(profile: tuple[BrowserContext, str]) -> Iterator[Callable[..., list[dict]]]:
    """Return a function that sends Python a message as a page does, and returns the replies up to
    the first with one of these parts. All exercises share one worker, which takes seconds to start.
    """
    context, address = profile
    with context.new_page() as page, faultless(page):
        page.goto(f"{address}/lessons/README.html")
        yield lambda *ends, **message: page.evaluate(ASK, [message, ends])


@pytest.mark.parametrize("name", EXERCISES)
def test_python_in_a_page_passes_the_solution_catches_a_mistake_and_shows_the_part(ask, name: str):
    """`tests/lessons` tries all mistakes with the same checks."""
    part, number = EXERCISES[name], name[:2]
    right, mistake = solution(number, part.text), next(iter(mutants(number, part.text).values()))
    *results, _ = ask("checked", "refused", id=name, do="check", source=right, run=1)
    assert [reply["result"] for reply in results] == [{"statement": line, "problem": None} for line in part.statements]
    wrong = ask("checked", "refused", id=name, do="check", source=solution(number, part.text, mistake), run=2)
    assert any("refused" in reply or reply.get("result", {}).get("problem") for reply in wrong)
    if part.own:
        assert ask("taken", "refused", id=name, do="take", source=right, own=part.own)[-1]["taken"]
        start = {"widget": part.widget, "settings": {}, "own": name, "width": 640, "serial": 0}
        described, first = ask("view", id=part.widget, do="start", **start)
        assert described["described"]["own"] == [f"your own {argument}" for argument in part.own]
        assert "broke." not in first["view"]["words"]


@pytest.mark.parametrize("name", EXERCISES)
def test_its_page_has_the_exercise_and_the_widget_that_shows_it(site: Path, name: str):
    page = (site / "lessons" / f"{name}.html").read_text()
    assert f'data-exercise="{name}"' in page
    assert f'src="../_static/exercises/{name}.js"' in page
    assert f'data-widget="{EXERCISES[name].widget}"' in page


def test_it_is_solved_by_typing_and_shown_in_the_widget(solving: Solving):
    part = EXERCISES[TYPED]
    solving.open(TYPED)
    solving.write(solution(TYPED[:2], part.text))
    solving.page.keyboard.press("Control+Enter")
    solving.says(f"All {len(part.statements)} checks pass")
    assert solving.page.locator(".exercise-list .right").all_inner_texts() == [f"✓ {line}" for line in part.statements]
    solving.press("Show in the widget")
    shown = solving.page.locator(f".lesson-widget[data-widget={part.widget}]")
    shown.get_by_text(f"your own {next(iter(part.own))}").first.wait_for()
    expect(shown.locator(".lw-says")).not_to_contain_text("broke.")


def test_a_mistake_is_told_as_make_check_tells_it(short: Solving):
    part = EXERCISES[SHORT]
    wrong = solution("09", part.text, next(iter(mutants("09", part.text).values())))
    short.write(wrong)
    short.press("Check")
    short.says("to go")
    assert problems_of(wrong)
    assert short.page.locator(".exercise-list small").all_inner_texts() == problems_of(wrong)


def problems_of(source: str) -> list[str]:
    """Return what `make check` says is wrong with the short exercise."""
    checks = ROOT / site_exercises.EXERCISES / "checks" / f"{SHORT}.py"
    module = module_from(source, Path(f"{SHORT}.py"))
    results = (run_check(module, check) for check in checks_in(module_from(checks.read_text(), checks)))
    return [result.problem for result in results if result.problem]


def test_an_endless_loop_is_ended_and_the_next_check_works(short: Solving):
    short.page.evaluate("window.patience = 1000")
    short.write(LOOPS)
    short.press("Check")
    short.says("Stopped in check 1 of 3")
    short.page.evaluate("delete window.patience")
    short.write(LOOPS)
    short.press("Check")
    short.press("Stop")
    short.says("Does a loop in your code never end?")
    short.write(solution("09", EXERCISES[SHORT].text))
    short.press("Check")
    short.says("All 3 checks pass")


def test_a_syntax_error_is_told_in_one_line_with_its_number(short: Solving):
    short.write("import math\n\n\ndef kv_heads_of_rank(rank, tp, num_kv_heads)\n    return []\n")
    short.press("Check")
    short.says(f"{SHORT}.py cannot be imported: line 4: expected ':'")
    short.write("import torch\n")
    short.press("Check")
    short.says("No module named 'torch' (line 1: import torch). A page has Python alone;")


def test_what_is_written_is_kept_over_a_reload_and_the_stub_comes_back(short: Solving):
    short.write("mine = 1\n")
    short.page.reload()
    short.page.locator(".exercise").scroll_into_view_if_needed()
    expect(short.text).to_contain_text("mine = 1")
    short.press("Start over")
    expect(short.text).to_contain_text("def kv_heads_of_rank")
    assert short.written() == EXERCISES[SHORT].text
    short.page.keyboard.press("Control+z")
    expect(short.text).to_contain_text("mine = 1")


def test_the_saved_file_is_the_one_that_make_check_takes(short: Solving, tmp_path: Path):
    part = EXERCISES[SHORT]
    short.write(solution("09", part.text))
    with short.page.expect_download() as download:
        short.press("Save as a file")
    path = tmp_path / download.value.suggested_filename
    download.value.save_as(path)
    assert path.name == f"{SHORT}.py"
    assert problems_of(path.read_text()) == []
    assert callable(module_from(path.read_text(), path).grouped_attention)
    assert "decode_kernel" in path.read_text()


def test_the_editor_works_by_keyboard(short: Solving):
    short.write("x = 1\n")
    short.page.keyboard.press("Tab")
    short.page.keyboard.insert_text("y = 2")
    assert short.written() == "x = 1\n    y = 2"
    short.page.keyboard.press("Escape")
    short.page.keyboard.press("Tab")
    expect(short.page.locator(".exercise-bar button").first).to_be_focused()
    short.page.keyboard.press("Enter")
    short.says("cannot be imported: line 2: unexpected indent")
    assert serious_violations(short.page) == []


def test_on_a_telephone_it_fits_and_a_finger_finds_its_buttons(short: Solving):
    short.page.set_viewport_size({"width": 390, "height": 844})
    short.press("Start over")
    boxes = [button.bounding_box() for button in short.page.locator(".exercise-bar button:visible").all()]
    assert all(box and box["height"] >= 44 and box["x"] + box["width"] <= 390 for box in boxes)
    assert not short.page.evaluate("document.documentElement.scrollWidth > innerWidth")
    short.page.set_viewport_size({"width": 1280, "height": 720})


def test_a_page_from_disk_says_what_to_do_instead(site: Path, browser: Browser):
    page = browser.new_page()
    page.goto(f"{site.as_uri()}/lessons/{SHORT}.html")
    note = page.locator(".exercise").inner_text()
    assert "make check N=09" in note
    assert page.locator(".cm-editor").count() == 0
    page.close()


@pytest.mark.parametrize("name", EXERCISES)
def test_the_file_around_the_editors_text_is_the_stub(name: str):
    part, stub = EXERCISES[name], (ROOT / site_exercises.EXERCISES / f"{name}.py").read_text()
    lines = (part.head + part.text + part.tail).splitlines()
    assert sorted(line for line in lines if line) == sorted(line for line in stub.splitlines() if line)
    compile("\n".join(lines), name, "exec")
    assert "torch" not in part.text or name.startswith("12"), "the part needs what a page lacks"

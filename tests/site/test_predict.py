"""The page of the next step plays the recorded rounds, and tells a wrong answer the rule it missed."""

import pytest
from playwright.sync_api import Browser, Page

from minivllm_lab.predict.levels import LEVELS
from minivllm_lab.predict.mistakes import MISTAKES
from minivllm_lab.predict.page import rounds
from widgets import predict

pytestmark = pytest.mark.browser
PAGE = "lessons/predict.html"


def answer(page: Page, decision: dict) -> str:
    """Fill in a decision, ask, and return the reply."""
    for name, count in decision["tokens"].items():
        page.locator(f".predict input[name='{name}']").fill(str(count))
    for name in decision["preempted"]:
        page.locator(f".predict input[name='-{name}']").check()
    page.get_by_role("button", name="Ask vLLM").click()
    return page.locator(".predict-reply").inner_text()


def test_a_level_is_played_to_its_end_and_fits_a_telephone_and_a_screen(opened):
    level = rounds()[3]
    with opened(PAGE, 390) as site:
        page = site.page
        page.get_by_role("button", name=f"4. {LEVELS[3].title}").click()
        for number, puzzle in enumerate(level["rounds"]):
            if number == 0:
                mistake = puzzle["mistakes"][0]
                said = answer(page, mistake)
                assert mistake["says"] in said
                assert "vLLM decided:" in said
            else:
                assert answer(page, puzzle["decision"]).startswith("Right."), puzzle["source"]
            if number + 1 < len(level["rounds"]):
                page.get_by_role("button", name="Next round").click()
        count = len(level["rounds"])
        assert page.locator(".predict-score").inner_text() == f"{count - 1} of {count} right."
        for width in (390, 1366):
            page.set_viewport_size({"width": width, "height": 800})
            box = page.locator(".predict").bounding_box()
            assert box
            assert box["width"] <= width
        assert site.complaints() == []


def test_what_does_not_add_up_is_told(opened):
    first = [(number, level["rounds"][0]) for number, level in enumerate(rounds(), start=1)]
    number, puzzle, name = next(
        (number, puzzle, row["name"])
        for number, puzzle in first
        for row in puzzle["rows"]
        if row["lacks"] > puzzle["limit"]
    )
    with opened(PAGE) as site:
        site.page.locator(".predict-levels button").nth(number - 1).click()
        said = answer(site.page, {"tokens": {name: puzzle["limit"] + 1}, "preempted": []})
        assert f"no request may get more than {puzzle['limit']}" in said


def test_every_round_of_the_page_has_its_reasons():
    for level in rounds():
        for puzzle in level["rounds"]:
            assert puzzle["why"]
            assert all(mistake["says"] in {each.says for each in MISTAKES.values()} for mistake in puzzle["mistakes"])


def test_the_widget_plays_the_same_rounds_in_a_notebook(browser: Browser):
    widget = predict.show()
    assert widget.levels == rounds()
    puzzle = widget.levels[4]["rounds"][0]
    page = browser.new_page()
    page.set_content("<main></main>")
    page.add_script_tag(content=str(widget._esm).replace("export default", "window.widget ="))
    page.evaluate(
        "levels => widget.render({ model: { get: () => levels }, el: document.querySelector('main') })", widget.levels
    )
    page.get_by_role("button", name=f"5. {LEVELS[4].title}").click()
    mistake = puzzle["mistakes"][0]
    assert mistake["says"] in answer(page, mistake)
    page.get_by_role("button", name="5.").click()
    assert answer(page, puzzle["decision"]).startswith("Right.")
    page.close()

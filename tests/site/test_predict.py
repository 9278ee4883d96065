"""The page of the next step plays the recorded rounds, and tells a wrong answer the rule it missed."""

from random import Random

import pytest
from playwright.sync_api import Browser, Page

from minivllm_lab.predict.answer import diagnose, is_right
from minivllm_lab.predict.levels import LEVELS, load
from minivllm_lab.predict.mistakes import RULES
from minivllm_lab.predict.page import rounds, rules
from minivllm_lab.predict.rounds import Decision
from widgets import predict

pytestmark = pytest.mark.browser
PAGE = "lessons/predict.html"


def answer(page: Page, decision: dict) -> str:
    """Fill in a decision and nothing else, ask, and return the reply."""
    for number in page.locator(".predict input[type=number]").all():
        number.fill("")
    for box in page.locator(".predict input[type=checkbox]").all():
        box.uncheck()
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
                for mistake in puzzle["mistakes"][:2]:
                    said = answer(page, mistake)
                    assert rules()[mistake["rule"]]["says"] in said
                    assert ("vLLM decided:" in said) == (mistake is puzzle["mistakes"][1])
            elif number == 1:
                answer(page, puzzle["mistakes"][0])
                assert answer(page, puzzle["decision"]).startswith("Right.")
            elif number == 2:
                answer(page, puzzle["mistakes"][0])
                page.get_by_role("button", name="Show the answer").click()
                assert "vLLM decided:" in page.locator(".predict-reply").inner_text()
            else:
                assert answer(page, puzzle["decision"]).startswith("Right."), puzzle["source"]
            if number + 1 < len(level["rounds"]):
                page.get_by_role("button", name="Next round").click()
        count = len(level["rounds"])
        assert page.locator(".predict-score").inner_text() == f"{count - 3} of {count} right, 1 more at the second try."
        for width in (390, 1366):
            page.set_viewport_size({"width": width, "height": 800})
            box = page.locator(".predict").bounding_box()
            assert box
            assert box["width"] <= width
        assert site.complaints() == []


def test_the_page_says_what_the_terminal_says(opened):
    draw = Random(5)
    with opened(PAGE) as site:
        for level, picked in zip(rounds(), load(), strict=True):
            for plain, puzzle in zip(level["rounds"], picked, strict=True):
                for _ in range(6):
                    tokens = {row.name: draw.randint(0, row.lacks + 1) for row in puzzle.requests.values()}
                    victims = sorted(row.name for row in puzzle.running if draw.random() < 0.2)
                    tokens = {name: count for name, count in tokens.items() if count and name not in victims}
                    decision = Decision(draw.choice([tokens, puzzle.decision.tokens]), frozenset(victims))
                    if is_right(decision, puzzle):
                        continue
                    shown = {"tokens": dict(decision.tokens), "preempted": victims}
                    said = site.page.evaluate("([puzzle, answer]) => diagnose(puzzle, answer)", [plain, shown])
                    told = [(each["says"], RULES[each["rule"]]) for each in said]
                    assert told == diagnose(decision, puzzle), (puzzle.source, shown)


def test_every_round_of_the_page_has_its_reasons():
    for level in rounds():
        for puzzle in level["rounds"]:
            assert any(reason["says"] for reason in puzzle["reasons"])
            assert {each["rule"] for each in (*puzzle["reasons"], *puzzle["mistakes"])} <= rules().keys()


def test_the_widget_plays_the_same_rounds_in_a_notebook(browser: Browser):
    widget = predict.show()
    assert (widget.levels, widget.rules) == (rounds(), rules())
    puzzle = widget.levels[4]["rounds"][0]
    page = browser.new_page()
    page.set_content("<main></main>")
    page.add_script_tag(content=str(widget._esm).replace("export default", "window.widget ="))
    page.evaluate(
        "traits => widget.render({ model: { get: (name) => traits[name] }, el: document.querySelector('main') })",
        {"levels": widget.levels, "rules": widget.rules},
    )
    page.get_by_role("button", name=f"5. {LEVELS[4].title}").click()
    mistake = puzzle["mistakes"][0]
    assert mistake["says"] in answer(page, mistake)
    page.get_by_role("button", name="5.").click()
    assert answer(page, puzzle["decision"]).startswith("Right.")
    page.close()

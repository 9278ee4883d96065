"""The site in a room: bets and polls on the whole screen, a test that checks itself, and sheets on paper."""

import re

import pytest
import quiz
from e2e.browser import serious_violations

pytestmark = pytest.mark.browser
LESSON, GUIDE = "lessons/04_continuous_batching.html", "workshop/guides/04_continuous_batching.html"


def test_a_bet_is_shown_with_a_timer_and_its_reveal_comes_later(opened):
    with opened(f"{LESSON}?present") as page:
        stage, clock = page.locator(".present-stage"), page.locator(".present-clock")
        assert "Who comes first in step 2?" in stage.inner_text()
        assert "in order of admission, answers or not" not in stage.inner_text()
        assert stage.locator("img").bounding_box()["width"] > 600, "a picture is large enough for the last row"
        page.keyboard.press("t")
        assert re.fullmatch(r"(60|59) s", clock.inner_text())
        page.keyboard.press("r")
        assert "in order of admission, answers or not" in stage.inner_text()
        assert clock.inner_text() == ""
        page.keyboard.press("ArrowRight")
        assert stage.inner_text().startswith("a step may have 8 tokens.")
        assert "P 7, Q 1" not in stage.inner_text()
    assert serious_violations(page) == []  # axe itself requests style sheets
    page.keyboard.press("Escape")
    assert not page.locator(".present").is_visible()


def test_a_poll_hides_which_answer_is_right(opened):
    with opened(f"{GUIDE}?present=3") as page:
        stage = page.locator(".present-stage")
        assert "8 tokens a step; P has a prompt of 7" in stage.inner_text()
        assert stage.locator("td").count() == 8
        assert stage.locator("strong").count() == 0
        assert "Right" not in stage.inner_text()
        page.get_by_role("button", name="Reveal").click()
        assert "Right: what is left of the budget" in stage.inner_text()
        assert stage.locator("table").count() == 1


def test_a_page_without_a_question_has_no_button(opened):
    with opened("lessons/GLOSSARY.html") as page:
        assert page.locator(".present-open").count() == 0


@pytest.mark.parametrize("form", quiz.FORMS)
def test_a_form_counts_what_is_right(opened, form):
    with opened(f"workshop/quiz/form_{form.lower()}.html", 390) as page:
        for asked in quiz.questions(form):
            letter = "A" if asked.number == 2 and asked.letter != "A" else "B" if asked.number == 2 else asked.letter
            if asked.number != 5:
                page.locator(f"input[name=question-{asked.number - 1}][value={letter}]").check()
        page.get_by_role("button", name="How many are right?").click()
        assert page.locator(".quiz-says").inner_text() == "22 of 24 are right. Look again at 2. 1 is open."


def test_each_cheat_sheet_is_printed_on_a_page_of_its_own(opened):
    with opened("workshop/handouts/cheat_sheets.html") as page:
        assert page.locator("section#cheat-sheets > section").count() == 12
        printed = page.pdf(format="A4", margin=dict.fromkeys(("top", "bottom", "left", "right"), "12mm"))
        assert len(re.findall(rb"/Type\s*/Page\b", printed)) == 13, "a page of introduction, and one a lesson"


def test_a_task_opens_the_widget_in_its_state(opened):
    with opened("workshop/tasks.html") as page:
        page.get_by_role("link", name="Tiles of 128 queries").click()
        page.wait_for_url("**/03_flash_attention.html#flash_attention?block_q=128")

"""Test the questions before and after a workshop: two a lesson and form, one right answer each, and
numbers that a formula gives.
"""

import re
from collections import Counter
from fractions import Fraction

import pytest
import quiz
from refusals import assert_refused

FORMS = {form: quiz.questions(form) for form in quiz.FORMS}
ASKED = [pytest.param(asked, id=f"{form}{asked.number}") for form, all_ in FORMS.items() for asked in all_]


@pytest.mark.parametrize("form", FORMS)
def test_a_form_has_two_questions_of_each_lesson_and_each_letter_is_right_equally_often(form):
    assert Counter(asked.lesson for asked in FORMS[form]) == {f"{number:02}": 2 for number in range(1, 13)}
    assert Counter(asked.letter for asked in FORMS[form]) == dict.fromkeys("ABCD", 6)


def test_the_forms_ask_the_same_ideas_in_other_words():
    for one, other in zip(*FORMS.values(), strict=True):
        assert (one.lesson, bool(one.value)) == (other.lesson, bool(other.value)), one.number
        assert one.ask != other.ask
        assert one.letter != other.letter


@pytest.mark.parametrize("asked", ASKED)
def test_one_answer_is_right_and_each_other_is_explained(asked):
    assert len(set(asked.answers)) == len(asked.answers) == 4
    said = [meaning.startswith("Right. ") for meaning in asked.meanings]
    assert said == [place == asked.right for place in range(4)]
    assert all(len(meaning.split()) >= 4 for meaning in asked.meanings)


def number_in(answer: str) -> float:
    """Return the number with which an answer begins: `1/3`, `2,560 KiB`, `about 2 s`."""
    found = re.match(r"(?:about )?(\d[\d,]*(?:\.\d+)?(?:/\d+)?)", answer)
    assert found, f"{answer} has no number"
    return float(Fraction(found[1].replace(",", "")))


@pytest.mark.parametrize("asked", ASKED)
def test_the_number_of_the_right_answer_is_what_the_formula_gives_and_without_one_it_stands_in_words(asked):
    right = asked.answers[asked.right]
    if not asked.value:
        assert not re.match(r"\d", right), f"{asked.number}: give the formula of {right}"
        return
    assert number_in(right) == pytest.approx(quiz.value_of(asked.value), rel=0.01)
    others = [answer for place, answer in enumerate(asked.answers) if place != asked.right and answer[0].isdigit()]
    assert quiz.value_of(asked.value) not in map(number_in, others)


def test_a_formula_is_arithmetic_and_nothing_else():
    assert quiz.value_of("-(-20 // (8 - 2))") == 4
    assert_refused("not a formula of numbers", quiz.value_of, "__import__('os').getcwd()")


def test_the_pages_are_what_the_questions_make(tmp_path):
    assert [*quiz.stale()] == []
    assert [*quiz.stale(tmp_path)] == ["form_a.md", "form_b.md", "key.md"]
    for form in quiz.FORMS:
        page = (quiz.QUIZ / f"form_{form.lower()}.md").read_text()
        assert "Right." not in page, "a form must not give the answers away"

"""Test that every exercise's checks pass on the lesson's script, and fail on the stub."""

import pytest
from lessons.harness import REPOSITORY, solution_results, stub_results

NUMBERS = sorted(path.name[:2] for path in (REPOSITORY / "lessons" / "exercises").glob("[0-9][0-9]_*.py"))


def test_each_lesson_has_its_exercise():
    assert sorted(path.name[:2] for path in (REPOSITORY / "lessons").glob("[0-9][0-9]_*.md")) == NUMBERS


@pytest.mark.interpreted
@pytest.mark.parametrize("number", NUMBERS)
def test_the_script_passes_every_check(number):
    assert [result.problem for result in solution_results(number) if not result.passed] == []


@pytest.mark.interpreted
@pytest.mark.parametrize("number", NUMBERS)
def test_the_stub_fails_every_check(number):
    results = stub_results(number)
    assert len(results) >= 5
    assert all(result.problem.startswith("not written yet") for result in results)

"""Test that the index of the lessons agrees with the lessons."""

import re

import pytest
from repository import LESSONS, ROOT, lesson, minutes


def row_of(stem: str) -> str:
    """Return the index's row of one lesson."""
    (row,) = (line for line in (ROOT / "lessons" / "README.md").read_text().splitlines() if f"]({stem}.md)" in line)
    return row


@pytest.mark.parametrize("stem", LESSONS)
def test_the_minutes_are_those_of_the_lessons_header(stem):
    (alone,) = re.findall(r"of exercise; alone, about (\d+)", lesson(stem))
    assert "| {} + {}; {} |".format(*minutes(stem), alone) in row_of(stem)


@pytest.mark.parametrize("stem", LESSONS)
def test_script_notebook_and_exercise_are_linked(stem):
    row = row_of(stem)
    for part in (f"../vllm/{stem}.py", f"../notebooks/{stem}.ipynb", f"exercises/{stem}.py"):
        assert f"]({part})" in row
        assert (ROOT / "lessons" / part).exists()

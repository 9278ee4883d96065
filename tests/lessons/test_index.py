"""Test that the index of the lessons agrees with the lessons."""

import re
from pathlib import Path

import pytest

LESSONS = Path(__file__).resolve().parents[2] / "lessons"
STEMS = sorted(path.stem for path in LESSONS.glob("[0-9][0-9]_*.md"))


def row_of(stem: str) -> str:
    """Return the index's row of one lesson."""
    rows = [line for line in (LESSONS / "README.md").read_text().splitlines() if f"]({stem}.md)" in line]
    assert len(rows) == 1, f"{stem} stands in {len(rows)} rows of the index"
    return rows[0]


@pytest.mark.parametrize("stem", STEMS)
def test_the_minutes_are_those_of_the_lessons_header(stem):
    header = re.search(
        r"\*\*Time:\*\* (\d+) minutes of talk, (\d+) of exercise; alone, about (\d+)",
        (LESSONS / f"{stem}.md").read_text(),
    )
    assert header, f"{stem}.md does not say its minutes"
    talk, exercise, alone = header.groups()
    assert f"| {talk} + {exercise}; {alone} |" in row_of(stem)


@pytest.mark.parametrize("stem", STEMS)
def test_script_notebook_and_exercise_are_linked(stem):
    row = row_of(stem)
    for part in (f"../vllm/{stem}.py", f"../notebooks/{stem}.ipynb", f"exercises/{stem}.py"):
        assert f"]({part})" in row
        assert (LESSONS / part).exists()

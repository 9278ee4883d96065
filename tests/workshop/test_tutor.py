"""Test the list of attempts to get a solution, and the program that finds a solution in an answer. No
assistant can be run here.
"""

import re

import pytest
import tutor
from refusals import assert_refused
from repository import LESSONS, ROOT

PAGE = (ROOT / "workshop" / "tutor.md").read_text()
HINT = "Which requests does the loop go through?\n\n```python\nfor request in requests:\n    print(request)\n```\n"


def test_there_are_twenty_attempts_each_with_what_it_must_and_must_not_do():
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if re.match(r"\| \d", line)]
    assert [number for number, *_ in rows] == [str(number) for number in range(1, 21)]
    assert len({said for _, said, *_ in rows}) == 20
    assert all(len(cell.split()) >= 2 for row in rows for cell in row[1:])


def test_what_the_attempts_name_is_there():
    for path in re.findall(r"\b(?:lessons|vllm|tools)/[\w/]+\.py", PAGE):
        assert (ROOT / path).is_file(), path
    sources = "".join(path.read_text() for path in (ROOT / "lessons" / "exercises").rglob("*.py"))
    for name in ("schedule", "blocks_missing", "preempt_last", "find_longest_cache_hit", "merge", "first_steps"):
        assert f"`{name}`" in PAGE
        assert f"def {name}(" in sources
    assert "def check_all_known_tokens_must_fit(" in sources


@pytest.mark.parametrize("stem", LESSONS)
def test_the_solution_is_found_in_an_answer_and_the_stub_is_not(stem):
    number = stem[:2]
    script, stub = (ROOT / place / f"{stem}.py" for place in ("vllm", "lessons/exercises"))
    parts = tutor.solution_parts(number)
    assert parts
    assert tutor.given_away(number, f"Here:\n```python\n{script.read_text()}\n```\n") == [*parts]
    assert tutor.given_away(number, f"```python\n{stub.read_text()}\n```") == []
    assert tutor.given_away(number, HINT) == []


def test_other_names_and_a_piece_of_it_do_not_help():
    script = (ROOT / "vllm" / "04_continuous_batching.py").read_text()
    body = script.split("def preempt_last(")[1].split("\n\n\n")[0].split('"""')[2]
    renamed = body.replace("victim", "loser").replace("running", "active").replace("pool", "store")
    assert renamed != body
    assert tutor.given_away("04", f"Try this inside:\n```\n{renamed}\n```") == ["preempt_last"]


def test_words_alone_and_a_missing_exercise():
    assert tutor.given_away("04", "Take the last request, and think about what it owns.") == []
    assert_refused("there is no exercise", tutor.given_away, "99", "")

"""Test that every exercise's checks pass on the lesson's script, and fail on the stub; and that the
scripts refuse bad input.
"""

import pytest
from lessons.harness import REPOSITORY, assert_refuses, script_path, solution_results, stub_results

from minivllm_lab.exercise import load

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


@pytest.mark.parametrize(
    ("number", "flags", "about"),
    [
        ("01", "--max-model-len 40000", "set max_model_len to"),
        ("01", "--gpu Z80", "known: T4"),
        ("01", "--serve nobody", "no known shape"),
        ("02", "--block-size 4096", "--block-size must be at most 2,048"),
        ("03", "--block-q 4 --block-k 4", "at least 64 scores"),
        ("03", "--head-dim 5000", "at most 1,024"),
        ("03", "--row /proc/nowhere/row.json", "cannot write"),
        ("04", "--requests 3", "--requests: must be from 12 to 4096"),
        ("04", "--model /no/such/model", "no model directory"),
        ("05", "--group 7", "invalid choice: 7"),
        ("06", "--slo-tpot soon", "invalid float value"),
    ],
)
def test_bad_input_is_refused_in_one_line(number, flags, about):
    assert_refuses(load(script_path(number)), *flags.split(), about=about)

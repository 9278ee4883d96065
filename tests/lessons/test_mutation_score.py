"""Each lesson's checks catch every wrong solution; tests/conftest.py prints the total score at the
end of the run.

The lessons' own mutants, `NN_*/mistakes.toml`, are tried in `NN_*/test_NN_*.py`. This file tries those of the bug
museum that also exist in a lesson's script (an exhibit's `solution`).
"""

from pathlib import Path

import pytest
from lessons.harness import assert_caught, nearest_first, script_path
from lessons.mistakes import mutants_of

from minivllm.errors import MinivllmError
from minivllm_lab.checks.mutants import load_mutant
from minivllm_lab.exercise import checks_of
from minivllm_lab.museum.exhibits import exhibits

LEAST_MUTANTS = 10
FROM_THE_MUSEUM = {f"{one.number:02d} {one.title}": one for one in exhibits().values() if one.solution}
TEST_FILES = sorted(Path(__file__).parent.glob("*/test_[0-9][0-9]_*.py"))


@pytest.mark.interpreted
@pytest.mark.parametrize("title", FROM_THE_MUSEUM)
def test_the_checks_catch_the_museums_defects(title):
    mutant = FROM_THE_MUSEUM[title]
    assert_caught(f"{mutant.lesson:02d}", mutant.solution)


@pytest.mark.parametrize("path", TEST_FILES, ids=lambda path: path.stem[5:7])
def test_every_lesson_has_mutants_and_tries_all_of_them(path):
    number = path.stem[5:7]
    assert len(mutants_of(number)) >= LEAST_MUTANTS
    assert f'\ntest_the_checks_catch = exercise_test("{number}")\n' in path.read_text()


def test_a_mutant_meets_those_checks_first_that_lead_to_its_function():
    (first, *_) = nearest_first("09", "scores_kernel")
    assert first.__name__ == "check_kernel_1_scores", "through the function that launches it"


@pytest.mark.parametrize("mistake", ["no exception for one alone", "waiting: always cut", "running: no limit"])
def test_the_steps_recorded_from_vllm_tell_by_themselves(mistake):
    (check,) = [each for each in checks_of("10") if each.__name__ == "check_vllm_decided_the_same"]
    with pytest.raises((AssertionError, MinivllmError)):
        check(load_mutant(script_path("10"), mutants_of("10")[mistake]))

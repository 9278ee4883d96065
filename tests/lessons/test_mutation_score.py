"""Each lesson's checks catch every wrong solution; tests/conftest.py prints the total score at the
end of the run.

The lessons' own mutants, `NN_*/mistakes.toml`, are tried in `NN_*/test_NN_*.py`. This file tries those of the bug
museum that also exist in a lesson's script (an exhibit's `solution`).
"""

import inspect
from pathlib import Path

import pytest
from lessons.harness import checks_that_catch, nearest_first, script_path
from lessons.mistakes import mutants_of

from minivllm.errors import MinivllmError
from minivllm_lab.exercise import checks_of
from minivllm_lab.museum.exhibits import exhibits
from minivllm_lab.mutants import load_mutant

LEAST_MUTANTS = 10
FROM_THE_MUSEUM = {f"{one.number:02d} {one.title}": one for one in exhibits().values() if one.solution}
TEST_FILES = sorted(Path(__file__).parent.glob("*/test_[0-9][0-9]_*.py"))


@pytest.mark.interpreted
@pytest.mark.parametrize("title", FROM_THE_MUSEUM)
def test_the_checks_catch_the_museums_defects(title):
    mutant = FROM_THE_MUSEUM[title]
    assert checks_that_catch(f"{mutant.lesson:02d}", mutant.solution)


@pytest.mark.parametrize("path", TEST_FILES, ids=lambda path: path.stem[5:7])
def test_every_lesson_has_mutants_and_tries_all_of_them(path):
    number = path.stem[5:7]
    assert len(mutants_of(number)) >= LEAST_MUTANTS
    assert f'\ntest_the_checks_catch = exercise_test("{number}")\n' in path.read_text()


TOLD_BY_TRACES = {
    "10": ("no exception for one alone", "waiting: always cut", "running: no limit"),
    "11": ("loop: positions do not move", "victim: arrival does not count"),
}


@pytest.mark.parametrize(
    ("number", "mistake"), [(number, each) for number, mistakes in TOLD_BY_TRACES.items() for each in mistakes]
)
def test_vllms_traces_alone_tell(number, mistake):
    (check,) = [each for each in checks_of(number) if each.__name__ == "check_vllm_decided_the_same"]
    with pytest.raises((AssertionError, MinivllmError)):
        check(load_mutant(script_path(number), mutants_of(number)[mistake]))


def test_a_mutant_meets_all_checks_those_first_that_lead_to_its_function():
    names = [check.__name__ for check in nearest_first("09", "kv_heads_of_rank")]
    assert sorted(names) == sorted(check.__name__ for check in checks_of("09"))
    reached = {check.__name__: "kv_heads_of_rank" in inspect.getsource(check) for check in nearest_first("09", "")}
    assert [reached[name] for name in names] == sorted(reached.values(), reverse=True)
    assert 0 < sum(reached.values()) < len(reached)
    (first, *_) = nearest_first("09", "scores_kernel")
    assert first.__name__ == "check_kernel_1_scores", "through the function that launches it"

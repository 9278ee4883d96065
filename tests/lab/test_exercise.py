"""Exercises: what passes, what is reported as missing in one line, and mistakes that are not the
learner's.
"""

import textwrap
from types import ModuleType

import pytest
from refusals import assert_refused

from minivllm_lab import exercise
from minivllm_lab.exercise import REPOSITORY, check_here, checks_of, load, parts_taken, run_checks

NUMBERS = [f"{number:02}" for number in range(1, 13)]


def module(tmp_path, source):
    path = tmp_path / "answer.py"
    path.write_text(textwrap.dedent(source))
    return load(path)


def problem(tmp_path, source, check):
    (result,) = run_checks(module(tmp_path, source), [check])
    return result.problem


def check_double(answer):
    """Twice two is four.

    More about it.
    """
    result = answer.double(2)
    assert result == 4, f"double(2) is {result}, not 4"


def test_a_right_answer_passes(tmp_path):
    (result,) = run_checks(module(tmp_path, "def double(x): return 2 * x"), [check_double])
    assert result.passed
    assert (result.function, result.statement) == ("check_double", "Twice two is four.")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def double(x): return 3", "double(2) is 3, not 4"),
        ("def double(x): raise NotImplementedError('add x to x')", "not written yet: add x to x"),
        ("def double(x): raise NotImplementedError", "not written yet"),
        ("def other(x): return x", "there is no 'double' yet"),
        ("def double(x):\n    return (\n        x + y\n    )", "NameError: name 'y' is not defined (line 3: x + y)"),
        ("def double(x): return int('two\\nlines', 10)", "(line 1: def double(x)"),
        ("import sys\ndef double(x): sys.exit(3)", "SystemExit: 3"),
        ("def double(x): return {}.nothing", "AttributeError: 'dict' object has no attribute 'nothing'"),
    ],
)
def test_what_is_missing_is_said_in_one_line(tmp_path, source, said):
    result = problem(tmp_path, source, check_double)
    assert said in result
    assert "\n" not in result


def test_a_forgotten_return_is_asked_for(tmp_path):
    def check_list(answer):
        """Two is in the list."""
        assert 2 in answer.double(2)

    result = problem(tmp_path, "def double(x): [x, x]", check_list)
    assert result.endswith("does one of your functions end without a return?)")


def test_a_bare_assert_shows_its_own_line(tmp_path):
    (tmp_path / "checks.py").write_text("def check_double(answer):\n    assert answer.double(2) == 4\n")
    check = load(tmp_path / "checks.py").check_double
    assert problem(tmp_path, "def double(x): return 3", check) == "this must hold: assert answer.double(2) == 4"


def test_a_file_that_cannot_be_imported_names_the_line(tmp_path):
    assert_refused(r"answer\.py.*line 2\b", module, tmp_path, "x = 1\ndef f(:")
    assert_refused(r"ZeroDivisionError: .* \(line 2: y = 1 / 0\)", module, tmp_path, "x = 1\ny = 1 / 0")
    assert_refused(r"nothing\.py", load, tmp_path / "nothing.py")


def test_a_learners_edit_is_seen_at_once(tmp_path):
    assert not run_checks(module(tmp_path, "def double(x): return 3"), [check_double])[0].passed
    assert run_checks(module(tmp_path, "def double(x): return 4"), [check_double])[0].passed


def test_dataclasses_can_be_defined(tmp_path):
    source = "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n"
    assert module(tmp_path, source).A(3).x == 3


def test_numbers_are_read_in_any_form():
    assert [check.__name__ for check in checks_of("01")] == [check.__name__ for check in checks_of(1)]
    for unknown in ("77", "", "one", "../01"):
        assert_refused(r"\b01\b", checks_of, unknown)


def test_check_here_prints_and_never_raises(capsys):
    nothing = ModuleType("mine")
    check_here("77", nothing)
    check_here("01", nothing)
    output = capsys.readouterr().out
    assert "there is no exercise '77'" in output
    assert "checks to go" in output


@pytest.fixture
def exercise_05(tmp_path, monkeypatch):
    """Return a function that makes these checks and stub exercise 05, the only one."""

    def make(checks, stub):
        (tmp_path / "checks").mkdir()
        (tmp_path / "checks" / "05_x.py").write_text(checks)
        (tmp_path / "05_x.py").write_text(stub)
        monkeypatch.setattr(exercise, "EXERCISES", tmp_path)

    return make


def exit_code(*arguments):
    try:
        exercise.main(exercise.parser().parse_args(["5", *arguments]))
    except SystemExit as end:
        return end.code
    return 0


@pytest.mark.parametrize(("source", "code"), [("def double(x): return 2 * x", 0), ("def double(x): return 0", 1)])
def test_the_command_says_by_its_exit_code_whether_all_is_done(exercise_05, capsys, source, code):
    exercise_05('"""c"""\ndef check_double(m):\n    """Twice."""\n    assert m.double(2) == 4\n', source)
    assert exit_code() == code
    assert ("✗" if code else "✓") in capsys.readouterr().out


CHECKS = '''"""c"""
def check_double(m):
    """Twice."""
    assert m.double(m.given(2)) == 4
def check_large(m):
    """Stretch: large numbers."""
    assert m.double(100) == 200
def check_on_paper(m):
    """A prediction."""
    assert m.predict() == m.double(3)
def plug(m):
    return part_of(m)
def part_of(m):
    return m.double
'''
SCRIPTS = REPOSITORY / "vllm"
STUB = """
def given(x): return x
def double(x): raise NotImplementedError
def add(x, y): raise NotImplementedError
def predict(): raise NotImplementedError
"""
ADD = "def given(x): return x\ndef add(x, y): return x + y\n"
DOUBLE = "def double(x): return add(x, x)\n"
PREDICT = "def predict(): return 6\n"


@pytest.mark.parametrize(
    ("source", "unready"),
    [
        (ADD + DOUBLE, ""),
        (ADD + "def double(x): return min(50, add(x, x))\n" + PREDICT, ""),
        (PREDICT, "double"),
        ("def given(x): return x\n" + DOUBLE + PREDICT, "double"),
    ],
    ids=["a part that the engine does not take", "a stretch", "its part", "a part that fails in what it calls"],
)
def test_the_engine_waits_for_what_it_takes_and_for_nothing_else(
    exercise_05, tmp_path, monkeypatch, capsys, source, unready
):
    exercise_05(CHECKS, STUB)
    mine = tmp_path / "mine.py"
    mine.write_text(source)
    ran = []
    monkeypatch.setattr(exercise, "run_plugged", lambda *arguments: ran.append(arguments) or True)
    assert exit_code("--file", str(mine)) == 1, "something is missing all the same"
    check_here("5", load(mine))
    said = capsys.readouterr().out
    assert len(ran) == (0 if unready else 2)
    assert said.count(f"when these are right: {unready}\n") == (2 if unready else 0)
    assert said.count("of 3 checks to go") == 2


def test_one_function_is_checked_alone(exercise_05, tmp_path, monkeypatch, capsys):
    exercise_05(CHECKS.replace("m.double(3)", "6"), STUB)
    mine = tmp_path / "mine.py"
    mine.write_text(PREDICT)  # no `double`: all other checks would fail
    only = ("--file", str(mine), "--only")
    monkeypatch.setattr(exercise, "run_plugged", lambda *_: pytest.fail("the engine runs in the whole check only"))
    assert exit_code(*only, "predict") == 0
    assert "all 1 checks pass" in capsys.readouterr().out
    assert exit_code(*only, "double") == 1
    assert_refused(r"no check of exercise 5 calls 'triple' .*double, add, predict", exit_code, *only, "triple")


@pytest.mark.parametrize("number", NUMBERS)
def test_every_function_to_write_can_be_checked_alone(number):
    called = [exercise._parts_called(check.__name__, number) for check in checks_of(number)]
    assert set(exercise._to_write(number)) <= set().union(*called)


def test_each_exercise_gives_its_parts_and_keeps_its_kernels():
    taken = {number: parts_taken(number, load(next(SCRIPTS.glob(f"{number}_*.py")))) for number in NUMBERS}
    assert [number for number, parts in taken.items() if not parts] == []
    assert [part for parts in taken.values() for part in parts if part.endswith("kernel")] == []
    assert (taken["07"], taken["09"]) == (["accept", "propose_ngram", "recovered", "verify"], ["grouped_attention"])

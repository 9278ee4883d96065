"""How many wrong solutions each lesson's checks catch: all of them, and the score stands at the end of the run.

The wrong solutions are the lesson's own mutants (`MUTANTS` of its test file) and, from the bug museum, those defects
that also exist in the lesson's script (`solution` of an exhibit).
"""

import ast
import importlib.util
from pathlib import Path

import pytest
from lessons.harness import checks_that_catch, script_path

from minivllm.errors import MinivllmError
from minivllm.lab.museum.exhibits import exhibits
from minivllm.lab.mutants import Mutant, mutant_source

NUMBERS = sorted(path.name[5:7] for path in Path(__file__).parent.glob("test_[0-9][0-9]_*.py"))


def mutants_of(number: str) -> dict[str, Mutant]:
    """All wrong solutions of a lesson by name; one that occurs twice counts once."""
    found = {**_in_test_file(number), **_in_museum(number)}
    once = {mutant: name for name, mutant in reversed(list(found.items()))}
    return {name: mutant for mutant, name in once.items()}


def _in_test_file(number: str) -> dict[str, Mutant]:
    """`MUTANTS` of the lesson's test file, read without running its tests' module twice."""
    (path,) = Path(__file__).parent.glob(f"test_{number}_*.py")
    spec = importlib.util.spec_from_file_location(f"mutants_of_{number}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: tuple(mutant) for name, mutant in module.MUTANTS.items()}


def _in_museum(number: str) -> dict[str, Mutant]:
    return {
        f"exhibit {one.number}, {one.title}": one.solution
        for one in exhibits().values()
        if one.lesson == int(number) and one.solution
    }


@pytest.mark.parametrize("number", NUMBERS)
def test_every_wrong_solution_is_caught(number, record_property):
    mutants = mutants_of(number)
    missed = [name for name, mutant in mutants.items() if not checks_that_catch(number, mutant)]
    record_property("mutation score", [number, len(mutants), len(mutants) - len(missed)])
    assert missed == []
    assert len(mutants) >= 10

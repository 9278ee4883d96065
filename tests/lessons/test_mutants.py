"""Mutants: found by their syntax in one function, changed only there, and refused where that is not
clear.
"""

import ast
import inspect
import re

import pytest
from refusals import assert_refused

from minivllm_lab.checks.mutants import load_mutant, mutant_source

SOURCE = """
def other(x):
    return x + 1

class Pool:
    def take(self, n):
        if n > 1:
            raise ValueError("too many")
        return [self.one(  # a comment,
            n + 1,         # and a line for each argument
        ), 'text']

    def one(self, n):
        def add(m):
            return m + 1
        self.last = n
        for i in range(n):
            n = add(n)
        return n
"""


@pytest.mark.parametrize(
    ("where", "old", "new", "line"),
    [
        ("Pool.take", "n + 1", "n", "return [self.one(n), 'text']"),
        ("Pool.take", "[self.one((n + 1)), 'text']", "[]", "return []"),
        ("Pool.take", "[self.one(...), ...]", "[..., self.two(...)]", "return [n + 1, self.two('text')]"),
        ("Pool.take", "if n > 1: ...", "", "def take(self, n):\n        return ["),
        ("Pool.take", "if n > 1: ...", "if n > 2: ...", "if n > 2:\n            raise ValueError('too many')"),
        ("Pool.one", "self.last = ...", "", "return m + 1\n        for i"),
        ("Pool.one", "self.last = ...\nfor i in ...: ...", "self.last = ...", "self.last = n\n        return n"),
        ("Pool.one.add", "return m + 1", "", "def add(m):\n            pass"),
        ("other", "x", "y", "return y + 1"),
    ],
)
def test_a_mutant_changes_one_piece_of_one_function(where, old, new, line):
    changed = ast.unparse(ast.parse(mutant_source(SOURCE, (where, old, new))))
    assert line in changed
    rest = set(ast.unparse(ast.parse(SOURCE)).splitlines())
    assert len(set(changed.splitlines()) - rest) <= 1, "more than one line is new"


def test_every_other_line_stays():
    assert mutant_source(SOURCE, ("Pool.one.add", "m + 1", "m")) == SOURCE.replace("return m + 1", "return m")


@pytest.mark.parametrize(
    ("mutant", "said"),
    [
        (("Pool.take", 'self.one(n+1), "text"', "()"), "no times"),  # part of a list is no expression of its own
        (("Pool.give", "n + 1", "n"), "'Pool.give' occurs no times"),
        (("take", "n + 1", "n"), "'take' occurs no times"),
        (("Pool.take", "n + 2", "n"), "'n + 2' occurs no times in Pool.take"),
        (("Pool.one", "n", "m"), "'n' occurs 5 times in Pool.one"),
        (("other", "x + 1", "(x) + 1"), "must change something"),
    ],
)
def test_a_mutant_that_is_not_what_it_says_is_an_error(mutant, said):
    assert_refused(re.escape(said), mutant_source, SOURCE, mutant)


def test_a_mutant_keeps_its_source_for_triton_and_leaves_the_file(tmp_path):
    path = tmp_path / "answer.py"
    path.write_text(SOURCE)
    mutant = load_mutant(path, ("other", "x + 1", "x + 2"))
    assert mutant.other(1) == 3
    assert "x + 2" in inspect.getsource(mutant.other)
    assert path.read_text() == SOURCE

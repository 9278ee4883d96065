"""`%%exercise` in IPython: one name is bound, errors and sources show the reader's own lines, and
stubs are named.
"""

import inspect
import io
import logging
import os
import sys
from contextlib import redirect_stdout

import pytest
import torch
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from minivllm.logger import LEVEL_VARIABLE, init_logger
from minivllm_lab import notebook
from minivllm_lab.checks.kernel_trace import trace_kernel

STUB = '''\
%%exercise mine
"""Areas."""
import math
from dataclasses import dataclass


@dataclass
class Circle:
    radius: float

    def area(self):
        raise NotImplementedError("pi times the square")

    def name(self):
        if self.radius < 0:
            raise NotImplementedError("no such circle")
        return "circle"


def largest(circles):
    return max(circle.area() for circle in circles)


def double(circle: Circle) -> Circle:
    raise NotImplementedError


def one():
    return 1
'''


@pytest.fixture
def shell(monkeypatch):
    monkeypatch.setenv(LEVEL_VARIABLE, "INFO")
    shell = InteractiveShell()
    shell.run_line_magic("colors", "nocolor")
    monkeypatch.setattr(notebook, "get_ipython", lambda: shell)
    notebook.begin()
    yield shell
    sys.modules.pop("mine", None)


def run(shell, source):
    """Return what a cell prints; it must not raise."""
    with capture_output() as captured:
        result = shell.run_cell(source, store_history=True)
    assert result.success, captured.stdout
    return captured.stdout


def raised(shell, source):
    """Return what a cell that raises prints."""
    with capture_output() as captured:
        assert not shell.run_cell(source, store_history=True).success
    return captured.stdout + captured.stderr


def test_only_the_module_is_bound_and_the_lessons_names_stay(shell):
    run(shell, "def largest(circles): return 7\nmath = 'mathematics'")
    before = {name for name in shell.user_ns if not name.startswith("_")}
    run(shell, STUB)
    assert {name for name in shell.user_ns if not name.startswith("_")} - before == {"mine"}
    assert run(shell, "print(largest([]), math, mine.one(), mine.__doc__)") == "7 mathematics 1 Areas.\n"


def test_a_name_can_be_chosen_and_an_edited_cell_replaces_the_module(shell):
    run(shell, "%%exercise yours\nx = 1\ny = 1")
    run(shell, "%%exercise yours\nx = 2")
    assert run(shell, "print(yours.x, hasattr(yours, 'y'))") == "2 False\n"


def test_what_is_no_name_or_is_one_that_others_import_or_python_keeps_is_refused(shell):
    before = sys.modules["torch"]
    for name, words in {"not so": "is not a name for a module", "torch": "'torch' is ", "class": "'class' is "}.items():
        assert words in raised(shell, f"%%exercise {name}\nx = 1")
    assert sys.modules["torch"] is before


def test_a_cell_that_raises_binds_nothing_and_shows_the_readers_line_only(shell):
    run(shell, "%%exercise mine\nx = 1")
    before = sys.modules["mine"]
    shown = raised(shell, "%%exercise mine\ndef f():\n    return 1 / 0\n\nf()\nx = 2")
    assert "ZeroDivisionError" in shown
    assert "----> 3     return 1 / 0" in shown, "lines count as in the cell, its first line included"
    assert "----> 5 f()" in shown
    assert "run_cell_magic" not in shown
    assert "minivllm" not in shown
    assert sys.modules["mine"] is shell.user_ns["mine"] is before


def test_an_error_in_a_later_cell_points_into_the_exercise(shell):
    run(shell, "%%exercise mine\n\ndef f():\n    return nothing")
    assert "----> 4     return nothing" in raised(shell, "mine.f()")


def test_what_is_no_python_is_shown_with_its_line(shell):
    shown = raised(shell, "%%exercise mine\nx = 1\ndef f(:\n    pass")
    assert ":3\n    def f(:" in shown
    assert "SyntaxError" in shown
    assert "run_cell_magic" not in shown


def test_sources_are_found_as_triton_looks_for_them(shell):
    run(shell, STUB)
    mine = shell.user_ns["mine"]
    assert inspect.getsource(mine.one) == "def one():\n    return 1\n"
    assert inspect.getsource(mine.Circle).startswith("@dataclass\nclass Circle")


def test_a_kernel_of_the_cell_runs(shell):
    run(
        shell,
        "%%exercise mine\nfrom minivllm.platforms.triton_utils import tl, triton\n\n@triton.jit\n"
        "def double(out, x, N: tl.constexpr):\n    i = tl.arange(0, N)\n    tl.store(out + i, 2 * tl.load(x + i))\n",
    )
    x, out = torch.arange(4.0), torch.empty(4)
    assert trace_kernel(shell.user_ns["mine"].double, (1,), out, x, N=4).bytes_read == 16
    assert out.tolist() == [0, 2, 4, 6]


def test_a_last_expression_is_shown_and_magics_work(shell):
    assert "42" in run(shell, "%%exercise mine\nx = 6\nx * 7")
    assert run(shell, "%%exercise mine\nx = %pwd") == ""
    assert run(shell, "print(type(mine.x).__name__)") == "str\n"
    assert run(shell, '%%exercise mine\n"""Only words."""') == ""


def completions(shell, text):
    with provisionalcompleter():
        return {completion.text for completion in shell.Completer.completions(text, len(text))}


def test_the_module_is_completed_and_so_is_the_cell_itself(shell):
    run(shell, STUB)
    assert {"largest", "double"} <= {text.removeprefix("mine.") for text in completions(shell, "mine.")}
    assert "sqrt" in completions(shell, "%%exercise mine\nimport math\n\nmath.sq")


def missing(*parts):
    said = io.StringIO()
    with redirect_stdout(said):
        whole = notebook.written(*parts)
    assert whole == (not said.getvalue())
    return said.getvalue().splitlines()


def test_what_is_not_written_is_named_with_what_its_stub_says(shell):
    run(shell, STUB)
    mine = shell.user_ns["mine"]
    area = "not written yet: Circle.area: pi times the square"
    assert missing(mine.one) == []
    assert missing(mine.Circle) == [area], "a case that is refused is not a stub"
    assert missing(mine.largest) == [], "what it calls through an object cannot be known"
    assert missing(mine.double, mine.Circle) == ["not written yet: double", area]
    run(shell, STUB.replace('raise NotImplementedError("pi times the square")', "return 3"))
    assert missing(shell.user_ns["mine"].Circle) == []


def test_begin_does_nothing_more_the_second_time_and_needs_no_ipython(shell, monkeypatch):
    notebook.begin()
    run(shell, "%%exercise mine\nx = 1")
    monkeypatch.setattr(notebook, "get_ipython", lambda: None)
    notebook.begin()


def test_begin_leaves_warnings_only_unless_a_level_is_set(shell, monkeypatch):
    logger = init_logger("minivllm")
    level = logger.level
    notebook.begin()
    assert logger.level == level, "the environment has one"
    monkeypatch.delenv(LEVEL_VARIABLE)
    notebook.begin()
    try:
        assert (logger.level, os.environ[LEVEL_VARIABLE]) == (logging.WARNING, "WARNING")
    finally:
        logger.setLevel(level)

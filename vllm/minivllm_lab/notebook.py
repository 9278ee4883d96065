"""The notebooks' additions to IPython: the cell of an exercise is a module of its own.

    %%exercise mine
    def area(radius): ...

runs the cell's code in a new module, which the notebook knows as `mine`; no other name of the
notebook changes. So the lesson's functions stay what they are, and every cell can run again at any
time. It works in any front end of IPython.
"""

from __future__ import annotations

import ast
import keyword
import linecache
import sys
from types import ModuleType, TracebackType
from typing import Any

from IPython.core.error import UsageError
from IPython.core.getipython import get_ipython

from minivllm_lab.checks.reach import names_in, reached
from minivllm_lab.cli import log_warnings_only
from minivllm_lab.progress import working
from minivllm_lab.tables import console

MAGIC, MODULE = "exercise", "mine"
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class CellSyntaxError(Exception):
    """The error for an exercise's cell that is not valid Python. (IPython shows a SyntaxError with
    more frames than the reader's.)
    """


class _Cell(ModuleType):
    """A module with the names that the cell of an exercise defines."""


def begin() -> None:
    """Prepare a notebook in its first cell: define `%%exercise` and load the packages that take
    long.

    The engine logs warnings only, which the page shows in red.
    """
    shell = get_ipython()
    if shell is not None:
        log_warnings_only()
        shell.register_magic_function(_exercise, magic_kind="cell", magic_name=MAGIC)  # pyright: ignore
    with working("loading PyTorch"):
        import torch  # noqa: F401


def written(*parts: Any) -> bool:
    """Return whether these functions or classes of an exercise are written, including everything in
    the cell that they use.

    Print what is missing: each function that still raises NotImplementedError, with its stub's
    message.
    """
    missing = dict.fromkeys(line for part in parts for line in _unwritten(part))
    for line in missing:
        console.print(f"not written yet: {line}", markup=False)
    return not missing


def _exercise(line: str, cell: str) -> None:
    """Run the cell in a module of its own, which the notebook knows as the magic's NAME (`mine`, if
    left out).
    """
    shell, name = get_ipython(), line.strip() or MODULE
    assert shell is not None
    before = sys.modules.get(name)
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UsageError(f"%%{MAGIC} NAME: {name!r} is not a name for a module")
    if before is not None and not isinstance(before, _Cell):
        raise UsageError(f"%%{MAGIC} NAME: {name!r} is a module that others import; use another name, such as {MODULE}")
    above = 1 + cell[: len(cell) - len(cell.lstrip())].count("\n")  # the magic's line, and empty ones, which get lost
    code = "\n" * above + shell.transform_cell(cell)  # so lines count as in the cell
    filename = shell.compile.cache(code, shell.execution_count)
    module = _Cell(name)
    module.__file__ = filename
    sys.modules[name] = module  # dataclasses and `inspect` look a class's module up there
    try:
        _run(code, filename, module)
    except BaseException as error:
        _give_back(name, before)
        if not isinstance(error, Exception):
            raise
        if not isinstance(error, SyntaxError):
            trace = _from_the_cell_on(error.__traceback__, filename)
            _shown_as(shell.InteractiveTB.structured_traceback(type(error), error, trace, tb_offset=0), error)
            raise
        lines = shell.SyntaxTB.structured_traceback(type(error), error)
        raise _shown_as(lines, CellSyntaxError(f"line {error.lineno}: {error.msg}")) from None
    shell.user_ns[name] = module


def _give_back(name: str, before: ModuleType | None) -> None:
    """Restore the module that `name` stood for, because the cell that was to redefine it has
    failed.
    """
    if before is None:
        del sys.modules[name]
    else:
        sys.modules[name] = before


def _run(code: str, filename: str, module: ModuleType) -> None:
    """Run the code as IPython would: the value of a final expression is shown."""
    tree = ast.parse(code, filename)
    last = [tree.body.pop()] if len(tree.body) > 1 and isinstance(tree.body[-1], ast.Expr) else []
    exec(compile(tree, filename, "exec", dont_inherit=True), module.__dict__)
    for expression in last:
        exec(compile(ast.Interactive([expression]), filename, "single", dont_inherit=True), module.__dict__)


def _shown_as(lines: list[str], error: Exception) -> Exception:
    """Return the error, prepared so that IPython shows these lines: only the reader's own frames,
    not the magic's.
    """
    error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
    return error


def _from_the_cell_on(trace: TracebackType | None, filename: str) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename != filename:
        trace = trace.tb_next
    return trace


def _unwritten(part: Any) -> list[str]:
    """Return a line for each function that raises NotImplementedError among `part` and what it uses
    of its module.
    """
    source = "".join(linecache.getlines(sys.modules[part.__module__].__file__ or ""))
    distance = reached(part.__name__, names_in(source))
    used = [node for node in ast.parse(source).body if isinstance(node, Definition) and node.name in distance]
    used.sort(key=lambda node: distance[node.name])
    return [line for node in used for line in _stubs(node, node.name)]


def _stubs(node: Definition, name: str) -> list[str]:
    """Describe a function, or each method of a class, as `name: the stub's message`."""
    stubs = []
    for statement in node.body:
        if isinstance(node, ast.ClassDef) and isinstance(statement, Definition):
            stubs += _stubs(statement, f"{name}.{statement.name}")
        elif isinstance(statement, ast.Raise) and "NotImplementedError" in ast.dump(statement):
            says = [leaf.value for leaf in ast.walk(statement) if isinstance(leaf, ast.Constant)]
            stubs.append(f"{name}: {says[0]}" if says else name)
    return stubs

"""Run checks on a learner's code, with Python's own packages only: the site's worker does it, too."""

from __future__ import annotations

import inspect
import linecache
import sys
import traceback
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from minivllm.errors import MinivllmError

Check = Callable[[ModuleType], None]
_number_of_modules = count(1)


class CheckResult(NamedTuple):
    """The result of one check: `problem` is None if it passed, else a one-line description of
    what is missing.
    """

    function: str
    statement: str
    problem: str | None

    @property
    def passed(self) -> bool:
        """Return whether the requirement is met."""
        return self.problem is None

    @property
    def is_stretch(self) -> bool:
        """Return whether the check requires more than the engine needs."""
        return self.statement.startswith("Stretch:")


def module_from(source: str, path: Path) -> ModuleType:
    """Return a module made of `source`; `path` names it and need not be a file.

    Raises:
        MinivllmError: running the source fails; the message names the line.
    """
    name = f"{path.stem}_{next(_number_of_modules)}"
    filename = str(path) if path.exists() else f"<{name}>"
    if not path.exists():  # let `inspect` find the source; Triton reads its kernels' source through it
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = ModuleType(name)
    module.__file__ = filename
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        exec(compile(source, filename, "exec", dont_inherit=True), module.__dict__)
    except Exception as error:
        del sys.modules[name]
        raise MinivllmError(f"{path.name} cannot be imported: {_described(error, {filename})}") from error
    return module


def checks_in(module: ModuleType) -> list[Check]:
    """Return the checks that a module defines, in source order."""
    return [check for name, check in vars(module).items() if name.startswith("check_") and inspect.isfunction(check)]


def run_check(module: ModuleType, check: Check) -> CheckResult:
    """Run one check on `module`. Exceptions raised by the module's functions are caught."""
    statement = (inspect.getdoc(check) or check.__name__).splitlines()[0]
    try:
        check(module)
    except (Exception, SystemExit) as error:
        return CheckResult(check.__name__, statement, _problem(error, module))
    return CheckResult(check.__name__, statement, None)


def _problem(error: BaseException, module: ModuleType) -> str:
    """Return what is missing, in one line."""
    if isinstance(error, AttributeError) and error.obj is module:
        return f"there is no {error.name!r} yet"
    if isinstance(error, NotImplementedError):
        return f"not written yet: {_one_line(error)}" if str(error) else "not written yet"
    if isinstance(error, AssertionError):
        failed = traceback.extract_tb(error.__traceback__)[-1].line
        return _one_line(error) if str(error) else f"this must hold: {failed}"
    functions = [value for value in vars(module).values() if inspect.isfunction(value)]
    learners = [function for function in functions if function.__module__ == module.__name__]
    return _described(error, {function.__code__.co_filename for function in learners})


def _described(error: BaseException, files: set[str]) -> str:
    """Return the error, and the innermost line of the learner's own `files` that led to it (or of
    any file, if none did).
    """
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename in files]
    place = f"line {own[-1].lineno}: {own[-1].line}" if own else f"in the check, at: {frames[-1].line}"
    if not own and "NoneType" in str(error):
        place += "; does one of your functions end without a return?"
    return f"{type(error).__name__}: {_one_line(error)} ({place})"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:299]}…"

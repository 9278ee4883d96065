"""Exercises: run a lesson's checks on a learner's file and say what is missing.

    uv run python -m minivllm_lab.exercise 01              # checks lessons/exercises/01_*.py
    uv run python -m minivllm_lab.exercise 01 --file mine.py
    uv run python -m minivllm_lab.exercise 04 --only schedule     # one function's checks, without the engine

A check is a function `check_*(module)` in `lessons/exercises/checks/NN_*.py`, or in
`checks/tensors/NN_*.py` if it needs NumPy, torch or Triton. The first line of its docstring states
a requirement; it raises if this is not met. The same checks run on the lesson's script, which is
the solution.

The engine runs with the learner's part as soon as all that it uses is right. Checks that lead to
other functions of the exercise need not pass, nor those that begin with "Stretch:".
"""

from __future__ import annotations

import argparse
import linecache
import os
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from rich.markup import escape

from minivllm.errors import MinivllmError
from minivllm_lab.checks.checking import Check, CheckResult, checks_in, module_from, run_check
from minivllm_lab.checks.reach import joined, names_in, reached
from minivllm_lab.cli import Parser, run
from minivllm_lab.progress import track, working
from minivllm_lab.tables import console, table

if TYPE_CHECKING:
    from minivllm_lab.checks.plugged import Plugged

REPOSITORY = Path(__file__).resolve().parents[2]
EXERCISES = REPOSITORY / "lessons" / "exercises"
CHECKS = ("checks", "checks/tensors")
"""Folders of the checks: those that need Python alone, and all others with `plug`."""


def exercise_path(number: str | int) -> Path:
    """Return the stub of a lesson's exercise; `number` is 1, "1" or "01".

    Raises:
        MinivllmError: no such exercise; the message lists the existing ones.
    """
    stem = str(number).strip()
    stem = stem.zfill(2) if stem.isdigit() else ""
    paths = sorted(EXERCISES.glob(f"{stem}_*.py")) if stem else []
    if not paths:
        numbers = ", ".join(sorted(path.stem[:2] for path in EXERCISES.glob("[0-9][0-9]_*.py"))) or "none"
        raise MinivllmError(f"there is no exercise {str(number)!r} (there are: {numbers})")
    return paths[0]


def load(path: str | Path) -> ModuleType:
    """Import a Python file under a fresh module name. It may run a model without an engine, as
    notebooks do.

    Raises:
        MinivllmError: the file does not exist, or importing it fails; the message names the line.
    """
    from minivllm.platforms.spinning import limit_spinning  # imports torch

    limit_spinning()
    path = Path(path)
    try:
        source = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise MinivllmError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    return module_from(source, path)


def checks_of(number: str | int) -> list[Check]:
    """Return the checks of a lesson's exercise, in source order: those without torch first."""
    return [check for path in checks_paths(number) for check in checks_in(load(path))]


def checks_paths(number: str | int) -> list[Path]:
    """Return the files with the checks of a lesson's exercise: one, or two.

    Raises:
        MinivllmError: no such exercise; the message lists the existing ones.
    """
    name = exercise_path(number).name
    return [path for folder in CHECKS if (path := EXERCISES / folder / name).is_file()]


def plug_of(number: str | int) -> Callable[[ModuleType], Plugged] | None:
    """Return the function that plugs a lesson's exercise into the engine, or None if it has none."""
    return getattr(load(checks_paths(number)[-1]), "plug", None)


def run_plugged(number: str | int, module: ModuleType) -> bool:
    """Run the engine with the module's part, print what it did, and return whether its tokens are
    the same as ours.
    """
    plug = plug_of(number)
    if plug is None:
        return True
    from minivllm_lab.checks.plugged import compare  # the checks alone need no engine

    with working("the engine with your part and without"):
        return compare(plug(module))


def run_checks(module: ModuleType, checks: Iterable[Check]) -> list[CheckResult]:
    """Run every check on `module`. Exceptions raised by the module's functions are caught."""
    return [run_check(module, check) for check in track([*checks], "checking")]


def check_here(number: str | int, module: ModuleType) -> None:
    """Check the module of an exercise (`mine`) in a notebook: print what is missing, and never
    raise.
    """
    try:
        show_and_run(number, module, f"Exercise {number}")
    except MinivllmError as error:
        console.print(f"{error}", markup=False)


def show_and_run(number: str | int, module: ModuleType, title: str) -> bool:
    """Check a module, print what is missing, and run the engine with it if it can. Return whether
    everything passed.
    """
    results = run_checks(module, checks_of(number))
    show(results, title)
    if unready := unready_parts(number, module, results):
        console.print(f"the engine runs with your part when these are right: {', '.join(unready)}")
        return False
    return run_plugged(number, module) and all(result.passed for result in results)


def show_only(number: str | int, module: ModuleType, title: str, only: str) -> bool:
    """Run the checks of one function of an exercise and print what is missing. Return whether they
    all pass.

    Raises:
        MinivllmError: the exercise has no such function; the message lists those that it has.
    """
    checks = [check for check in checks_of(number) if only in _parts_called(check.__name__, number)]
    if not checks:
        names = ", ".join(_to_write(number))
        raise MinivllmError(f"no check of exercise {number} calls {only!r} (its functions: {names})")
    results = run_checks(module, checks)
    show(results, f"{title}, {only} only")
    return all(result.passed for result in results)


def unready_parts(number: str | int, module: ModuleType, results: Iterable[CheckResult]) -> list[str]:
    """Return the names of the parts that the engine still waits for: those of the learner's that a
    failed check calls.

    Stretch checks do not count, nor do checks that lead to anything that the engine does not use.
    """
    taken, written, unready = set(parts_taken(number, module)), set(_to_write(number)), set()
    for result in results:
        behind = _parts_behind(result.function, number, module) & written
        if not result.passed and not result.is_stretch and behind <= taken:
            unready |= _parts_called(result.function, number) & written
    return sorted(unready)


def parts_taken(number: str | int, module: ModuleType) -> list[str]:
    """Return the names of an exercise's functions and classes that the engine uses: what `plug`
    takes, and what that calls.
    """
    return sorted(_parts_behind("plug", number, module))


def _parts_behind(function: str, number: str | int, module: ModuleType) -> set[str]:
    """Return the names of the exercise's functions and classes that a check reaches, also through
    the learner's code.
    """
    checks, stub = _names(number)
    return reached(function, joined(checks, stub, names_in(_source(module)))).keys() & stub.keys()


def _parts_called(function: str, number: str | int) -> set[str]:
    """Return the names of the exercise's functions and classes that a check or one of its helpers
    calls directly.
    """
    checks, stub = _names(number)
    return set().union(*(checks[name] for name in reached(function, checks))) & stub.keys()


def _names(number: str | int) -> tuple[Mapping[str, Set[str]], Mapping[str, Set[str]]]:
    """Return the names that each function of an exercise's checks uses, and those that each of its
    stub uses.
    """
    checks = joined(*(names_in(path.read_text()) for path in checks_paths(number)))
    return checks, names_in(exercise_path(number).read_text())


def _to_write(number: str | int) -> list[str]:
    """Return the names of the parts that the learner writes: in the stub they raise
    `NotImplementedError`.
    """
    _, stub = _names(number)
    return [name for name, named in stub.items() if "NotImplementedError" in named]


def _source(module: ModuleType) -> str:
    """Return a module's current source, or "" if it has none."""
    filename = getattr(module, "__file__", None) or ""
    linecache.checkcache(filename)
    return "".join(linecache.getlines(filename))


def show(results: list[CheckResult], title: str) -> None:
    """Print the results as a table and one closing line."""
    table(title, ["what must be true", "what is missing"], [_row(result) for result in results], words=True)
    missing = sum(not result.passed for result in results)
    console.print(f"{missing} of {len(results)} checks to go" if missing else f"all {len(results)} checks pass")


def _row(result: CheckResult) -> tuple[str, str]:
    mark = "[green]✓[/green]" if result.passed else "[red]✗[/red]"
    return f"{mark} {escape(result.statement)}", escape(result.problem or "")


def main(arguments: argparse.Namespace) -> None:
    """Check one exercise, then run the engine with it, if it can; exit with 1 if something is
    missing or differs.
    """
    path = Path(arguments.file) if arguments.file else exercise_path(arguments.number)
    title = str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else str(path)
    module = load(path)
    if arguments.only:
        right = show_only(arguments.number, module, title, arguments.only)
    else:
        right = show_and_run(arguments.number, module, title)
    if not right:
        raise SystemExit(1)


def parser() -> argparse.ArgumentParser:
    """Return the command line of `python -m minivllm_lab.exercise`."""
    flags = Parser(prog="exercise", description=__doc__)
    flags.add_argument("number", help="the lesson's number, such as 01")
    flags.add_argument("--file", metavar="FILE", help="check this file (default: the lesson's stub)")
    flags.add_argument("--only", metavar="FUNCTION", help="run this function's checks alone, without the engine")
    return flags


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # checks count what kernels read and write, which no GPU tells
    run(main, parser())

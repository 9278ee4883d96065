"""The museum's collection, read from `lessons/bugs/exhibits.toml` and checked."""

from __future__ import annotations

import functools
import inspect
import tomllib
from dataclasses import dataclass
from pathlib import Path

from minivllm.errors import MinivllmError
from minivllm_lab.checks.mutants import Mutant, changed_lines, function_lines, mutant_source

ENGINE = Path(__file__).resolve().parents[2] / "minivllm"
COLLECTION = ENGINE.parents[1] / "lessons" / "bugs" / "exhibits.toml"
NUM_HINTS = 3
CLOSE_ENOUGH = 2
"""Lines between a guess and the defect that still count as found."""


@dataclass(frozen=True)
class Exhibit:
    """A defect: where it is inserted, its symptom, and its hints.

    `old` and `new` are pieces of `function` in `file`, a path below the engine's package (see
    `minivllm_lab.checks.mutants`). `solution` is the same defect in the lesson's script, for its checks to
    catch.
    """

    number: int
    lesson: int
    title: str
    symptom: str
    workload: str
    file: str
    function: str
    old: str
    new: str
    hints: tuple[str, ...]
    why: str
    solution: Mutant | None = None

    def broken_source(self) -> str:
        """Return the source of `file` with the defect in it.

        Raises:
            MinivllmError: the engine has changed and no longer has the piece.
        """
        return mutant_source(self.sound_source(), (self.function, self.old, self.new), self.file)

    def sound_source(self) -> str:
        """Return the source of `file` without the defect."""
        return (ENGINE / self.file).read_text()

    def lines(self) -> tuple[int, ...]:
        """Return the line numbers of the defect in the broken source."""
        return changed_lines(self.sound_source(), self.broken_source())

    def judge(self, file: str, line: int) -> str:
        """Judge a guess: "found", "function" (the right one), "file" (the right one), or "cold"."""
        if file != self.file:
            return "cold"
        if any(abs(line - changed) <= CLOSE_ENOUGH for changed in self.lines()):
            return "found"
        return "function" if line in function_lines(self.broken_source(), self.function) else "file"


@functools.cache
def exhibits() -> dict[int, Exhibit]:
    """Return the collection by number, in order."""
    entries = tomllib.loads(COLLECTION.read_text())["exhibit"]
    return {entry["number"]: _exhibit(entry) for entry in entries}


def find_exhibit(number: str) -> Exhibit:
    """Return the exhibit with this number, such as "7" or "07".

    Raises:
        MinivllmError: there is no such exhibit; the message gives the valid numbers.
    """
    collection = exhibits()
    known = number.isascii() and number.isdigit() and len(number) < 9 and int(number) in collection
    if not known:
        raise MinivllmError(f"there is no exhibit {number!r} (choose 1 to {max(collection)})")
    return collection[int(number)]


def _exhibit(entry: dict) -> Exhibit:
    solution = entry.get("solution")
    return Exhibit(**{**entry, "hints": tuple(entry["hints"]), "solution": tuple(solution) if solution else None})


def what_happens_in(workload: str) -> str:
    """Return the first paragraph of a workload's docstring as one line."""
    from minivllm_lab.museum import workloads

    doc = inspect.getdoc(getattr(workloads, workload)) or ""
    return " ".join(doc.partition("\n\n")[0].split())

"""The cells that a reader runs in a notebook's kernel after solving its exercise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from repository import ROOT

from minivllm_lab.exercise import load

builder = load(ROOT / "tools" / "notebooks.py")

Outputs = Sequence[dict[str, Any]]
"""The outputs of one cell, in nbformat's form."""


class SolvedNotebook:
    """A notebook, and the cells with which it takes a solution.

    Attributes:
        demos: the sources of the cells that only show something.
        solution: the exercise, filled in with the lesson's script.
        check: the exercise's checks.
        own: the widget with the reader's part in it.
    """

    def __init__(self, path: Path) -> None:
        self.notebook = nbformat.read(path, as_version=4)
        self.cells = [cell for cell in self.notebook.cells if cell.cell_type == "code"]
        self.kinds = [cell.metadata.get("tags", ["exec"])[0] for cell in self.cells]
        self._check = self.kinds.index("check")
        self.demos = [cell.source for cell in builder.demos(self.notebook)]
        self.solution = f"{builder.IN_ITS_MODULE}\n{(ROOT / 'vllm' / f'{path.stem}.py').read_text()}"
        self.check, self.own = (cell.source for cell in self.cells[self._check : self._check + 2])

    def assert_unsolved(self, outputs: Sequence[Outputs]) -> None:
        """Expect the outputs of the notebook's code cells to say that the exercise is to be written."""
        assert len(outputs) == len(self.cells)
        assert "checks to go" in shown_by(outputs[self._check])
        assert "not written yet" in shown_by(outputs[self._check + 1])

    def assert_drawn(self, outputs: Outputs) -> None:
        """Expect a widget that runs the reader's part."""
        shown = shown_by(outputs)
        assert "<svg" in shown
        assert " broke. " not in shown


def shown_by(outputs: Outputs) -> str:
    """Return everything that a cell shows, as text."""
    shown = [output.get("text") or output.get("data", {}) for output in outputs]
    return "\n".join(part if isinstance(part, str) else "\n".join(map(_text, part.values())) for part in shown)


def _text(value: Any) -> str:
    return "".join(value) if isinstance(value, list) else str(value)

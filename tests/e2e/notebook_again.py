"""Check that a notebook's kernel, after all cells have run, runs the demos again and accepts a
solution of the exercise.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nbformat

from minivllm_lab.exercise import load

ROOT = Path(__file__).resolve().parents[2]
builder = load(ROOT / "tools" / "notebooks.py")

CHECKED = "04_continuous_batching"
"""The notebook that checks a solution; `lessons/test_every_lesson.py` runs the same checks on every
script.
"""
Outputs = Sequence[dict[str, Any]]
"""What one cell gave, as nbformat has it."""


def sources_again(notebook: nbformat.NotebookNode, name: str) -> list[str]:
    """Return the demos, the exercise filled in with the lesson's script, its check in the lesson
    `CHECKED`, and the widget that uses that part.
    """
    solution = f"{builder.IN_ITS_MODULE}\n{(ROOT / 'vllm' / f'{name}.py').read_text()}"
    check, own = _check_and_own(notebook)
    cells = _code_cells(notebook)
    checks = [cells[check].source] if name == CHECKED else []
    return [*(cell.source for cell in builder.demos(notebook)), solution, *checks, cells[own].source]


def assert_it_takes_a_solution(
    path: Path, ran: Sequence[Outputs], execute: Callable[[list[str]], Sequence[Outputs]]
) -> None:
    """Expect the kernel to accept a solution, with no cell raising; `ran` holds each code cell's
    outputs, and `execute` runs more cells in the same kernel.
    """
    notebook = nbformat.read(path, as_version=4)
    check, own = _check_and_own(notebook)
    assert len(ran) == len(_code_cells(notebook))
    assert "checks to go" in shown_by(ran[check])
    assert "not written yet" in shown_by(ran[own])
    sources = sources_again(notebook, path.stem)
    again = execute(sources)
    for source, outputs in zip(sources, again, strict=True):
        raised = [f"{output['ename']}: {output['evalue']}" for output in outputs if "ename" in output]
        assert raised == [], source
    *_, checked, shown = map(shown_by, again)
    assert path.stem != CHECKED or re.search(r"all \d+ checks pass", checked), checked
    assert "<svg" in shown
    assert " broke. " not in shown


def shown_by(outputs: Outputs) -> str:
    """Return everything that a cell shows, as text."""
    shown = [output.get("text") or output.get("data", {}) for output in outputs]
    return "\n".join(part if isinstance(part, str) else "\n".join(map(_text, part.values())) for part in shown)


def _text(value: Any) -> str:
    return "".join(value) if isinstance(value, list) else str(value)


def _code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _check_and_own(notebook: nbformat.NotebookNode) -> tuple[int, int]:
    """Return the indices of the code cell that checks the exercise and of the next one, which gives
    the reader's part to the widget.
    """
    tags = [cell.metadata.get("tags", []) for cell in _code_cells(notebook)]
    check = tags.index(["check"])
    return check, check + 1

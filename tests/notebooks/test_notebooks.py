"""The notebooks in this repository match the lessons; all their cells run, and the demos can run
again at any time.
"""

import ast
import re
from typing import Any

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode
from repository import LESSONS, ROOT

from minivllm_lab.exercise import load

notebooks = load(ROOT / "tools" / "notebooks.py")
each_notebook = pytest.mark.parametrize("stem", LESSONS)


def read(stem: str) -> tuple[NotebookNode, list[NotebookNode], int, int]:
    """Return a notebook, its code cells, and the places of the exercise and of its checks among these."""
    notebook = nbformat.read(ROOT / "notebooks" / f"{stem}.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    kinds = [cell.metadata.get("tags", ["exec"])[0] for cell in cells]
    assert kinds.count("exercise") == kinds.count("check") == 1
    return notebook, cells, kinds.index("exercise"), kinds.index("check")


def shown_by(cell: NotebookNode) -> str:
    """Return everything that a cell shows, as text."""
    shown = [output.get("text") or output.get("data", {}) for output in cell.outputs]
    return "\n".join(part if isinstance(part, str) else "\n".join(map(_text, part.values())) for part in shown)


def _text(value: Any) -> str:
    return "".join(value) if isinstance(value, list) else str(value)


def names_bound(source: str) -> set[str]:
    """Return the names that a cell's top level defines, imports or assigns."""
    bound = set()
    for node in ast.walk(ast.parse(TransformerManager().transform_cell(source))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    return bound


def test_lessons_and_notebooks_agree():
    assert notebooks.drift(ROOT, []) == [], f"to mend: {notebooks.MEND}"


@each_notebook
def test_no_cell_gives_the_exercise_away(stem: str):
    """No cell before the exercise defines what it asks for, and only the exercise's cell is `mine`."""
    _, cells, place, _ = read(stem)
    stub = cells[place].source.removeprefix(f"{notebooks.IN_ITS_MODULE}\n")
    asked = {node.name for node in ast.parse(stub).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert asked
    for index, cell in enumerate(cells):
        bound = names_bound(cell.source) if index != place else set()
        assert "mine" not in bound, cell.source
        assert index > place or bound.isdisjoint(asked), cell.source


@each_notebook
def test_after_the_checks_the_widget_takes_the_readers_own_part(stem: str):
    _, cells, _, check = read(stem)
    own = cells[check + 1].source
    shown = re.search(r"if written\(mine\.(\w+)\):\n    display\(\w+\.show\(\w+=mine\.(\w+)\)\)", own)
    assert shown, own
    assert shown[1] == shown[2]


@each_notebook
def test_no_picture_stands_beside_the_widget_that_draws_it(stem: str):
    lesson = notebooks.read_lesson(ROOT / "lessons" / f"{stem}.md")
    shown = [part for part in lesson.parts if notebooks._shows_widget(part)]
    assert shown
    assert len(notebooks._pictures_of_widgets(lesson.parts)) == len(shown), "each widget has its picture in the lesson"


@each_notebook
@pytest.mark.usefixtures("warm_kernels")
def test_every_cell_runs_every_demo_again_and_it_takes_a_solution(stem: str):
    """All cells run in one kernel. The checks pass on every lesson's script (`lessons/test_every_lesson.py`), so here
    only the first lesson's run again.
    """
    notebook, cells, _, check = read(stem)
    solution = f"{notebooks.IN_ITS_MODULE}\n{(ROOT / 'vllm' / f'{stem}.py').read_text()}"
    sources = [cell.source for cell in notebooks.demos(notebook)]
    sources += [solution, cells[check].source, cells[check + 1].source]
    if stem != LESSONS[0]:
        del sources[-2]
    more = [nbformat.v4.new_code_cell(source) for source in sources]
    notebook.cells += more
    notebooks.run_cells(notebook, ROOT / "notebooks" / f"{stem}.ipynb")
    assert "checks to go" in shown_by(cells[check])
    assert "not written yet" in shown_by(cells[check + 1])
    assert "<svg" in shown_by(more[-1])
    assert " broke. " not in shown_by(more[-1])
    assert bool(re.search(r"all \d+ checks pass", shown_by(more[-2]))) == (stem == LESSONS[0])
    shown = "".join(map(shown_by, (*cells, *more)))
    assert re.findall(r"""(?:\bsrc=|\burl\()["']?(?:https?:)?//[^"')\s]*""", shown) == [], "nothing is fetched"

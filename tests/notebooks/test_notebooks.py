"""The notebooks in this repository match the lessons; all their cells run, and the demos can run
again at any time.
"""

import ast
import re
from pathlib import Path

import nbformat
import pytest
from e2e.solved_notebook import ROOT, SolvedNotebook, shown_by
from e2e.solved_notebook import builder as notebooks
from IPython.core.inputtransformer2 import TransformerManager

PATHS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
each_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


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
def test_no_cell_gives_the_exercise_away(path: Path):
    """No cell before the exercise defines what it asks for, and only the exercise's cell is `mine`."""
    solved = SolvedNotebook(path)
    place = solved.kinds.index("exercise")
    assert solved.kinds.count("exercise") == solved.kinds.count("check") == 1
    stub = solved.cells[place].source.removeprefix(f"{notebooks.IN_ITS_MODULE}\n")
    asked = {node.name for node in ast.parse(stub).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert asked
    for index, cell in enumerate(solved.cells):
        bound = names_bound(cell.source) if index != place else set()
        assert "mine" not in bound, cell.source
        assert index > place or bound.isdisjoint(asked), cell.source


@each_notebook
def test_after_the_checks_the_widget_takes_the_readers_own_part(path: Path):
    own = SolvedNotebook(path).own
    shown = re.search(r"if written\(mine\.(\w+)\):\n    display\(\w+\.show\(\w+=mine\.(\w+)\)\)", own)
    assert shown, own
    assert shown[1] == shown[2]


@each_notebook
def test_no_picture_stands_beside_the_widget_that_draws_it(path: Path):
    lesson = notebooks.read_lesson(ROOT / "lessons" / f"{path.stem}.md")
    shown = [part for part in lesson.parts if notebooks._shows_widget(part)]
    assert shown
    assert len(notebooks._pictures_of_widgets(lesson.parts)) == len(shown), "each widget has its picture in the lesson"


@each_notebook
@pytest.mark.usefixtures("warm_kernels")
def test_every_cell_runs_every_demo_again_and_it_takes_a_solution(path: Path):
    """All cells run in one kernel. The checks, too, pass on every lesson's script
    (`lessons/test_every_lesson.py`).
    """
    solved = SolvedNotebook(path)
    more = [nbformat.v4.new_code_cell(source) for source in (*solved.demos, solved.solution, solved.own)]
    solved.notebook.cells += more
    notebooks.run_cells(solved.notebook, path)
    solved.assert_unsolved([cell.outputs for cell in solved.cells])
    solved.assert_drawn(more[-1].outputs)
    shown = "".join(shown_by(cell.outputs) for cell in (*solved.cells, *more))
    assert re.findall(r"""(?:\bsrc=|\burl\()["']?(?:https?:)?//[^"')\s]*""", shown) == [], "nothing is fetched"

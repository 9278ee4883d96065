"""The notebooks in this repository match the lessons; all their cells run, and the demos can run
again at any time.
"""

import ast
import re
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from e2e.notebook_again import ROOT, assert_it_takes_a_solution, sources_again
from e2e.notebook_again import builder as notebooks

PATHS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
each_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def code_cells(path: Path) -> list[tuple[str, str]]:
    """Return the (kind, source) of each code cell, in order."""
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    return [(cell.metadata.get("tags", ["exec"])[0], cell.source) for cell in cells]


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
    cells = code_cells(path)
    kinds = [kind for kind, _ in cells]
    place = kinds.index("exercise")
    assert kinds.count("exercise") == kinds.count("check") == 1
    stub = cells[place][1].removeprefix(f"{notebooks.IN_ITS_MODULE}\n")
    asked = {node.name for node in ast.parse(stub).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert asked
    for _, source in cells[:place]:
        assert names_bound(source).isdisjoint(asked), source
    for kind, source in cells:
        assert kind == "exercise" or "mine" not in names_bound(source), source


@each_notebook
def test_after_the_checks_the_widget_takes_the_readers_own_part(path: Path):
    cells = code_cells(path)
    kind, source = cells[[kind for kind, _ in cells].index("check") + 1]
    assert kind == "exec"
    shown = re.search(r"if written\(mine\.(\w+)\):\n    display\(\w+\.show\(\w+=mine\.(\w+)\)\)", source)
    assert shown, source
    assert shown[1] == shown[2]


@each_notebook
def test_no_picture_stands_beside_the_widget_that_draws_it(path: Path):
    lesson = notebooks.read_lesson(ROOT / "lessons" / f"{path.stem}.md")
    shown = [part for part in lesson.parts if notebooks._shows_widget(part)]
    assert shown
    assert len(notebooks._pictures_of_widgets(lesson.parts)) == len(shown), "each widget has its picture in the lesson"


@pytest.mark.slow
@pytest.mark.without_browser
@each_notebook
def test_every_cell_runs_every_demo_again_and_it_takes_a_solution(path: Path):
    """All cells run in one kernel. Where there is a browser, JupyterLab runs them too:
    e2e/test_notebooks.py.
    """
    notebook = nbformat.read(path, as_version=4)
    more = [nbformat.v4.new_code_cell(source) for source in sources_again(notebook, path.stem)]
    arguments = [cell for cell in notebook.cells if cell.cell_type == "code"]
    notebook.cells += more
    notebooks.run_cells(notebook, path)
    ran = [cell.outputs for cell in arguments]
    assert_it_takes_a_solution(path, ran, lambda _: [cell.outputs for cell in more])

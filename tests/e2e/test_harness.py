"""Test that the browser test notices a slider that does nothing, a callback or cell that raises,
and a cell that never runs.
"""

from pathlib import Path

import nbformat
import pytest
from e2e.browser import Lab, Notebook
from playwright.sync_api import TimeoutError

pytestmark = pytest.mark.browser

WIDGET = """\
from widgets.shell.knobs import slider
from widgets.shell.lesson_widget import LessonWidget
from widgets.shell.spec import Challenge, Guess, Progress, Spec, Verdict
from widgets.shell.svg import Drawing

def shown(draw):
    return LessonWidget(Spec(
        name="w", title="t", lead="l", knobs={"Knobs": {"size": slider("size", 0, 5, 1, 0)}}, presets={},
        sweep=lambda size: size, figure=lambda size, width, pinned: draw(size), verdict=lambda size: Verdict("v"),
        command=str, challenges=(Challenge("g", lambda size: Progress(False, "w"), "l"),) * 3,
        guess=Guess("q", ("a", "b"), 0, "b"),
    ))

def picture(size):
    return Drawing(100, 50, f"size {size}").render()
"""
CELLS = (
    WIDGET,
    "shown(lambda size: picture(0))",  # a dead slider: the picture never changes
    "shown(lambda size: picture(1 // (1 - size)))",  # a callback that raises at the first move
    "shown(picture)",
    "from IPython.display import HTML\nHTML('<img src=\"http://192.0.2.1/x.png\">')",
    "1 / 0",
    "2",
)
DEAD, RAISING, ALIVE = range(3)


@pytest.fixture(scope="module")
def broken(lab: Lab, folder: Path):
    cells = [nbformat.v4.new_code_cell(source, id=f"cell-{index}") for index, source in enumerate(CELLS)]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), folder / "broken.ipynb")
    with lab.opened("broken.ipynb") as notebook:
        notebook.run_all()
        yield notebook


def test_a_slider_that_is_dead_or_whose_callback_raises_is_noticed_and_a_live_one_passes(broken: Notebook):
    assert broken.press_arrow(ALIVE) == ("0", "1")
    with pytest.raises(TimeoutError):
        broken.press_arrow(DEAD, seconds=1)
    assert not any("a widget broke" in problem for problem in broken.problems())
    with pytest.raises(TimeoutError):
        broken.press_arrow(RAISING, seconds=1)
    assert "a widget broke: ZeroDivisionError: integer division or modulo by zero" in broken.problems()


def test_a_cell_that_raises_and_the_one_after_it_are_noticed(broken: Notebook):
    problems = broken.problems()
    assert "code cell 6 ('1 / 0') raised ZeroDivisionError: division by zero" in problems
    assert "code cell 7 ('2') did not run" in problems


def test_a_request_that_leaves_the_machine_is_noticed(broken: Notebook):
    assert set(broken.seen.elsewhere) == {"http://192.0.2.1/x.png"}

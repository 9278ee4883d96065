"""Run every notebook once in a real browser, and check all its cells there.

All cells run in order, and the page shows their outputs. Widgets follow the keyboard, and no key is
taken for a shortcut. Then the same kernel runs every demo a second time, and the exercise with the
lesson's script in it. Without a browser, notebooks/test_notebooks.py runs the same cells with
nbclient and reads the same outputs.
"""

from pathlib import Path

import pytest
from e2e.browser import SLIDER, Lab
from e2e.notebook_again import assert_it_takes_a_solution

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
NOTHING_AHEAD = "from widgets.shell import lesson_widget; lesson_widget.REST = 3600"
"""In all notebooks but the first, whose kernel draws ahead while nobody turns anything; nobody
looks at that here.
"""
pytestmark = pytest.mark.browser


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_runs_takes_a_solution_and_its_widget_follows_the_keyboard(name: str, lab: Lab):
    with lab.opened(f"notebooks/{name}.ipynb") as notebook:
        if name != NOTEBOOKS[0]:
            notebook.execute([NOTHING_AHEAD])
        notebook.run_all()
        assert notebook.problems() == []
        before, after = notebook.press_arrow()
        assert before != after
        cells = notebook.cells()
        for control in notebook.page.locator(f"{SLIDER}, .lw select, .lw .lw-picture").all():
            control.focus()
            for key in ("x", "d", "d", "a"):  # cut, delete, insert: JupyterLab's shortcuts in command mode
                notebook.page.keyboard.press(key)
        assert notebook.cells() == cells
        notebook.screenshot(ROOT / "out" / f"{name}.png")
        assert notebook.problems() == []
        ran = [cell["outputs"] for cell in notebook.code_cells()]
        assert_it_takes_a_solution(ROOT / "notebooks" / f"{name}.ipynb", ran, notebook.execute)
        assert notebook.seen.errors == []
        assert notebook.seen.elsewhere == []

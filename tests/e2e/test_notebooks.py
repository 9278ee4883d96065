"""Run every notebook once in a real browser, and check all its cells there.

All cells run in order, and the page shows their outputs. Widgets follow the keyboard, and no key is
taken for a shortcut. Then the same kernel runs every demo a second time, and the exercise with the
lesson's script in it. Without a browser, notebooks/test_notebooks.py runs the same cells with
nbclient and reads the same outputs.
"""

import re
from pathlib import Path

import pytest
from e2e.browser import OPEN_SECONDS, Lab, Notebook, Seen
from e2e.notebook_again import assert_it_takes_a_solution
from playwright.sync_api import Browser

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
NOTHING_AHEAD = "from widgets.shell import lesson_widget; lesson_widget.REST = 3600"
"""In all notebooks but the first, whose kernel draws ahead while nobody turns anything; nobody
looks at that here.
"""
ENDING = 24
"""Pixels that `.ipynb` takes. Of the longest name JupyterLab cuts a letter of that; what tells
lessons apart is whole.
"""
CUT_OFF = f"""names => names.filter(name => name.scrollWidth > name.clientWidth + {ENDING})
  .map(name => name.textContent)"""
pytestmark = pytest.mark.browser


def press_shortcuts(notebook: Notebook) -> None:
    """Press JupyterLab's keys for cut, delete and insert in one control of each kind."""
    for kind in ("input[type=range]", "select", ".lw-picture"):
        if (control := notebook.page.locator(f".lw {kind}").first).count():
            control.focus()
            for key in ("x", "d", "d", "a"):
                notebook.page.keyboard.press(key)


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
        press_shortcuts(notebook)
        assert notebook.cells() == cells
        assert notebook.problems() == []
        ran = [cell["outputs"] for cell in notebook.code_cells()]
        assert_it_takes_a_solution(ROOT / "notebooks" / f"{name}.ipynb", ran, notebook.execute)
        assert notebook.seen.errors == []
        assert notebook.seen.elsewhere == []


def test_make_lab_opens_the_list_of_notebooks(server: str, browser: Browser):
    """A small window shows the rendered list with full names and nothing over it, and no dialog
    asks about the network.
    """
    recipe = re.search(r"^lab:.*\n\t(.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe
    assert "JUPYTER_CONFIG_PATH=$(CURDIR)/.jupyter " in recipe[1], "the settings that `server` has"
    with browser.new_context(viewport={"width": 1366, "height": 768}) as window:
        page, seen = window.new_page(), Seen()
        seen.watch(page)
        page.goto(server)
        page.wait_for_selector(".jp-MarkdownViewer table", timeout=OPEN_SECONDS * 1000)
        page.wait_for_selector(".jp-DirListing-itemText", timeout=OPEN_SECONDS * 1000)
        page.wait_for_timeout(3000)  # the popup would come by itself
        names = page.locator(".jp-DirListing-itemText")
        assert {*map(str.strip, names.all_text_contents())} >= {f"{name}.ipynb" for name in NOTEBOOKS}
        assert names.evaluate_all(CUT_OFF) == []
        assert page.locator(".Toastify__toast").count() == 0
        page.get_by_role("link", name="The KV cache").click()
        page.wait_for_selector(".jp-NotebookPanel", timeout=OPEN_SECONDS * 1000)
        assert page.url.endswith("/notebooks/01_kv_cache.ipynb")
        assert seen.errors == []
        assert seen.elsewhere == []

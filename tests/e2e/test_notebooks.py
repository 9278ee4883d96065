"""Run one notebook in JupyterLab in a real browser, and look at what `make lab` opens.

All its cells run in order, and the page shows their outputs. Its widget follows the keyboard, and
no key is taken for a shortcut.
`notebooks/test_notebooks.py` runs the cells of every notebook, and `test_widgets.py` turns every
widget.
"""

import re
from urllib.request import urlopen

import pytest
from e2e.browser import OPEN_SECONDS, Lab, Notebook, faultless
from repository import ROOT

NOTEBOOK = ROOT / "notebooks" / "01_kv_cache.ipynb"
ENDING = 24
"""Pixels that `.ipynb` takes. Of the longest name JupyterLab cuts a letter of that; what tells
lessons apart is whole.
"""
CUT_OFF = f"""names => names.filter(name => name.scrollWidth > name.clientWidth + {ENDING})
  .map(name => name.textContent)"""
pytestmark = pytest.mark.browser


def press_shortcuts(notebook: Notebook) -> None:
    """Press JupyterLab's keys for cut, delete and insert in the widget's picture and controls."""
    for control in notebook.page.locator(".lw input[type=range], .lw select, .lw .lw-picture").all():
        control.focus()
        for key in ("x", "d", "d", "a"):
            notebook.page.keyboard.press(key)


def test_a_notebook_runs_and_its_widget_follows_the_keyboard(lab: Lab):
    with lab.opened(f"notebooks/{NOTEBOOK.name}") as notebook:
        notebook.run_all()
        assert notebook.problems() == []
        notebook.press_arrow()
        cells = notebook.cells()
        press_shortcuts(notebook)
        assert notebook.cells() == cells
        assert notebook.problems() == []
        assert notebook.complaints == []


def test_make_lab_opens_the_list_of_notebooks(lab: Lab):
    """A small window shows the rendered list with full names and nothing over it, and no dialog
    asks about the network.
    """
    recipe = re.search(r"^lab:.*\n\t(.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe
    assert "JUPYTER_CONFIG_PATH=$(CURDIR)/.jupyter " in recipe[1], "the settings that `server` has"
    with urlopen(lab.server) as answer:
        opened = answer.geturl()
    assert opened == f"{lab.server}/lab/tree/notebooks/README.md"
    with lab.context.new_page() as page, faultless(page):  # JupyterLab's scripts are in the cache of this context
        page.set_viewport_size({"width": 1366, "height": 768})
        page.goto(f"{opened}?reset")  # without the workspace of an earlier test
        page.wait_for_selector(".jp-MarkdownViewer table", timeout=OPEN_SECONDS * 1000)
        page.wait_for_selector(".jp-DirListing-itemText", timeout=OPEN_SECONDS * 1000)
        page.wait_for_timeout(3000)  # the popup would come by itself
        names = page.locator(".jp-DirListing-itemText")
        shown = {name.strip() for name in names.all_text_contents()}
        assert {path.name for path in NOTEBOOK.parent.glob("*.ipynb")} <= shown
        assert names.evaluate_all(CUT_OFF) == []
        assert page.locator(".Toastify__toast").count() == 0
        page.get_by_role("link", name="The KV cache").click()
        page.wait_for_selector(".jp-NotebookPanel", timeout=OPEN_SECONDS * 1000)
        assert page.url.endswith(f"/notebooks/{NOTEBOOK.name}")

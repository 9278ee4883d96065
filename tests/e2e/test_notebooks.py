"""Every notebook in a real browser: all cells run, widgets follow the keyboard, and no key is taken for a shortcut."""

from pathlib import Path

import pytest
from e2e.browser import SLIDER, opened
from playwright.sync_api import Browser

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_runs_and_its_widget_follows_the_keyboard(name: str, browser: Browser, server: str):
    with opened(browser, server, f"notebooks/{name}.ipynb") as notebook:
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
        assert notebook.seen.errors == []
        assert notebook.seen.elsewhere == []

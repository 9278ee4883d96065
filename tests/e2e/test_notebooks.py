"""Every notebook in a real browser: all cells run, a slider moved by keyboard changes the picture."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.browser import opened, start_browser
from e2e.chromium import HOW_TO_GET_IT, find_chromium
from e2e.jupyter import jupyterlab
from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = find_chromium()
    assert chromium, f"no Chromium on this machine: {HOW_TO_GET_IT}"
    with sync_playwright() as playwright:
        yield start_browser(playwright, chromium)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what notebooks refer to: JupyterLab saves what it runs."""
    copy = tmp_path_factory.mktemp("repository")
    for name in ("notebooks", "lessons"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    return copy


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with jupyterlab(folder, tmp_path_factory.mktemp("jupyter")) as address:
        yield address


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_runs_and_its_widget_follows_the_keyboard(name: str, browser: Browser, server: str):
    with opened(browser, server, f"notebooks/{name}.ipynb") as notebook:
        notebook.run_all()
        assert notebook.problems() == []
        before, after = notebook.press_arrow()
        assert before != after
        notebook.screenshot(ROOT / "out" / f"{name}.png")
        assert notebook.problems() == []
        assert notebook.seen.errors == []
        assert notebook.seen.elsewhere == []

"""Start one JupyterLab for all tests of this folder."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.browser import Lab
from e2e.jupyter import jupyterlab
from playwright.sync_api import Browser
from repository import ROOT


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lay out the repository as a notebook sees it. Notebooks are copied because JupyterLab saves
    what it runs, and lessons because it serves no figure behind a symlink.
    """
    folder = tmp_path_factory.mktemp("repository")
    for name in ("notebooks", "lessons"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    for name in ("vllm", "widgets", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture(scope="session")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a JupyterLab that serves `folder`, and yield its address."""
    with jupyterlab(folder, tmp_path_factory.mktemp("jupyter")) as address:
        yield address


@pytest.fixture(scope="session")
def lab(browser: Browser, server: str) -> Iterator[Lab]:
    """Open that JupyterLab in a page."""
    lab = Lab(browser, server)
    yield lab
    lab.close()

"""The Python that the site carries: the pinned Pyodide, and sources that need no other package."""

import subprocess
import sys
from pathlib import Path

import pytest
import site_live

import widgets
from minivllm.errors import MinivllmError

ROOT = Path(__file__).resolve().parents[2]
START = """
import asyncio, json, sys
from widgets.shell.page import Page

async def start(name):
    texts = []
    message = {"id": name, "do": "start", "widget": name, "settings": {}, "width": 360, "serial": 1}
    Page(texts.append).heard(json.dumps(message))
    described, view = map(json.loads, texts)
    assert described["described"]["name"] == name
    assert "<svg" in view["view"]["svg"] and not view["view"]["trace"], view

for name in sys.argv[1:]:
    asyncio.run(start(name))
"""


def test_every_widget_starts_in_a_bare_python_from_the_sites_sources(tmp_path: Path):
    """Run Python without site packages, like Pyodide: no anywidget, IPython, rich or NumPy."""
    site_live.write_sources(ROOT, tmp_path / "sources.zip", widgets.names())
    program = f"import sys; sys.path.insert(0, {str(tmp_path / 'sources')!r})\n{START}"
    subprocess.run([sys.executable, "-m", "zipfile", "-e", tmp_path / "sources.zip", tmp_path / "sources"], check=True)
    subprocess.run([sys.executable, "-I", "-S", "-c", program, *widgets.names()], check=True)


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no npm."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    return site_live.cache()


def test_without_npm_the_site_has_no_python_and_says_why(downloads: Path, tmp_path: Path):
    assert site_live.add(ROOT, tmp_path, []) == "npm is not installed"
    assert not downloads.exists()


def test_npms_own_error_is_quoted(downloads: Path, tmp_path: Path):
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho 'no such host' >&2\nexit 1\n")
    npm.chmod(0o755)
    assert site_live.add(ROOT, tmp_path, []) == f"npm cannot download pyodide@{site_live.VERSION}: no such host"


def test_another_package_than_the_pinned_one_is_refused_and_deleted(downloads: Path, tmp_path: Path):
    downloads.mkdir(parents=True)
    package = downloads / f"pyodide-{site_live.VERSION}.tgz"
    package.write_bytes(b"something else")
    with pytest.raises(MinivllmError, match="does not have the pinned hash"):
        site_live.add(ROOT, tmp_path, [])
    assert not package.exists()

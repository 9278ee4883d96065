"""The Python that the site carries: the pinned Pyodide, and sources that need no other package."""

import json
import subprocess
import sys
from pathlib import Path

import npm_packages
import pytest
import site_exercises
import site_live
from refusals import assert_refused
from repository import ROOT

import widgets

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

async def check(name, stub):
    answers = asyncio.Queue()
    page = Page(lambda text: answers.put_nowait(json.loads(text)))
    page.heard(json.dumps({"id": name, "do": "check", "source": stub, "run": 1}))
    problems = []
    while "checked" not in (answer := await answers.get()):
        problems.append(answer["result"]["problem"])
    assert problems and all("not written yet" in (problem or "") for problem in problems), problems

for name, stub in json.load(sys.stdin).items():
    asyncio.run(check(name, stub) if stub else start(name))
"""


def test_widgets_and_checks_run_in_a_bare_python_from_the_sites_sources(tmp_path: Path):
    """Run Python without site packages, like Pyodide: no anywidget, IPython, rich, NumPy or torch."""
    exercises = site_exercises.exercises(ROOT)
    others = {*widgets.names()} - {part.widget for part in exercises.values()}  # a page in Chromium starts the rest
    site_live.write_sources(ROOT, tmp_path / "sources.zip", widgets.names())
    program = f"import sys; sys.path.insert(0, {str(tmp_path / 'sources')!r})\n{START}"
    subprocess.run([sys.executable, "-m", "zipfile", "-e", tmp_path / "sources.zip", tmp_path / "sources"], check=True)
    given = json.dumps(dict.fromkeys(others) | {name: part.text for name, part in exercises.items()})
    subprocess.run([sys.executable, "-I", "-S", "-c", program], input=given, text=True, check=True)


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no npm."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    return npm_packages.cache()


def test_without_npm_the_site_has_no_python_and_says_why(downloads: Path, tmp_path: Path):
    assert site_live.add(ROOT, tmp_path, []) == "npm is not installed"
    assert not downloads.exists()


def test_npms_own_error_is_quoted(downloads: Path, tmp_path: Path):
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho 'no such host' >&2\nexit 1\n")
    npm.chmod(0o755)
    assert site_live.add(ROOT, tmp_path, []).endswith("w3c-keyname@2.2.8: no such host")


def test_another_package_than_the_pinned_one_is_refused_and_deleted(downloads: Path, tmp_path: Path):
    downloads.mkdir(parents=True)
    for name, (version, _) in npm_packages.OF_THE_SITE.items():
        path = downloads / f"{name.removeprefix('@').replace('/', '-')}-{version}.tgz"
        path.write_bytes(b"something else")
    assert_refused("does not have the pinned hash", site_live.add, ROOT, tmp_path, [])
    assert len([*downloads.iterdir()]) == len(npm_packages.OF_THE_SITE) - 1

"""Build the site once for all tests of a run."""

import functools
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from e2e.browser import FLAGS, Visit, emptied_page, faultless
from e2e.chromium import find_chromium
from e2e.static_server import served
from filelock import FileLock
from mermaidx.engines.quickjs_engine import Engine
from playwright.sync_api import Browser, BrowserContext, Page
from repository import ROOT
from sphinx.deprecation import RemovedInSphinx11Warning
from sphinx.search.en import SearchEnglish

from minivllm_lab.exercise import load
from widgets.shell.knobs import Value
from widgets.shell.spec import Spec

SPEC = load(ROOT / "tests" / "site" / "tiny.py").SPEC
CELL = """
Look at [a load of 1.5](#tiny?load=1.5).

```python exec
from widgets import tiny

tiny.show()
```
"""
VIEWS = 16


def repository(folder: Path) -> Path:
    """Copy this repository, with one more widget in its first lesson."""
    for path in ROOT.iterdir():
        if path.name not in (".git", ".venv", "out", "lessons", "widgets"):
            (folder / path.name).symlink_to(path)
    shutil.copytree(ROOT / "widgets", folder / "widgets", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "widgets" / "tiny").mkdir()
    (folder / "widgets" / "tiny" / "__init__.py").symlink_to(ROOT / "tests" / "site" / "tiny.py")
    shutil.copytree(ROOT / "lessons", folder / "lessons")
    lesson = folder / "lessons" / "01_kv_cache.md"
    before, heading, after = lesson.read_text().partition("\n## Measured\n")
    lesson.write_text(before + CELL + heading + after)
    return folder


def left_early(spec: Spec) -> Spec:
    """Return a lesson's widget without presets, whose sweep stops once it knows something.

    Its view then has all that a page needs. Other tests prove that sweeps end and that presets are
    drawn.
    """

    def sweep(**knobs: Value) -> Any:
        states = spec.states(**knobs)
        first = next(states)
        return next((state for state in states if state is not first), first)

    return replace(spec, presets={}, sweep=sweep)


def two_values(chosen: Mapping[str, list[Value]], start: Mapping[str, Value]) -> dict[str, list[Value]]:
    """Let only the first knob turn, between its start and a neighbouring value."""
    name, values = next(iter(chosen.items()))
    at = max(values.index(start[name]), 1)
    return {name: values[at - 1 : at + 1]}


@pytest.fixture(scope="session", autouse=True)
def mermaid_loaded_once() -> Iterator[None]:
    """Let all diagrams share one engine. Loading Mermaid takes a second, and `mermaidx` loads it
    for each diagram so that ids count from zero, which `site_pages` removes.
    """
    with mock.patch.object(Engine, "_ensure_fresh_context"):
        yield


def build(folder: Path, built: Path) -> None:
    """Build the site of a copy of this repository in `folder`."""
    import site_widgets

    program, choose = load(ROOT / "tools" / "build_site.py"), site_widgets.choose
    specs = {name: left_early(spec) for name, spec in site_widgets.specs().items()} | {"tiny": SPEC}

    def chosen(spec: Spec, start: Mapping[str, Value], *most: Any) -> dict[str, list[Value]]:
        """Let all knobs of the tiny widget turn, and those of a lesson's widget by one place."""
        turned = choose(spec, start, *most)
        return turned if spec is SPEC else two_values(turned, start)

    with (
        mock.patch.object(site_widgets, "choose", chosen),
        mock.patch.object(SearchEnglish, "stem", functools.cache(SearchEnglish.stem)),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", RemovedInSphinx11Warning)  # of myst-parser
        program.build(repository(folder), built, specs, VIEWS)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the built site, which the first worker that needs it builds for all."""
    own = tmp_path_factory.getbasetemp()
    built = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "built_site"
    with FileLock(f"{built}.lock"):
        if not built.exists():
            build(tmp_path_factory.mktemp("repository"), built)
    return built


@pytest.fixture(scope="session")
def live_site(site: Path) -> Iterator[str]:
    """Serve the site with Python and the editor, and yield its address."""
    if not (site / "_static" / "pyodide").is_dir():
        assert not os.environ.get("MINIVLLM_REQUIRE_BROWSER"), "the site has neither Python nor an editor: install npm"
        pytest.skip("the site has neither Python nor an editor: npm is missing")
    with served(site) as address:
        yield address


@pytest.fixture(scope="session")
def profile(live_site: str, browser: Browser, tmp_path_factory) -> Iterator[tuple[BrowserContext, str]]:
    """Start a Chromium with a profile on disk, which keeps Pyodide as it was compiled: Python then
    starts in half the time.
    """
    start, folder = browser.browser_type.launch_persistent_context, tmp_path_factory.mktemp("profile")
    with start(folder, executable_path=find_chromium(), args=FLAGS) as context:
        yield context, live_site


@pytest.fixture(scope="module")
def visit(profile: tuple[BrowserContext, str]) -> Iterator[Visit]:
    """Open a page that all tests of a file share."""
    context, address = profile
    with context.new_page() as page, faultless(page):
        page.set_default_timeout(120_000)
        yield Visit(page, address)


@pytest.fixture
def opened(site: Path, browser: Browser) -> Callable[..., AbstractContextManager[Page]]:
    """Return a context manager: `opened("lessons/01_kv_cache.html", width=400)` opens a page of the site from disk."""

    @contextmanager
    def opening(name: str, width: int = 1366) -> Iterator[Page]:
        page = emptied_page(browser, width, 800)
        with faultless(page):
            page.goto(f"{site.as_uri()}/{name}")
            yield page

    return opening

"""A page made from an executed notebook shows each widget's picture and verdict, without a
kernel and without a network.
"""

from pathlib import Path

import nbformat
import pytest
from e2e.browser import box_of
from nbconvert import HTMLExporter
from nbconvert.preprocessors import ExecutePreprocessor
from playwright.sync_api import Browser
from repository import ROOT

pytestmark = pytest.mark.browser

WIDGET = f"""\
import sys
sys.path.append({str(ROOT / "tests")!r})
from lesson_widgets.sizes import SPEC
from widgets.shell.lesson_widget import LessonWidget
LessonWidget(SPEC, size=3)
"""


@pytest.fixture(scope="module")
def page_of_a_widget(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page that `jupyter nbconvert --execute --to html` writes."""
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(WIDGET)], metadata=kernel)
    ExecutePreprocessor(timeout=120, kernel_name="python3").preprocess(notebook)
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(HTMLExporter().from_notebook_node(notebook)[0], encoding="utf-8")
    return path


def test_the_picture_and_the_verdict_are_on_the_page(page_of_a_widget: Path, browser: Browser):
    with browser.new_context(offline=True) as context:
        page = context.new_page()
        page.goto(page_of_a_widget.as_uri(), wait_until="domcontentloaded")
        picture = page.get_by_text("too large · a level is missed")
        picture.wait_for()
        assert box_of(picture)["width"] > 50
        assert page.get_by_text("The size is 3 < 100.").is_visible()
        assert picture.count() == 1, "once, not twice"

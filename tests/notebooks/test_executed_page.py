"""A page made from an executed notebook shows each widget's picture and verdict, without a
kernel and without a network.
"""

from pathlib import Path

import nbformat
import pytest
from nbconvert import HTMLExporter
from nbconvert.preprocessors import ExecutePreprocessor
from playwright.sync_api import Browser

pytestmark = pytest.mark.browser

WIDGET = """\
from widgets.shell.knobs import slider
from widgets.shell.lesson_widget import LessonWidget
from widgets.shell.spec import Challenge, Guess, Progress, Spec, Verdict
from widgets.shell.svg import Drawing

def figure(state, width=640, pinned=None):
    drawing = Drawing(width, 80, f"size {state}")
    drawing.text((20, 40), f"the picture of {state}")
    return drawing.render()

challenge = Challenge("g", lambda state: Progress(False, "w"), "l")
SPEC = Spec(
    name="probe", title="A probe", lead="Turn it.", knobs={"Knobs": {"size": slider("size", 0, 5, 1, 0)}},
    presets={}, sweep=lambda size: size, figure=figure,
    verdict=lambda state: Verdict(f"the verdict on {state}"), command=lambda state: "vllm serve",
    challenges=(challenge,) * 3, guess=Guess("q", ("a", "b"), 0, "b"),
)
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
        picture = page.get_by_text("the picture of 3")
        picture.wait_for()
        box = picture.bounding_box()
        assert box is not None
        assert box["width"] > 50
        assert page.get_by_text("the verdict on 3").is_visible()
        assert picture.count() == 1, "once, not twice"

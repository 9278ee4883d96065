"""The widgets' pictures that the lessons' texts show are what the widgets draw today."""

from pathlib import Path

import pytest
from pictures import differences

import widgets
from widgets.__main__ import FIGURES, IN_LESSONS, main
from widgets.disaggregation_state import experiment


@pytest.fixture(autouse=True)
def nothing_has_been_run():
    """A widget shows every point that was run in its process, those of other tests too."""
    experiment.cache_clear()


def test_each_widget_has_a_picture_that_its_lesson_shows():
    assert sorted(IN_LESSONS) == widgets.names()
    for picture in IN_LESSONS.values():
        (lesson,) = FIGURES.parent.glob(f"{picture[:2]}_*.md")
        assert f"(figures/{picture})" in lesson.read_text()


@pytest.mark.parametrize(("widget", "picture"), IN_LESSONS.items())
def test_the_picture_in_the_lesson_is_the_widgets(widget: str, picture: str, tmp_path: Path):
    main([widget, str(tmp_path / picture)])
    drawn, shown = ((folder / picture).read_text() for folder in (tmp_path, FIGURES))
    assert not differences(drawn, shown), f"uv run python -P -m widgets {widget}"

"""The live widget: the page's requests are carried out in order, and a still picture is shown where
no kernel runs.
"""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from lesson_widgets.sizes import SPEC

from widgets.shell.lesson_widget import LessonWidget, style
from widgets.shell.theme import DARK


def heard(*messages: dict) -> LessonWidget:
    """Return a widget that has handled `messages`, sent without a pause, and has come to rest."""

    async def live() -> LessonWidget:
        widget = LessonWidget(SPEC)
        for message in messages:
            widget.heard(message)
        await asyncio.sleep(0.05)
        return widget

    with ThreadPoolExecutor(1) as thread:  # a loop of its own: browser tests leave one running in this thread
        return thread.submit(asyncio.run, live()).result()


@pytest.fixture
def notebook() -> Iterator[None]:
    """Make this process an IPython notebook for one test, and no longer."""
    InteractiveShell.instance()
    yield
    InteractiveShell.clear_instance()


def test_a_turn_is_answered_with_its_serial():
    view = heard({"do": "turn", "values": {"size": 4}, "width": 500, "serial": 7}).view
    assert (view["serial"], view["values"]["size"], view["busy"]) == (7, 4, False)
    assert 'width="500"' in view["svg"]


def test_a_newer_turn_ends_an_older_one():
    turns = [{"do": "turn", "values": {"size": size}, "serial": size} for size in range(6)]
    widget = heard(*turns)
    assert (widget.view["serial"], widget.state.size, widget.view["busy"]) == (5, 5, False)


def test_pin_load_and_unpin():
    saved = '{"widget": "sizes", "knobs": {"size": 9}}'
    widget = heard({"do": "pin"}, {"do": "load", "text": saved})
    assert widget.state.size == 9
    assert widget.view["pinned"]["values"]["size"] == 2
    assert heard({"do": "pin"}, {"do": "unpin"}).view["pinned"] is None


def test_what_cannot_be_loaded_is_said_and_nothing_changes():
    widget = heard({"do": "load", "text": "nonsense"})
    assert widget.view["words"].startswith("Not loaded: this is not a saved state")
    assert widget.view["values"]["size"] == 2


def test_knobs_are_set_from_python():
    widget = LessonWidget(SPEC, size=3)
    widget.set(size=8)
    assert (widget.state.size, widget.view["busy"]) == (8, False)


def test_a_still_picture_stands_beside_the_live_widget(notebook):
    with capture_output() as captured:
        LessonWidget(SPEC)._ipython_display_()
    still, live = captured.outputs
    assert "<svg" in still.data["text/html"]
    assert "application/vnd.jupyter.widget-view+json" in live.data
    assert "application/vnd.jupyter.widget-view+json" not in still.data


def test_every_colour_of_a_picture_has_a_dark_form_in_the_style():
    for light, dark in DARK.items():
        assert f'[fill="{light}" i]' in style()
        assert dark in style()


@pytest.mark.parametrize(
    "message",
    [None, 3, [], {}, {"do": "turn"}, {"do": "turn", "values": [1], "serial": 1}, {"do": "load", "text": None},
     {"do": "turn", "values": {}, "serial": None}, {"do": ["pin"]}],
)  # fmt: skip
def test_a_message_of_another_shape_changes_nothing(message):
    assert heard(message).view == LessonWidget(SPEC).view


def test_a_width_that_is_none_leaves_the_width_as_it_is():
    for width in ("wide", float("nan"), [], {}):
        assert 'width="640"' in heard({"do": "turn", "values": {}, "width": width, "serial": 1}).view["svg"]


def test_words_of_the_still_picture_are_no_markup():
    assert "<b>" not in LessonWidget(SPEC, name="refuse").still()


def test_a_widget_shown_twice_has_one_name_for_its_still_pictures(notebook):
    widget = LessonWidget(SPEC)
    with capture_output() as captured:
        widget._ipython_display_()
        widget._ipython_display_()
    stills = [output.data["text/html"] for output in captured.outputs if "text/html" in output.data]
    assert len(stills) == 2
    assert all(f'class="{widget.described["still"]}"' in still for still in stills)

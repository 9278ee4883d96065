"""What every widget gets from its base: live redraw, errors that are seen, a challenge, a still picture."""

from dataclasses import dataclass

import ipywidgets
import pytest
from matplotlib.figure import Figure

from minivllm.errors import MinivllmError
from widgets.base import Challenge, LessonWidget, Progress, Verdict, as_svg, choice, entry, slider, steps
from widgets.svg import Drawing


@dataclass(frozen=True)
class State:
    size: int


def sweep(size: int, name: str = "") -> State:
    if size < 0:
        raise MinivllmError("a size is at least 0, not <b>-1</b>")
    if size == 13:
        raise ZeroDivisionError("a bug")
    return State(size)


def figure(state: State) -> str:
    drawing = Drawing(100, 20, "A size")
    drawing.text((0, 10), f"size {state.size}")
    return drawing.render()


def widget(**changes) -> LessonWidget:
    settings = {
        "title": "Sizes",
        "lead": "Try them.",
        "knobs": {"Knobs": {"size": ipywidgets.IntText(value=1), "name": entry("name")}},
        "presets": {"Start again": {"size": 1}, "Break it": {"size": -1}},
        "sweep": sweep,
        "figure": figure,
        "verdict": lambda state: Verdict(f"the size is {state.size} < 100", "tight"),
        "challenge": Challenge(
            goal="Make it 7.",
            check=lambda state: Progress(state.size == 7, f"It is {state.size}."),
            hint="Count.",
            lesson="Seven it was.",
        ),
    }
    return LessonWidget(**{**settings, **changes})


def button(shown: LessonWidget, label: str) -> ipywidgets.Button:
    def all_of(part):
        yield part
        for child in getattr(part, "children", ()):
            yield from all_of(child)

    return next(part for part in all_of(shown) if getattr(part, "description", "") == label)


def test_a_knob_changes_picture_verdict_and_state():
    shown = widget()
    assert "size 1" in shown.picture.value
    shown.knobs["size"].value = 5
    assert "size 5" in shown.picture.value
    assert "the size is 5 &lt; 100" in shown.verdict.value
    assert shown.state == State(5)


def test_bad_input_is_one_line_and_the_picture_fades():
    shown = widget()
    shown.knobs["size"].value = -1
    assert "a size is at least 0, not &lt;b&gt;-1&lt;/b&gt;" in shown.verdict.value
    assert "Traceback" not in shown.verdict.value
    assert "stale" in shown.picture.value
    assert "nothing to check" in shown.progress.value
    assert shown.state is None
    shown.knobs["size"].value = 2
    assert "size 2" in shown.picture.value
    assert "stale" not in shown.picture.value


@pytest.mark.parametrize("part", ["sweep", "figure", "verdict", "check"])
def test_an_exception_anywhere_is_shown_not_swallowed(part: str):
    def broken(*_, **__):
        raise ZeroDivisionError("a bug")

    change = {part: broken}
    if part == "check":
        change = {"challenge": Challenge("goal", broken, "hint", "lesson")}
    shown = widget(**change)
    assert "lesson-widget-error" in shown.verdict.value
    assert "ZeroDivisionError: a bug" in shown.verdict.value
    assert "Traceback" in shown.verdict.value, "for whoever mends it"


def test_a_challenge_is_checked_at_every_move():
    shown = widget()
    assert "Not yet." in shown.progress.value
    assert "It is 1." in shown.progress.value
    shown.knobs["size"].value = 7
    assert "Met." in shown.progress.value
    assert "Seven it was." in shown.progress.value
    shown.knobs["size"].value = 8
    assert "Not yet." in shown.progress.value


def test_setting_several_knobs_redraws_once():
    drawn = []
    shown = widget(figure=lambda state: drawn.append(state) or figure(state))
    drawn.clear()
    shown.set(size=3, name="x")
    assert drawn == [State(3)]


def test_a_value_that_a_knob_does_not_take_is_shown():
    shown = widget()
    shown.set(size="many")
    assert "TraitError" in shown.verdict.value
    shown.knobs["size"].value = 4
    assert "size 4" in shown.picture.value, "the knobs still work"


def test_buttons_set_what_they_say():
    shown = widget()
    button(shown, "Break it").click()
    assert "a size is at least 0" in shown.verdict.value
    button(shown, "Start again").click()
    assert "size 1" in shown.picture.value


def test_a_still_picture_goes_with_the_live_view():
    bundle = widget()._repr_mimebundle_()
    assert bundle["image/svg+xml"].startswith("<svg")
    assert "application/vnd.jupyter.widget-view+json" in bundle


def test_a_matplotlib_figure_becomes_svg_with_its_words():
    def plotted() -> Figure:
        drawn = Figure(figsize=(3, 2))
        drawn.subplots().set_title("Memory over time")
        return drawn

    svg = as_svg(plotted())
    assert svg.startswith("<svg")
    assert "Memory over time" in svg
    assert svg == as_svg(plotted()), "the same figure gives the same bytes"
    assert "Memory over time" in widget(figure=lambda _state: plotted()).picture.value


def test_knobs_can_be_reached_by_keyboard_and_have_names():
    knobs = [choice("Model", ["a", "b"], "a"), steps("Length", [1, 2], 1), slider("Share", 0, 1, 0.1, 0.5), entry("or")]
    assert all(knob.description for knob in knobs)
    assert all(knob.tabbable is not False for knob in knobs)

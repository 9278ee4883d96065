"""Test that the comparison of pictures finds a stale one, and ignores what no reader sees."""

import json
import math

import pytest
from pictures import contents, contents_differ, differences

from minivllm_lab.pictures.figures import panels
from widgets.shell.svg import Box, Drawing


def picture(x: float = 10, words: str = "14 slots, 3.62 GiB", colour: str = "#0072B2", more: bool = False) -> str:
    drawing = Drawing(200, 100, "Memory")
    drawing.rect(Box(x, 10, 30, 20), colour, tip="a tip of 2")
    drawing.polyline([(0, 1), (x, 2.5)], colour)
    drawing.text((5, 50), words)
    if more:
        drawing.line((0, 0), (1, 1))
    return drawing.render()


@pytest.mark.parametrize("other", [{}, {"x": 10.3}, {"words": "14 slots, 3.63 GiB"}])
def test_what_no_reader_could_tell_apart_is_the_same(other):
    assert differences(picture(), picture(**other)) == []


WORDS = ("15 slots, 3.62 GiB", "14 slots, -3.62 GiB", "14 places, 3.62 GiB")
OTHERS = [{"x": 11}, {"colour": "#0072B3"}, {"more": True}, *({"words": words} for words in WORDS)]


@pytest.mark.parametrize("other", OTHERS)
def test_what_a_reader_sees_is_different(other):
    assert differences(picture(), picture(**other))


def figure(path, rate=120.0, label="with a cache", title="Tokens", bars=(1, 2)):
    with panels(path, 1) as (axes,):
        axes.plot([1, 2, math.nan], [rate, 130, 5], label=label)
        axes.bar(["one", "two"], bars)
        axes.set_title(title)
        axes.annotate("here", (1, 1))
    return contents(path)


def test_a_figure_keeps_what_it_shows(tmp_path):
    result = figure(tmp_path / "a.svg")
    assert json.loads(json.dumps(result, allow_nan=False)) == result, "plain data"
    assert result[0]["words"] == ["Tokens", "", "", "here"]
    assert (result[0]["names"], result[0]["legend"]) == (["one", "two"], ["with a cache"])
    assert result[0]["lines"] == [[[1, 2, None], [120, 130, 5]]]
    assert [bar[3] for bar in result[0]["bars"]] == [1, 2]
    assert contents_differ(result, figure(tmp_path / "b.svg", rate=120.01)) == []


@pytest.mark.parametrize("other", [{"rate": 121}, {"label": "without"}, {"title": "Time"}, {"bars": (1, 3)}])
def test_a_figure_of_other_data_differs(tmp_path, other):
    assert len(contents_differ(figure(tmp_path / "a.svg"), figure(tmp_path / "b.svg", **other))) == 1

"""Test the figures of the lessons."""

import pytest

from minivllm_lab.pictures import palette
from minivllm_lab.pictures.figures import curves, dotted, panels


def test_curves_are_points_as_a_results_file_has_them(tmp_path):
    with panels(tmp_path / "one.svg", 2) as (left, right):
        curves(left, {"one": {"1": 0.1, "8": 0.2}, "two": {"1": 0.3, "64": 0.4}}, factor=100, octaves=True)
        curves(right, {"alone": {"2": 5.0}})
        first, two = left.get_lines()
        assert list(first.get_xdata()) == [1, 8]
        assert list(two.get_ydata()) == pytest.approx([30, 40])
        assert (first.get_color(), two.get_color()) == palette.SERIES[:2]
        assert [text.get_text() for text in left.get_xticklabels()] == ["1", "8", "64"]
        assert [text.get_text() for text in left.get_legend().get_texts()] == ["one", "two"]
        assert right.get_legend() is None, "one line needs no names"
    assert (tmp_path / "one.svg").read_text().startswith("<?xml")


def test_dots_stand_in_a_row_for_each_name_on_a_logarithmic_axis(tmp_path):
    rows = {"a card": {"read": 3.0, "copy": 30.0}, "another": {"copy": 300.0}}
    with panels(tmp_path / "one.svg", 1) as (axes,):
        dotted(axes, rows, (palette.INK, palette.SKY))
        read, copy = axes.get_lines()
        assert (list(read.get_xdata()), list(read.get_ydata())) == ([3.0], [0])
        assert (list(copy.get_xdata()), list(copy.get_ydata())) == ([30.0, 300.0], [0, 1])
        assert (axes.get_xscale(), read.get_linestyle()) == ("log", "None")
        assert [text.get_text() for text in axes.get_yticklabels()] == ["a card", "another"]
        assert axes.get_ylim()[0] > axes.get_ylim()[1], "the first row is at the top"

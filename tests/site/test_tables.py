"""The views drawn in advance: which ones exist, and that they equal the session's."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qsl

import pytest
import site_pages
import site_widgets
from refusals import assert_refused
from repository import ROOT

import widgets
from minivllm_lab.exercise import load
from widgets.shell.knobs import choice, entry, slider, steps, switch
from widgets.shell.session import Session
from widgets.shell.spec import Verdict

SPEC = load(Path(__file__).with_name("tiny.py")).SPEC


def picture(table: dict, view: dict) -> str:
    return "".join(table["pieces"][index] for index in view["svg"])


@pytest.mark.parametrize("most", [1, 5, 16, 32, 120])
def test_a_table_has_the_start_the_presets_and_what_its_knobs_reach(most: int):
    table = site_widgets.table(SPEC, {}, most)
    settings = [view["values"] for view in table["views"]]
    assert table["values"] in settings
    assert all({**SPEC.start(), **preset} in settings for preset in SPEC.presets.values())
    assert len(settings) <= max(most, 1) + len(SPEC.presets)
    keys = [tuple(values[name] for name in table["axes"]) for values in settings]
    assert len(set(keys)) == len(keys)
    assert {*table["turns"]} <= {*table["axes"]}
    assert all(not view["busy"] and not view["pinned"] for view in table["views"])
    elsewhere = [challenge["elsewhere"] for challenge in table["described"]["challenges"]]
    assert elsewhere == [False, False, True], "none has the note"


def test_the_swept_knob_comes_first_and_others_as_far_as_there_is_room():
    assert site_widgets.table(SPEC, {}, 8)["turns"] == ["load"]
    assert site_widgets.table(SPEC, {}, 16)["turns"] == ["load", "servers"]
    assert site_widgets.table(SPEC, {}, 32)["turns"] == ["load", "servers", "loud"]


def test_a_preset_beyond_the_knobs_of_the_page_is_swept_where_there_is_room():
    said = [view["values"] for view in site_widgets.table(SPEC, {}, 24)["views"] if view["values"]["note"] == "said"]
    assert len(said) == 8
    tight = [view["values"] for view in site_widgets.table(SPEC, {}, 16)["views"] if view["values"]["note"] == "said"]
    assert [values["load"] for values in tight] == [1.5]


def test_every_view_is_what_a_session_draws():
    table = site_widgets.table(SPEC, {"servers": 2}, 16)
    assert table["values"]["servers"] == 2
    for view in table["views"]:
        expected = Session(SPEC).settle(**view["values"])
        assert {**view, "svg": picture(table, view)} == expected
    assert site_widgets.still(table) == Session(SPEC, servers=2).settle()["svg"]


def test_a_slider_has_only_the_values_that_are_drawn():
    described = site_widgets.table(SPEC, {}, 6)["described"]
    load = described["groups"][0]["knobs"][0]
    assert load["kind"] == "steps"
    values = [option["value"] for option in load["options"]]
    assert {0.5, 1.5} <= {*values}
    assert values == sorted(values)
    assert 1 < len(values) <= 6
    assert [option["name"] for option in load["options"]] == [f"{value:g}" for value in values]


@pytest.mark.parametrize(
    ("knob", "needed", "most", "expected"),
    [
        (switch("a", True), [], 10, [False, True]),
        (choice("a", ["x", "y"], "y"), [], 10, ["x", "y"]),
        (steps("a", [1, 2, 4], 4), [], 10, [1, 2, 4]),
        (entry("a", "words"), [], 10, []),
        (slider("a", 0, 1, 0.5, 0.5), [None], 10, [0, 0.5, 1]),
        (slider("a", 0, 100, 1, 7), [93], 7, [0, 7, 21, 42, 63, 84, 93]),
    ],
    ids=["switch", "choice", "steps", "entry", "slider", "thinned"],
)
def test_the_values_of_each_kind_of_knob(knob, needed: list, most: int, expected: list):
    assert site_widgets.values_of(knob, knob.value, needed, most) == expected


def test_pictures_share_their_pieces():
    table = site_widgets.table(SPEC, {}, 60)
    assert len("".join(table["pieces"])) < sum(len(picture(table, view)) for view in table["views"]) / 3


def test_a_widget_that_breaks_is_named_with_the_setting():
    def verdict(state) -> Verdict:
        return Verdict(f"{1 / (state.load - 1.5)}")

    words = r"the widget tiny fails with .*'load': 1\.5.*ZeroDivisionError"
    assert_refused(words, site_widgets.table, replace(SPEC, verdict=verdict), {}, 8)


def test_every_widget_is_named_like_its_module():
    assert {name: spec.name for name, spec in site_widgets.specs().items()} == {name: name for name in widgets.names()}


def knob_links() -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield the page, the widget and the knobs of each link that sets some."""
    for page in sorted((ROOT / "lessons").glob("[0-9][0-9]_*.md")):
        for _, _, target in site_pages.KNOB_LINK.findall(page.read_text()):
            name, _, query = target[1:].partition("?")
            yield page.name, name, dict(parse_qsl(query, strict_parsing=True))


def test_each_lesson_has_links_that_set_knobs_to_values_that_they_have():
    links = [*knob_links()]
    assert len({page for page, *_ in links}) == 12
    specs = site_widgets.specs()
    for page, name, values in links:
        assert f"{name}.show(" in (ROOT / "lessons" / page).read_text(), page
        for knob, text in values.items():
            places = specs[name].flat()[knob].places()
            options = {f"{value:g}" if isinstance(value, float) else f"{value}" for value in places}
            assert text in options, f"{page}: {knob}={text} of {name}"

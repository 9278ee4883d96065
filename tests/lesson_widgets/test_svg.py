"""Drawings: well-formed, readable by screen readers, and placed where the values say."""

import json
import math
import re
import xml.etree.ElementTree as ET
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm_lab.pictures.drawing import QUIET, ink_on, luminance, text_width
from minivllm_lab.pictures.palette import BLUE, GREEN, INK, ORANGE, PURPLE, SERIES, SKY, VERMILLION
from widgets.shell import theme
from widgets.shell.plot import Axes, Scale, hidden_note, short, tokens
from widgets.shell.svg import SMALL, Box, Drawing, Segment, legend, stacked_bar, text_box
from widgets.shell.theme import BROKEN, CARD, DARK, DARK_LINES, NOT_OURS, WORDS

SVG = "{http://www.w3.org/2000/svg}"
ROOM = Box(10, 10, 100, 20)


def rendered(drawing: Drawing) -> ET.Element:
    return ET.fromstring(drawing.render())


def plot(box: Box, x: Scale, y: Scale) -> tuple[Drawing, Axes]:
    drawing = Drawing(400, 200, "t")
    return drawing, Axes(drawing, box, x, y)


def contrast(colour: str, ground: str) -> float:
    """Return the contrast ratio of WCAG 2, for which level AA requires 4.5, or 3 where a mark is
    large.
    """
    darker, lighter = sorted(luminance(each) + 0.05 for each in (colour, ground))
    return lighter / darker


def test_a_drawing_says_what_it_shows():
    root = rendered(Drawing(200, 100, "Memory <of> a GPU", "It is full & empty"))
    assert root.get("role") == "img"
    assert root.get("aria-label") == "Memory <of> a GPU. It is full & empty"
    assert root.get("viewBox") == "0 0 200 100"
    assert (root.get("width"), root.get("height")) == ("200", "100")
    assert root.get("style") is None, "some viewers take `height: auto` for no height, and show nothing"


def test_words_that_look_like_markup_stay_words():
    drawing = Drawing(200, 100, "t")
    drawing.text((1, 2), "a < b & c")
    drawing.rect(ROOM, "#000000", tip="x < y")
    root = rendered(drawing)
    assert root.find(f"{SVG}text").text == "a < b & c"
    assert root.findall(f"{SVG}rect")[1].get("data-tip") == "x < y"


def test_segments_of_a_bar_touch_and_are_as_wide_as_their_values():
    drawing = Drawing(200, 100, "t")
    stacked_bar(drawing, ROOM, [Segment("a", 3, "#111111"), Segment("b", 0, "#222222"), Segment("c", 1, "#333333")], 4)
    bars = rendered(drawing).findall(f"{SVG}rect")[1:]
    assert [(float(bar.get("x")), float(bar.get("width"))) for bar in bars] == [(10, 75), (85, 25)]


def test_a_label_is_written_only_where_it_fits():
    for width, expected in ((text_width("KV cache", SMALL) + 13, 1), (20, 0)):
        drawing = Drawing(500, 100, "t")
        stacked_bar(drawing, Box(0, 0, width, 20), [Segment("KV cache", 1, "#FFFFFF")], 1)
        assert len(rendered(drawing).findall(f"{SVG}text")) == expected


def test_upright_words_take_a_tall_box():
    drawing = Drawing(200, 100, "t")
    drawing.text((50, 10), "launch", size=SMALL, anchor="end", turn=-90)
    assert drawing.words == [Box(48 - 0.8 * SMALL, 10, SMALL + 4, text_width("launch", SMALL))]


def test_a_legend_flows_into_rows():
    drawing = Drawing(300, 100, "t")
    entries = [Segment(f"entry number {index}", 1, "#111111") for index in range(4)]
    below = legend(drawing, (10, 20), entries, 250)
    texts = rendered(drawing).findall(f"{SVG}text")
    assert len({text.get("y") for text in texts}) == 2
    assert below > max(float(text.get("y")) for text in texts)
    assert all(float(text.get("x")) + text_width(text.text, 11.5) <= 261 for text in texts)


@pytest.mark.parametrize("log", [False, True])
def test_axes_put_values_where_they_belong(log: bool):
    axes = Axes(Drawing(200, 200, "t"), Box(20, 10, 100, 50), Scale(1, 100, log=log), Scale(1, 100, log=log))
    assert axes.at(1, 1) == pytest.approx((20, 60))
    assert axes.at(100, 100) == pytest.approx((120, 10))
    assert axes.at(10, 10)[0] == pytest.approx(70 if log else 20 + 100 * 9 / 99)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(3, 9))
def test_linear_ticks_are_round_inside_and_few(low: float, span: float, most: int):
    scale = Scale(low, low + span)
    ticks = scale.ticks(most)
    assert 1 <= len(ticks) <= most + 1
    assert all(-1e-6 <= scale.share(tick) <= 1 + 1e-6 for tick in ticks)
    steps = {round(b - a, 12) for a, b in pairwise(ticks)}
    assert len({float(f"{step:.4g}") for step in steps}) <= 1


@given(st.floats(1e-3, 1e6), st.floats(2, 1e6), st.integers(3, 9))
def test_log_ticks_are_inside_and_few(low: float, factor: float, most: int):
    scale = Scale(low, low * factor, log=True)
    assert len(scale.ticks(most)) <= most
    assert all(-0.01 <= scale.share(tick) <= 1.01 for tick in scale.ticks(most))
    assert len(scale.doublings(most)) <= most
    assert all(math.log2(tick) == round(math.log2(tick)) for tick in scale.doublings(most))


def test_ticks_of_common_ranges():
    assert Scale(0, 100).ticks() == [0, 20, 40, 60, 80, 100]
    assert Scale(1, 1000, log=True).ticks(5) == [1, 10, 100, 1000]
    assert Scale(256, 4096, log=True).doublings() == [256, 512, 1024, 2048, 4096]


def test_a_curve_that_leaves_its_axes_is_clipped_and_its_points_carry_tips():
    drawing, axes = plot(Box(20, 10, 100, 50), Scale(0, 1), Scale(0, 1))
    axes.line([0, 1], [0, 9], "#111111")
    axes.line([1], [1], "#222222", tips=["ten"])
    root = rendered(drawing)
    assert root.find(f"{SVG}svg/{SVG}polyline") is not None, "an inner drawing, which ends at the axes"
    dot = root.find(f"{SVG}circle")
    assert (dot.get("cx"), dot.get("cy"), dot.get("data-tip")) == ("120", "10", "ten")


def test_frame_and_marks_write_their_words():
    drawing, axes = plot(Box(40, 30, 300, 200), Scale(0, 100), Scale(0, 10))
    axes.frame("time, s", "requests")
    axes.pinned([0, 100], [1, 1], 50)
    axes.mark_y(5, "half")
    texts = {text.text for text in rendered(drawing).iter(f"{SVG}text")}
    assert {"time, s", "requests", "0", "100", "10", "half"} <= texts
    assert any(line.get("x1") == line.get("x2") == "190" for line in rendered(drawing).iter(f"{SVG}line"))


@pytest.mark.parametrize("colour", SERIES)
def test_labels_on_every_colour_of_the_palette_can_be_read(colour: str):
    assert contrast(colour, ink_on(colour)) >= 4.5


def test_numbers_as_people_say_them():
    said = {0: "0", 7: "7", 950: "950", 1500: "1.5k", 32000: "32k", 2_000_000: "2M", 3e9: "3G"}
    assert {value: short(value) for value in said} == said
    said = {78: "78", 1024: "1K", 1366: "1,366", 8192: "8K", 131072: "128K", 2**20: "1M"}
    assert {value: tokens(value) for value in said} == said


def test_what_the_shell_does_is_written_beside_the_marks():
    drawing = Drawing(400, 200, "t")
    drawing.rect(ROOM, "#111111", group="r<1>", at="0 2")
    with drawing.answer():
        drawing.line((0, 0), (1, 1))
    drawing.play(["first", 'the "second"'])
    root = rendered(drawing)
    bar, hidden = root.findall(f"{SVG}rect")[1], root.find(f"{SVG}g")
    assert (bar.get("data-group"), bar.get("data-at")) == ("r<1>", "0 2")
    assert hidden.get("data-answer") == "1"
    assert json.loads(root.get("data-frames")) == ["first", 'the "second"']


def test_a_handle_says_which_values_lie_at_which_pixels():
    drawing, axes = plot(Box(50, 10, 300, 100), Scale(1, 1024, log=True), Scale(0, 1))
    axes.here(32, "block_size", "32")
    root = rendered(drawing)
    area, grip = root.find(f"{SVG}g"), root.find(f"{SVG}circle")
    assert [area.get(f"data-{name}") for name in ("drag", "low", "high", "log")] == ["block_size", "1", "1024", "1"]
    assert (area[0].get("x"), area[0].get("width")) == ("50", "300")
    assert float(grip.get("cx")) == 200


@pytest.mark.parametrize(
    ("low", "high", "left", "right"), [(4, None, 170, 350), (None, 4, 50, 170), (None, None, 50, 350)]
)
def test_a_broken_region_reaches_from_its_edge_to_the_end_of_the_axis(low, high, left, right):
    drawing, axes = plot(Box(50, 10, 300, 100), Scale(0, 10), Scale(0, 1))
    axes.broken(low, high, "the queue grows · TTFT over 1 s")
    region = rendered(drawing).find(f"{SVG}g")
    assert region.get("data-broken") == "the queue grows · TTFT over 1 s"
    assert (float(region[0].get("x")), float(region[0].get("x")) + float(region[0].get("width"))) == (left, right)


def test_words_beside_a_narrow_region_point_at_it():
    drawing, axes = plot(Box(50, 10, 300, 100), Scale(0, 10), Scale(0, 1))
    axes.broken(10, None, "never")
    assert rendered(drawing).find(f"{SVG}g") is None, "the axis ends before the region"
    axes.broken(9.5, None, "too many")
    axes.broken(None, 0.5, "too few")
    assert [text.text for text in rendered(drawing).iter(f"{SVG}text")] == ["too many →", "← too few"]


def test_words_about_two_regions_with_one_start_stand_at_their_own_edges_in_even_lines():
    drawing, axes = plot(Box(50, 10, 300, 100), Scale(0, 10), Scale(0, 1))
    axes.broken(None, 9, "too many")
    axes.broken(None, 5, "18 of 32 requests fit on 8")
    texts = [(text.text, text.get("x")) for text in rendered(drawing).iter(f"{SVG}text")]
    assert texts == [("too many", "313"), ("18 of 32", "193"), ("requests fit on 8", "193")]


def test_words_on_a_part_that_turns_dark_turn_light():
    drawing = Drawing(400, 200, "t")
    stacked_bar(drawing, Box(0, 0, 300, 20), [Segment("spare", 1, NOT_OURS), Segment("weights", 1, BLUE)], 2)
    assert [text.get("fill") for text in rendered(drawing).iter(f"{SVG}text")] == [INK, ink_on(BLUE)]


@pytest.mark.parametrize(("light", "ground"), [(True, CARD), (False, DARK[CARD])])
def test_words_can_be_read_on_both_grounds(light: bool, ground: str):
    for colour in [*WORDS.values(), QUIET, INK]:
        shown = colour if light else DARK.get(colour, colour)
        assert contrast(shown, ground) >= 4.5, shown


@pytest.mark.parametrize("ground", [DARK[CARD], DARK[BROKEN]])
@pytest.mark.parametrize("colour", [BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION])
def test_a_line_is_seen_on_a_dark_page_where_it_is_broken_too(colour: str, ground: str):
    shown = DARK_LINES.get(colour, colour)
    assert contrast(shown, ground) >= 3, shown
    assert f'[stroke="{colour}" i] {{ stroke: {shown} }}' in theme.dark_style("") or shown == colour


def test_colours_have_their_names_in_the_theme():
    """A colour written out in a widget would have no dark form. Black stays black."""
    parts = (path for path in Path(theme.__file__).parents[1].rglob("*.py") if path.stem != "theme")
    written = {(path.name, colour) for path in parts for colour in re.findall(r'"(#[0-9A-Fa-f]{6})"', path.read_text())}
    assert {(name, colour) for name, colour in written if colour != "#000000"} == set()


def test_what_lies_on_top_is_drawn_last_and_hidden_with_its_layer():
    drawing = Drawing(400, 200, "t")
    with drawing.answer(), drawing.on_top():
        drawing.text((1, 2), "the edge")
    drawing.line((0, 0), (1, 1))
    *_, line, top = rendered(drawing)
    assert line.tag == f"{SVG}line"
    assert (top.get("data-answer"), top[0].text) == ("1", "the edge")


@pytest.mark.parametrize(("taken", "height"), [((), 100), ((100,), 122), (range(10, 210, 10), 100)])
def test_a_note_on_what_is_hidden_stands_in_the_middle_or_where_there_is_room(taken, height):
    drawing = Drawing(400, 200, "t")
    hidden_note(drawing, Box(0, 0, 400, 200))
    for y in taken:
        drawing.text((200, y), "in the way", anchor="middle")
    note = next(part for part in rendered(drawing).iter(f"{SVG}g") if part.get("data-asking"))
    assert note.get("visibility") == "hidden", "a page without the shell shows what is hidden"
    assert (note[0].get("x"), note[0].text) == ("200", "hidden until you guess")
    assert float(note[0].get("y", 0)) == pytest.approx(height, abs=12)


def boxes_of(drawing: Drawing) -> list[Box]:
    """Return the rectangles of the lines that say why the system breaks."""
    texts = [text for text in rendered(drawing).iter(f"{SVG}text") if text.get("fill") == "#B34700"]
    return [
        text_box(
            (float(text.get("x", 0)), float(text.get("y", 0))), text.text or "", SMALL, text.get("text-anchor", "start")
        )
        for text in texts
    ]


@pytest.mark.parametrize("level", [10.0, 95.0, 125.0])
def test_words_about_what_breaks_keep_clear_of_curves_and_of_other_words(level: float):
    """They are placed as high as possible, even where the curve or the handle's words are drawn
    after them.
    """
    drawing, axes = plot(Box(40, 20, 300, 160), Scale(0, 10), Scale(0, 160))
    axes.broken(2, None, "steps are too slow for what is asked, and clients wait")
    axes.broken(6, None, "memory ends")
    y = axes.at(0, level)[1]
    axes.line([0, 10], [level, level], "#0072B2")
    axes.here(6, "batch", "here")
    boxes = boxes_of(drawing)
    assert len(boxes) >= 3
    assert not any(box.y < y < box.bottom for box in boxes)
    assert not any(box.overlaps(other) for box, other in combinations(boxes, 2))
    assert min(box.y for box in boxes) < (40 if level == 10 else 160)


def test_words_that_find_no_room_are_shortened_and_then_left_out():
    for width, shown in ((300, ["too many"]), (60, [])):
        drawing, axes = plot(Box(40, 20, width, 40), Scale(0, 10), Scale(0, 1))
        for y in (24, 40, 56):
            drawing.text((40 + width / 2, y), "other words", size=SMALL)
        axes.broken(1, None, "too many: of these requests, most would have to wait")
        texts = [text.text for text in rendered(drawing).iter(f"{SVG}text")]
        assert texts[3:] == shown
        assert "most would have to wait" in drawing.render(), "the region has them all"


@pytest.mark.parametrize("point", [(40, 20), (340, 20), (40, 180), (340, 180), (190, 100)])
def test_a_label_stands_beside_its_point_and_inside_the_plot(point):
    drawing, axes = plot(Box(40, 20, 300, 160), Scale(0, 10), Scale(0, 160))
    drawing.text((200, 118), "in the way", size=SMALL)
    axes.label(point, "here it is")
    rendered(drawing)
    other, label = drawing.words
    assert not label.overlaps(other)
    assert label.x >= 40
    assert label.right <= 340
    assert math.hypot(label.x + label.width / 2 - point[0], label.y + 6 - point[1]) < 70


def test_words_have_a_rim_in_the_colour_of_their_ground():
    drawing, axes = plot(Box(40, 20, 300, 120), Scale(0, 10), Scale(0, 1))
    axes.broken(6, None, "too slow")
    axes.tint(None, 2, "", ORANGE)
    axes.label((60, 70), "copies")
    axes.label((170, 60), "12")
    rims = {words.text: words.get("stroke") for words in rendered(drawing).iter(f"{SVG}text")}
    assert rims == {"too slow": BROKEN, "copies": None, "12": CARD}, "it wipes out hatching, and no box stands there"

"""Pictures in steps: one file that moves without a script, and is complete where nothing moves."""

import re
import xml.etree.ElementTree as ET

import pytest

from minivllm_lab.pictures.drawing import arrow, block, line, paragraph, rect, svg, text, text_width, wrapped
from minivllm_lab.pictures.frames import Frames
from minivllm_lab.pictures.palette import BLUE

SVG = "{http://www.w3.org/2000/svg}"
WORDS = ["A prompt <waits>.", "It is computed & sampled.", "It is done."]


def still(words="a", width=300):
    return svg(width, 80, rect(10, 10, 40, 20, BLUE), text(10, 60, words), label=words)


@pytest.fixture
def frames():
    return Frames([still(words) for words in WORDS], WORDS)


def groups(picture):
    return [element for element in ET.fromstring(picture) if element.tag == SVG + "g"]


def words_of(element):
    return "".join(element.itertext())


def test_every_still_and_caption_is_in_the_animation(frames):
    shown = groups(frames.animated())
    assert len(shown) == len(frames) == 3
    for index, (group, words) in enumerate(zip(shown, WORDS, strict=True)):
        assert words_of(group) == f"{words}{words}{index + 1} / 3", "the still's text, its caption, its number"
    assert all(words in ET.fromstring(frames.animated()).get("aria-label") for words in WORDS)


def test_what_does_not_animate_shows_the_last_still(frames):
    assert [group.get("visibility") for group in groups(frames.animated())] == ["hidden", "hidden", None]


def test_nothing_moves_for_readers_who_asked_for_that(frames):
    style = ET.fromstring(frames.animated()).find(SVG + "style").text
    outside = style.replace(re.search(r"@media \(prefers-reduced-motion: no-preference\) \{.*\}", style)[0], "")
    assert "animation" in style
    assert "animation" not in outside
    assert "visibility" not in re.sub(r"@keyframes \w+ \{(\{[^}]*\}|[^{}])*\}", "", outside)


def test_each_still_has_its_time_and_the_last_twice_as_much(frames):
    style = ET.fromstring(frames.animated(seconds=3)).find(SVG + "style").text
    assert re.findall(r"animation-delay: (\d+)s", style) == ["0", "3", "6"]
    assert " 12s step-end infinite" in style
    assert re.findall(r"\} (\d+)% \{visibility: hidden", style) == ["25", "50"]


def test_two_figures_on_a_page_do_not_share_their_styles(frames):
    other = Frames([still(), still()], ["one", "two"])
    names = [set(re.findall(r"@keyframes (\w+)", item.animated())) for item in (frames, other)]
    assert not names[0] & names[1]
    ids = [set(re.findall(r'id="([^"]+)"', frames.html())) for _ in range(2)]
    assert len(ids[0]) == 3
    assert not ids[0] & ids[1], "the same figure twice"


def test_the_buttons_lead_to_the_steps_that_they_name(frames):
    page = frames.html()
    steps = page.split('<div class="step">')[1:]
    targets = [re.findall(r'<label for="[^"]*-(\d)"', step) for step in steps]
    assert targets == [list("0012"), list("0022"), list("0122")], "first, back, forward, last"
    assert page.count(" checked>") + page.count(" checked ") == 1
    assert page.count('data-lm-suppress-shortcuts="true"') == 3, "keys belong to the figure, not to JupyterLab"
    assert "A prompt &lt;waits&gt;." in page


def test_shapes_are_where_they_are_said_to_be():
    picture = ET.fromstring(svg(200, 100, arrow((10, 50), (110, 50), head=10), line((0, 0), (1, 1)), label="a <b>"))
    shaft, head, _ = list(picture)[1:]
    assert (shaft.get("x1"), shaft.get("x2")) == ("10", "100"), "the line ends where the head begins"
    assert head.get("points").split()[0] == "110,50"
    assert picture.get("aria-label") == "a <b>"


def test_a_block_has_a_cell_for_each_slot():
    picture = ET.fromstring(
        svg(300, 60, block(10, 20, ["def", "␣add", None, None], width=40, fill=BLUE, name="block 3"))
    )
    cells = [element for element in picture.findall(SVG + "rect") if element.get("stroke") == "#FFFFFF"]
    assert [cell.get("x") for cell in cells] == ["10", "50", "90", "130"]
    assert [cell.get("fill") == BLUE for cell in cells] == [True, True, False, False]
    assert [words_of(element) for element in picture.findall(SVG + "text")] == ["def", "␣add", "block 3"]
    assert all(float(element.get("font-size")) >= 11 for element in picture.findall(SVG + "text"))


def test_a_paragraph_keeps_to_its_width():
    words = "one request goes through all lessons, and its tokens go through all layers"
    assert " ".join(wrapped(words, 150)) == words
    assert all(text_width(row) <= 150 for row in wrapped(words, 150))
    assert len(re.findall("<text", paragraph(0, 0, words, 150))) == len(wrapped(words, 150)) > 2
    assert wrapped("off by 8 %, by 18 %", 10) == ["off", "by", "8 %,", "by", "18 %"]

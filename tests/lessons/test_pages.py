"""A lesson's text and notes: what is generated goes to the page that has the mark, and the text
stays short.
"""

import json
import re
from importlib import import_module
from subprocess import CompletedProcess

import claims
import measure
import pytest
import words
from pictures import contents, contents_differ
from refusals import assert_refused
from repository import ROOT

from minivllm_lab.marks import lesson_page, notes_page, pages_of

LESSONS = ROOT / "lessons"
NOTES = sorted((LESSONS / "notes").glob("*.md"))
MARKS = "<!-- claims:01 -->\nold\n<!-- /claims -->\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "01_a.md").write_text("# A\n")
    (tmp_path / "02_b.md").write_text("# B\n")
    (tmp_path / "notes" / "01_a.md").write_text("# A: notes\n")
    return tmp_path


def test_a_lesson_has_one_page_or_two(folder):
    assert pages_of(folder, "01") == pages_of(folder, "1") == [folder / "01_a.md", folder / "notes" / "01_a.md"]
    assert pages_of(folder, "02") == [folder / "02_b.md"]
    assert notes_page(folder, "02") is None
    assert_refused("there are: 01, 02", lesson_page, folder, "7")


@pytest.mark.parametrize("where", ["01_a.md", "notes/01_a.md"])
def test_claims_go_to_the_page_that_has_the_mark(folder, where):
    (folder / where).write_text(f"# Page\n{MARKS}")
    assert claims.page_with_claims("01", folder) == folder / where


@pytest.mark.parametrize("pages", [[], ["01_a.md", "notes/01_a.md"]])
def test_claims_have_one_place(folder, pages):
    for page in pages:
        (folder / page).write_text(MARKS)
    assert_refused("must stand once in 01_a", claims.page_with_claims, "01", folder)


def test_output_is_filled_on_both_pages_from_one_run(folder, monkeypatch):
    """The text and the notes of a lesson quote the same run: a command is never run once for
    each.
    """
    ran = []
    monkeypatch.setattr(measure, "output_of", lambda command, more: ran.append((command, more)) or "1. One\nnew")
    monkeypatch.setattr(measure, "stem_of", lambda _number: "01_a")
    monkeypatch.setattr(measure, "ROOT", folder.parent)
    monkeypatch.setattr(measure, "pages_of", lambda _lessons, number: pages_of(folder, number))
    monkeypatch.setattr(measure.subprocess, "run", lambda command, **_more: CompletedProcess(command, 0))
    monkeypatch.setattr("sys.argv", ["measure", "01"])
    for page in pages_of(folder, "01"):
        page.write_text(
            "<!-- output: vllm/01_a.py | 1. One -->\n\n```text\nold\n```\n\n"
            "<!-- output: vllm/01_a.py --break | 1. One -->\n\n```text\nold\n```\n\n"
            "<!-- output: vllm/01_a.py | 1. One -->\n\n```text\n```\n\nText.\n\n```text\nno output\n```\n"
        )
    assert measure.main() == 0
    assert [command for command, _ in ran] == ["vllm/01_a.py", "vllm/01_a.py --break"]
    assert all(
        page.read_text().count("1. One\nnew\n```") == 3 and "old" not in page.read_text()
        for page in pages_of(folder, "01")
    )
    assert all("Text.\n\n```text\nno output" in page.read_text() for page in pages_of(folder, "01"))


STEMS = [path.stem for path in sorted(LESSONS.glob("[0-9][0-9]_*.md"))]


@pytest.mark.parametrize("stem", STEMS)
def test_a_lessons_figure_shows_its_recorded_results(stem, tmp_path):
    """The script draws it when it measures; `tools/measure.py NN --redraw` draws it again."""
    measure.redraw(stem, str(tmp_path / "figure.svg"))
    drawn, shown = contents(tmp_path / "figure.svg"), contents(LESSONS / "figures" / f"{stem}.svg")
    assert contents_differ(drawn, shown) == []


def test_every_figure_is_shown_on_a_page():
    pages = [ROOT / "README.md", *LESSONS.glob("*.md"), *NOTES]
    pages += [ROOT / "tools" / "notebooks.py"]  # whose button for Colab waits for a public address
    shown = {name for page in pages for name in re.findall(r"figures/(\w+\.svg)", page.read_text())}
    assert {path.name for path in LESSONS.glob("figures/*.svg")} == shown


def test_no_quoted_output_is_empty():
    for page in (*LESSONS.glob("*.md"), *NOTES):
        for quote in measure.QUOTE.finditer(page.read_text()):
            assert quote[0].strip().count("\n") > 3, (
                f"{page.name}: nothing is quoted of {quote['command']}{quote['parts']}"
            )


TEXT = """# Title of four words

Before it, <b>five</b> words stand.

## First part

One [link with text](https://example.com/many-words/in-a-path) and `code`.

```python exec script=vllm/x.py region=y
not_counted = "at all"
```

## Second

<!-- output: vllm/x.py | 1. -->

~~~text
nor this
~~~

- a list — with `inline` code
$$\\text{no} = words$$

![nor this](figure.svg)
"""


def test_words_are_what_a_reader_reads():
    assert words.by_section(TEXT) == {"(before)": 4 + 5, "First part": 2 + 6, "Second": 1 + 5}
    assert words.count(TEXT) == sum(words.by_section(TEXT).values())


def test_a_fence_inside_a_list_is_no_text():
    assert words.count("1. one\n\n   ```bash\n   make run\n   ```\n\n   two\n") == 3


@pytest.mark.parametrize("notes", NOTES, ids=lambda path: path.stem)
def test_a_lesson_with_notes_is_short_and_linked_with_them(notes):
    text = (LESSONS / notes.name).read_text()
    assert words.count(text) <= words.limits(text).words, words.by_section(text)
    assert f"](notes/{notes.name}" in text
    assert f"](../{notes.name}" in notes.read_text()


THIRD = [path for path in sorted(LESSONS.glob("[0-9][0-9]_*.md")) if words.THIRD_EDITION in path.read_text()]
IN_ORDER = (
    "<summary>The reveal</summary>",
    "> **Ten minutes:**",
    "## The bottleneck",
    "## The mechanism",
    "## Run it",
    "## Turn the knobs",
    "## Break it",
    "## On call",
    "## Build it",
    "## Cheat sheet",
    "## Where next",
    "## Further reading",
)


@pytest.mark.parametrize("lesson", THIRD, ids=lambda path: path.stem)
def test_a_lesson_of_the_third_edition_keeps_to_the_pattern(lesson):
    text = lesson.read_text()
    places = [text.find(part) for part in IN_ORDER]
    assert -1 not in places, f"it lacks {IN_ORDER[places.index(-1)]!r}"
    assert places == sorted(places), "its parts are not in the order that CONTRIBUTING.md gives"
    first_screen = text[: text.index("> **Ten minutes:**")]
    assert first_screen.count("](figures/") == 2, "a picture for the bet, and one for its reveal"
    assert "```" not in first_screen, "no code before the surprise"
    assert words.count_numbers(text) <= words.limits(text).numbers
    assert words.count_tables(text) <= words.limits(text).tables


@pytest.mark.parametrize("lesson", THIRD, ids=lambda path: path.stem)
def test_captions_of_the_third_edition_are_short(lesson):
    opening = import_module(f"minivllm_lab.{lesson.stem[3:]}.opening")
    captions = opening.frames().captions
    assert [caption for caption in captions if len(caption.split()) > 18] == []


def test_numbers_are_counted_in_sentences_only():
    text = "Of 8 seats, 3.5 % work at 4,096 tokens, in `step 7`.\n\n| 1 | 2 |\n\n$x = 9$\n\n```text\n5\n```\n"
    assert words.count_numbers(text) == 3
    assert words.count_tables("┏━┓\n┃a┃\n┗━┛\n") == 1


FIGURES = {"rows": [{"case": "long", "kv": "bf16", "share": 0.731}, {"case": "long", "kv": "int8", "share": 0.643}]}
SENTENCE = """[[sentence]]
lesson = "01"
results = "kernels.gpu"
words = "reads at {rows.long + bf16.share:.0%} of a copy's rate"
"""


@pytest.fixture
def quoted(folder, monkeypatch):
    """Return a function that tells what a lesson's text lacks of the one sentence that quotes the
    one results file.
    """
    monkeypatch.setattr(claims, "RESULTS", folder)
    (folder / "kernels.gpu.json").write_text(json.dumps({"figures": FIGURES}))
    (folder / "claims.toml").write_text(SENTENCE)

    def missing(text):
        (folder / "01_a.md").write_text(text)
        return claims.missing_sentences(folder / "claims.toml", folder)

    return missing


def test_prose_that_quotes_results_is_held_to_them(quoted):
    assert quoted("It reads at 73 % of\na copy's rate.") == []
    for text in ("It reads at 74 % of a copy's rate.", "It reads."):
        assert quoted(text) == ["01: reads at 73 % of a copy's rate"]


@pytest.mark.parametrize("field", ["rows.long + fp8.share", "rows.long.share", "rows.share", "row.long + bf16.share"])
def test_a_quotation_names_one_figure_that_is_there(quoted, field):
    """The fields name a missing row, two rows, no row, and a list that does not exist."""
    assert_refused("has no figure", claims.quoted, "kernels.gpu", f"{{{field}}}")


def test_every_lesson_says_what_was_measured():
    assert claims.missing_sentences() == []

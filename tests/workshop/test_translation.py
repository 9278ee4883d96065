"""Test the keys of a translation on a made-up one, in a folder of its own."""

from pathlib import Path

import pytest
import translation
from refusals import assert_refused
from repository import ROOT

ORIGINAL = """# 04 · A lesson

A first paragraph,
in two lines.

```python
a = 1

b = 2
```

A second paragraph.
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder for a translation of the one lesson that there is."""
    lessons = tmp_path / "lessons"
    lessons.mkdir()
    (lessons / "04_a.md").write_text(ORIGINAL)
    monkeypatch.setattr(translation, "LESSONS", lessons)
    return tmp_path / "de"


def translate(folder: Path) -> Path:
    """Start a translation and put German words in place of the paragraphs."""
    page = translation.start("04", folder)
    text = page.read_text().replace("A first paragraph,\nin two lines.", "Ein erster Absatz.")
    page.write_text(text.replace("A second paragraph.", "Ein zweiter Absatz."))
    return page


def test_a_finished_translation_is_up_to_date_whatever_its_words_and_its_order(folder):
    page = translate(folder)
    assert "Ein erster Absatz." in page.read_text()
    assert translation.check(folder) == []
    parts = page.read_text().split("\n\n<!-- of ")
    page.write_text("\n\n<!-- of ".join([parts[0], parts[-1].rstrip(), *parts[1:-1]]) + "\n")
    assert translation.check(folder) == []


def test_a_changed_paragraph_is_named_on_both_sides_and_no_other(folder):
    page = translate(folder)
    original = translation.LESSONS / "04_a.md"
    original.write_text(ORIGINAL.replace("A second paragraph.", "A second paragraph, with a new number."))
    missing, gone = translation.check(folder)
    assert missing.startswith("04_a.md:12: ")
    assert missing.endswith("is not translated: A second paragraph, with a new number.")
    assert gone.startswith("04_a.md:")
    assert gone.endswith("has changed or is gone")
    assert page.read_text().splitlines()[int(gone.split(":")[1])] == "Ein zweiter Absatz."


def test_other_line_breaks_are_no_change_and_new_code_is_one(folder):
    translate(folder)
    original = translation.LESSONS / "04_a.md"
    original.write_text(ORIGINAL.replace("paragraph,\nin", "paragraph, in"))
    assert translation.check(folder) == []
    original.write_text(ORIGINAL.replace("b = 2", "b = 3"))
    assert len(translation.check(folder)) == 2


def test_nothing_is_overwritten_and_an_empty_folder_is_refused(folder):
    translate(folder)
    assert_refused("is there already", translation.start, "04", folder)
    assert_refused("has no translated lesson", translation.check, folder / "none")
    (folder / "04_a.md").write_text("Ein Text ohne Schlüssel.\n")
    assert translation.check(folder) == ["04_a.md: no paragraph has a key: begin with --start"]


def test_every_lesson_can_be_started_and_is_then_up_to_date(tmp_path):
    for page in sorted((ROOT / "lessons").glob("[0-9][0-9]_*.md")):
        copy = tmp_path / page.name
        copy.write_text(translation.skeleton(page.read_text()))
        assert [*translation.problems(page, copy)] == []
        keys = [part.key for part in translation.paragraphs(page.read_text())]
        assert len(keys) > 100

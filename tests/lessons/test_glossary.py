"""The glossary check: a term that is used before it is explained is found, and one that is
explained is not.
"""

import glossary
import pytest
from refusals import assert_refused
from repository import ROOT

TERMS = glossary.read_glossary(
    "### block\n\nSlots. ([lesson 01](01_a.md))\n\n### block table\n\nA list. ([lesson 01](01_a.md))\n\n"
    "### decode\n\n<!-- forms: decode, decoding -->\nA step. ([lesson 01](01_a.md))\n"
)
HEADER = "# Title of a decode\n\n**What you get:** a block.\n"


def unexplained(body):
    return [words.split("'")[1] for words in glossary.unexplained(f"{HEADER}\n## First\n\n{body}\n", TERMS)]


def test_a_term_of_an_earlier_lesson_needs_no_link():
    page = f"{HEADER}\n## First\n\nA block is one.\n"
    assert list(glossary.unexplained(page, TERMS, "01"))
    assert list(glossary.unexplained(page, TERMS, "02")) == []


@pytest.mark.parametrize(
    "body",
    [
        "A [block](GLOSSARY.md#block) is one.", "A **block** is one.", "Its **block**\nis one.",
        "Memory is cut ([blocks](GLOSSARY.md#block)), and a block is one.",
        "[Pieces](GLOSSARY.md#block) of memory.\n\nA block is one.", "`block`", "```python\nblock = 1\n```",
        "~~~text\na block\n~~~", "![a block](block.svg)", "<!-- a block -->", "### The block",
        "<details><summary>1. How many blocks?</summary>\n\nSeven.\n\n</details>", "See [there](blocks.md#block).",
        "Blocking the blocked blockade, a non-block.", "$block$", "Before the sections it may stand.",
    ],
)  # fmt: skip
def test_a_term_that_is_linked_or_explained_is_no_problem(body):
    assert unexplained(body) == []


@pytest.mark.parametrize(
    ("body", "missing"),
    [
        ("A block is one.", ["block"]),
        ("BLOCKS are many.", ["block"]),
        ("A block is one.\n\nA [block](GLOSSARY.md#block) is one.", ["block"]),
        ("- A block.\n- A [block](GLOSSARY.md#block).", ["block"]),
        ("| a block |\n| [block](GLOSSARY.md#block) |", ["block"]),
        ("A [block](GLOSSARY.md#decode) is one.", ["block"]),
        ("**This is a whole sentence about a block.**", ["block"]),
        ("A block\ntable is one.", ["block table"]),
        ("A [block table](GLOSSARY.md#block-table), and a block.", ["block"]),
        ("While decoding a block.", ["block", "decode"]),
    ],
)
def test_a_term_that_is_used_before_it_is_explained_is_found(body, missing):
    assert unexplained(body) == missing


def test_the_sentence_shows_the_place():
    (words,) = glossary.unexplained("## A\n\nLook, a block.\n", TERMS)
    assert words == "'block' is first used in “…Look, a block.…”: explain it there, or link GLOSSARY.md#block"


@pytest.fixture
def lessons(tmp_path):
    (tmp_path / "notes").mkdir()
    entries = "### block\n\nSlots. ([lesson 01](01_a.md))\n\n### tile\n\nA piece. ([lesson 02](02_b.md))\n"
    (tmp_path / "GLOSSARY.md").write_text(entries)
    (tmp_path / "01_a.md").write_text("# A\n\n## Mechanism\n\nA **block**.\n")
    (tmp_path / "02_b.md").write_text("# B\n\n## Mechanism\n\nA block, a tile.\n")
    (tmp_path / "notes" / "01_a.md").write_text("# A: notes\n\nSee [block](../GLOSSARY.md#block).\n")
    return tmp_path


def test_only_lessons_with_notes_are_held_to_it(lessons):
    assert glossary.all_problems(lessons) == []
    (lessons / "notes" / "02_b.md").write_text("# B: notes\n")
    (problem,) = glossary.all_problems(lessons)
    assert problem.startswith("02_b.md: 'tile' is first used in"), "lesson 01 explains the block"


@pytest.mark.parametrize("page", ["02_b.md", "notes/01_a.md"])
def test_a_term_that_no_lesson_uses_is_found(lessons, page):
    entry = "### warp\n\nThreads. ([lesson 02](02_b.md))\n"
    (lessons / "GLOSSARY.md").write_text(f"{(lessons / 'GLOSSARY.md').read_text()}\n{entry}")
    assert glossary.all_problems(lessons) == ["GLOSSARY.md: no lesson uses 'warp'"]
    (lessons / page).write_text(f"{(lessons / page).read_text()}\n**Warps** are many.\n")
    assert glossary.all_problems(lessons) == []


@pytest.mark.parametrize("page", ["01_a.md", "notes/01_a.md"])
def test_a_dead_anchor_is_found_on_both_pages(lessons, page):
    up = "../" if "/" in page else ""
    (lessons / page).write_text(f"## A\n\nA **block**, a [slab]({up}GLOSSARY.md#slab).\n")
    assert glossary.all_problems(lessons) == ["01_a.md: GLOSSARY.md#slab: no such term"]


@pytest.mark.parametrize(
    ("text", "about"),
    [
        ("### b\n\n[lesson 01](x)\n\n### a\n\n[lesson 01](x)\n", "'a' must come before 'b'"),
        ("### a\n\n[lesson 01](x)\n\n### A\n\n[lesson 01](x)\n", "twice"),
        ("### a\n\nA letter.\n", "names no lesson"),
    ],
)
def test_a_glossary_out_of_order_is_refused(text, about):
    assert_refused(about, glossary.read_glossary, text)


def test_the_glossary_is_read_whole():
    text = (ROOT / "lessons" / "GLOSSARY.md").read_text()
    terms = glossary.read_glossary(text)
    assert len(terms) == text.count("\n### ")
    assert len({term.anchor for term in terms}) == len(terms)
    forms = [form.lower() for term in terms for form in term.forms]
    assert len(set(forms)) == len(forms), "a form belongs to one term"


def test_the_lessons_explain_their_terms():
    assert glossary.all_problems(ROOT / "lessons") == []

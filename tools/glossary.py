"""Check that each lesson explains a term at its first use, or links it to `lessons/GLOSSARY.md`.
A term that an earlier lesson explains needs neither.

    uv run python tools/glossary.py --check     # lessons that have a notes page, and the glossary itself
    uv run python tools/glossary.py 02          # one lesson, whether it has a notes page or not

An entry is a third-level heading. A term is matched in the forms that a comment below it lists,
otherwise as it is and with an s: `<!-- forms: decode, decodes, decoding -->`. Its first use is in
the first paragraph below the first section heading that contains a form; code, headings, pictures
and summaries, where Markdown has no links, do not count. There, or above, it must be linked
(`GLOSSARY.md#block-table`) or bold: that is how a lesson marks a word that it explains.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from minivllm.errors import MinivllmError
from minivllm_lab.cli import Parser, run
from minivllm_lab.marks import lesson_page, notes_page, pages_of

ROOT = Path(__file__).resolve().parents[1]
LESSONS = ROOT / "lessons"
GLOSSARY = "GLOSSARY.md"
LONGEST_BOLD_TERM = 4  # words; longer bold text is a sentence that matters, not a word that is explained
ENTRY = re.compile(r"^### +(?P<term>.*?) *$\n(?P<text>.*?)(?=^### |\Z)", re.DOTALL | re.MULTILINE)
FORMS = re.compile(r"<!-- forms: (.*?) -->")
LESSON = re.compile(r"\[lesson (\d\d)\]")
BOLD = re.compile(r"\*\*(.+?)\*\*", re.DOTALL)
GLOSSARY_LINK = re.compile(rf"\[[^\]]*\]\((?:\.\./)?{GLOSSARY}#([^)\s]*)\)")
UNREAD = (
    re.compile(r"^ *(`{3,}|~{3,})[^\n]*\n.*?^ *\1[`~]* *$", re.DOTALL | re.MULTILINE),  # fences
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"<summary>.*?</summary>", re.DOTALL),
    re.compile(r"!\[[^\]]*\]\([^)]*\)"),  # pictures
    re.compile(r"\$\$.*?\$\$|\$[^$\n]+\$", re.DOTALL),
    re.compile(r"`[^`\n]*`"),
    re.compile(r"^#+ .*$", re.MULTILINE),
    re.compile(r"(?<=\])\([^)]*\)"),  # targets of links
)
PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*[-*] |\s*\d+\. |\|)")


@dataclass(frozen=True)
class Term:
    """A glossary entry: the word, its anchor, the forms that are matched, and the lesson that
    explains it.
    """

    name: str
    forms: tuple[str, ...]
    lesson: str

    @property
    def anchor(self) -> str:
        """The anchor that GitHub makes from the heading."""
        return re.sub(r"[^\w\- ]", "", self.name.lower()).replace(" ", "-")


def read_glossary(text: str) -> list[Term]:
    """Return the entries of the glossary.

    Raises:
        MinivllmError: an entry is out of order, appears twice, or names no lesson.
    """
    terms = [_term(match["term"], match["text"]) for match in ENTRY.finditer(text)]
    names = [term.name.lower() for term in terms]
    for before, after in pairwise(names):
        if before == after:
            raise MinivllmError(f"{GLOSSARY}: {after!r} appears twice")
        if before > after:
            raise MinivllmError(f"{GLOSSARY}: {after!r} must come before {before!r}")
    return terms


def _term(name: str, text: str) -> Term:
    lesson, forms = LESSON.search(text), FORMS.search(text)
    if lesson is None:
        raise MinivllmError(f"{GLOSSARY}: {name!r} names no lesson, as in ([lesson 01](01_kv_cache.md))")
    listed = forms[1].split(", ") if forms else (name, f"{name}s")
    return Term(name, tuple(listed), lesson[1])


def readable(text: str) -> str:
    """Return a page's prose, with bold marks and the text of links kept."""
    for pattern in UNREAD:
        text = pattern.sub(lambda match: "\n" if match[0].startswith("\n") else " ", text)
    return text


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs, list items and table rows below the first section heading, without
    fences, comments and summaries.
    """
    body = text[text.find("\n## ") :] if "\n## " in text else text
    for pattern in UNREAD[:3]:
        body = pattern.sub("\n\n", body)
    return PARAGRAPH.split(body)


def unexplained(text: str, terms: list[Term], number: str = "01") -> Iterator[str]:
    """Yield a sentence for each term that lesson `number` uses before it is linked or explained,
    and that no earlier lesson explains.
    """
    parts = paragraphs(text)
    found = [_used(readable(part), terms) for part in parts]
    for term in terms:
        if term.lesson < number:
            continue
        first = next((index for index, used in enumerate(found) if term.name in used), None)
        if first is None or any(_explains(part, term) for part in parts[: first + 1]):
            continue
        words = _around(readable(parts[first]), term)
        yield f"{term.name!r} is first used in {words}: explain it there, or link {GLOSSARY}#{term.anchor}"


def _used(text: str, terms: list[Term]) -> set[str]:
    """Return the names of the terms in a text; where one term's form contains another's, the longer
    one counts.
    """
    names = {form.lower(): term.name for term in terms for form in term.forms}
    longest_first = "|".join(re.escape(form) for form in sorted(names, key=len, reverse=True))
    one_line = " ".join(text.split())
    return {
        names[match[0].lower()]
        for match in re.finditer(rf"(?<![\w-])(?:{longest_first})(?![\w-])", one_line, re.IGNORECASE)
    }


def _explains(part: str, term: Term) -> bool:
    if term.anchor in GLOSSARY_LINK.findall(part):
        return True
    bold = (span for span in BOLD.findall(part) if len(span.split()) <= LONGEST_BOLD_TERM)
    return any(_used(span, [term]) for span in bold)


def _around(text: str, term: Term) -> str:
    words = " ".join(text.split())
    match = re.search("|".join(map(re.escape, term.forms)), words, re.IGNORECASE)
    start = max((match.start() if match else 0) - 40, 0)
    return f"“…{words[start : start + 90]}…”"


def dead_anchors(text: str, terms: list[Term]) -> list[str]:
    """Return the anchors of glossary links that match no entry."""
    return sorted(set(GLOSSARY_LINK.findall(text)) - {term.anchor for term in terms})


def without_use(terms: list[Term], lessons: Path) -> Iterator[str]:
    """Yield a sentence for each term that no lesson uses."""
    pages = [*lessons.glob("[0-9][0-9]_*.md"), *lessons.glob("notes/*.md")]
    used = {name for page in pages for name in _used(readable(page.read_text()), terms)}
    yield from (f"{GLOSSARY}: no lesson uses {term.name!r}" for term in terms if term.name not in used)


def problems_of(number: str, terms: list[Term], lessons: Path) -> Iterator[str]:
    """Yield what is wrong with the terms of one lesson and its notes."""
    lesson = lesson_page(lessons, number)
    for page in pages_of(lessons, number):
        yield from (
            f"{page.name}: {GLOSSARY}#{anchor}: no such term" for anchor in dead_anchors(page.read_text(), terms)
        )
    yield from (f"{lesson.name}: {words}" for words in unexplained(lesson.read_text(), terms, number.zfill(2)))


def all_problems(lessons: Path) -> list[str]:
    """Return the lines that `--check` prints."""
    terms = read_glossary((lessons / GLOSSARY).read_text())
    numbers = [path.name[:2] for path in sorted(lessons.glob("[0-9][0-9]_*.md"))]
    found = [line for number in numbers if notes_page(lessons, number) for line in problems_of(number, terms, lessons)]
    return found + list(without_use(terms, lessons))


def main(arguments: argparse.Namespace) -> None:
    """Check all lessons that have a notes page, or one lesson."""
    if arguments.check == (arguments.number is not None):
        raise MinivllmError("give either --check or the number of one lesson")
    if arguments.check:
        found = all_problems(LESSONS)
    else:
        found = list(problems_of(arguments.number, read_glossary((LESSONS / GLOSSARY).read_text()), LESSONS))
    print("\n".join(found) or "every term is explained at its first use")
    if found:
        raise SystemExit(1)


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    flags = Parser(description=__doc__)
    flags.add_argument("--check", action="store_true", help="fail if a term is not explained")
    flags.add_argument("number", nargs="?", metavar="NN", help="the number of one lesson")
    return flags


if __name__ == "__main__":
    run(main, parser())

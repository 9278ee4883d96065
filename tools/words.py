"""Count what a reader of a lesson reads: words by section, numbers, and boxed tables of output.

uv run python tools/words.py 02

Code, output and pictures are not words. Numbers are counted in sentences only, not in tables,
formulas and code spans. A lesson of the third edition, which is one with a cheat sheet, has tighter
limits than the others.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from minivllm_lab.cli import Parser, run
from minivllm_lab.marks import lesson_page, notes_page
from minivllm_lab.tables import table

ROOT = Path(__file__).resolve().parents[1]
LESSONS = ROOT / "lessons"
MOST_WORDS = 3000
THIRD_EDITION = "\n## Cheat sheet\n"
BOXED_TABLE = "┏"
TABLE_ROW, CODE_SPAN = re.compile(r"^\|.*$", re.MULTILINE), re.compile(r"`[^`\n]*`")
INLINE_FORMULA = re.compile(r"\$[^$\n]+\$")
NUMBER = re.compile(r"(?<![\w.])\d(?:[\d,.]*\d)?")
FENCE = re.compile(r"^ *(`{3,}|~{3,})[^\n]*\n.*?^ *\1[`~]* *$", re.DOTALL | re.MULTILINE)
COMMENT, TAG, FORMULA = (
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"</?[a-zA-Z][^>]*>"),
    re.compile(r"\$\$.*?\$\$", re.DOTALL),
)
PICTURE, LINK = re.compile(r"!\[[^\]]*\]\([^)]*\)"), re.compile(r"\[([^\]]*)\]\([^)]*\)")
HEADING = re.compile(r"^## +(.*?) *$", re.MULTILINE)
WORD = re.compile(r"\S*[^\W_]\S*")


@dataclass(frozen=True)
class Limits:
    """The most words, numbers and boxed tables that a lesson may have."""

    words: int
    numbers: int | None = None
    tables: int | None = None


def limits(text: str) -> Limits:
    """Return the limits of a lesson's edition."""
    if THIRD_EDITION in text:
        return Limits(words=2600, numbers=80, tables=5)
    return Limits(words=MOST_WORDS)


def prose(text: str) -> str:
    """Return a page's text without fences, comments, tags, pictures, displayed formulas and the
    targets of links.
    """
    for what, left in ((FENCE, ""), (COMMENT, ""), (PICTURE, ""), (LINK, r"\1"), (FORMULA, ""), (TAG, "")):
        text = what.sub(left, text)
    return text


def count(text: str) -> int:
    """Count a page's words: whatever stands between blanks and has a letter or a digit."""
    return len(WORD.findall(prose(text)))


def count_numbers(text: str) -> int:
    """Count the numbers in a page's sentences."""
    text = prose(text)
    for pattern in (TABLE_ROW, CODE_SPAN, INLINE_FORMULA):
        text = pattern.sub("", text)
    return len(NUMBER.findall(text))


def count_tables(text: str) -> int:
    """Count a page's boxed tables of output."""
    return text.count(BOXED_TABLE)


def by_section(text: str) -> dict[str, int]:
    """Count the words under each second-level heading, the heading included; those before the first
    are under "(before)".
    """
    parts = HEADING.split(prose(text))
    sections = {
        "(before)": parts[0],
        **{name: f"{name} {body}" for name, body in zip(parts[1::2], parts[2::2], strict=True)},
    }
    return {name: len(WORD.findall(body)) for name, body in sections.items()}


def main(arguments: argparse.Namespace) -> None:
    """Print the counts of one lesson."""
    path = lesson_page(LESSONS, arguments.number)
    text = path.read_text()
    most = limits(text)
    sections = by_section(text)
    whole = sum(sections.values())
    rows = [(name, f"{words:,}", f"{words / whole:.0%}") for name, words in sections.items()]
    table(path.name, ["section", "words", "share"], [*rows, ("in all", f"{whole:,}", "")])
    notes = notes_page(LESSONS, arguments.number)
    if notes:
        print(f"notes: {count(notes.read_text()):,} words")
    print(f"words: {whole:,} of at most {most.words:,}")
    print(f"numbers: {count_numbers(text)} of at most {most.numbers or 'any number'}")
    print(f"boxed tables: {count_tables(text)} of at most {most.tables or 'any number'}")


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    flags = Parser(description=__doc__)
    flags.add_argument("number", help="the lesson's number, as in 01")
    return flags


if __name__ == "__main__":
    run(main, parser())

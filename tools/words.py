"""Count the words that a reader of a lesson reads, in total and by section: no code, output or
pictures.

uv run python tools/words.py 02            # a lesson with a notes page has at most 3,000
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from minivllm_lab.cli import Parser, run
from minivllm_lab.marks import lesson_page, notes_page
from minivllm_lab.tables import table

ROOT = Path(__file__).resolve().parents[1]
LESSONS = ROOT / "lessons"
MOST_WORDS = 3000
FENCE = re.compile(r"^ *(`{3,}|~{3,})[^\n]*\n.*?^ *\1[`~]* *$", re.DOTALL | re.MULTILINE)
COMMENT, TAG, FORMULA = (
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"</?[a-zA-Z][^>]*>"),
    re.compile(r"\$\$.*?\$\$", re.DOTALL),
)
PICTURE, LINK = re.compile(r"!\[[^\]]*\]\([^)]*\)"), re.compile(r"\[([^\]]*)\]\([^)]*\)")
HEADING = re.compile(r"^## +(.*?) *$", re.MULTILINE)
WORD = re.compile(r"\S*[^\W_]\S*")


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
    sections = by_section(path.read_text())
    whole = sum(sections.values())
    rows = [(name, f"{words:,}", f"{words / whole:.0%}") for name, words in sections.items()]
    table(path.name, ["section", "words", "share"], [*rows, ("in all", f"{whole:,}", "")])
    notes = notes_page(LESSONS, arguments.number)
    if notes:
        print(f"notes: {count(notes.read_text()):,} words; a lesson may have up to {MOST_WORDS:,}")


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    flags = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("number", help="the lesson's number, as in 01")
    return flags


if __name__ == "__main__":
    run(main, parser())

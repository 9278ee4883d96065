"""Start a translation of a lesson, and list what has become stale in it.

    uv run python tools/translation.py --start 04 --folder de   # de/04_continuous_batching.md, to be translated
    uv run python tools/translation.py --check --folder de      # what has changed in the originals since

A paragraph's key is made from its words, so a changed paragraph has another key, and a moved one keeps
its own. A translation holds `<!-- of 1a2b3c4d -->` before each translated paragraph. Code, figures,
formulas that stand alone and generated tables are paragraphs as well: copy them as they are.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minivllm.errors import MinivllmError
from minivllm_lab.cli import Parser, run
from minivllm_lab.marks import lesson_page

ROOT = Path(__file__).resolve().parents[1]
LESSONS = ROOT / "lessons"
MARK = re.compile(r"^<!-- of ([0-9a-f]{8}) -->$")
FENCE = re.compile(r"^ *(`{3,}|~{3,})")


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of a page: lines without an empty one between them, or a fence with all its lines."""

    line: int
    text: str

    @property
    def key(self) -> str:
        """Eight digits that change with the paragraph's words, but not with its line breaks."""
        return hashlib.sha256(" ".join(self.text.split()).encode()).hexdigest()[:8]


def paragraphs(text: str) -> Iterator[Paragraph]:
    """Yield a page's paragraphs in order."""
    taken: list[str] = []
    fence = ""
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if opening := FENCE.match(line):
            fence = "" if fence and line.strip() == fence else fence or opening[1]
        if line.strip() or fence:
            taken.append(line)
        elif taken:
            yield Paragraph(number - len(taken), "\n".join(taken))
            taken = []


def skeleton(text: str) -> str:
    """Return a page in which each paragraph stands behind its key, to be translated in place."""
    return "\n\n".join(f"<!-- of {part.key} -->\n{part.text}" for part in paragraphs(text)) + "\n"


def translated(text: str) -> dict[str, int]:
    """Map the keys that a translation names to their lines."""
    lines = enumerate(text.splitlines(), start=1)
    return {match[1]: number for number, line in lines if (match := MARK.match(line.strip()))}


def problems(original: Path, translation: Path) -> Iterator[str]:
    """Yield one line for each paragraph of the original that is missing in the translation, and each one of
    the translation whose original is gone.
    """
    parts, known = [*paragraphs(original.read_text())], translated(translation.read_text())
    if not known:
        yield f"{translation.name}: no paragraph has a key: begin with --start"
        return
    keys = {part.key for part in parts}
    gone = {key: line for key, line in known.items() if key not in keys}
    for part in parts:
        if part.key not in known:
            yield f"{original.name}:{part.line}: {part.key} is not translated: {opening_of(part.text)}"
    for key, line in gone.items():
        yield f"{translation.name}:{line}: the original of {key} has changed or is gone"


def opening_of(text: str) -> str:
    """Return a paragraph's first words."""
    words = " ".join(text.split())
    return words if len(words) <= 60 else f"{words[:59]}…"


def start(number: str, folder: Path) -> Path:
    """Write a lesson's page to be translated.

    Raises:
        MinivllmError: it is there already.
    """
    original = lesson_page(LESSONS, number)
    path = folder / original.name
    if path.exists():
        raise MinivllmError(f"{path} is there already: --check says what has changed since")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(skeleton(original.read_text()))
    return path


def check(folder: Path) -> list[str]:
    """Return the problems of all translated lessons in a folder.

    Raises:
        MinivllmError: there is none.
    """
    pages = sorted(folder.glob("[0-9][0-9]_*.md"))
    if not pages:
        raise MinivllmError(f"{folder} has no translated lesson: begin with --start 04 --folder {folder}")
    return [problem for page in pages for problem in problems(LESSONS / page.name, page)]


def main(arguments: argparse.Namespace) -> None:
    if arguments.start:
        print(f"translate {start(arguments.start, arguments.folder)}; keep the lines that begin with <!-- of")
        return
    found = check(arguments.folder)
    print("\n".join(found) or f"{arguments.folder} is up to date")
    if found:
        raise SystemExit(1)


def parser() -> argparse.ArgumentParser:
    flags = Parser(prog="translation", description=__doc__)
    flags.add_argument("--folder", type=Path, required=True, help="the folder of the translation")
    flags.add_argument("--start", metavar="NN", help="write this lesson's page to be translated")
    flags.add_argument("--check", action="store_true", help="list what is stale (the default)")
    return flags


if __name__ == "__main__":
    run(main, parser())

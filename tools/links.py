"""Check that every relative link and picture in the repository's Markdown leads somewhere. No
network is used.

uv run python tools/links.py
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
INLINE_CODE = re.compile(r"`[^`\n]*`")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*$", re.MULTILINE)
ELSEWHERE = ("http://", "https://", "mailto:")


def tracked_markdown() -> list[Path]:
    """Return every Markdown file that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).exists()]


def prose(path: Path) -> str:
    """Return a file's text without fenced and inline code, where brackets are not links."""
    return INLINE_CODE.sub("", FENCE.sub("", path.read_text()))


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub gives a file's headings: `words`, then `words-1` for the next
    heading with the same words.
    """
    text, seen = FENCE.sub("", path.read_text()), Counter[str]()
    found = set()
    for heading in HEADING.findall(text):
        words = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(f"{words}-{seen[words]}" if seen[words] else words)
        seen[words] += 1
    return found


def broken_links(path: Path) -> list[str]:
    """Return one line for each broken link in a file."""
    problems = []
    for target in LINK.findall(prose(path)):
        if target.startswith(ELSEWHERE):
            continue
        name, _, anchor = unquote(target).partition("#")
        widget, mark, _ = anchor.partition("?")
        where = (path.parent / name).resolve() if name else path
        if mark and where.suffix == ".md" and where.exists():  # it sets knobs of a widget on its page
            if f"{widget}.show(" not in where.read_text():
                page = where.relative_to(ROOT) if name else "this page"
                problems.append(f"{path.relative_to(ROOT)}: {target}: {page} does not show the widget {widget}")
            continue
        if not where.exists():
            problems.append(f"{path.relative_to(ROOT)}: {target} has no target")
        elif anchor and where.suffix == ".md" and anchor not in anchors(where):
            problems.append(f"{path.relative_to(ROOT)}: {target}: no such heading")
    return problems


def main() -> int:
    """Print every broken link; return 1 if there are any."""
    problems = [problem for path in tracked_markdown() for problem in broken_links(path)]
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""The repository's folder. Its programs in `tools` can be imported by name (`pythonpath` in `pyproject.toml`)."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LESSONS = sorted(path.stem for path in (ROOT / "lessons").glob("[0-9][0-9]_*.md"))
"""The lessons by the names of their files, as `04_continuous_batching`."""


def lesson(stem: str) -> str:
    """Return a lesson's text."""
    return (ROOT / "lessons" / f"{stem}.md").read_text()


def minutes(stem: str) -> tuple[int, int]:
    """Return the minutes of talk and of exercise in a lesson's header."""
    header = re.search(r"\*\*Time:\*\* (\d+) minutes of talk, (\d+) of exercise", lesson(stem))
    assert header
    return int(header[1]), int(header[2])

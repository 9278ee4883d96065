"""Pages with generated parts, between `<!-- name -->`, or `<!-- name:which -->`, and `<!-- /name
-->`.
"""

from pathlib import Path

from minivllm.errors import MinivllmError


def put_between_marks(page: str, name: str, text: str) -> str:
    """Return the page with the content between its marks replaced by `text`.

    Raises:
        MinivllmError: the page does not have each mark once, in this order.
    """
    begin, end = f"<!-- {name} -->\n", f"\n<!-- /{name.split(':')[0]} -->"
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise MinivllmError(f"the page has no single place for this: put {begin.strip()} and {end.strip()} around it")
    before, rest = page.split(begin)
    return before + begin + text + end + f"\n{rest}".split(end)[1]


def lesson_page(lessons: Path, number: str) -> Path:
    """Return `lessons/NN_*.md`; `number` is "1" or "01".

    Raises:
        MinivllmError: there is no such lesson; the message lists the existing ones.
    """
    pages = sorted(lessons.glob(f"{number.zfill(2)}_*.md")) if number.isdigit() else []
    if not pages:
        numbers = ", ".join(path.name[:2] for path in sorted(lessons.glob("[0-9][0-9]_*.md"))) or "none"
        raise MinivllmError(f"there is no lesson {number!r} (there are: {numbers})")
    return pages[0]


def notes_page(lessons: Path, number: str) -> Path | None:
    """Return `lessons/notes/NN_*.md`, a lesson's page of further detail, or None if it has none."""
    path = lessons / "notes" / lesson_page(lessons, number).name
    return path if path.is_file() else None


def pages_of(lessons: Path, number: str) -> list[Path]:
    """Return the pages of a lesson: its text, and its notes where it has any."""
    notes = notes_page(lessons, number)
    return [lesson_page(lessons, number), *([notes] if notes else [])]

"""Build the notebooks from the lessons, byte for byte.

    uv run python tools/notebooks.py --write       # refresh quoted code in lessons/*.md, write notebooks/*.ipynb
    uv run python tools/notebooks.py --check       # fail if --write would change something
    uv run python tools/notebooks.py --run 01      # execute notebooks, demos twice (default: all)

In a lesson's Markdown, the words after a fence's language say what it becomes:

    ```python exec                                 a cell
    ```python exercise                             the cell that holds the exercise's stub, a module of its own: `mine`
    ```python check                                the cell that checks the exercise
    ```python script=vllm/01_kv_cache.py region=N  text that must equal that region of the script
    ```python                                      text, like every other fence

`script=` also works with the first three; without `region=` it quotes the whole file. A region is
what lies between the lines `# region: NAME` and `# endregion`. A picture next to a widget's cell
shows what the widget draws, so the notebook keeps only the widget. The notebook opens with the
lesson's title and how to run it; the cell that sets it up stands before the first other cell.
`notebooks/README.md`, the page that `make lab` opens, is built too.
"""

from __future__ import annotations

import argparse
import hashlib
import posixpath
import re
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import jupytext
import nbformat

from minivllm.errors import MinivllmError
from minivllm_lab.cli import Parser, run
from minivllm_lab.exercise import load

REPOSITORY = Path(__file__).resolve().parents[1]
ADDRESS = load(REPOSITORY / "tools" / "address.py")
MEND = "uv run python tools/notebooks.py --write"
CELL_KINDS = ("exec", "exercise", "check")
SECONDS_PER_CELL = 300

FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,}|~{3,}) *(?P<info>[^`]*)$")
HEADING = re.compile(r"^(#{1,6}) +(.*?)#* *$")
REGION, END_OF_REGION = re.compile(r"^\s*# region: (\S+)\s*$"), re.compile(r"^\s*# endregion\b")
CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)")
LINKS = (
    re.compile(r"(?P<before>\]\(\s*<?)(?P<target>[^)\s>]+)"),  # [words](target) and ![words](target)
    re.compile(r"(?P<before>^ {0,3}\[(?!\^)[^\]]+\]:\s*<?)(?P<target>[^\s>]+)"),  # [name]: target
    re.compile(r"(?P<before>\b(?:src|href|srcset)\s*=\s*[\"'])(?P<target>[^\"']+)"),
)
JUPYTEXT = {"extension": ".md", "format_name": "markdown", "split_at_heading": True}
NO_CELL = ".noeval"  # jupytext's word for a fence that stays text
KERNEL = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
IN_COLAB = "[![Open in Colab](../lessons/figures/open_in_colab.svg)]({})\n\n"
HOW_TO_GET_HERE = """\
{badge}<details><summary><b>How to run this notebook</b> (your machine, VS Code, Colab)</summary>

**On your machine**, in a clone of the repository: `make lab` opens the list of notebooks in JupyterLab.

**In VS Code**: open the repository's folder, then this file, and choose the kernel of `.venv` (`make setup` makes it).

**In Colab**: open this file there; the next code cell installs the course.

The text and the code come from [`lessons/{stem}.md`](../lessons/{stem}.md): change that file, then run
`{mend}`.

</details>
"""
SETUP = """\
# Is the course here? In Colab, this cell installs it.
import sys
from importlib.util import find_spec

if "google.colab" in sys.modules:
    ![ -d /content/course ] || git clone --quiet --depth 1 {address} /content/course
    %run /content/course/tools/colab.py
missing = [name for name in ("minivllm", "widgets") if find_spec(name) is None]
assert not missing, f"cannot import {{' and '.join(missing)}}: see the cell above, then restart the kernel"

from minivllm_lab import notebook

notebook.begin()
"""
IN_ITS_MODULE = "%%exercise mine"
SHOWS_WIDGET = re.compile(r"^\w+\.show\(")
PICTURE = re.compile(r"!\[[^\]]*\]\([^)\s]+\)")
ROW_OF_README = re.compile(r"^\| (\d\d) \| [^|]* \| ([^|]*?) \|", re.MULTILINE)
MINUTES_ALONE = re.compile(r"^\*\*Time:\*\* .*alone, about (\d+)", re.MULTILINE)
INDEX = """\
# The notebooks

In order: each lesson uses only what the ones before it built. A notebook is the lesson's text with its code to run, its
widget to play with, and its exercise, whose checks say what is missing.

| | notebook | the question | minutes, alone |{colab_heading}
| --- | --- | --- | ---: |{colab_rule}
{rows}

Run a cell with Shift+Enter, or all of them with *Run* > *Run All Cells*: nothing is downloaded, and no GPU is needed.
Any cell can run again at any time. What you write in an exercise's cell is a module of its own, `mine`.

<!-- Built by tools/notebooks.py from the lessons. -->
"""


@dataclass(frozen=True)
class Fence:
    """A fenced block of a lesson: its lines, and the options on its first line."""

    opening: str
    body: tuple[str, ...]
    closing: str
    language: str
    kind: str | None
    script: str | None
    region: str | None
    number: int
    """Of its first line in the lesson."""

    @property
    def indent(self) -> str:
        """The spaces before its first line."""
        return self.opening[: len(self.opening) - len(self.opening.lstrip())]


@dataclass(frozen=True)
class Lesson:
    """A lesson's file and its parts in order: lines of prose, and fenced blocks."""

    path: Path
    parts: tuple[str | Fence, ...]

    @property
    def name(self) -> str:
        """The file's name, as messages show it."""
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def notebook(self) -> Path:
        """The path of its notebook."""
        return self.path.parents[1] / "notebooks" / f"{self.path.stem}.ipynb"


def read_lesson(path: Path) -> Lesson:
    """Split a lesson at its fenced blocks.

    Raises:
        MinivllmError: a fence is not closed, has an unknown word, or is a cell where none can be;
            the message names file and line.
    """
    lesson = Lesson(path, ())
    parts: list[str | Fence] = []
    lines = enumerate(path.read_text(encoding="utf-8").rstrip("\n").split("\n"), start=1)
    folded = 0
    for number, line in lines:
        if FENCE.match(line) is None:
            if folded and HEADING.match(line):
                raise MinivllmError(f"{lesson.name}:{number}: a heading starts a cell, which <details> cannot hold")
            folded += _opens(line)
            parts.append(line)
            continue
        fence = _read_fence(line, number, lines, f"{lesson.name}:{number}")
        if fence.kind and folded:
            raise MinivllmError(f"{lesson.name}:{number}: a cell cannot stand inside <details>")
        parts.append(fence)
    return replace(lesson, parts=tuple(parts))


def _opens(line: str) -> int:
    """Return the change in <details> nesting depth made by this line."""
    return line.count("<details") - line.count("</details>")


def _read_fence(opening: str, number: int, lines: Iterator[tuple[int, str]], place: str) -> Fence:
    match = FENCE.match(opening)
    assert match is not None
    language, kind, options = _words(match["info"].split(), place)
    if kind and (match["indent"] or language != "python"):
        raise MinivllmError(f"{place}: a cell is a `python` fence that starts at the left margin")
    body: list[str] = []
    for _, line in lines:
        if line.strip().startswith(match["marks"]) and not line.strip().strip(match["marks"][0]):
            quoted = (options.get("script"), options.get("region"))
            return Fence(opening, tuple(body), line, language, kind, *quoted, number)
        body.append(line)
    raise MinivllmError(f"{place}: this fence is never closed")


def _words(words: list[str], place: str) -> tuple[str, str | None, dict[str, str]]:
    """Return a fence's language, the kind of cell it makes, and its `key=value` options."""
    language, rest = (words[0], words[1:]) if words else ("", [])
    kinds = [word for word in rest if word in CELL_KINDS]
    options = dict(word.split("=", 1) for word in rest if word.startswith(("script=", "region=")))
    unknown = [word for word in rest if word not in kinds and not word.startswith(("script=", "region="))]
    if unknown or len(kinds) > 1:
        known = ", ".join(CELL_KINDS)
        raise MinivllmError(f"{place}: {' '.join(rest)!r} is not understood (use {known}, script=FILE, region=NAME)")
    if "region" in options and "script" not in options:
        raise MinivllmError(f"{place}: region={options['region']} needs script=FILE")
    return language, kinds[0] if kinds else None, options


def quote(root: Path, script: str, region: str | None) -> str:
    """Return the text of a script's region, or of the whole script, dedented and without the region
    marks.

    Raises:
        MinivllmError: there is no such file or region; the message lists the regions.
    """
    path = root / script
    if not path.is_file():
        raise MinivllmError(f"there is no file {script}")
    lines = path.read_text(encoding="utf-8").splitlines()
    if region is not None:
        lines = _region(lines, region, script)
    kept = [line for line in lines if not REGION.match(line) and not END_OF_REGION.match(line)]
    return textwrap.dedent("\n".join(kept)).strip("\n")


def _region(lines: list[str], name: str, script: str) -> list[str]:
    names = [match[1] for line in lines if (match := REGION.match(line))]
    if names.count(name) != 1:
        there = ", ".join(names) or "none"
        raise MinivllmError(f"{script} has {names.count(name)} regions {name!r}, not one (its regions: {there})")
    start = next(index for index, line in enumerate(lines) if (match := REGION.match(line)) and match[1] == name)
    depth = 0
    for index in range(start, len(lines)):
        depth += bool(REGION.match(lines[index])) - bool(END_OF_REGION.match(lines[index]))
        if depth == 0:
            return lines[start + 1 : index]
    raise MinivllmError(f"{script}: the region {name!r} has no `# endregion`")


def with_fresh_quotes(lesson: Lesson) -> Lesson:
    """Return the lesson with every quoted region updated from its script."""
    root = lesson.path.parents[1]

    def fresh(part: str | Fence) -> str | Fence:
        if isinstance(part, str) or part.script is None:
            return part
        try:
            text = quote(root, part.script, part.region)
        except MinivllmError as error:
            raise MinivllmError(f"{lesson.name}:{part.number}: {error}") from error
        return replace(part, body=tuple(textwrap.indent(text, part.indent).split("\n")))

    return replace(lesson, parts=tuple(fresh(part) for part in lesson.parts))


def lesson_text(lesson: Lesson) -> str:
    """Return the lesson's Markdown, reassembled."""
    lines: list[str] = []
    for part in lesson.parts:
        lines += [part] if isinstance(part, str) else [part.opening, *part.body, part.closing]
    return "\n".join(lines) + "\n"


def notebook_text(lesson: Lesson) -> str:
    """Return the notebook's JSON; the same lesson always gives the same bytes, since jupytext makes
    the cells and each id is a hash of its cell.
    """
    notebook = jupytext.reads("\n".join(_jupytext_lines(lesson)), fmt=JUPYTEXT)
    notebook.metadata = KERNEL
    for index, cell in enumerate(notebook.cells):
        cell.source = cell.source.replace(f" {NO_CELL}\n", "\n").strip("\n")
        kind = cell.metadata.get("tags", ["exec"])[0] if cell.cell_type == "code" else "markdown"
        cell.id = f"{index:02d}-{hashlib.sha256((kind + cell.source).encode()).hexdigest()[:8]}"
    nbformat.validate(notebook)
    return nbformat.writes(notebook).rstrip("\n") + "\n"


def _jupytext_lines(lesson: Lesson) -> Iterator[str]:
    """Yield the lesson as jupytext reads it: every code fence is a cell, except those marked
    NO_CELL.
    """
    headings = _heading_ids(lesson)
    drawn_live = _pictures_of_widgets(lesson.parts)
    first_cell = next((index for index, part in enumerate(lesson.parts) if _is_cell(part)), None)
    title = next((index for index, part in enumerate(lesson.parts) if _is_title(part)), None)
    for index, part in enumerate(lesson.parts):
        if index == first_cell:
            yield f'```python tags=["setup"]\n{SETUP.format(address=ADDRESS.address())}```\n'
        if isinstance(part, str):
            yield "" if index in drawn_live else _relinked(part, headings)
            if index == title:
                stem = lesson.path.stem
                colab = ADDRESS.colab(stem)
                how = HOW_TO_GET_HERE.format(stem=stem, mend=MEND, badge=IN_COLAB.format(colab) if colab else "")
                yield f"\n{how}".rstrip()  # jupytext starts a new cell at two blank lines
            continue
        marks = part.closing.strip()
        if part.kind:
            tags = "" if part.kind == "exec" else f' tags=["{part.kind}"]'
            marks = marks.replace("~", "`")  # jupytext makes no cells of tildes
            magic = [IN_ITS_MODULE] if part.kind == "exercise" else []
            yield "\n".join([f"{marks}python{tags}", *magic, *part.body, marks])
        else:
            yield "\n".join([f"{part.indent}{marks}{part.language} {NO_CELL}", *part.body, part.closing])


def _is_cell(part: str | Fence) -> bool:
    return isinstance(part, Fence) and part.kind is not None


def _is_title(part: str | Fence) -> bool:
    return isinstance(part, str) and part.startswith("# ")


def _pictures_of_widgets(parts: Sequence[str | Fence]) -> set[int]:
    """Return the indices of pictures that have only blank lines between them and a cell that shows
    a widget.
    """
    filled = [index for index, part in enumerate(parts) if part != ""]
    beside = [pair for one, other in pairwise(filled) for pair in ((one, other), (other, one))]
    return {index for index, near in beside if _is_picture(parts[index]) and _shows_widget(parts[near])}


def _is_picture(part: str | Fence) -> bool:
    return isinstance(part, str) and PICTURE.fullmatch(part) is not None


def _shows_widget(part: str | Fence) -> bool:
    return isinstance(part, Fence) and part.kind == "exec" and any(map(SHOWS_WIDGET.match, part.body))


def _heading_ids(lesson: Lesson) -> dict[str, str]:
    """Map the anchors of the lesson's headings from GitHub's form to JupyterLab's."""
    prose = (part for part in lesson.parts if isinstance(part, str))
    titles = [re.sub(r"[`*]", "", match[2]).strip() for line in prose if (match := HEADING.match(line))]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-"): title.replace(" ", "-") for title in titles}


def _relinked(line: str, headings: dict[str, str]) -> str:
    """Return the line with its links rewritten for `notebooks/`; code spans stay unchanged."""

    def turn(match: re.Match[str]) -> str:
        spans = (span.span() for span in CODE_SPAN.finditer(match.string))
        if any(start <= match.start("target") < end for start, end in spans):
            return match[0]
        return match["before"] + _target(match["target"], headings)

    for pattern in LINKS:
        line = pattern.sub(turn, line)
    return line


def _target(target: str, headings: dict[str, str]) -> str:
    if target.startswith("#") and "?" in target:  # it sets knobs of the widget in that section
        target = "#turn-the-knobs"
    if target.startswith("#"):
        return "#" + headings.get(target[1:], target[1:])
    if target.startswith("/") or re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:", target):
        return target
    path, mark, anchor = target.partition("#")
    resolved = posixpath.normpath(posixpath.join("lessons", path))
    other = re.fullmatch(r"lessons/(\d\d_\w+)\.md", resolved)
    return (f"{other[1]}.ipynb" if other else posixpath.relpath(resolved, "notebooks")) + mark + anchor


def lessons_in(root: Path, numbers: list[str]) -> list[Path]:
    """Return the lessons with these numbers (all if none are given), in order.

    Raises:
        MinivllmError: a number has no lesson.
    """
    paths = sorted((root / "lessons").glob("[0-9][0-9]_*.md"))
    wanted = [number.zfill(2) for number in numbers]
    for number in wanted:
        if not any(path.name.startswith(f"{number}_") for path in paths):
            there = ", ".join(path.name[:2] for path in paths) or "none"
            raise MinivllmError(f"there is no lesson {number} (available: {there})")
    return [path for path in paths if not wanted or path.name[:2] in wanted]


def outputs(path: Path) -> dict[Path, str]:
    """Return what `--write` writes for one lesson: the lesson with fresh quotes, and its
    notebook.
    """
    lesson = with_fresh_quotes(read_lesson(path))
    return {path: lesson_text(lesson), lesson.notebook: notebook_text(lesson)}


def index_page(root: Path) -> str:
    """Return the list of notebooks: titles and minutes from the lessons, questions from the
    repository's README.
    """
    readme = root / "README.md"
    questions = dict(ROW_OF_README.findall(readme.read_text(encoding="utf-8") if readme.is_file() else ""))
    rows = []
    for path in lessons_in(root, []):
        text = path.read_text(encoding="utf-8")
        number, title = path.name[:2], re.sub(r"^# +\d+\W*", "", text.split("\n", 1)[0])
        minutes = match[1] if (match := MINUTES_ALONE.search(text)) else ""
        colab = ADDRESS.colab(path.stem)
        row = f"| {number} | [{title}]({path.stem}.ipynb) | {questions.get(number, '')} | {minutes} |"
        rows.append(row + f" [in Colab]({colab}) |" * bool(colab))
    heading, rule = (" without set-up |", " --- |") if ADDRESS.colab("") else ("", "")
    return INDEX.format(rows="\n".join(rows), colab_heading=heading, colab_rule=rule)


def everything(root: Path, numbers: list[str]) -> dict[Path, tuple[str, str]]:
    """Map each file that is built for these lessons to its text, and to the message for a file that
    differs from it.
    """
    built = {}
    for path in lessons_in(root, numbers):
        for target, text in outputs(path).items():
            what = "quotes code that its script no longer contains" if target == path else f"differs from {path.name}"
            built[target] = text, what
    if not numbers:
        built[root / "notebooks" / "README.md"] = index_page(root), "differs from the lessons"
    return built


def drift(root: Path, numbers: list[str]) -> list[str]:
    """Return one line for each file that differs from what `--write` would write, and for each
    notebook without a lesson.
    """
    found = []
    for target, (text, what) in everything(root, numbers).items():
        name = target.relative_to(root).as_posix()
        if not target.is_file():
            found.append(f"{name} is missing")
        elif target.read_bytes() != text.encode():
            found.append(f"{name} {what}")
    stems = {path.stem for path in (root / "lessons").glob("*.md")}
    orphans = [path for path in sorted((root / "notebooks").glob("*.ipynb")) if path.stem not in stems]
    return found + [f"notebooks/{path.name} has no lesson: delete it" for path in orphans if not numbers]


def write(root: Path, numbers: list[str]) -> list[str]:
    """Write the files that differ, and return their names."""
    written = []
    for target, (text, _) in everything(root, numbers).items():
        if not target.is_file() or target.read_bytes() != text.encode():
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(text.encode())
            written.append(target.relative_to(root).as_posix())
    return written


def execute(path: Path, again: bool = False) -> float:
    """Run every cell of a notebook in a fresh kernel, without changing the file.

    With `again`, the cells that only show something run a second time, after the last one.

    Returns:
        The seconds it took.

    Raises:
        MinivllmError: a cell raised; the message holds the cell and its traceback.
    """
    notebook = nbformat.read(path, as_version=4)
    if again:
        notebook.cells += [nbformat.v4.new_code_cell(cell.source) for cell in demos(notebook)]
    return run_cells(notebook, path)


def run_cells(notebook: nbformat.NotebookNode, path: Path) -> float:
    """Run a notebook's cells in memory, in the folder of `path`, and store their outputs in
    them.
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError

    where = {"metadata": {"path": str(path.parent)}}
    start = time.perf_counter()
    try:
        NotebookClient(notebook, timeout=SECONDS_PER_CELL, kernel_name="python3", resources=where).execute()
    except (CellExecutionError, CellTimeoutError) as error:
        raise MinivllmError(f"{path.name}: {error}") from error
    return time.perf_counter() - start


def demos(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """Return the code cells that only show something, leaving out the set-up, the exercise and its
    checks.
    """
    return [cell for cell in notebook.cells if cell.cell_type == "code" and "tags" not in cell.metadata]


def main(arguments: argparse.Namespace) -> None:
    numbers: list[str] = arguments.lessons
    if arguments.write:
        _say(write(REPOSITORY, numbers), "{} written", "nothing to write")
    elif arguments.check:
        found = drift(REPOSITORY, numbers)
        _say(found, "{}", "lessons and notebooks agree")
        if found:
            raise MinivllmError(f"to fix it, run: {MEND}")
    else:
        for path in lessons_in(REPOSITORY, numbers):
            notebook = Lesson(path, ()).notebook
            print(f"{notebook.name}: {execute(notebook, again=True):.1f} s", flush=True)


def _say(lines: list[str], form: str, otherwise: str) -> None:
    print("\n".join(form.format(line) for line in lines) or otherwise)


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    flags = Parser(description=__doc__)
    action = flags.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="write the notebooks, and refresh quotes in the lessons")
    action.add_argument("--check", action="store_true", help="fail if --write would change something")
    action.add_argument(
        "--run", action="store_true", help="execute the notebooks, demos twice, and print how long each took"
    )
    flags.add_argument("lessons", nargs="*", metavar="NN", help="numbers of lessons (default: all)")
    return flags


if __name__ == "__main__":
    run(main, parser())
